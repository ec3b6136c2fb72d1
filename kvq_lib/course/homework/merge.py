"""Several JSON files of `kvq homework grade` become one."""

import json
from pathlib import Path

from ...errors import InvalidArgument
from .grade import FORMAT, missing
from .words import count

#: What all parts must agree on: grades that were made otherwise are not one list.
_SAME = ("format", "homework", "title", "key", "questions", "limits", "late")
_NAMED = {
    "key": "the keys differ: grade all with one key",
    "limits": "the limits differ: grade all with one --time and --memory",
    "late": "due times or rules of lateness differ",
}


def load(path: Path) -> dict:
    """A JSON file of grades.

    Raises:
        InvalidArgument: it is none, or of another version.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found["format"]
        found["rows"], found["key"]
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidArgument(f"{path} holds no grades") from None
    if version != FORMAT:
        raise InvalidArgument(f"{path} is of format {version}, not {FORMAT}")
    return found


def merge(parts: list[tuple[str, dict]]) -> tuple[dict, list[str]]:
    """One document of all parts, and what is wrong with them.

    Args:
        parts: (name, document) pairs.

    Raises:
        InvalidArgument: they cannot be one: other homework, key, limits or lateness.
    """
    first_name, first = parts[0]
    for name, document in parts[1:]:
        for what in _SAME:
            if document[what] != first[what]:
                why = _NAMED.get(what, f"not the same {what}")
                raise InvalidArgument(f"{first_name} and {name}: {why}")
    rows, problems, skipped, level = {}, [], {}, set()
    for name, document in parts:
        skipped |= {tuple(pair): None for pair in document["skipped"]}
        level.add(document["sandbox"])
        for row in document["rows"]:
            old = rows.setdefault(row["student"], row)
            if old is row:
                continue
            if "missing" in (old["status"], row["status"]):
                rows[row["student"]] = row if old["status"] == "missing" else old
            elif _graded(old) != _graded(row):
                problems.append(
                    f"{row['student']}: two grades; the one of the file "
                    f"given first counts, not that of {name}"
                )
            else:
                problems.append(f"{row['student']}: there twice, with the same grade")
    classes = [document["class"] for _, document in parts if document["class"]]
    everyone = sorted({student for names in classes for student in names})
    for student in everyone:
        if student not in rows:
            rows[student] = missing(first["questions"], student)
    gone = [s for s in everyone if rows[s]["status"] == "missing"]
    if gone:
        problems.append(
            f"{count(len(gone), 'student')} without a submission: {', '.join(gone)}"
        )
    problems += _shards(parts)
    if len(level) > 1:
        problems.append(f"graded in different sandboxes: {', '.join(sorted(level))}")
    merged = {
        **first,
        "sandbox": ", ".join(sorted(level)),
        "shard": None,
        "class": everyone or None,
        "skipped": [list(pair) for pair in skipped],
        "rows": [rows[student] for student in sorted(rows)],
    }
    return merged, problems


def _graded(row: dict) -> tuple:
    return row["fingerprint"], row["status"], row["final"]


def _shards(parts: list[tuple[str, dict]]) -> list[str]:
    """Which shards are not there."""
    given = [tuple(document["shard"]) for _, document in parts if document["shard"]]
    problems = []
    for most in sorted({n for _, n in given}):
        absent = sorted(set(range(1, most + 1)) - {i for i, n in given if n == most})
        if absent:
            names = ", ".join(f"{i}/{most}" for i in absent)
            problems.append(f"shards are missing: {names}")
    return problems
