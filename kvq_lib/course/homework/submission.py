"""Read one submitted file, whatever it is.

Files of formats 3 and 4 become code cells; everything else is `Unreadable`, with a
reason that holds nothing of the file's own text.  No output is read and nothing runs.
"""

import hashlib
import json
import os
import re
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from ...errors import KVQError
from .session import Cell

MAX_FILE = 32 * 2**20  # bytes; parsed, they become ten times as many
MAX_CODE = 2**20  # characters of all code cells together
MAX_CELLS = 2000

#: Marks that open a cell.  They come before metadata: editors drop those.
_MARK = re.compile(
    r"^[ \t]*#[ \t]*@(answer|check)[ \t]+(q\d{1,6})\b", re.MULTILINE | re.IGNORECASE
)
_QUESTION = re.compile(r"q\d{1,6}")
_HOMEWORK, _TITLE = re.compile(r"hw\d{1,3}"), re.compile(r"\s*# Homework (\d{1,3})\b")
_BEGINNINGS = {
    b"<": "a web page, not a notebook",
    b"PK": "an archive, not a notebook",
    b"\x1f\x8b": "an archive, not a notebook",
    b"%PDF": "a PDF, not a notebook",
}
# A hostile file takes much memory while it is parsed: one at a time.
_parsing = threading.Lock()


class Unreadable(KVQError):
    """The file is no notebook that can be graded; the message says why."""


@dataclass(frozen=True)
class Submission:
    """What a file holds.

    Attributes:
        cells: its code cells, numbered by their place among all cells.
        digest: SHA-256 of the file.
        homework: "hw02", if metadata or a title says so, or "".
    """

    cells: tuple[Cell, ...]
    digest: str
    homework: str


def read(path: Path) -> Submission:
    """Read a notebook.

    Raises:
        Unreadable: it is none.
    """
    data = _bytes(path)
    with _parsing:
        notebook = _notebook(data)
        cells = tuple(_cells(notebook))
        homework = _homework(notebook)
    return Submission(cells, hashlib.sha256(data).hexdigest(), homework)


def digest(path: Path) -> str:
    """SHA-256 of the file, or "" where it cannot be read."""
    try:
        return hashlib.sha256(_bytes(path)).hexdigest()
    except Unreadable:
        return ""


def _bytes(path: Path) -> bytes:
    """The file's content, if it is a file: no link is followed, no pipe waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        link = os.path.islink(path)
        reason = "a link, not a file" if link else f"cannot be opened ({_why(error)})"
        raise Unreadable(reason) from None
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        folder = stat.S_ISDIR(mode)
        what = "a folder" if folder else "a pipe or a device"
        raise Unreadable(f"{what}, not a file")
    with open(fd, "rb") as file:
        try:
            data = file.read(MAX_FILE + 1)
        except OSError as error:
            raise Unreadable(f"cannot be read ({_why(error)})") from None
    if len(data) > MAX_FILE:
        size = f"{MAX_FILE // 2**20} MiB"
        raise Unreadable(f"larger than {size}: clear its outputs and save it again")
    return data


def _why(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else "unknown"


def _notebook(data: bytes) -> dict:
    if not data.strip(b"\0 \t\r\n"):
        raise Unreadable("empty")
    for beginning, reason in _BEGINNINGS.items():
        if data.lstrip().startswith(beginning):
            raise Unreadable(reason)
    try:
        text = data.decode(json.detect_encoding(data))
    except UnicodeDecodeError:
        raise Unreadable("not text in UTF-8") from None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Unreadable(f"not JSON, or cut off ({where})") from None
    except RecursionError:
        raise Unreadable("JSON nested too deeply") from None
    except ValueError:
        raise Unreadable("JSON with a number that is too long") from None
    if not isinstance(found, dict) or "nbformat" not in found:
        raise Unreadable("JSON, but no notebook")
    return found


def _cells(notebook: dict):
    """The code cells.

    Raises:
        Unreadable: the notebook's structure is not that of its format.
    """
    size = 0
    for number, (kind, source, metadata) in enumerate(_raw_cells(notebook), 1):
        if kind != "code":
            continue
        source = _text(source)
        if source is None:
            raise Unreadable(f"cell {number} has no text")
        size += len(source)
        if size > MAX_CODE:
            raise Unreadable(f"more than {MAX_CODE:,} characters of code")
        role, questions = _role(source, metadata)
        yield Cell(source, role, questions, number)


def _text(source) -> str | None:
    """A cell's text, also of a list of lines; None if it is something else."""
    if isinstance(source, list) and all(isinstance(s, str) for s in source):
        return "".join(source)
    return source if isinstance(source, str) else None


def _homework(notebook: dict) -> str:
    """Of which homework a notebook says that it is; nothing else of what it says."""
    metadata = notebook.get("metadata")
    said = metadata.get("kvq") if isinstance(metadata, dict) else None
    name = said.get("homework") if isinstance(said, dict) else None
    if isinstance(name, str) and _HOMEWORK.fullmatch(name):
        return name
    for kind, source, _ in _raw_cells(notebook):
        if kind == "markdown" and (found := _TITLE.match(_text(source) or "")):
            return f"hw{int(found[1]):02}"
    return ""


def _raw_cells(notebook: dict):
    """(type, source, metadata) of all cells, of format 3 or 4."""
    version = notebook["nbformat"]
    if type(version) is not int:
        raise Unreadable("a notebook without the number of its format")
    if version == 3:
        sheets = notebook.get("worksheets")
        if not isinstance(sheets, list) or not all(isinstance(s, dict) for s in sheets):
            raise Unreadable("a notebook of format 3 without worksheets")
        lists, text = [sheet.get("cells", []) for sheet in sheets], "input"
    elif version == 4:
        lists, text = [notebook.get("cells")], "source"
    else:
        # A number of any length can stand there.
        shown = version if 0 <= version < 1000 else "unknown"
        raise Unreadable(f"a notebook of format {shown}: save it in format 4")
    if not all(isinstance(cells, list) for cells in lists):
        raise Unreadable("a notebook without cells")
    cells = [cell for one in lists for cell in one]
    if len(cells) > MAX_CELLS:
        raise Unreadable(f"more than {MAX_CELLS:,} cells")
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict):
            raise Unreadable(f"cell {number} is no cell")
        kind = cell.get("cell_type")
        yield kind, cell.get(text), cell.get("metadata")


def _role(source: str, metadata) -> tuple[str, tuple[str, ...]]:
    """What a cell is for: by its marks, else by its metadata.

    A cell with several marks, as merging cells makes it, answers all those questions.
    """
    marks: dict[str, list[str]] = {"answer": [], "check": []}
    for role, question in _MARK.findall(source):
        marks[role.lower()].append(question.lower())
    for role, questions in marks.items():
        if questions:
            return role, tuple(dict.fromkeys(questions))
    said = metadata.get("kvq") if isinstance(metadata, dict) else None
    if isinstance(said, dict) and said.get("role") in ("answer", "check"):
        question = said.get("question")
        if isinstance(question, str) and _QUESTION.fullmatch(question):
            return said["role"], (question,)
    return "given", ()
