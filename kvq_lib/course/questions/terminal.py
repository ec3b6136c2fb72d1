"""The mock interview in a terminal, or from a pipe: `kvq quiz`."""

import codecs
import contextlib
import random
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from ...errors import InvalidArgument
from . import balance, bank, text
from .bank import Question
from .marking import mark, mistake
from .numbers import asked_in, read_number, why_not
from .sheet import ASKS, LETTERS

HELP = {
    "single": "Type a letter.",
    "multiple": "Type all letters that are right, such as ac.",
    "numeric": "Try again.",
    "open": "Answer in your head or aloud, then press Enter.",
}


#: Signs of this page for terminals that have none of them.
ASCII = {"✓": "+", "✗": "-", "◐": "~", "·": "-", "×": "x", "≈": "~", "…": "..."}
MOST_MINUTES = 600


class _TimeIsUp(Exception):
    pass


def run(
    topics: Iterable[str] = (),
    levels: Iterable[str] = (),
    kinds: Iterable[str] = (),
    number: int = 10,
    minutes: float = 0,
    seed: int | None = None,
    report: bool = False,
) -> str:
    """Ask questions, print what was right, and give the score as text.

    Args:
        topics: of `bank.TOPICS`; all of them if none is given.
        levels: of `bank.LEVELS`, likewise.
        kinds: of `bank.KINDS`, likewise.
        number: of questions, at most.
        minutes: how long it may take; 0 for no limit.
        seed: the same seed asks the same questions; the time of day if it is not given.
        report: do not ask, say what the bank holds.

    Raises:
        InvalidArgument: an unknown topic, level or kind, nothing that fits, or nowhere
            to read answers from.
        BankError: the bank has problems.
    """
    wish = {
        "topic": _known("topic", topics, bank.TOPICS),
        "level": _known("level", levels, bank.LEVELS),
        "kind": _known("kind", kinds, bank.KINDS),
    }
    if number < 1:
        raise InvalidArgument(f"at least one question, got {number}")
    if not 0 <= minutes <= MOST_MINUTES:
        raise InvalidArgument(f"minutes are from 0 to {MOST_MINUTES}, got {minutes}")
    _any_terminal()
    questions = _load(report)
    if report:
        return balance.report(questions, balance.chapters())
    if sys.stdin is None or sys.stdout is None:
        closed = "input" if sys.stdin is None else "output"
        raise InvalidArgument(f"nobody can answer: the standard {closed} is closed")
    draw = random.Random(seed)
    fit = [q for q in questions if all(getattr(q, k) in v for k, v in wish.items())]
    if not fit:
        raise InvalidArgument("no question fits these topics, levels and kinds")
    with _limit(minutes):
        return interview(draw.sample(fit, min(number, len(fit))), draw)


def _known(name: str, values: Iterable[str], known: Iterable[str]) -> list[str]:
    """The values, each one known; all that there are if none is given."""
    values = list(values)
    for value in values:
        if value not in known:
            listed = ", ".join(known)
            raise InvalidArgument(f"a {name} is one of {listed}; got {value!r}")
    return values or list(known)


def _any_terminal() -> None:
    """Have signs that a terminal does not know replaced, instead of failing."""

    def replace(error: UnicodeError) -> tuple[str, int]:
        lacking = error.object[error.start : error.end]
        return "".join(ASCII.get(sign, "?") for sign in lacking), error.end

    codecs.register_error("kvq", replace)
    for stream, errors in ((sys.stdout, "kvq"), (sys.stdin, "replace")):
        if hasattr(stream, "reconfigure"):  # not what a notebook puts in its place
            stream.reconfigure(errors=errors)


@contextlib.contextmanager
def _limit(minutes: float) -> Iterator[None]:
    """Raise `_TimeIsUp` after some minutes, also while a line is waited for."""
    if not minutes:
        yield
        return

    def stop(*_):
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _load(report: bool) -> Sequence[Question]:
    try:
        return bank.load()
    except bank.BankError as error:
        if report:  # errors are cut to one line; here all of them are wanted
            print(error)
            found = len(error.problems)
            raise InvalidArgument(f"{found} problem{'s' * (found > 1)}") from None
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
    except _TimeIsUp:
        answered = sum(map(len, points.values()))
        ending = f"\nTime is up: {answered} of {len(questions)} were answered.\n"
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


def _input(kind: str, read: Callable[[str], tuple], nothing):
    """What the reader types, as `read` understands it.

    Args:
        kind: of the question.
        read: gives what a line means, and why it means nothing, if it does.
        nothing: what is given after three lines that mean nothing.
    """
    for left in (2, 1, 0):
        found, why = read(input("> ").strip())
        if not why:
            return found
        print(f"{why} {HELP[kind] if left else 'That counts as no answer.'}")
    return nothing


def _choose(question: Question, draw: random.Random) -> float:
    order = list(range(len(question.choices)))
    draw.shuffle(order)
    letters = dict(zip(LETTERS, order, strict=False))
    for letter, place in letters.items():
        _say(question.choices[place].text, f"  {letter}) ", "     ")

    def read(typed: str) -> tuple[set[int], str]:
        picks = [c for c in typed.lower() if c not in " ,.;)"]
        if set(picks) - set(letters):
            return set(), f"The letters are {', '.join(letters)}."
        if question.kind == "single" and len(picks) > 1:
            return set(), "One letter alone."
        return {letters[pick] for pick in picks}, ""

    chosen = _input(question.kind, read, set())
    earned = mark(question, chosen)
    print(f"{_sign(earned)}\n")
    for letter, place in letters.items():
        choice = question.choices[place]
        sign = "✓" if choice.right else "✗"
        yours = " your choice:" if place in chosen else ""
        _say(choice.why, f"  {letter}) {sign}{yours} ", "       ")
    print(_where(question))
    return earned


def _number(question: Question) -> float:
    print(f"A number{asked_in(question.unit)}:")

    def read(typed: str) -> tuple[str, str]:
        return typed, why_not(typed, question.unit) if typed else ""

    answer = _input("numeric", read, "")
    given = read_number(answer, question.unit)
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
    """Where the book explains it, and on which works it rests."""
    section = question.section
    title = text.plain(section.title)
    place = f"  Section {section.number}, {title}, in {section.page}"
    return "\n".join([place, *(f"  Source: {work}" for work in question.cited)])
