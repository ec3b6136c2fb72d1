"""One rule of marking: Python, the page's script, the terminal and the cards agree."""

import builtins
import html as escaping
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from questions import ROOT, answers, by_rule, everything, sample

from kvq_lib.course.questions import bank, deck, marking, mock, numbers, terminal, text
from kvq_lib.course.questions.marking import mark, mistake, near
from kvq_lib.course.questions.numbers import read_number, why_not
from kvq_lib.errors import InvalidArgument

EVERY = everything()
NUMERIC = [question for question in EVERY if question.kind == "numeric"]

# -- numbers ---------------------------------------------------------------------------

READ = [
    ("260", "", 260),
    (" 260 MiB ", "MiB", 260),
    ("260MiB", "MiB", 260),
    ("1,024", "", 1024),
    ("1 024", "", 1024),
    ("1_024.5", "", 1024.5),
    ("12'345'678", "", 12345678),
    ("1e3", "", 1000),
    ("1.5E-2", "", 0.015),
    ("1.5 × 10^3", "", 1500),
    ("2x10^6", "", 2e6),
    ("3/4", "", 0.75),
    ("−3", "", -3),
    ("+3", "", 3),
    (".5", "", 0.5),
    ("5.", "", 5),
    ("~ 5", "", 5),
    ("about 5 %", "%", 5),
    ("4x", "", 4),
    ("12 GB/s", "GB/s", 12),
    ("16 tokens", "", 16),
    ("1 GiB", "MiB", 1024),
    ("1 GB", "MB", 1000),
    ("1 GB", "GiB", 1e9 / 2**30),
    ("2048 bytes", "KiB", 2),
    ("1500 µs", "ms", 1.5),
    ("50%", "", 0.5),
    ("50 per cent", "", 0.5),
    ("5 percent", "%", 5),
    ("0.05", "%", 0.05),
    ("115 %", "times", None),
    ("4-fold", "times", 4),
    ("1.15 times", "times", 1.15),
    ("1500 microseconds", "ms", 1.5),
    ("1500 μs", "ms", 1.5),
    ("2e6 ns", "ms", 2),
    ("1.5 Seconds", "ms", 1500),
    ("2 sec", "ms", 2000),
    ("5 min", "ms", 300_000),
    ("1 h", "ms", 3_600_000),
    ("5 hours", "MiB", None),
    ("12 parsecs", "ms", None),
    ("1 constructor", "MiB", None),
    ("5 MiB", "tokens", None),
    ("5 MiB", "", None),
    ("1 Token", "tokens", 1),
    ("12 heads", "KV heads", 12),
    ("260 mib", "MiB", 260),
    ("1 gigabyte", "MB", 1000),
    ("2080 Mbit", "MB", 260),
    ("2080 Mb", "MB", None),
    ("260 mb", "MB", None),
    ("260 b", "MiB", None),
    ("0.5 bytes", "bits", 4),
    ("3.2 bits per number", "bits", 3.2),
    ("1 GB/s", "MB/s", 1000),
    ("1 GB", "MB/s", None),
    ("800 tokens per second", "tokens/s", 800),
    ("4k", "tokens", None),
    ("4 k tokens", "tokens", None),
    ("7M", "", None),
    ("0,292", "", None),
    ("1,024 000", "", None),
    ("1½", "", None),
    ("½", "", None),
    ("1²", "", None),
    ("٣", "", None),
    ("5\x1c", "", None),
    ("5\ufeff", "", None),
    ("1,5", "", None),
    ("1.000,5", "", None),
    ("10,24", "", None),
    ("1234,567", "", None),
    ("1e999", "", None),
    ("1/0", "", None),
    ("1 + 1", "", None),
    ("5 6", "", None),
    ("eight", "", None),
    (".", "", None),
    ("-", "", None),
    ("", "", None),
    ("NaN", "", None),
    ("Infinity", "", None),
    ("0x10", "", None),
    ("9" * 70, "", None),
    ("1" + " of them" * 8, "", None),
    ("𝟙" * 31, "", None),
]

WHY_NOT = [
    ("12 parsecs", "ms", "the unit here is ms."),
    ("5 MiB", "", "there is no unit here"),
    ("0,292", "", "write 1.5 with a point"),
    ("1,5", "ms", "write 1.5 with a point"),
    ("4k", "tokens", "4,000 to some and 4,096 to others"),
    ("260 Mb", "MB", "bits or bytes"),
    ("1/0", "", "divided by 0"),
    ("1e999", "", "too large"),
    ("eight", "", "That is no number; 1,024 is one"),
    ("5 6", "ms", "That is no number; 1,024 is one"),
    ("9" * 70, "", "too long"),
    ("5 ms", "ms", ""),
]


@pytest.mark.parametrize(("typed", "unit", "value"), READ)
def test_numbers_are_read_as_people_type_them(typed, unit, value):
    assert read_number(typed, unit) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(("typed", "unit", "said"), WHY_NOT)
def test_what_is_no_number_is_refused_with_the_reason(typed, unit, said):
    assert said in why_not(typed, unit)
    assert bool(why_not(typed, unit)) is bool(said)
    assert (read_number(typed, unit) is None) is bool(said)


@pytest.mark.parametrize("question", NUMERIC, ids=lambda q: q.id)
def test_every_unit_of_the_bank_can_be_typed(question):
    assert mark(question, question.shown) == 1
    if question.unit:
        assert why_not("1 parsec", question.unit).endswith(f"is {question.unit}.")


@given(st.floats(-1e12, 1e12).filter(lambda x: x == 0 or abs(x) > 1e-200))
def test_every_number_that_python_prints_is_read(value):
    assert read_number(repr(value)) == value
    assert read_number(f"{value:,.3f}") == pytest.approx(value, abs=1e-3)


@given(st.floats(1e-6, 1e12), st.floats(0.001, 0.2))
def test_the_tolerance_is_relative_and_ends_where_it_says(value, tolerance):
    for sign in (-1, 1):
        assert near(value * (1 + sign * 0.999 * tolerance), value, tolerance)
        assert not near(value * (1 + sign * 1.001 * tolerance), value, tolerance)
        assert near(-value * (1 + sign * 0.999 * tolerance), -value, tolerance)


def test_what_is_counted_must_be_exact():
    assert near(63, 63, 0) and near(0.1 + 0.2, 0.3, 0) and near(0, 0, 0)
    assert not near(63.001, 63, 0) and not near(1e-12, 0, 0)


# -- the rule --------------------------------------------------------------------------


@pytest.mark.parametrize("question", EVERY, ids=lambda q: q.id)
def test_answers_earn_what_the_rule_says(question):
    for answer in answers(question):
        earned = mark(question, answer)
        assert 0 <= earned <= 1
        if question.kind == "numeric":
            continue
        assert earned == pytest.approx(by_rule(question, answer)), answer
    if question.choices:
        assert mark(question, question.rights) == 1
        assert mark(question, range(len(question.choices))) < 1
    elif question.kind == "open":
        assert mark(question, range(len(question.rubric))) == 1


@pytest.mark.parametrize("question", NUMERIC, ids=lambda q: q.id)
def test_numbers_earn_a_point_if_they_are_near(question):
    shown = question.shown
    assert mark(question, shown) == 1, f"what is shown, {shown}, is marked as wrong"
    width = marking.width(question.answer, question.tolerance)
    for sign in (-1, 1):
        assert mark(question, repr(question.answer + sign * 0.99 * width)) == 1
        assert mark(question, repr(question.answer + sign * 1.01 * width)) == (
            1 if width == 0 else 0
        )
    for known in question.mistakes:
        assert mark(question, repr(known.value)) == 0
        assert mistake(question, known.value) == known
    assert mistake(question, question.answer) is None
    assert mark(question, "nothing") == mark(question, None) == 0


def test_of_several_choices_a_wrong_pick_takes_back_a_right_one():
    (question,) = (q for q in sample() if q.id == "memory-what-grows")
    picks = {(): 0, (0,): 0.5, (0, 1): 1, (0, 2): 0, (0, 1, 2): 0.5, (2,): 0, (2, 3): 0}
    assert {p: mark(question, p) for p in picks} == picks


# -- the page's script -----------------------------------------------------------------


@pytest.fixture(scope="module")
def page(browser):
    """The mock interview of every question, for its script."""
    context = browser.new_context()
    context.set_default_timeout(300_000)
    opened = context.new_page()
    opened.set_content(
        "<!doctype html><html lang='en'><meta charset='utf-8'><body>"
        + mock.page(EVERY, lambda section: "#"),
    )
    yield opened
    context.close()


@pytest.mark.browser
def test_the_page_marks_every_answer_as_python_does(page):
    given_answers = [answers(question) for question in EVERY]
    found = page.evaluate(
        """(given) => {
          const { bank, mark } = document.getElementById("kvqm").kvq;
          return given.map((list, i) => list.map((a) => mark(bank.questions[i], a)));
        }""",
        given_answers,
    )
    for question, listed, points in zip(EVERY, given_answers, found, strict=True):
        expected = [mark(question, answer) for answer in listed]
        assert points == pytest.approx(expected), question.id
    assert sum(map(len, found)) > 10 * len(EVERY)


@pytest.mark.browser
def test_the_page_reads_numbers_as_python_does(page):
    draw = random.Random(3)
    names = [name for kind in numbers.TABLE["units"] for name in kind]
    names += [*numbers.TABLE["counts"], *numbers.TABLE["percent"], "/s", " per second"]
    alphabet = [*"0123456789.,eE-+−×x*^/ _'~%½²\xa0\x1c\ufeff", "10", "k", "about "]
    texts = ["".join(draw.choices(alphabet, k=draw.randint(1, 9))) for _ in range(5000)]
    for _ in range(5000):  # numbers with units, more often read
        name = draw.choice(names)
        name = draw.choice([name, name, name.upper(), name.title(), f"{name}/s"])
        texts.append(f"{draw.choice(['7', '1,024', '.5', '3e2'])}{' ' * 2}{name}")
    texts += [typed for typed, *_ in READ + WHY_NOT]
    asked = [*{question.unit for question in NUMERIC}, "GB", "GB/s", "s", "%"]
    units = [draw.choice(sorted(asked)) for _ in texts[: -len(READ + WHY_NOT)]]
    units += [unit for _, unit, _ in READ + WHY_NOT]
    found = page.evaluate(
        """([texts, units]) => {
          const { readNumber, whyNot } = document.getElementById("kvqm").kvq;
          return texts.map((t, i) => [readNumber(t, units[i]), whyNot(t, units[i])]);
        }""",
        [texts, units],
    )
    expected = [
        (read_number(typed, unit), why_not(typed, unit))
        for typed, unit in zip(texts, units, strict=True)
    ]
    assert sum(value is not None for value, _ in expected) > 800
    assert {why.split("is ")[0] for _, why in expected} >= {
        why.split("is ")[0] for why in numbers.TABLE["reasons"].values()
    }
    for typed, unit, here, there in zip(texts, units, expected, found, strict=True):
        assert there[1] == here[1], (typed, unit)
        assert there[0] == (here[0] and pytest.approx(here[0])), (typed, unit)


# -- the terminal ----------------------------------------------------------------------


@pytest.fixture
def tell(monkeypatch):
    """A function that answers a question in the terminal: the points, what was said."""

    def reply(question, lines, seed=7):
        left = iter(lines)
        said = []

        def read(prompt=""):
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)
        monkeypatch.setattr(builtins, "print", lambda *words: said.append(words))
        try:
            return terminal.ask(question, random.Random(seed)), "\n".join(
                " ".join(map(str, words)) for words in said
            )
        finally:
            monkeypatch.undo()

    return reply


def in_terminal(question, answer, seed=7):
    """The lines that somebody types to give an answer."""
    if question.kind == "numeric":
        return [answer or ""] * 3
    if question.kind == "open":
        lines = range(len(question.rubric))
        return ["", *("y" if i in (answer or ()) else "n" for i in lines)]
    order = list(range(len(question.choices)))
    random.Random(seed).shuffle(order)
    return [", ".join(terminal.LETTERS[order.index(i)] for i in answer or ())] * 3


@pytest.mark.parametrize("question", EVERY, ids=lambda q: q.id)
def test_the_terminal_marks_every_answer_as_python_does(question, tell):
    for answer in answers(question):
        if question.kind == "single" and len(answer or ()) > 1:
            continue  # several letters are asked again, and then are none
        earned, said = tell(question, in_terminal(question, answer))
        expected = mark(question, answer)
        assert earned == pytest.approx(expected), answer
        if question.kind != "open":
            word = {0.0: "✗ Wrong.", 1.0: "✓ Right."}.get(expected, "◐ Partly right")
            assert word in said
        section = text.plain(question.section.title)
        assert f"Section {question.section.number}, {section}" in said


def test_several_letters_for_one_choice_are_asked_again(tell):
    (question,) = (q for q in sample() if q.id == "memory-kv-heads")
    right = in_terminal(question, question.rights)[0]
    earned, said = tell(question, ["abc", "z", right])
    assert earned == 1 and said.count("Type a letter.") == 2


def test_a_third_line_that_means_nothing_is_no_answer(tell):
    (question,) = (q for q in sample() if q.id == "memory-bytes-of-int8")
    earned, said = tell(question, ["260 ms", "0,26", "many", "260"])
    assert earned == 0 and said.count("Try again.") == 2
    assert "the unit here is MiB. Try again." in said and "with a point" in said
    assert "and 1.5e3. That counts as no answer." in said
    (question,) = (q for q in sample() if q.id == "memory-kv-heads")
    earned, said = tell(question, ["z", "ab", "y", "a"])
    assert earned == 0 and said.count("The letters are a, b, c.") == 2
    assert "The letters are a, b, c. That counts as no answer." in said


def test_the_reader_s_own_choices_and_the_page_are_named(tell):
    (question,) = (q for q in sample() if q.id == "memory-what-grows")
    said = tell(question, in_terminal(question, (0, 2)))[1]
    assert said.count("your choice: ") == 2 and "✓ your choice: Each token" in said
    assert "✗ your choice: That changes the weights alone." in said
    assert "in book/02_memory_bottleneck" in said
    (question,) = (q for q in sample() if q.id == "memory-kv-heads")
    said = tell(question, ["a"])[1]
    assert "Source: Ainslie and others, 2023: GQA: " in said


def test_a_known_mistake_is_explained(tell):
    (question,) = (q for q in sample() if q.id == "memory-bytes-of-int8")
    assert "forgets the scales" in tell(question, ["256"])[1]
    assert "forgets the scales" not in tell(question, ["260"])[1]


def run(monkeypatch, capsys, lines, **options):
    """What `kvq quiz` prints for a reader who types these lines and leaves."""
    monkeypatch.setattr(bank, "FOLDER", bank.ROOT / "tests" / "bank")
    left = iter(lines)

    def read(prompt=""):
        print(prompt, end="")
        word = next(left, EOFError)
        if isinstance(word, str):
            return word
        raise word

    monkeypatch.setattr(builtins, "input", read)
    ending = terminal.run(**options)
    return capsys.readouterr().out + ending


@pytest.mark.parametrize("stop", [EOFError, KeyboardInterrupt])
def test_an_interview_ends_politely_with_its_score(monkeypatch, capsys, stop):
    said = run(
        monkeypatch, capsys, [*["260"] * 3, stop], topics=["quantization"], seed=1
    )
    assert "Stopped." in said and re.search(r"\b\d of \d points", said)
    nothing = run(monkeypatch, capsys, [stop], seed=1)
    assert "No question was answered." in nothing


def test_the_same_seed_asks_the_same_and_choices_are_kept_to(monkeypatch, capsys):
    lines = [""] * 60
    one, two, other = (
        run(monkeypatch, capsys, lines, levels=["easy"], seed=seed)
        for seed in (1, 1, 2)
    )
    assert one == two != other
    easy = [q for q in sample() if q.level == "easy"]
    assert one.count(" · easy · ") == len(easy) and " · mid · " not in one
    assert f"0 of {len(easy)} points" in one
    assert run(monkeypatch, capsys, lines, number=2, seed=1).count(" of 2 · ") == 2


def test_several_topics_levels_and_kinds_can_be_asked(monkeypatch, capsys):
    wish = {"topics": ["memory"], "levels": ["easy", "mid"], "kinds": ["numeric"]}
    said = run(monkeypatch, capsys, [""] * 60, number=50, **wish)
    fit = [q for q in sample() if q.topic == "memory" and q.kind == "numeric"]
    assert said.count("A number") == len(fit) == 2 and f"of {len(fit)} points" in said
    both = {"topics": ["memory", "quantization"], "kinds": ["single", "open"]}
    said = run(monkeypatch, capsys, [""] * 90, number=50, **both)
    fit = [q for q in sample() if q.kind in ("single", "open")]
    assert f"of {len(fit)} points" in said


def test_time_ends_an_interview_that_waits_for_a_line(monkeypatch, capsys):
    monkeypatch.setattr(bank, "FOLDER", bank.ROOT / "tests" / "bank")
    left = iter([""] * 3)

    def read(prompt=""):
        try:
            return next(left)
        except StopIteration:
            time.sleep(60)  # nobody types

    monkeypatch.setattr(builtins, "input", read)
    before = signal.getsignal(signal.SIGALRM)
    started = time.monotonic()
    ending = terminal.run(kinds=["single"], seed=1, minutes=1 / 60)
    assert time.monotonic() - started < 20
    assert "Time is up: 3 of 4 were answered." in ending
    assert "0 of 3 points" in ending
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


COMMAND = [
    *(
        sys.executable,
        "-u",
        "-c",
        "import sys; from kvq_lib.cli import main; sys.exit(main())",
    ),
    *("quiz", "--number", "3", "--seed", "1"),
]


def test_the_command_works_from_a_pipe_and_into_one():
    done = subprocess.run(
        COMMAND, cwd=ROOT, input="a\n\n1\n", capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr
    assert "1 of 3 · " in done.stdout and "Section " in done.stdout
    assert re.search(r"of \d points?", done.stdout.strip().split("Stopped.")[-1])
    reader = subprocess.Popen(
        COMMAND, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    reader.stdout.close()  # as `head` does when it has seen enough
    assert reader.communicate("a\n" * 30)[1] == "" and reader.returncode == 0


@pytest.mark.parametrize(
    ("closed", "said"), [("<&-", "the standard input is closed"), (">&-", "output is")]
)
def test_a_closed_terminal_is_told_without_a_traceback(closed, said):
    script = f'exec "$@" {closed}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *COMMAND],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_a_terminal_without_signs_gets_letters():
    done = subprocess.run(
        [*COMMAND, "--kind", "single,multiple", "--topic", "memory"],
        cwd=ROOT, input="a\n\u00e9\n\n".encode(), capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr
    said = done.stdout.decode("ascii")
    assert "1 of 3 - " in said and ("+ " in said and "- " in said)


def test_an_interrupt_ends_the_command_politely():
    running = subprocess.Popen(
        COMMAND, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said = ""
    while "> " not in said:
        said += running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    said, wrong = running.communicate()
    assert running.returncode == 0 and not wrong
    assert "Stopped." in said and "No question was answered." in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topics": ["memory", "weather"]}, "a topic is one of"),
        ({"levels": ["medium"]}, "a level is one of"),
        ({"kinds": ["numbers"]}, "a kind is one of"),
        ({"number": 0}, "at least one question"),
        ({"minutes": -1}, "minutes are from 0"),
        ({"minutes": float("nan")}, "minutes are from 0"),
        ({"topics": ["art"], "levels": ["easy"]}, "no question fits"),
    ],
)
def test_what_nobody_can_ask_is_refused(monkeypatch, options, said):
    monkeypatch.setattr(bank, "FOLDER", bank.ROOT / "tests" / "bank")
    with pytest.raises(InvalidArgument, match=said):
        terminal.run(**options)


def test_the_report_prints_all_problems_of_a_bad_bank(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bank, "FOLDER", tmp_path)
    for lines, said in (
        (["- {kind: a}"], "^1 problem$"),
        (["- 3"] * 2, "^2 problems$"),
    ):
        (tmp_path / "02_memory.yml").write_text("\n".join(lines))
        with pytest.raises(InvalidArgument, match=said):
            terminal.run(report=True)
        out = capsys.readouterr().out
        assert out.count("02_memory.yml:") == len(lines)


# -- the cards -------------------------------------------------------------------------


class _Card(HTMLParser):
    """What the back of a card says: choices with their sign, a number, points."""

    def __init__(self, back):
        super().__init__()
        self.right, self.number, self.points = [], None, []
        self.feed(back)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag == "li" and "data-points" in values:
            self.points.append(int(values["data-points"]))
        elif tag == "li":
            self.right.append(values.get("class") == "right")
        if "data-answer" in values:
            self.number = values


@pytest.mark.parametrize("question", EVERY, ids=lambda q: q.id)
def test_the_cards_hold_what_marks_every_answer_as_python_does(question):
    shown = deck.fields(question)
    card = _Card(shown["Answer"])
    for answer in answers(question):
        expected = mark(question, answer)
        if question.choices:
            places = [question.order.index(i) for i in answer or ()]
            signs = [card.right[place] for place in places]
            hits, wrong = signs.count(True), signs.count(False)
            rights = card.right.count(True)
            if question.kind == "single":
                earned = float(hits == rights and not wrong)
            else:
                earned = max(0, (hits - wrong) / rights)
        elif question.kind == "open":
            earned = sum(card.points[i] for i in answer or ()) / sum(card.points)
        else:
            found = read_number(answer or "", question.unit)
            value, within = (float(card.number[f"data-{k}"]) for k in KEYS)
            earned = float(found is not None and near(found, value, within))
        assert earned == pytest.approx(expected), answer
    for place in question.order:
        choice = text.line(question.choices[place].text)
        assert choice in shown["Choices"] and choice in shown["Answer"]
    if question.kind == "numeric":
        assert escaping.escape(question.shown) in shown["Answer"]


KEYS = ("answer", "tolerance")


def test_the_data_of_the_page_are_json():
    content = json.dumps(mock.data(EVERY, lambda section: "#"), allow_nan=False)
    assert len(content.encode()) < 1_500_000
