"""The mock interview in a real browser."""

import dataclasses
import json

import pytest
from questions import reload, sample, show  # noqa: F401
from sitepages import TOO_WIDE, WRONG_MATH
from test_explorer import DANGLING, PALE, UNNAMED

from kvq_lib.course.questions import mock

THEMES = ("light", "dark")
NOW = 1_900_000_000  # seconds
BY_ID = {question.id: question for question in sample()}


def interview(questions=None):
    def href(section):
        return f"{section.page.rsplit('/', 1)[-1]}.html#{section.number}"

    return mock.page(questions or sample(), href)


def shown(page, name):
    return page.locator(f'[data-show="{name}"]').inner_text()


def start(page, number=20, minutes=5):
    page.fill("#kvqm-number", str(number))
    page.fill("#kvqm-minutes", str(minutes))
    page.get_by_role("button", name="Start").click()


def current(page):
    """The question that is asked, by its text and not by its id."""
    said = " ".join(shown(page, "question").split())
    starts = {q.id: " ".join(q.question.split())[:25].split("*")[0] for q in sample()}
    (found,) = (i for i, start in starts.items() if said.startswith(start))
    return BY_ID[found]


def pick(page, question, places):
    """Choose choices by what they say."""
    for place in places:
        value = f'[name=kvqm-choice][value="{place}"]'
        page.locator(f".kvqm-choice:has({value})").click()


#: For each question of the sample an answer, and what it is worth.
ANSWERS = {
    "memory-kv-heads": ((0,), 1),
    "memory-what-grows": ((0,), 0.5),
    "memory-bytes-of-int8": ("257.5 MiB", 1),  # within 1%
    "memory-pages-exact": ("62", 0),
    "memory-time-of-a-step": ((1,), 0),
    "memory-one-right": ((0, 2), 0),
    "memory-why-cache": ("They never change.", 0),
    "quantization-divisor": ("1.27e2", 1),
    "quantization-who-shares": ((), 0),
    "quantization-asymmetric": ((0,), 1),
    "quantization-round-trip": ("", 0),
}


def answer(page, question):
    given = ANSWERS[question.id][0]
    if isinstance(given, str):
        page.locator("#kvqm-typed").fill(given)
    else:
        pick(page, question, given)


def answer_all(page):
    asked = []
    while page.locator("[data-part=session]").is_visible():
        question = current(page)
        asked.append(question.id)
        answer(page, question)
        page.locator("[data-do=next]").click()
        if "no answer" in shown(page, "message"):
            page.locator("[data-do=next]").click()
    return asked


def finish(page):
    for _ in range(2):
        if page.locator("[data-part=session]").is_visible():
            page.locator("[data-do=finish]").click()
    assert page.locator("[data-part=results]").is_visible()


def reviewed(page, question_id):
    """The part of the review that belongs to a question."""
    first = BY_ID[question_id].question.split("*")[0].split("\n")[0][:40].strip()
    return page.locator(".kvqm-review > li", has_text=first)


# -- an interview ----------------------------------------------------------------------


@pytest.mark.browser
def test_an_interview_from_start_to_review(show):  # noqa: F811
    page = show(interview())
    assert "11 of 11 questions fit." in shown(page, "fit")
    start(page)
    assert sorted(answer_all(page)) == sorted(BY_ID)
    assert shown(page, "score").startswith("4.5 of 11 points, 41%, in 0:")
    rows = page.locator('[data-show="topic-scores"] tr').all_inner_texts()
    assert {tuple(row.split("\t")) for row in rows} == {
        ("Memory", "7", "2.5"),
        ("Quantization", "4", "2"),
    }
    for question_id, (_, points) in ANSWERS.items():
        review = reviewed(page, question_id)
        worth = review.locator("[data-points]").inner_text()
        sign = {1: "✓", 0: "✗"}.get(points, "◐")
        assert worth == f"{sign} {points:g} of 1", question_id
        number = BY_ID[question_id].section.number
        link = review.locator("a")
        assert link.inner_text().startswith(number)
        assert link.get_attribute("href").endswith(f"#{number}")
    said = reviewed(page, "memory-what-grows").inner_text()
    assert "✓ right, your choice: A longer context" in said
    assert "✓ right: More sequences at once. Each sequence has a cache" in said
    assert "a[0](b) and $x$, if" in said and "changes the weights alone" in said
    wrong = reviewed(page, "memory-pages-exact").inner_text()
    assert (
        "✗ You answered 62. The rest of eight tokens" in wrong and "Right: 63" in wrong
    )
    assert "No answer." in reviewed(page, "quantization-round-trip").inner_text()
    assert "1 interview so far" in shown(page, "history-note")
    assert "4.5 of 11" in shown(page, "history") and "Memory" in shown(page, "history")


@pytest.mark.browser
def test_open_answers_are_marked_by_who_wrote_them(show):  # noqa: F811
    page = show(interview())
    start(page)
    answer_all(page)
    review = reviewed(page, "memory-why-cache")
    assert review.locator(".kvqm-own").inner_text() == "They never change."
    review.get_by_label("Compares the work").check()
    assert review.locator("[data-points]").inner_text() == "◐ 0.5 of 1"
    assert shown(page, "score").startswith("5 of 11 points")
    assert "5 of 11" in shown(page, "history")
    reload(page)
    assert shown(page, "score").startswith("5 of 11 points")
    review = reviewed(page, "memory-why-cache")
    assert review.get_by_label("Compares the work").is_checked()
    review.get_by_label("Compares the work").uncheck()
    assert shown(page, "score").startswith("4.5 of 11 points")
    assert "1 interview so far" in shown(page, "history-note")


@pytest.mark.browser
def test_topics_levels_kinds_and_number_are_kept_to(show):  # noqa: F811
    page = show(interview())
    page.get_by_role("button", name="No topic").click()
    assert "0 of 11 questions fit. Choose a topic" in shown(page, "fit")
    page.get_by_role("button", name="Start").click()
    assert page.locator("[data-part=setup]").is_visible()
    page.get_by_label("Quantization (4)").check()
    page.get_by_label("open").uncheck()
    page.get_by_label("easy").uncheck()
    assert "2 of 11 questions fit. All of them will be asked." in shown(page, "fit")
    for bad in ("0", "", "1.5"):
        page.fill("#kvqm-number", bad)
        assert "at least 1" in shown(page, "fit")
        assert page.locator("#kvqm-number").get_attribute("aria-invalid") == "true"
    start(page, number=1, minutes=0)
    assert shown(page, "count") == "Question 1 of 1"
    assert shown(page, "timer") == "no time limit"
    assert current(page).topic == "quantization" and current(page).level == "mid"


@pytest.mark.browser
def test_questions_and_choices_come_in_another_order_each_time(show):  # noqa: F811
    page = show(interview())
    orders, choices = set(), set()
    for _ in range(4):
        start(page)
        kept = json.loads(page.evaluate("localStorage['kvq-mock-interview']"))
        items = kept["sessions"][0]["items"]
        orders.add(tuple(item["id"] for item in items))
        choices.add(
            tuple(tuple(i["order"]) for i in sorted(items, key=lambda i: i["id"]))
        )
        for _ in range(2):
            page.locator("[data-do=finish]").click()
        page.locator("[data-do=again]").click()
    assert len(orders) > 2 and len(choices) > 2


@pytest.mark.browser
@pytest.mark.parametrize("kind", ["one of several", "several of several", "numbers"])
def test_a_reload_goes_on_where_the_reader_was(show, kind):  # noqa: F811
    page = show(interview(), clock=NOW)
    for label in ("one of several", "several of several", "numbers", "open"):
        page.get_by_label(label, exact=True).set_checked(label == kind)
    start(page)
    if kind == "numbers":
        page.locator("#kvqm-typed").fill("7 <b>")
    else:
        pick(page, current(page), (1,))
    page.locator("[data-do=next]").click()
    second = current(page)
    page.clock.fast_forward(60_000)
    reload(page)
    assert current(page) == second
    assert shown(page, "count").startswith("Question 2 of ")
    assert shown(page, "timer") == "4:00"
    page.locator("[data-do=previous]").click()
    if kind == "numbers":
        assert page.locator("#kvqm-typed").input_value() == "7 <b>"
    else:
        ticked = page.locator("[name=kvqm-choice]:checked")
        assert [box.get_attribute("value") for box in ticked.all()] == ["1"]
    jumps = page.locator("[data-jump]")
    assert jumps.nth(0).get_attribute("aria-current") == "step"
    done = "no answer yet" if kind == "numbers" else "answered"
    assert jumps.nth(0).get_attribute("aria-label") == f"Question 1, {done}"
    assert jumps.nth(1).get_attribute("aria-label") == "Question 2, no answer yet"


@pytest.mark.browser
def test_time_runs_out(show):  # noqa: F811
    page = show(interview(), clock=NOW)
    start(page, minutes=6)
    answer(page, current(page))
    page.clock.fast_forward(30_000)
    assert shown(page, "warning") == "" and shown(page, "timer").startswith("5:")
    for seconds, words in ((40, "Five minutes"), (240, "One minute"), (42, "Ten sec")):
        page.clock.fast_forward(1000 * seconds)
        assert shown(page, "warning").startswith(words)
    assert page.locator("[data-show=timer]").get_attribute("role") == "timer"
    page.clock.fast_forward(20_000)
    assert shown(page, "message") == "Time is up."
    assert page.locator("[data-part=results]").is_visible()
    assert "in 6:00 minutes" in shown(page, "score")
    assert page.evaluate("document.activeElement.id") == "kvqm-results"


@pytest.mark.browser
def test_time_runs_out_while_the_page_is_closed(show):  # noqa: F811
    page = show(interview(), clock=NOW)
    start(page, minutes=1)
    page.clock.fast_forward(3_600_000)
    reload(page)
    assert page.locator("[data-part=results]").is_visible()
    assert "in 1:00 minutes" in shown(page, "score")
    assert "1 interview so far" in shown(page, "history-note")


@pytest.mark.browser
def test_progress_is_exported_imported_and_deleted(show, tmp_path):  # noqa: F811
    page = show(interview())
    start(page)
    answer_all(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as JSON").click()
    file = tmp_path / "progress.json"
    download.value.save_as(file)
    kept = json.loads(file.read_text())
    assert download.value.suggested_filename == "kvq-progress.json"
    assert [entry["all"] for entry in kept["history"]] == [[11, 4.5]]
    page.get_by_role("button", name="Delete").click()
    assert "Press Delete again" in shown(page, "message")
    assert "1 interview so far" in shown(page, "history-note")
    page.get_by_role("button", name="Delete").click()
    assert "No interview yet" in shown(page, "history-note")
    page.set_input_files("input[type=file]", file)
    page.get_by_text("Imported: 1 new, 0 changed, 1 in all.").wait_for()
    page.set_input_files("input[type=file]", file)
    page.get_by_text("Imported: 0 new, 0 changed, 1 in all.").wait_for()
    assert "1 interview so far" in shown(page, "history-note")
    damaged = json.loads(file.read_text())
    damaged["history"][0]["all"] = [1, 2]
    bad = {
        "no JSON": ("{", "not JSON"),
        "other": ('{"history": []}', "no progress"),
        "damaged": (json.dumps(damaged), "damaged"),
        "topics": (file.read_text().replace("2.5", "1.5"), "damaged"),
        "version": (file.read_text().replace(": 1,", ": 2,", 1), "another version"),
        "year": (file.read_text().replace('"when": "20', '"when": "29'), "damaged"),
        "large": (" " * 5_000_001 + file.read_text(), "too large"),
        "markup": (
            file.read_text().replace("memory", "<img src=x>"),
            "Imported: 0 new, 1 changed, 1 in all.",
        ),
    }
    for name, (content, said) in bad.items():
        other = tmp_path / f"{name}.json"
        other.write_text(content)
        page.set_input_files("input[type=file]", other)
        page.get_by_text(said).wait_for()
    assert page.locator(".kvqm img").count() == 0
    assert "<img src=x>" in shown(page, "history")
    reload(page)
    assert "1 interview so far" in shown(page, "history-note")


@pytest.mark.browser
@pytest.mark.parametrize("change", ["fewer", "reworded"])
def test_an_interview_of_other_questions_is_dropped_and_that_is_said(show, change):  # noqa: F811
    page = show(interview())
    start(page)
    others = sample()[1:]
    if change == "reworded":
        first = dataclasses.replace(sample()[0], question="What decides its size?")
        others = (first, *others)
    other = show(interview(others), context=page.context)
    assert "The questions have changed" in shown(other, "message")
    assert other.locator("[data-part=setup]").is_visible()


@pytest.mark.browser
def test_a_number_that_nobody_can_read_is_told_at_once(show):  # noqa: F811
    page = show(interview([BY_ID["memory-bytes-of-int8"]]))
    start(page)
    field = page.locator("#kvqm-typed")
    jump = page.locator("[data-jump]")
    for typed, said in (
        ("many", "That is no number; 1,024 is one"),
        ("260 ms", "the unit here is MiB"),
        ("0,26", "with a point"),
        ("260 MiB", ""),
        ("", ""),
    ):
        field.fill(typed)
        hint = shown(page, "hint")
        assert said in hint and bool(hint) is bool(said)
        assert field.get_attribute("aria-invalid") == str(bool(said)).lower()
        answered = "answered" if typed == "260 MiB" else "no answer yet"
        assert jump.get_attribute("aria-label") == f"Question 1, {answered}"
    field.fill("260 ms")
    page.locator("[data-do=next]").click()
    assert "1 question has no answer" in shown(page, "message")
    page.locator("[data-do=next]").click()
    assert "the unit here is MiB" in page.locator(".kvqm-review").inner_text()


# -- for everyone ----------------------------------------------------------------------


@pytest.mark.browser
def test_the_keyboard_alone_suffices(show):  # noqa: F811
    page = show(interview())
    press = page.keyboard.press
    for _ in range(60):
        press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Start":
            break
    press("Enter")
    for _ in range(10):
        assert page.evaluate("document.activeElement.dataset.show") == "count"
        question = current(page)
        press("Tab")
        if question.kind == "single":
            press("Space")
        elif question.kind == "multiple":
            press("Space")
            press("Tab")
            press("Space")
        else:
            page.keyboard.type("260")
        focus = page.evaluate(
            """() => { const e = document.activeElement;
              const outlined = [e, e.parentElement].some((x) => {
                const s = getComputedStyle(x);
                return s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2; });
              return outlined && e.matches(".kvqm *"); }"""
        )
        assert focus, question.id
        if question.kind == "open":  # Enter is a new line there
            press("Tab")
            while page.evaluate("document.activeElement.dataset.do") != "next":
                press("Tab")
        press("Enter")
    assert page.evaluate("document.activeElement.id") == "kvqm-results"
    assert "points" in shown(page, "score")


@pytest.mark.browser
def test_every_control_has_a_name_in_every_part(show):  # noqa: F811
    page = show(interview())
    unnamed = UNNAMED.replace(".kvqx", ".kvqm").replace(".kvqm input", ".kvqm textarea")
    for part in ("setup", "session", "results"):
        assert page.locator(f"[data-part={part}]").is_visible()
        assert page.evaluate(unnamed) == [] and page.evaluate(DANGLING) == []
        names = page.locator(".kvqm button:visible, .kvqm input:visible").evaluate_all(
            "all => all.map((e) => e.getAttribute('aria-label') || e.innerText.trim()"
            " || e.labels?.[0]?.innerText.trim())"
        )
        assert all(names), part
        if part == "setup":
            start(page)
        elif part == "session":
            for _ in range(2):
                page.locator("[data-do=finish]").click()
    live = page.locator(".kvqm [aria-live]").evaluate_all("all => all.length")
    assert live >= 4


def parts(page):
    """Each part of the page in turn, with every kind of question."""
    yield "setup"
    start(page)
    for number in range(len(sample())):
        page.locator(f"[data-jump='{number}']").click()
        answer(page, current(page))
        yield f"question {number}"
    for _ in range(2):
        page.locator("[data-do=finish]").click()
    yield "results"


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
def test_text_stands_out_and_everything_fits_a_phone(show, theme):  # noqa: F811
    page = show(interview(), width=375, theme=theme)
    for part in parts(page):
        assert page.evaluate(TOO_WIDE) == [], part
        ratios = page.evaluate(PALE.replace(".kvqx", ".kvqm"))
        # A button that does nothing is pale on purpose.
        ratios = [row for row in ratios if row[2] != "Previous"]
        assert ratios and ratios[0][0] >= 4.5, (part, ratios[:3])


@pytest.mark.browser
def test_no_button_of_the_theme_lies_on_next(show):  # noqa: F811
    """The theme's button is fixed near the lower edge and shows itself on scrolling."""
    button = """<style>#pst-back-to-top { position: fixed; left: 50vw; top: 40vh;
      transform: translate(-50%); z-index: 1080; display: block; width: 99vw;
      height: 50vh; }</style>"""
    top = '<button id="pst-back-to-top">Back to top</button>'
    for width, hidden in ((375, True), (1280, False)):
        page = show(top + interview(), before=button, width=width)
        assert page.locator("#pst-back-to-top").is_visible() is not hidden
    page = show(top + interview(), before=button, width=375)
    start(page)
    page.locator("[data-do=next]").click(timeout=5000)


@pytest.mark.browser
def test_the_review_names_sources(show):  # noqa: F811
    page = show(interview([BY_ID["memory-kv-heads"]]))
    start(page)
    finish(page)
    review = page.locator(".kvqm-review").inner_text()
    assert "Sources: Ainslie and others, 2023: GQA: " in review


@pytest.mark.browser
def test_results_can_be_printed(show):  # noqa: F811
    page = show(interview())
    start(page)
    answer_all(page)
    page.emulate_media(media="print")
    assert not page.get_by_role("button", name="Another").is_visible()
    assert not page.locator(".kvqm-progress").is_visible()
    assert page.locator(".kvqm-review > li").count() == len(sample())
    assert page.locator(".kvqm-review > li").last.is_visible()


# -- the site --------------------------------------------------------------------------


@pytest.mark.browser
def test_every_formula_of_the_bank_is_one_that_mathjax_knows(open_page):
    opened = open_page("book/mock_interview.html")
    opened.wait_for_function("window.MathJax?.startup?.promise")
    opened.evaluate(
        """async () => {
          await MathJax.startup.promise;
          const { bank } = document.getElementById("kvqm").kvq;
          const texts = (x) => typeof x === "string" ? [x]
            : x instanceof Object ? Object.values(x).flatMap(texts) : [];
          const box = document.createElement("div");
          box.innerHTML = texts(bank.questions).join("<br>");
          document.querySelector(".kvqm").append(box);
          await MathJax.typesetPromise([box]);
        }"""
    )
    assert opened.locator(".kvqm mjx-container").count() > 20
    assert opened.evaluate(WRONG_MATH) == []
