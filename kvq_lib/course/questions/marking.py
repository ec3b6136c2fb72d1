"""One rule of marking for every face; `marking.js` says the same to browsers.

A question is worth one point. Of several choices each right pick earns its share and
each wrong pick loses as much, down to nothing. A number counts if it is near enough.
Open answers are marked by who wrote them, and earn their share of the rubric's points.
"""

import math
import re
from collections.abc import Collection

from .bank import Mistake, Question

#: What a float may be off by although the number that was meant is right.
SLACK = 1e-9

# A number as people type it: signs, groups of thousands, fractions, powers of ten.
_NUMBER = re.compile(
    r"(?P<sign>[-+−]?)\s*"
    r"(?P<whole>[0-9]{1,3}(?:[,_' \u00a0\u2009\u202f][0-9]{3})+(?![0-9])|[0-9]+)?"
    r"(?P<part>\.[0-9]+|\.)?"
    r"(?:[eE](?P<e>[-+−]?[0-9]+)|\s*[×x*·]\s*10\s*\^?\s*(?P<ten>[-+−]?[0-9]+))?"
    r"(?P<over>\s*/\s*[0-9]+(?:\.[0-9]+)?)?"
)
_AROUND = re.compile(r"^\s*(?:[~≈=]|about\b|approx\.?)?\s*|\s+$", re.I)
# What may stand behind the number: one unit, or the words of one.
_UNIT = re.compile(r"(?:[^\W\d_]|[%/·²³\u2070-\u209f .^()-])*")
LONGEST = 60  # characters that are read as a number

#: Units that are converted if the answer is asked for in another one of the row.
UNITS = (
    {
        **{"b": 1, "byte": 1, "bytes": 1},
        **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
        **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
    },
    {"s": 1, "ms": 1e-3, "µs": 1e-6, "us": 1e-6},
)


def read_number(typed: str, unit: str = "") -> float | None:
    """The number that somebody typed, in `unit`, or None if there is none.

    Commas, spaces, underscores and apostrophes between groups of three digits are
    taken, "1e3", "1.5 × 10^3", "3/4", and words or a unit behind the number. GiB are
    converted where MiB are asked for. A comma elsewhere is refused: whether "1,5" is
    fifteen tenths or a slip nobody can say.
    """
    if len(typed) > LONGEST:
        return None
    text = _AROUND.sub("", typed.strip())
    found = _NUMBER.match(text)
    if found is None or not (found["whole"] or (found["part"] or ".") != "."):
        return None
    behind = text[found.end() :].strip()
    if not _UNIT.fullmatch(behind):
        return None
    digits = re.sub(r"\D", "", found["whole"] or "0") + (found["part"] or "")
    power = (found["e"] or found["ten"] or "0").replace("−", "-")
    sign = -1.0 if found["sign"] in ("-", "−") else 1.0
    # Refused, not infinite: no quantity of this book has a thousand digits.
    if abs(int(power)) > 300 or len(digits) > 40:
        return None
    value = sign * float(f"{digits}e{power}")
    if found["over"]:
        below = float(found["over"].strip().lstrip("/"))
        if below == 0:
            return None
        value /= below
    for row in UNITS:
        if unit.lower() in row and behind.lower() in row:
            value *= row[behind.lower()] / row[unit.lower()]
    return value if math.isfinite(value) else None


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
