"""A folder of submissions becomes rows of grades; one bad file hurts no other.

A row is a dictionary of plain data, as it stands in the JSON file:

    student, file   who, and which file (relative to the folder; "" if missing)
    status          "ok"; "partial": some cell or probe could not be run to its end,
                    or it is another homework's; "unreadable"; "missing";
                    "grader-error": the grader's own fault
    questions       [{"id", "title", "points", "max", "right", "probes", "failures"}]
    total, max      points, before lateness
    sandbox         the level it ran in, or ""
    notes           sentences for an instructor, from grading
    about           the same, about which file it is
    modified        time of the file, seconds since 1970
    fingerprint     of all that the grade depends on
    seconds         that it took
"""

import concurrent.futures
import functools
import hashlib
import json
import os
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path

from . import pipe, score, submission
from .sandbox import Limits, Sandbox
from .session import run_cells
from .words import count

FORMAT = 1
STATUSES = ("ok", "partial", "unreadable", "missing", "grader-error")
_KEPT = ("questions", "total", "sandbox", "notes", "fingerprint", "seconds")
_JUNK = {"__MACOSX", "Thumbs.db", "desktop.ini"}


@dataclass(frozen=True)
class Entry:
    """A student's submission: a file, or a reason why there is none to grade."""

    student: str
    path: Path
    file: str
    reason: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """What a folder holds: submissions, and (name, why) of all that is none."""

    entries: list[Entry]
    skipped: list[tuple[str, str]] = field(default_factory=list)


def find(folder: Path, homework: str, ours: Iterable[Path] = ()) -> Found:
    """Submissions of a folder: NAME.ipynb, or a folder NAME with a notebook.

    Args:
        homework: of several files of a student, the one named after it counts, or else
            the newest.
        ours: files of the instructor, which are no submissions.
    """
    mine = {os.path.realpath(path) for path in ours}
    skipped, files = [], {}
    for item in sorted(os.scandir(folder), key=lambda item: item.name):
        path = Path(item.path)
        if (
            item.name.startswith(".")
            or item.name in _JUNK
            or os.path.realpath(path) in mine
        ):
            continue
        if item.is_dir(follow_symlinks=False):
            student, inside = _name(item.name.removesuffix(".ipynb")), _notebooks(path)
            files.setdefault(student, []).extend(inside or [path])
        elif path.suffix.lower() == ".ipynb":
            files.setdefault(_name(path.stem), []).append(path)
        else:
            what = "a link" if item.is_symlink() else "not a notebook"
            skipped.append((_name(item.name), what))
    entries = [
        _entry(student, paths, folder, homework) for student, paths in files.items()
    ]
    return Found(sorted(entries, key=lambda entry: entry.student), skipped)


def _notebooks(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # not ours to read
        return []
    return [
        folder / name
        for name in names
        if name.lower().endswith(".ipynb") and not name.startswith(".")
    ]


def _name(name: str) -> str:
    """A name that can be printed: as one writes it, without control characters."""
    name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    name = unicodedata.normalize("NFC", name)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _entry(student: str, paths: list[Path], folder: Path, homework: str) -> Entry:
    def file(path: Path) -> str:
        return "/".join(map(_name, path.relative_to(folder).parts))

    path, *others = sorted(paths, key=lambda p: _preference(p, homework))
    notes = ()
    if others:
        names = ", ".join(file(other) for other in others)
        notes = (f"{len(paths)} files: {file(path)} is graded, not {names}",)
    reason = ""
    if path.is_dir() and not path.is_symlink():
        reason = "a folder without a notebook"
    return Entry(student, path, file(path), reason, notes)


def _preference(path: Path, homework: str) -> tuple:
    try:
        age = -path.lstat().st_mtime
    except OSError:
        age = 0.0
    return path.is_dir(), not path.name.lower().startswith(homework), age, path.name


def in_shard(student: str, shard: tuple[int, int] | None) -> bool:
    """Whether a student belongs to shard (i, n), i from 1: by a hash of the name, so
    that no other student's coming or going changes it."""
    if shard is None:
        return True
    number = int.from_bytes(hashlib.sha256(student.encode()).digest()[:8])
    return number % shard[1] == shard[0] - 1


# -- grading -------------------------------------------------------------------------


@dataclass(frozen=True)
class Grader:
    """All that a grade depends on besides the file."""

    key: dict
    sandbox: Sandbox
    limits: Limits

    @functools.cached_property
    def questions(self) -> list[dict]:
        """The key's questions, without points."""
        return blank_questions(self.key)

    def fingerprint(self, digest: str) -> str:
        """Of a file's grade: equal if grading again would give the same."""
        said = [FORMAT, digest, self.key["hash"], self.sandbox.level]
        said += [self.sandbox.library.name, asdict(self.limits)]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def row(self, entry: Entry, known: Mapping[tuple, dict]) -> dict:
        """Grade one submission; whatever happens becomes part of the row.

        Args:
            known: rows of an earlier run, by student and fingerprint.
        """
        try:
            if entry.reason:
                raise submission.Unreadable(entry.reason)
            fingerprint = self.fingerprint(submission.digest(entry.path))
            old = known.get((entry.student, fingerprint))
            if old is None:
                return self._graded(entry)
            fresh = empty(self.questions, entry, old["status"])
            return {**fresh, **{name: old[name] for name in _KEPT}}
        except submission.Unreadable as error:
            return empty(self.questions, entry, "unreadable", str(error))
        except pipe.Interrupted:
            raise
        except Exception as error:
            return empty(self.questions, entry, "grader-error", _where(error))

    def _graded(self, entry: Entry) -> dict:
        read = submission.read(entry.path)
        probes = score.probes(self.key)
        transcript = run_cells(read.cells, probes, self.sandbox, self.limits)
        scores = score.score(self.key, transcript)
        known = {q["id"]: q["cells"] for q in self.key["questions"]}
        notes = []
        strange = {q for cell in read.cells for q in cell.questions} - set(known)
        if strange:
            notes.append(
                f"{count(len(strange), 'mark')} of no question of this homework"
            )
        notes += [f"{q}: no cell answers it" for q in transcript.unanswered]
        notes += [
            f"{q}: answered by {count(found, 'cell')}, of {known[q]} in the exercise"
            for q, found in transcript.answers.items()
            if q in known and found != known[q]
        ]
        notes += transcript.notes
        reached = sum(found.points for found in scores)
        foreign = not reached and not score.asks_for(self.key, read.cells)
        if foreign:
            notes.insert(0, self._other(read.homework))
        whole = not foreign and not transcript.cells and not transcript.unanswered
        whole = whole and not any(found.stopped for found in scores)
        return {
            **empty(self.questions, entry, "ok" if whole else "partial"),
            "questions": [_question(found) for found in scores],
            "total": number(reached),
            "sandbox": self.sandbox.level,
            "notes": notes,
            "fingerprint": self.fingerprint(read.digest),
            "seconds": round(transcript.seconds, 3),
        }

    def _other(self, said: str) -> str:
        """What to tell of a notebook that has nothing of this homework."""
        homework = self.key["homework"]
        if said and said != homework:
            return f"a notebook of {said}, not of {homework}"
        return f"no answer defines what {homework} asks for: another notebook?"


def number(points) -> int | float:
    """Exact decimal points as JSON's number that prints the same."""
    return int(points) if points == int(points) else float(points)


def _question(found: score.Score) -> dict:
    return {
        "id": found.question,
        "title": found.title,
        "points": number(found.points),
        "max": number(found.most),
        "right": found.right,
        "probes": found.probes,
        "failures": list(found.failures),
    }


def blank_questions(key: dict) -> list[dict]:
    """The questions of a key without any points, as rows have them."""
    return [
        {
            "id": question["id"],
            "title": question["title"],
            "points": 0,
            "max": number(sum(map(score.points, question["probes"]))),
            "right": 0,
            "probes": len(question["probes"]),
            "failures": [],
        }
        for question in key["questions"]
    ]


def empty(questions: list[dict], entry: Entry, status: str, note: str = "") -> dict:
    """A row without points.

    Args:
        questions: as `blank_questions` makes them.
    """
    try:
        modified = entry.path.lstat().st_mtime if entry.file else None
    except OSError:
        modified = None
    return {
        "student": entry.student,
        "file": entry.file,
        "status": status,
        "questions": [dict(question) for question in questions],
        "total": 0,
        "max": number(sum(Decimal(repr(question["max"])) for question in questions)),
        "sandbox": "",
        "notes": [note] if note else [],
        "about": list(entry.notes),
        "modified": modified,
        "fingerprint": "",
        "seconds": 0.0,
    }


def missing(questions: list[dict], student: str) -> dict:
    """The row of a student who handed in nothing, lateness included."""
    row = empty(questions, Entry(student, Path(), ""), "missing")
    return {**row, "late_seconds": 0.0, "lost_percent": 0, "final": 0}


def _where(error: Exception) -> str:
    """Kind and place of an error of the grader's own; its message stays unsaid."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"


def grade(
    entries: list[Entry],
    grader: Grader,
    jobs: int = 1,
    known: Iterable[dict] = (),
    done: Callable[[dict], None] = lambda row: None,
) -> list[dict]:
    """Rows of all entries, in their order.

    Args:
        jobs: submissions at once.
        known: rows of an earlier run; those whose fingerprint holds are taken as they
            are, with the file's name and time of now.
        done: called with each row as it is ready.
    """
    before = {
        (row["student"], row["fingerprint"]): row for row in known if row["fingerprint"]
    }

    rows = {}
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        waiting = {pool.submit(grader.row, entry, before): entry for entry in entries}
        for future in concurrent.futures.as_completed(waiting):
            rows[waiting[future].student] = row = future.result()
            done(row)
    except BaseException:
        pipe.interrupted.set()  # running sandboxes end, waiting ones do not begin
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        pipe.interrupted.clear()
    return [rows[entry.student] for entry in entries]
