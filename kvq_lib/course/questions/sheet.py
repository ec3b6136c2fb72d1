"""All questions on paper: a page of Markdown, questions first, answers at the end."""

import textwrap
from collections.abc import Iterator, Sequence

from . import bank
from .bank import Question
from .numbers import asked_in

LETTERS = "abcde"
ASKS = {
    "single": "choose one",
    "multiple": "choose all that are right",
    "numeric": "a number",
    "open": "in your own words",
}


def letters(question: Question) -> dict[int, str]:
    """The letter of each choice on paper, in the order in which they are listed."""
    return {place: LETTERS[i] for i, place in enumerate(question.order)}


def markdown(questions: Sequence[Question]) -> str:
    """The sheet, from headings of the second level down."""
    parts = ["## Questions", *_by_topic(questions, _question)]
    parts += ["## Answers", *_by_topic(questions, _answer)]
    return "\n\n".join(parts) + "\n"


def _by_topic(questions: Sequence[Question], write) -> Iterator[str]:
    numbered = list(enumerate(questions, start=1))
    for topic, title in bank.TOPICS.items():
        here = [(number, q) for number, q in numbered if q.topic == topic]
        if here:
            yield f"### {title}"
        for number, question in here:
            yield from write(number, question)


def _item(words: str) -> str:
    """An item of a list, its further lines below its first."""
    return "- " + textwrap.indent(words.strip(), "  ").lstrip()


def _question(number: int, question: Question) -> Iterator[str]:
    section = question.section
    unit = asked_in(question.unit)
    yield f"(question-{question.id})="
    yield (
        f"**{number}** · section [{section.number}](/{section.page}) · "
        f"{question.level} · {ASKS[question.kind]}{unit} · "
        f"[answer](#answer-{question.id})"
    )
    yield question.question
    if question.choices:
        yield "\n".join(
            _item(f"{letter}) {question.choices[place].text}")
            for place, letter in letters(question).items()
        )


def _answer(number: int, question: Question) -> Iterator[str]:
    yield f"(answer-{question.id})="
    yield f"[**{number}**](#question-{question.id}) · {_short(question)}"
    if question.choices:
        yield "\n".join(
            _item(f"{letter}) {_sign(question, place)} {question.choices[place].why}")
            for place, letter in letters(question).items()
        )
    elif question.kind == "numeric":
        yield question.why
        yield "\n".join(_item(f"Not {m.shown}: {m.why}") for m in question.mistakes)
    else:
        yield question.model
        yield "\n".join(
            _item(f"{_points(line.points)}: {line.text}") for line in question.rubric
        )
    if question.sources:
        yield f"Source: {{cite:p}}`{','.join(question.sources)}`."


def _short(question: Question) -> str:
    """The answer in a word, where it has one."""
    if question.choices:
        named = letters(question)
        return ", ".join(sorted(named[place] for place in question.rights))
    return question.shown or "a good answer, and what counts"


def _sign(question: Question, place: int) -> str:
    return "✓" if question.choices[place].right else "✗"


def _points(points: int) -> str:
    return f"{points} point{'s' if points > 1 else ''}"
