"""Files that grading is to write: asked before the first submission runs, whether they
can be written, and whether they would overwrite something that is needed."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...errors import InvalidArgument


def check(
    files: Mapping[str, Path],
    feedback: Path | None,
    inputs: Iterable[Path],
    submissions: Path | None = None,
) -> None:
    """Refuse outputs that grading would fail at, in the end, or should not write.

    Args:
        files: by the option that names them; their folders are made where they lack.
        feedback: a folder, or None.
        inputs: files that are read.
        submissions: the folder of submissions.

    Raises:
        InvalidArgument: two of them are one, one is an input or lies among a student's
            files, or one cannot be written.
    """
    seen = {os.path.realpath(path): "is read, too" for path in inputs}
    outputs = [*files.items()] + [("--feedback", feedback)] * (feedback is not None)
    for name, path in outputs:
        place = os.path.realpath(path)
        if place in seen:
            raise InvalidArgument(f"{name} {path} {seen[place]}: choose another")
        seen[place] = f"is {name}, too"
        if submissions and _is_handed_in(Path(place), submissions.resolve()):
            raise InvalidArgument(f"{name} {path} is a submission: choose another")
    for name, path in files.items():
        with _told(f"{name} {path}"):
            with contextlib.suppress(FileNotFoundError):
                _refuse_unless(stat.S_ISREG, path, "file")
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
    if feedback:
        with _told(f"--feedback {feedback}"):
            with contextlib.suppress(FileNotFoundError):
                _refuse_unless(stat.S_ISDIR, feedback, "folder")
            feedback.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=feedback).close()


def _refuse_unless(is_kind, path: Path, kind: str) -> None:
    if not is_kind(path.stat().st_mode):
        raise InvalidArgument(f"{path} is there and is no {kind}: choose another")


@contextlib.contextmanager
def _told(what: str):
    """Errors of the system as one line."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{what} cannot be written: {error.strerror}") from None


def write(path: Path, text: str) -> None:
    """Write a file at once: a reader sees the old one or the new one.

    Raises:
        InvalidArgument: it cannot be written.
    """
    with _told(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The name is short: that of the file may be as long as is allowed.
        part = path.with_name(f".kvq-{os.getpid()}")
        try:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _is_handed_in(place: Path, submissions: Path) -> bool:
    """Whether a place is a notebook among the submissions, or lies in the folder of a
    student: grading would take it for the instructor's own."""
    if place == submissions:
        return True
    if not place.is_relative_to(submissions):
        return False
    first = submissions / place.relative_to(submissions).parts[0]
    names = [place.name, *(os.listdir(first) if first.is_dir() else ())]
    return any(name.lower().endswith(".ipynb") for name in names)
