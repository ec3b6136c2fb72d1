"""Rows of grades as CSV, JSON, feedback for students and a summary.

Nothing that a submission says reaches a student: feedback has a fixed vocabulary.
"""

import csv
import datetime as dt
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path

from .grade import number
from .late import Policy
from .outputs import write
from .session import FAILURES
from .words import count

#: What a student reads about a question that did not get full marks.
WORDS = {
    **{name: f"your code {words}" for name, words in FAILURES.items()},
    "wrong": "a value was wrong",
    "blank": "not answered",
}
_NAME = 200  # bytes of a student's name in that of a file, of which 255 are allowed
_UNREADABLE = "The file could not be read as a notebook, so that nothing was graded."
_FAULT = "Something went wrong while grading. Your instructor knows."
_MISSING = "Nothing was handed in."


def decimal(points: "int | float") -> Decimal:
    """Points of a row, exact."""
    return Decimal(repr(points))


def plain(points: Decimal) -> str:
    """Exact points without zeros at the end: 7.5, 10."""
    text = f"{points:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def apply_lateness(
    rows: Iterable[dict],
    policy: Policy | None,
    times: Mapping[str, dt.datetime] | None = None,
) -> None:
    """Put what lateness costs into rows: late_seconds, lost_percent and final.

    Args:
        times: when each student submitted; None takes the times of the files.
    """
    for row in rows:
        late, lost = 0.0, Decimal(0)
        if policy is not None and row["file"]:
            when = _when(row, times)
            if when is None:
                row["about"].append("no time is known: counted as in time")
            else:
                late, lost = policy.lost(when)
        final = decimal(row["total"]) * (100 - lost) / 100
        row["late_seconds"], row["lost_percent"] = round(late, 3), number(lost)
        row["final"] = number(final)


def _when(row: dict, times) -> dt.datetime | None:
    if times is not None:
        return times.get(row["student"])
    if row["modified"] is None:
        return None
    return dt.datetime.fromtimestamp(row["modified"], dt.UTC)


def notes(row: dict) -> list[str]:
    """All notes of a row."""
    found = [*row["about"], *row["notes"]]
    if row["late_seconds"]:
        lost = plain(decimal(row["lost_percent"]))
        points = f"{plain(decimal(row['total']))} points before it"
        found.insert(0, f"{_span(row['late_seconds'])} late, {lost}% lost, {points}")
    return found


def _span(seconds: float) -> str:
    """A time as a person says it, not rounded down to nothing."""
    for name, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"


# -- files ---------------------------------------------------------------------------


def as_csv(document: dict) -> str:
    """student, file, status, each question's points and maximum, total, max, sandbox,
    notes.  The total is what is left after lateness."""
    table = io.StringIO()
    out = csv.writer(table, lineterminator="\n")
    rows, names = document["rows"], [q["id"] for q in document["questions"]]
    questions = [column for name in names for column in (name, f"{name}_max")]
    heading = ["student", "file", "status", *questions, "total", "max", "sandbox"]
    out.writerow([*heading, "notes"])
    for row in rows:
        points = [
            plain(decimal(question[which]))
            for question in row["questions"]
            for which in ("points", "max")
        ]
        final, most = plain(decimal(row["final"])), plain(decimal(row["max"]))
        text = [row["student"], row["file"], row["status"]]
        said = _harmless("; ".join(notes(row)))
        numbers = [*points, final, most, row["sandbox"]]
        out.writerow([*map(_harmless, text), *numbers, said])
    return table.getvalue()


def _harmless(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


def as_json(document: dict) -> str:
    """All that is known, for `merge` and for a later run."""
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write_feedback(document: dict, folder: Path, detail: str = "words") -> int:
    """One Markdown file for each student who handed something in; how many.

    Args:
        detail: "words" says what went wrong, "points" gives numbers alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    used = set()
    for row in document["rows"]:
        if row["status"] == "missing":
            continue
        name = _file_name(row["student"], used)
        used.add(name.casefold())
        write(folder / name, feedback(document, row, detail))
    return len(used)


def _file_name(student: str, used: set[str]) -> str:
    """A file for a student: with a part of a hash where the name is too long for a
    file, or another student's file has it.  On some systems A is a."""
    name = student.replace("/", "_").replace("\\", "_").lstrip(".") or "_"
    short = name.encode(errors="replace")[:_NAME].decode(errors="ignore")
    if short != name or f"{name}.md".casefold() in used:
        short += f"-{hashlib.sha256(repr(student).encode()).hexdigest()[:16]}"
    while f"{short}.md".casefold() in used:
        short += "_"
    return f"{short}.md"


def feedback(document: dict, row: dict, detail: str = "words") -> str:
    """What a student reads."""
    lines = [f"# {document['title']}", ""]
    final, most = plain(decimal(row["final"])), plain(decimal(row["max"]))
    lines += [f"**{final} of {most} points**", ""]
    if row["late_seconds"]:
        lost = plain(decimal(row["lost_percent"]))
        before = plain(decimal(row["total"]))
        lines += [
            f"Handed in {_span(row['late_seconds'])} late: {lost}% of {before} points "
            "lost.",
            "",
        ]
    whole = {"unreadable": _UNREADABLE, "grader-error": _FAULT, "missing": _MISSING}
    if row["status"] in whole:
        # Why a file cannot be read is said in fixed words: see submission.py.
        why = row["notes"] if row["status"] == "unreadable" else []
        lines += [whole[row["status"]], *(f"Why: {reason}." for reason in why), ""]
        return "\n".join(lines)
    words = detail == "words"
    lines += ["| Question | Points |" + " |" * words, "|---|---|" + "---|" * words]
    for question in row["questions"]:
        points = f"{plain(decimal(question['points']))} of "
        points += plain(decimal(question["max"]))
        title = question["title"].replace("|", "\\|")
        line = f"| {question['id']}: {title} | {points} |"
        lines.append(f"{line} {said(question)} |" if words else line)
    return "\n".join([*lines, ""])


def said(question: dict) -> str:
    """A question's result in the fixed vocabulary."""
    if question["right"] == question["probes"]:
        return "full marks"
    why = "; ".join(WORDS[failure] for failure in question["failures"])
    return f"part of the marks: {why}" if question["right"] else why


# -- summary -------------------------------------------------------------------------


def summary(document: dict) -> str:
    """Counts, how points are distributed, hard questions, what needs a look."""
    rows = document["rows"]
    counts = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    said = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    lines = [f"{document['homework']}: {count(len(rows), 'student')}: {said or 'none'}"]
    handed = [row for row in rows if row["status"] in ("ok", "partial")]
    if handed:
        lines += ["", *_distribution(handed), "", *_hardest(handed)]
    look = [
        f"  {row['student']}: {row['status']}"
        + (f": {'; '.join(notes(row))}" if notes(row) else "")
        for row in rows
        if row["status"] not in ("ok", "missing") or row["about"]
    ]
    look += [f"  {name}: skipped, {why}" for name, why in document["skipped"]]
    if look:
        lines += ["", "needs a look:", *look]
    return "\n".join(lines)


def _distribution(rows: list[dict]) -> list[str]:
    """A histogram of ten classes of percent, and the middle."""
    shares = sorted(
        decimal(row["final"]) / decimal(row["max"]) * 100 if row["max"] else Decimal(0)
        for row in rows
    )
    middle = (shares[(len(shares) - 1) // 2] + shares[len(shares) // 2]) / 2
    counts = [0] * 10
    for share in shares:
        counts[min(9, int(share // 10))] += 1
    widest = max(counts)
    lines = [f"percent of the points (median {middle:.0f}):"]
    for low, there in enumerate(counts):
        high = 10 * low + (10 if low == 9 else 9)
        bar = "#" * -(-there * 40 // widest)
        lines.append(f"  {10 * low:3}-{high:3}  {there:4}  {bar}".rstrip())
    return lines


def _hardest(rows: list[dict]) -> list[str]:
    """Questions by the share of their points that was reached, hardest first."""
    found = []
    for index, first in enumerate(rows[0]["questions"]):
        reached = sum(decimal(row["questions"][index]["points"]) for row in rows)
        most = decimal(first["max"]) * len(rows)
        share = reached / most * 100 if most else Decimal(100)
        found.append(
            (share, index, f"  {share:3.0f}%  {first['id']}: {first['title']}")
        )
    return ["hardest questions:", *(line for _, _, line in sorted(found)[:5])]
