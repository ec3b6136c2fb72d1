"""Rows that are done, kept while the others are graded: a stop costs nothing."""

import fcntl
import json
from pathlib import Path

from ...errors import InvalidArgument


class Journal:
    """A file of rows beside the JSON file; a context manager.

    Raises:
        InvalidArgument: another run writes to it.
    """

    def __init__(self, target: Path):
        self.path = target.with_name(f"{target.name}.part")
        self._target = target

    def __enter__(self) -> "Journal":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InvalidArgument(f"another run writes {self._target}") from None
        self._file.write("\n")  # the last line may be cut off
        return self

    def __exit__(self, *what) -> None:
        self._file.close()

    def known(self) -> list[dict]:
        """Rows of the last run, whether it came to its end or not."""
        rows = []
        try:
            rows += json.loads(self._target.read_text(encoding="utf-8"))["rows"]
        except (OSError, ValueError, KeyError, TypeError):
            rows = []  # there is none yet, or it is something else
        self._file.seek(0)
        for line in self._file:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # the run was stopped while it wrote this one
        return rows

    def forget(self) -> None:
        """Begin anew."""
        self._file.seek(0)
        self._file.truncate()

    def keep(self, row: dict) -> None:
        """One more is done."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def remove(self) -> None:
        """All is in the JSON file."""
        self.path.unlink(missing_ok=True)
