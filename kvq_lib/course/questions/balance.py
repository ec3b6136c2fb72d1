"""Whether the bank as a whole is balanced, and a report of it: `kvq quiz --report`.

`troubles` holds the bank to what was promised: enough questions, easy and hard ones, of
all kinds, for each chapter, and choices that do not give themselves away.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from . import bank, rules, text
from .bank import Question

LEAST = 120  # questions
LEAST_A_CHAPTER = 8
#: A chapter's quiz needs so many that are no open ones.
LEAST_CLOSED = 5
#: Shares of levels and kinds, at least and at most.
LEVELS = {"easy": (0.30, 0.45), "mid": (0.30, 0.45), "hard": (0.10, 0.40)}
KINDS = {
    "single": (0.40, 0.60),
    "multiple": (0.10, 0.25),
    "numeric": (0.15, 0.35),
    "open": (0.04, 0.20),
}
MOST_GIVEN_AWAY = 0.40
TEN = 10  # the lesson's questions
#: Words that must not tell right choices from wrong ones.
TELLING = {
    "a reason": re.compile(r"\b(?:since|because|so)\b|, for\b", re.I),
    "a hedge": re.compile(
        r"\b(?:about|most|mostly|nearly|almost|hardly|some|often|usually|may|might|can)\b",
        re.I,
    ),
}
MOST_APART = 0.08  # between the shares of right and of wrong choices with such words


def lengths(question: Question) -> list[int]:
    """Characters of each choice, as readers see them."""
    return [len(text.plain(choice.text)) for choice in question.choices]


def given_away(
    questions: Sequence[Question], pick: Callable[[list[int]], int]
) -> list[Question]:
    """The single questions whose right choice alone is the longest, or the shortest.

    Args:
        questions: the bank.
        pick: `max` or `min`.
    """
    found = []
    for question in questions:
        if question.kind == "single":
            sizes = lengths(question)
            most = pick(sizes)
            if sizes[question.rights[0]] == most and sizes.count(most) == 1:
                found.append(question)
    return found


def telling(questions: Sequence[Question], word: re.Pattern) -> tuple[float, float]:
    """The shares of right and of wrong choices of single questions that hold a word."""
    shares = []
    for right in (True, False):
        texts = [
            text.plain(choice.text)
            for question in questions
            if question.kind == "single"
            for choice in question.choices
            if choice.right is right
        ]
        shares.append(sum(bool(word.search(t)) for t in texts) / max(1, len(texts)))
    return shares[0], shares[1]


def troubles(questions: Sequence[Question], pages: Sequence[str]) -> Iterator[str]:
    """What is out of balance, a line each.

    Args:
        questions: the whole bank.
        pages: the chapters.
    """
    total = len(questions)
    if total < LEAST:
        yield f"{total} questions; at least {LEAST}"
    for field, bounds in (("level", LEVELS), ("kind", KINDS)):
        counted = Counter(getattr(question, field) for question in questions)
        for name, (low, high) in bounds.items():
            share = counted[name] / max(1, total)
            if not low <= share <= high:
                yield f"{share:.0%} are {name}; {low:.0%} to {high:.0%}"
    for page in pages:
        here = [q for q in questions if q.section.page == page]
        closed = sum(q.kind != "open" for q in here)
        if len(here) < LEAST_A_CHAPTER or closed < LEAST_CLOSED:
            yield (
                f"{page} has {len(here)} questions, {closed} of them closed; at least "
                f"{LEAST_A_CHAPTER} and {LEAST_CLOSED}"
            )
    ten = sum("ten" in question.tags for question in questions)
    if ten != TEN:
        yield f"{ten} questions have the tag ten; {TEN}"
    singles = sum(question.kind == "single" for question in questions)
    for pick, word in ((max, "longest"), (min, "shortest")):
        found = given_away(questions, pick)
        if len(found) > MOST_GIVEN_AWAY * singles:
            listed = ", ".join(question.id for question in found)
            yield (
                f"the right choice is the {word} in {len(found)} of {singles} single "
                f"questions; at most {MOST_GIVEN_AWAY:.0%}: {listed}"
            )
    for name, word in TELLING.items():
        right, wrong = telling(questions, word)
        if singles >= 20 and abs(right - wrong) > MOST_APART:
            yield (
                f"{name} stands in {right:.0%} of right and {wrong:.0%} of wrong "
                f"single choices; at most {100 * MOST_APART:.0f} points apart"
            )
    places = Counter(q.rights[0] for q in questions if q.kind == "single")
    place, most = max(places.items(), key=lambda item: item[1], default=(0, 0))
    if singles >= 20 and most > singles / 2:
        yield f"the right choice is number {place + 1} in {most} of {singles} questions"


def report(questions: Sequence[Question], pages: Sequence[str]) -> str:
    """Counts by topic, level, kind, chapter and tag, and what is out of balance."""
    lines = [f"{len(questions)} questions", ""]
    lines += _table("topic", [q.topic for q in questions], questions)
    lines += _table("chapter", [q.section.page for q in questions], questions)
    tags = Counter(tag for question in questions for tag in question.tags)
    used = ", ".join(f"{tag} {count}" for tag, count in sorted(tags.items()))
    unused = ", ".join(tag for tag in rules.TAGS if tag not in tags)
    lines += [f"tags: {used}", f"tags not used: {unused or 'none'}", ""]
    for name, word in TELLING.items():
        right, wrong = telling(questions, word)
        lines += [
            f"{name} in {right:.0%} of right, {wrong:.0%} of wrong single choices"
        ]
    lines += [""]
    found = list(troubles(questions, pages))
    if not found:
        return "\n".join([*lines, "The bank is balanced."])
    return "\n".join([*lines, "Out of balance:", *(f"- {line}" for line in found)])


def _table(title: str, groups: list[str], questions: Sequence[Question]) -> list[str]:
    """A row for each group: all, by level, by kind."""
    columns = [*bank.LEVELS, *bank.KINDS]
    width = max(map(len, [title, "together", *groups]))
    heads = " ".join(f"{name:>8}" for name in ["all", *columns])
    lines = [f"{title:{width}} {heads}"]
    for group in [*dict.fromkeys(groups), None]:
        here = [
            question
            for name, question in zip(groups, questions, strict=True)
            if group in (name, None)
        ]
        counted = Counter(q.level for q in here) + Counter(q.kind for q in here)
        cells = [len(here), *(counted[name] for name in columns)]
        lines.append(
            f"{group or 'together':{width}} " + " ".join(f"{n:8}" for n in cells)
        )
    return [*lines, ""]


def chapters() -> list[str]:
    """The pages of the chapters."""
    return sorted(bank.surroundings().sections)
