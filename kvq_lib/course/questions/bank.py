"""The bank: what a question is, and reading all of them from `book/questions`.

    questions = bank.load()
    bank.of_chapter(questions, "book/02_memory_bottleneck")

A file of the bank is a list of questions in YAML, one file a topic. `load` reads all
of them and says all that is wrong at once; what is right and wrong is in `rules`.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path("book") / "questions"

#: The topics, as the files name them, and as readers see them.
TOPICS = {
    "demonstration": "The demonstration",
    "memory": "Memory",
    "quantization": "Quantization",
    "precision": "Precision",
    "compensation": "Compensation",
    "paging": "Paging and kernels",
    "deployment": "Deployment",
    "scenarios": "Scenarios",
    "scratch": "From scratch",
    "misconceptions": "Misconceptions",
    "interview": "Interview",
    "art": "State of the art",
}
KINDS = ("single", "multiple", "numeric", "open")
LEVELS = ("easy", "mid", "hard")


class BankError(InvalidArgument):
    """The bank has problems; `problems` lists all of them."""

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(problems)
        found = len(self.problems)
        title = f"the bank has {found} problem{'s' if found > 1 else ''}"
        super().__init__("\n".join([f"{title}:", *self.problems]))


class NoBank(InvalidArgument):
    """There is no question: the library was installed without its repository."""


@dataclass(frozen=True)
class Section:
    """A place in the book.

    Attributes:
        page: as in `_toc.yml`, "book/02_memory_bottleneck".
        number: "2.2".
        title: what the heading says behind the number.
    """

    page: str
    number: str
    title: str


@dataclass(frozen=True)
class Choice:
    """One of the answers to choose from: its text, whether it is right, and why."""

    text: str
    right: bool
    why: str


@dataclass(frozen=True)
class Mistake:
    """A wrong number that people give: the number, how it is shown, what went wrong."""

    value: float
    shown: str
    why: str


@dataclass(frozen=True)
class Line:
    """A line of a rubric: points for what an open answer should say."""

    points: int
    text: str


@dataclass(frozen=True)
class Question:
    """One question; its texts are Markdown with formulas between dollar signs.

    Attributes:
        id: stable for ever, begins with the topic.
        kind: one of `KINDS`.
        level: one of `LEVELS`.
        topic: one of `TOPICS`.
        choices: of a single or multiple question.
        answer: of a numeric question, computed.
        shown: the answer with its unit, as readers see it.
        unit, tolerance: of a numeric question; the tolerance is relative.
        mistakes: of a numeric question.
        why: of a numeric question, the answer filled in.
        rubric, model: of an open question: what counts, and an answer that is good.
        sources: keys of the bibliography.
        cited: these works as faces without a bibliography show them.
        place: the file and the line, "02_memory.yml:17".
    """

    id: str
    kind: str
    level: str
    topic: str
    tags: tuple[str, ...]
    section: Section
    question: str
    choices: tuple[Choice, ...] = ()
    answer: float | None = None
    shown: str = ""
    unit: str = ""
    tolerance: float = 0.0
    mistakes: tuple[Mistake, ...] = ()
    why: str = ""
    rubric: tuple[Line, ...] = ()
    model: str = ""
    sources: tuple[str, ...] = ()
    cited: tuple[str, ...] = ()
    place: str = field(default="", compare=False)

    @property
    def points(self) -> int:
        """The points of the whole rubric of an open question."""
        return sum(line.points for line in self.rubric)

    @property
    def order(self) -> tuple[int, ...]:
        """The places of the choices as paper shows them: shuffled, always alike."""

        def key(place: int) -> str:
            return hashlib.sha256(f"{self.id} {place}".encode()).hexdigest()

        return tuple(sorted(range(len(self.choices)), key=key))

    @property
    def rights(self) -> tuple[int, ...]:
        """The places of the right choices."""
        return tuple(i for i, choice in enumerate(self.choices) if choice.right)


# -- reading ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Surroundings:
    """What questions refer to: sections by page and number, and works by key."""

    sections: dict[str, dict[str, str]]
    works: dict[str, str]


def surroundings(root: Path = ROOT) -> Surroundings:
    """The numbered sections of the chapters and the keys of the bibliography."""
    sections = {}
    for path in sorted((root / "book").glob("[0-9][0-9]*_*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found = (
            re.findall(r"^## (\w+\.\d+) (.+)$", "".join(cell["source"]), re.M)
            for cell in cells
            if cell["cell_type"] == "markdown"
        )
        page = f"book/{path.stem}"
        sections[page] = {number: title for cell in found for number, title in cell}
    works = root / "book" / "references.bib"
    listed = works.read_text(encoding="utf-8") if works.exists() else ""
    found = re.findall(r"^@\w+\{([^,]+),\n(.*?)^\}", listed, re.M | re.S)
    return Surroundings(sections, {key: _work(fields) for key, fields in found})


def _work(fields: str) -> str:
    """A work in a line, from the fields of its entry in the bibliography."""

    def part(name: str) -> str:
        held = re.search(rf"^ *{name} *= *\{{(.*)\}},?$", fields, re.M)
        return re.sub(r"[{}]", "", held[1]) if held else ""

    authors = part("author").split(" and ")
    name = authors[0].split(",")[0] + (" and others" if authors[1:] else "")
    parts = [f"{name}, {part('year')}: {part('title')}", part("url")]
    return ", ".join(part for part in parts if part)


def load(folder: Path | None = None, root: Path = ROOT) -> tuple[Question, ...]:
    """All questions, in the order of files and places.

    Args:
        folder: of the YAML files; that of the book if it is not given.
        root: of the repository, whose chapters and works the questions name.

    Raises:
        BankError: something is wrong; the message lists everything that is.
        NoBank: there is no such folder, or no file of questions in it.
    """
    folder = root / FOLDER if folder is None else folder
    files = sorted(folder.glob("*.yml"))
    if not files:
        raise NoBank(
            f"no questions in {folder}: they come with the repository, so run this "
            "in a copy of it"
        )
    stamp = tuple((str(path), path.stat().st_mtime_ns) for path in files)
    # A question in a file with another ending would be missing, and nobody would know.
    other = [path.name for path in sorted(folder.iterdir()) if path not in files]
    other = [name for name in other if name != "README.md" and name[0] != "."]
    return _load(stamp, tuple(other), root)


@functools.lru_cache(maxsize=4)
def _load(
    stamp: tuple[tuple[str, int], ...], other: tuple[str, ...], root: Path
) -> tuple[Question, ...]:
    from . import rules

    around = surroundings(root)
    questions: list[Question] = []
    problems = [f"{name}: a file is called NN_topic.yml" for name in other]
    for name, _ in stamp:
        path = Path(name)
        found, wrong = rules.read_file(path.name, path.read_bytes(), around)
        questions += found
        problems += wrong
    problems += rules.together(questions)
    if problems:
        raise BankError(problems)
    return tuple(questions)


def of_chapter(questions: Iterable[Question], page: str) -> list[Question]:
    """The questions whose section is in a chapter.

    Raises:
        InvalidArgument: there is none.
    """
    found = [q for q in questions if q.section.page == page]
    if not found:
        raise InvalidArgument(f"no question belongs to {page!r}")
    return found
