"""The mock interview in a terminal, or from a pipe: `kvq quiz`."""

import random
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from ...errors import InvalidArgument
from . import balance, bank, text
from .bank import Question
from .marking import mark, mistake
from .numbers import read_number
from .sheet import ASKS, LETTERS

HELP = {
    "single": "Type a letter.",
    "multiple": "Type all letters that are right, such as ac.",
    "numeric": "Type a number, such as 1,024 or 1.5e3.",
    "open": "Answer in your head or aloud, then press Enter.",
}


def run(
    topic: str | None = None,
    level: str | None = None,
    number: int = 10,
    seed: int | None = None,
    report: bool = False,
) -> str:
    """Ask questions, print what was right, and give the score as text.

    Args:
        topic: one of `bank.TOPICS`; all of them if it is not given.
        level: one of `bank.LEVELS`; all of them if it is not given.
        number: of questions, at most.
        seed: the same seed asks the same questions; the time of day if it is not given.
        report: do not ask, say what the bank holds.

    Raises:
        InvalidArgument: an unknown topic or level, or nothing that fits.
        BankError: the bank has problems.
    """
    for name, value, known in (
        ("topic", topic, bank.TOPICS),
        ("level", level, bank.LEVELS),
    ):
        if value is not None and value not in known:
            listed = ", ".join(known)
            raise InvalidArgument(f"a {name} is one of {listed}; got {value!r}")
    if number < 1:
        raise InvalidArgument(f"at least one question, got {number}")
    questions = _load(report)
    if report:
        return balance.report(questions, balance.chapters())
    draw = random.Random(seed)
    fit = [q for q in questions if topic in (None, q.topic)]
    fit = [q for q in fit if level in (None, q.level)]
    if not fit:
        raise InvalidArgument("no question fits that topic and level")
    return interview(draw.sample(fit, min(number, len(fit))), draw)


def _load(report: bool) -> Sequence[Question]:
    try:
        return bank.load()
    except bank.BankError as error:
        if report:  # errors are cut to one line; here all of them are wanted
            print(error)
            raise InvalidArgument(f"{len(error.problems)} problems") from None
        raise


def interview(questions: Sequence[Question], draw: random.Random) -> str:
    """Ask questions one after the other; the score, also if the reader stops early."""
    points: dict[str, list[float]] = {}
    ending = ""
    try:
        for place, question in enumerate(questions, start=1):
            print(f"\n{place} of {len(questions)} · {_head(question)}\n")
            _say(question.question)
            earned = ask(question, draw)
            points.setdefault(question.topic, []).append(earned)
    except (EOFError, KeyboardInterrupt):
        ending = "\nStopped.\n"
    return ending + score(points)


def score(points: dict[str, list[float]]) -> str:
    """The score, together and by topic; each question is worth one point."""
    asked = sum(map(len, points.values()))
    if not asked:
        return "\nNo question was answered."
    lines = [f"\n{sum(map(sum, points.values())):.4g} of {asked} points"]
    if len(points) > 1:
        width = max(len(bank.TOPICS[topic]) for topic in points)
        lines += [
            f"  {bank.TOPICS[topic]:{width}}  {sum(found):.4g} of {len(found)}"
            for topic, found in points.items()
        ]
    return "\n".join(lines)


def ask(question: Question, draw: random.Random) -> float:
    """Ask one question and say what is right; the points, from 0 to 1.

    Raises:
        EOFError, KeyboardInterrupt: the reader stops.
    """
    if question.choices:
        return _choose(question, draw)
    return _open(question) if question.kind == "open" else _number(question)


def _head(question: Question) -> str:
    topic = bank.TOPICS[question.topic]
    return f"{topic} · {question.level} · {ASKS[question.kind]}"


def _say(markdown: str, first: str = "", later: str = "") -> None:
    """Print a text, its lines as long as the terminal likes them."""
    width = min(88, shutil.get_terminal_size().columns)
    for line in text.plain(markdown).splitlines():
        indents = {"initial_indent": first, "subsequent_indent": later}
        print(textwrap.fill(line, max(20, width), **indents) if line else "")
        first = later


def _input(kind: str) -> Iterator[str]:
    """What the reader types, line by line; what nothing can be made of is asked again.

    An empty line, from the third try on any line, is an answer, too.
    """
    for _ in range(3):
        typed = input("> ").strip()
        yield typed
        print(HELP[kind])
    yield ""


def _choose(question: Question, draw: random.Random) -> float:
    order = list(range(len(question.choices)))
    draw.shuffle(order)
    letters = dict(zip(LETTERS, order, strict=False))
    for letter, place in letters.items():
        _say(question.choices[place].text, f"  {letter}) ", "     ")
    chosen: set[int] = set()
    for typed in _input(question.kind):
        picks = [c for c in typed.lower() if c not in " ,.;)"]
        one = question.kind == "multiple" or len(picks) == 1
        if not picks or (one and set(picks) <= set(letters)):
            chosen = {letters[pick] for pick in picks}
            break
    earned = mark(question, chosen)
    print(f"{_sign(earned)}\n")
    for letter, place in letters.items():
        choice = question.choices[place]
        sign = "✓" if choice.right else "✗"
        _say(choice.why, f"  {letter}) {sign} ", "       ")
    print(_where(question))
    return earned


def _number(question: Question) -> float:
    asked = f" in {question.unit}" if question.unit else ""
    print(f"A number{asked}:")
    given, answer = None, ""
    for typed in _input("numeric"):
        given, answer = read_number(typed, question.unit), typed
        if not typed or given is not None:
            break
    earned = mark(question, answer)
    print(f"{_sign(earned)} {question.shown}\n")
    known = mistake(question, given) if given is not None and not earned else None
    if known:
        _say(known.why, "  ", "  ")
    _say(question.why, "  ", "  ")
    print(_where(question))
    return earned


def _open(question: Question) -> float:
    print(HELP["open"])
    input("> ")
    _say(question.model, "  ", "  ")
    print("\nDid your answer say this? y or n")
    met = []
    for place, line in enumerate(question.rubric):
        _say(f"{line.text} ({line.points})", "  ", "  ")
        if input("> ").strip().lower() in ("y", "yes"):
            met.append(place)
    earned = mark(question, met)
    print(f"{earned:.2g} of 1 point\n{_where(question)}")
    return earned


def _sign(earned: float) -> str:
    """The word for what an answer earned."""
    if earned == 1:
        return "✓ Right."
    return "✗ Wrong." if earned == 0 else f"◐ Partly right: {earned:.2g}."


def _where(question: Question) -> str:
    section = question.section
    return f"  Section {section.number}, {text.plain(section.title)}"
