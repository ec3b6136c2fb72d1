"""When a submission came, and what lateness costs."""

import csv
import datetime as dt
import re
import unicodedata
import zoneinfo
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from ...errors import InvalidArgument

_UNITS = {"min": 60, "minute": 60, "hour": 3600, "h": 3600, "day": 86400, "d": 86400}
_UNITS |= {"week": 604800}
_RULE = re.compile(r"([\d.]+) ?% ?(?:/|per|a) ?(\w+)", re.IGNORECASE)
_MOST = re.compile(r"at most ([\d.]+) ?%", re.IGNORECASE)
_GRACE = re.compile(r"([\d.]+) ?(\w+) grace|grace ([\d.]+) ?(\w+)", re.IGNORECASE)


@dataclass(frozen=True)
class Policy:
    """Lateness, and its price.

    Attributes:
        due: when submissions are due, with a time zone.
        percent: lost for every unit begun; 0 without a rule.
        unit: seconds.
        most: percent that can be lost at all.
        grace: seconds after `due` that cost nothing; later than that, all count.
    """

    due: dt.datetime
    percent: Decimal = Decimal(0)
    unit: int = 86400
    most: Decimal = Decimal(100)
    grace: float = 0.0

    def lost(self, submitted: dt.datetime) -> tuple[float, Decimal]:
        """(seconds late, percent lost)."""
        late = (submitted - self.due).total_seconds()
        if late <= 0:
            return 0.0, Decimal(0)
        if late <= self.grace:
            return late, Decimal(0)
        begun = int(-(-late // self.unit))
        return late, min(self.most, self.percent * begun)

    def said(self) -> dict[str, str]:
        """The policy as JSON, exact."""
        return {
            "due": self.due.isoformat(),
            "percent": str(self.percent),
            "unit_seconds": str(self.unit),
            "most": str(self.most),
            "grace_seconds": str(self.grace),
        }


def policy(due: str | None, rule: str | None) -> Policy | None:
    """The policy of `--due` and `--late`; None without.

    Raises:
        InvalidArgument: a time without zone, or a rule that says something else than
            "10%/day, at most 50%, 15 min grace".
    """
    if due is None:
        if rule is not None:
            raise InvalidArgument("--late needs --due: late after what?")
        return None
    when = moment(due, "--due")
    if rule is None:
        return Policy(when)
    percent = unit = most = grace = None
    for part in filter(None, (part.strip() for part in rule.split(","))):
        if (found := _MOST.fullmatch(part)) and most is None:
            most = _percent(found[1], rule)
        elif (found := _GRACE.fullmatch(part)) and grace is None:
            number, name = found[1] or found[3], found[2] or found[4]
            grace = float(_decimal(number, rule)) * _unit(name, rule)
        elif (found := _RULE.fullmatch(part)) and percent is None:
            percent, unit = _percent(found[1], rule), _unit(found[2], rule)
        else:
            raise _unclear(rule)
    if percent is None:
        raise _unclear(rule)
    most = Decimal(100) if most is None else most
    return Policy(when, percent, unit, most, grace or 0.0)


def _unclear(rule: str) -> InvalidArgument:
    return InvalidArgument(
        f"--late {rule[:80]!r} is unclear: write it as '10%/day, at most 50%, "
        "15 min grace'; the last two may be left out"
    )


def _decimal(text: str, rule: str) -> Decimal:
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
        raise _unclear(rule)
    return Decimal(text)


def _percent(text: str, rule: str) -> Decimal:
    found = _decimal(text, rule)
    if found > 100:
        raise _unclear(rule)
    return found


def _unit(name: str, rule: str) -> int:
    name = name.lower()
    for unit, seconds in _UNITS.items():
        if name in (unit, f"{unit}s"):
            return seconds
    raise _unclear(rule)


def moment(text: str, where: str) -> dt.datetime:
    """A time with its zone: "2026-03-01T23:59+01:00", "... Z", "... Europe/Berlin".

    Raises:
        InvalidArgument: it is no time, its zone or its time of day is not said, or no
            clock of that zone showed it.
    """
    parts = text.strip().rsplit(" ", 1)
    zone = None
    if len(parts) == 2 and re.fullmatch(r"[A-Za-z]+(/[\w+-]+)*", parts[1]):
        if parts[1] not in ("Z", "z"):
            try:
                zone = zoneinfo.ZoneInfo(parts[1])
            except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
                raise InvalidArgument(f"{where}: unknown zone {parts[1]!r}") from None
        parts = [parts[0], ""] if zone else ["".join(parts), ""]
    try:
        found = dt.datetime.fromisoformat(" ".join(parts).strip())
    except ValueError:
        raise InvalidArgument(f"{where}: {text[:60]!r} is no time") from None
    found = found if zone is None else found.replace(tzinfo=zone)
    if found.tzinfo is None:
        raise InvalidArgument(
            f"{where}: {text[:60]!r} has no time zone: add Z, +01:00 or Europe/Berlin"
        )
    if _is_date(parts[0]):
        raise InvalidArgument(f"{where}: {text[:60]!r} has no time of day: add 23:59")
    if found.astimezone(dt.UTC).astimezone(found.tzinfo) != found:
        raise InvalidArgument(
            f"{where}: {text[:60]!r} is no time: clocks were set forward over it"
        )
    return found


def _is_date(text: str) -> bool:
    try:
        dt.date.fromisoformat(text.strip())
    except ValueError:
        return False
    return True


def times(path: Path) -> dict[str, dt.datetime]:
    """When each student submitted, from a CSV file with columns student and time.

    Raises:
        InvalidArgument: a column, a time or its zone is missing, or a student is there
            twice.
    """
    found = {}
    for line, row in table(path, ("student", "time")):
        student = row["student"]
        if student in found:
            raise InvalidArgument(f"{path}, line {line}: {student!r} is there twice")
        found[student] = moment(row["time"], f"{path}, line {line}")
    return found


def students(path: Path) -> list[str]:
    """The students of a class, from a CSV file with a column student.

    Raises:
        InvalidArgument: the column is missing, or a student is there twice.
    """
    names = [row["student"] for _, row in table(path, ("student",))]
    for name, times in Counter(names).items():
        if times > 1:
            raise InvalidArgument(f"{path}: {name!r} is there {times} times")
    return names


def table(path: Path, columns: tuple[str, ...]):
    """(line, row) of a CSV file that has a heading; rows without a student are left
    out."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}") from None
    reader = csv.DictReader(text.splitlines())
    heading = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = heading
    for column in columns:
        if column not in heading:
            there = ", ".join(heading)[:200] or "nothing"
            hint = "; put commas between columns" if ";" in there else ""
            raise InvalidArgument(
                f"{path}: no column {column!r} in its first line, but {there}{hint}"
            )
    rows = []
    for row in reader:
        clean = {name: (row[name] or "").strip() for name in columns}
        # As names of files are written, whichever way this system composes accents.
        clean["student"] = unicodedata.normalize("NFC", clean["student"])
        if clean["student"]:
            rows.append((reader.line_num, clean))
    return rows
