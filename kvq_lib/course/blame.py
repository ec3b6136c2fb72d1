"""Which cell of which notebook a failed build is about."""

import html
import json
import re
from pathlib import Path

from .strict import CELL

ANSI = re.compile(r"\x1b\[[0-9;]*m")
LOG_TAIL = 40  # lines of a notebook's traceback to print
LINE_OF_CELL = re.compile(r"(\S+\.ipynb):(\d+):")


def _name(root: Path, page: str, index: int) -> str:
    """A cell as a person finds it: its number and how it begins."""
    cell = json.loads((root / page).read_text(encoding="utf-8"))["cells"][index]
    first = "".join(cell["source"]).strip().split("\n")[0]
    return f"{page}, cell {index + 1} ({first[:60]!r})"


def with_cell(root: Path, warning: str) -> str:
    """A warning of a notebook with its cell named: MyST-NB gives a number of lines."""
    place = LINE_OF_CELL.match(warning)
    if not place:
        return warning
    path = Path(place[1]).resolve()
    index, line = divmod(int(place[2]), CELL)
    if index == 0 or not path.is_relative_to(root.resolve()):
        return warning
    page = path.relative_to(root.resolve()).as_posix()
    where = f", line {line - 1}" if line else ""  # it counts a line too many
    return f"{_name(root, page, index - 1)}{where}: {warning[place.end() :].strip()}"


def failed_cell(root: Path, notebook: str, log: str) -> str:
    """Which cell of a notebook the log of its failure quotes."""
    page = f"{notebook}.ipynb"
    if not (root / page).exists():
        return notebook
    cells = json.loads((root / page).read_text(encoding="utf-8"))["cells"]
    quoted = {
        i: len("".join(cell["source"]))
        for i, cell in enumerate(cells)
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip() in log
    }
    return _name(root, page, max(quoted, key=quoted.get)) if quoted else page


def cell_with(root: Path, page: str, text: str) -> str:
    """Which cell of a built page's notebook has a text, or shows it, or which line of
    its Markdown; else the page."""
    name = page.removesuffix(".html")
    notebook, markdown = f"{name}.ipynb", root / f"{name}.md"
    executed = root / "_build" / "jupyter_execute" / notebook
    if executed.exists() and (root / notebook).exists():
        cells = json.loads(executed.read_text(encoding="utf-8"))["cells"]
        for index, cell in enumerate(cells):
            written = ["".join(cell["source"])]
            for output in cell.get("outputs", ()):
                written += map("".join, output.get("data", {}).values())
            if any(text in one or text in html.unescape(one) for one in written):
                return _name(root, notebook, index)
    elif markdown.exists():
        written = markdown.read_text(encoding="utf-8")
        for whole in (written, html.unescape(written)):
            before, found, _ = whole.partition(text)
            if found:
                line = before.count("\n") + 1
                return f"{markdown.relative_to(root).as_posix()}, line {line}"
    return page


def failure_report(root: Path, warnings: list[str]) -> str:
    """Name each cell that failed, with the end of its traceback, then warnings."""
    reports = root / "_build" / "html" / "reports"
    parts = []
    for path in sorted(reports.rglob("*.err.log")):
        notebook = path.relative_to(reports).as_posix().removesuffix(".err.log")
        log = ANSI.sub("", path.read_text(encoding="utf-8")).rstrip()
        tail = "\n".join(f"    {line}" for line in log.splitlines()[-LOG_TAIL:])
        parts.append(f"{failed_cell(root, notebook, log)} failed:\n\n{tail}\n")
    if warnings:
        named = dict.fromkeys(with_cell(root, warning) for warning in warnings)
        listed = "\n".join(f"    {warning}" for warning in named)
        parts.append(f"Warnings fail the build:\n\n{listed}\n")
    if not parts:
        parts.append("Jupyter Book stopped; its own message is above.\n")
    return "\n".join(parts)
