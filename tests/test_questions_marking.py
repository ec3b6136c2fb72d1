"""One rule of marking: Python, the page's script, the terminal and the cards agree."""

import html as escaping
import json
import random
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from questions import answers, by_rule, everything, sample

from kvq_lib.course.questions import deck, marking, mock, numbers, text
from kvq_lib.course.questions.marking import mark, mistake, near
from kvq_lib.course.questions.numbers import read_number, why_not

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
