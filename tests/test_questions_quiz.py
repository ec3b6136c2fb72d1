"""The quizzes of the chapters in a real browser."""

import random
import re
import sys

import pytest
from questions import sample, show  # noqa: F401
from sitepages import HTML, TOO_WIDE
from test_explorer import PALE

from kvq_lib.course import site
from kvq_lib.course.questions import balance, bank, marking, numbers, quiz
from kvq_lib.course.questions.quiz import Quiz, chosen, contained
from kvq_lib.errors import InvalidArgument

THEMES = ("light", "dark")
PAGE = "book/02_memory_bottleneck"
BY_ID = {question.id: question for question in sample()}


def memory_quiz():
    return Quiz(PAGE, chosen(bank.of_chapter(sample(), PAGE)))


def asked(page, question):
    """The box of a question in a quiz."""
    first = question.question.split("*")[0].split("\n")[0].strip()
    return page.locator(".Quiz", has_text=first)


@pytest.mark.browser
def test_a_quiz_takes_right_and_wrong_choices(show):  # noqa: F811
    page = show(memory_quiz().html)
    question = BY_ID["memory-kv-heads"]
    box = asked(page, question)
    for choice in (*question.choices[1:], question.choices[0]):
        button = box.get_by_role("button", name=choice.text)
        assert button.get_attribute("aria-pressed") == "false"
        button.click()
        feedback = box.get_by_role("status").inner_text()
        assert feedback == f"{'✓' if choice.right else '✗'} {choice.why}"
        assert box.locator(".Feedback.correct").count() == int(choice.right)
        assert button.get_attribute("aria-pressed") == "true"
        pressed = box.locator("[aria-pressed=true]")
        assert pressed.count() == 1


@pytest.mark.browser
def test_a_quiz_counts_partly_right_picks(show):  # noqa: F811
    page = show(memory_quiz().html)
    question = BY_ID["memory-what-grows"]
    box = asked(page, question)
    status = box.get_by_role("status")

    def choose(place):
        start_of = question.choices[place].text[:14]
        box.get_by_role("button", name=re.compile(re.escape(start_of))).click()
        return status.inner_text()

    assert choose(0) == "✓ Each token adds keys and values. [1/2]"
    assert choose(0).endswith("[1/2]")
    assert choose(1) == "✓ Each sequence has a cache of its own. [2/2]"
    shown = box.get_by_role("button", name="Weights in 8 bits")
    assert "a[0](b) and $x$, if" in shown.inner_text() and not box.locator("a").count()
    assert choose(2).startswith("✗ That changes") and "[0/2]" in status.inner_text()
    assert box.locator("[aria-pressed=true]").count() == 1  # begins anew
    assert choose(1).endswith("[1/2]") and choose(0).endswith("[2/2]")


@pytest.mark.browser
def test_a_quiz_takes_numbers_as_every_face_does(show):  # noqa: F811
    page = show(memory_quiz().html)
    question = BY_ID["memory-bytes-of-int8"]
    box = asked(page, question)
    field = box.get_by_label("Your answer, in MiB")
    status = box.get_by_role("status")
    width = question.tolerance * question.answer
    tried = [
        *("260", "260 MiB", "2.6e2", "0.25390625 GiB", "1,040", "256", "99", "262.6"),
        *(repr(question.answer + sign * 0.99 * width) for sign in (-1, 1)),
        *(repr(question.answer + sign * 1.01 * width) for sign in (-1, 1)),
    ]
    for number, typed in enumerate(tried):
        field.fill(typed)
        if number % 2:
            field.press("Enter")
        else:
            box.get_by_role("button", name="Check").click()
        right = marking.mark(question, typed) == 1
        said = status.inner_text()
        assert said.startswith("✓ Codes take" if right else "✗"), typed
        assert box.locator(".Feedback.correct").count() == int(right), typed
        assert field.input_value() == typed
        known = marking.mistake(question, numbers.read_number(typed, "MiB"))
        if known and not right:
            assert said == f"✗ {known.why}"
    assert {marking.mark(question, typed) for typed in tried} == {0, 1}
    for typed in ("", "many", "1,5", "260 ms", "260 mb"):
        field.fill(typed)
        field.press("Enter")
        assert status.inner_text() == f"✗ {numbers.why_not(typed, 'MiB')}"
        assert box.locator(".Feedback.correct").count() == 0
    exact = asked(page, BY_ID["memory-pages-exact"])
    for typed, sign in (("63", "✓"), ("63.001", "✗"), ("62", "✗ The rest of eight")):
        exact.get_by_label("Your answer").fill(typed)
        exact.get_by_label("Your answer").press("Enter")
        assert exact.get_by_role("status").inner_text().startswith(sign)


@pytest.mark.browser
def test_a_quiz_needs_no_mouse(show):  # noqa: F811
    page = show(memory_quiz().html)
    reached = {}
    for _ in range(60):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => { const e = document.activeElement, s = getComputedStyle(e);
              const place = [...document.querySelectorAll("*")].indexOf(e);
              return e === document.body ? null : [place,
                s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2]; }"""
        )
        if found is None or found[0] in reached:
            break
        reached[found[0]] = found[1]
        page.keyboard.type("7")  # into a field, where there is one
        page.keyboard.press("Space")
        page.keyboard.press("Enter")
        # Nothing takes the focus away.
        assert page.evaluate("document.activeElement !== document.body")
    controls = page.locator(".kvqz :is([role=button], input)").count()
    assert len(reached) >= controls and all(reached.values())
    said = page.get_by_role("status").all_inner_texts()
    assert len(said) == len(memory_quiz().questions) and all(said)


@pytest.mark.browser
def test_two_quizzes_do_not_disturb_each_other(show):  # noqa: F811
    page = "book/03_quantization_strategies"
    others = [q for q in sample() if q.topic == "quantization" and q.kind != "open"]
    others += [q for q in sample() if q.id.startswith("memory-p")]
    others += [q for q in sample() if q.id.startswith("memory-o")]
    second = Quiz(page, chosen(others))
    opened = show(memory_quiz().html + second.html)
    ids = opened.locator("[id]").evaluate_all("all => all.map((e) => e.id)")
    assert len(ids) == len(set(ids))
    boxes = opened.locator(".kvqz")
    assert boxes.count() == 2
    boxes.nth(1).get_by_label("Your answer").first.fill("1")
    boxes.nth(1).get_by_role("button", name="Check").first.click()
    assert not any(boxes.nth(0).get_by_role("status").all_inner_texts())
    assert sum(map(bool, boxes.nth(1).get_by_role("status").all_inner_texts())) == 1


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
def test_a_quiz_stands_out_and_fits_a_phone(show, theme):  # noqa: F811
    page = show(memory_quiz().html, width=375, theme=theme)
    pale = PALE.replace(".kvqx", ".kvqz")
    for click in (False, True):
        if click:
            for box in page.locator(".Quiz").all():
                box.get_by_role("button").first.click()
            assert page.locator(".incorrectButton, .correctButton").count() >= 4
        assert page.evaluate(TOO_WIDE) == []
        ratios = page.evaluate(pale)
        assert len(ratios) > 15 and ratios[0][0] >= 4.5, ratios[:3]


@pytest.mark.browser
@pytest.mark.parametrize(
    "mathjax", ["{}", '{"version": "3.2.2"}', '{"options": {}}', "undefined"]
)
def test_a_quiz_goes_to_no_other_host_whatever_mathjax_does(show, mathjax):  # noqa: F811
    before = f"<script>window.MathJax = {mathjax}</script>"
    page = show(memory_quiz().html, before=before)
    page.locator(".Quiz").first.get_by_role("button").first.click()
    page.wait_for_timeout(1000)  # it would look for MathJax after half a second
    scripts = page.locator("script[src]").count()
    assert scripts == 0  # and the fixture fails on any request


@pytest.mark.browser
def test_what_follows_a_quiz_stays_outside_of_it(show):  # noqa: F811
    page = show(f"<div>{memory_quiz().html}</div><p id='after'>After.</p>")
    assert page.evaluate("document.getElementById('after').parentElement.tagName") == (
        "MAIN"
    )


@pytest.mark.browser
def test_formulas_that_come_later_are_set(show):  # noqa: F811
    """MathJax is asked for each answer that appears; here it only takes notes."""
    fake = """<script>window.seen = []; window.MathJax = {
      startup: {promise: Promise.resolve()},
      typesetPromise: async (list) => window.seen.push(list[0].className)};</script>"""
    page = show(memory_quiz().html, before=fake)
    asked(page, BY_ID["memory-pages-exact"]).get_by_label("Your answer").fill("63")
    asked(page, BY_ID["memory-pages-exact"]).get_by_role("button").click()
    page.wait_for_function("window.seen.includes('Feedback correct')")
    inside = page.locator(".Feedback .math").inner_text()
    assert inside == r"\(\lceil 1000 / 16 \rceil\)"


def test_a_quiz_is_the_same_whenever_it_is_made():
    random.seed(5)  # a quiz that was made before would have left its own seed
    state = random.getstate()
    one, two = memory_quiz(), memory_quiz()
    assert one.html == two.html and random.getstate() == state
    reversed_bank = chosen(bank.of_chapter(sample()[::-1], PAGE))
    assert reversed_bank == list(one.questions)
    assert [q.level for q in one.questions] == sorted(
        (q.level for q in one.questions), key=bank.LEVELS.index
    )


@pytest.mark.parametrize("page", balance.chapters())
def test_each_chapter_has_a_quiz_of_every_kind(page):
    made = quiz(page)
    assert 5 <= len(made.questions) <= 8
    assert {q.kind for q in made.questions} >= {"single", "numeric"}
    assert all(q.section.page == page and q.kind != "open" for q in made.questions)
    assert repr(made).startswith("1. ")
    kinds = {q.kind for q in bank.of_chapter(bank.load(), page)} - {"open"}
    assert {q.kind for q in made.questions} == kinds


def test_what_has_no_quiz_is_refused():
    with pytest.raises(InvalidArgument, match="no question belongs"):
        quiz("book/appendix_api")
    with pytest.raises(InvalidArgument, match="5 questions, not 3"):
        chosen(bank.of_chapter(sample(), "book/03_quantization_strategies"))


def test_without_jupyterquiz_a_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jupyterquiz", None)
    assert quiz(PAGE) is None
    assert "pip install jupyterquiz" in capsys.readouterr().out


def test_without_the_repository_a_line_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bank, "FOLDER", tmp_path)
    assert quiz(PAGE) is None
    assert "come with the repository" in capsys.readouterr().out


@pytest.mark.parametrize("shown", ["</script>", "<!-- <script>", "</ScRiPt >"])
def test_no_text_can_end_a_script(shown):
    assert contained(f'"{shown}"').count("<\\") == 1


# -- the site --------------------------------------------------------------------------


@pytest.mark.parametrize("page", balance.chapters())
def test_each_chapter_of_the_site_has_its_quiz_under_its_questions(page):
    path = HTML / f"{page}.html"
    assert path.exists(), f"{page} is not built: run `make book`"
    written = path.read_text(encoding="utf-8")
    (place,) = (m.start() for m in re.finditer('class="kvqz"', written))
    assert written.index('<section id="questions">') < place
    assert place < written.index('<section id="further-reading">')


@pytest.mark.browser
@pytest.mark.parametrize("page", balance.chapters())
def test_a_quiz_on_the_site_sets_its_formulas_and_its_answers(open_page, page):
    opened = open_page(f"{page}.html", 375)
    box = opened.locator(".kvqz")
    assert 5 <= box.locator(".Quiz").count() <= 8
    for question in box.locator(".Quiz").all():
        question.get_by_role("button").first.click()
    # Also where the formulas of the quiz are the only ones of the page.
    opened.wait_for_function("window.MathJax?.startup?.promise")
    opened.evaluate("async () => { await MathJax.startup.promise; }")
    raw = box.locator(".math").evaluate_all(
        "all => all.filter((e) => !e.querySelector('mjx-container')).length"
    )
    assert raw == 0 and opened.evaluate(TOO_WIDE) == []


def test_a_quiz_loads_nothing_from_elsewhere(tmp_path):
    (tmp_path / "page.html").write_text(memory_quiz().html)
    assert list(site.external_files(tmp_path)) == []
