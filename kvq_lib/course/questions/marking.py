"""One rule of marking for every face; `marking.js` says the same to browsers.

A question is worth one point. Of several choices each right pick earns its share and
each wrong pick loses as much, down to nothing. A number counts if it is near enough.
Open answers are marked by who wrote them, and earn their share of the rubric's points.
"""

from collections.abc import Collection

from .bank import Mistake, Question
from .numbers import read_number

#: What a float may be off by although the number that was meant is right.
SLACK = 1e-9


def width(wanted: float, tolerance: float) -> float:
    """How far a number may be from another that it should be."""
    return (tolerance + SLACK) * abs(wanted)


def near(given: float, wanted: float, tolerance: float) -> bool:
    """Whether a number is within a relative tolerance of another."""
    return abs(given - wanted) <= width(wanted, tolerance)


def mistake(question: Question, given: float) -> Mistake | None:
    """The known mistake that a wrong number comes from, if it is one."""
    for known in question.mistakes:
        if near(given, known.value, question.tolerance):
            return known
    return None


def mark(question: Question, answer) -> float:
    """The points of an answer, from 0 to 1.

    Args:
        question: from the bank.
        answer: for single and multiple the places of the chosen choices in
            `question.choices`; for numeric what was typed; for open the places of the
            rubric's lines that are met. None, or nothing chosen or typed: no answer.
    """
    if question.kind == "numeric":
        given = read_number(answer or "", question.unit)
        right = given is not None and near(given, question.answer, question.tolerance)
        return float(right)
    chosen = set(answer or ())
    if question.kind == "open":
        met = (line for i, line in enumerate(question.rubric) if i in chosen)
        return sum(line.points for line in met) / question.points
    return _choices(question, chosen)


def _choices(question: Question, chosen: Collection[int]) -> float:
    rights = {i for i, choice in enumerate(question.choices) if choice.right}
    if question.kind == "single":
        return float(chosen == rights)
    hits = len(rights & set(chosen))
    wrong = len(set(chosen)) - hits
    return max(0.0, (hits - wrong) / len(rights))
