"""Read `solutions/source/hwNN_topic.md`, the only form of a homework edited by hand.

    homework = read(Path("solutions/source/hw02_memory.md"))

The file is a MyST notebook, read by jupytext.  `read` refuses what would surprise a
student or the grader, and tells all problems of a file at once, each with its line.
What a source must look like is in `rules`; `kvq homework new` writes one that does.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import KVQError

#: A question's heading: the first line of a Markdown cell.
HEADING = re.compile(r"## Question (\d+): (\S.*)")

#: What each role may say in its cell's metadata; the first two are of Markdown.
OPTIONS = {
    "text": (),
    "explain": ("question",),
    "given": (),
    "answer": ("question",),
    "check": ("question",),
    "hidden": ("question", "name", "points", "rtol", "atol", "seed"),
    "mutant": ("question", "name", "also", "replaces"),
}


@dataclass(frozen=True)
class Problem:
    """Something wrong with a source: where, and what to do."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class SourceError(KVQError):
    """A source breaks rules; `problems` lists all of them, in the file's order."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = sorted(problems, key=lambda problem: problem.line)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(frozen=True)
class Cell:
    """A cell of the source.

    Attributes:
        kind: "markdown" or "code".
        source: its text.
        line: of the file, where the text begins, from 1.
        section: number of the question under whose heading it stands; 0 before any.
        metadata: as the source gives it.
    """

    kind: str
    source: str
    line: int
    section: int
    metadata: Mapping = field(default_factory=dict)

    @property
    def options(self) -> Mapping:
        """The `kvq` part of the metadata; empty if there is none, or none to read."""
        found = self.metadata.get("kvq")
        return found if isinstance(found, Mapping) else {}

    @property
    def role(self) -> str:
        """What the cell says; else "given" for code and "text" for Markdown."""
        plain = "text" if self.kind == "markdown" else "given"
        return str(self.options.get("role", plain))

    @property
    def question(self) -> str | None:
        """The id of its question: "q1"."""
        found = self.options.get("question")
        return None if found is None else str(found)


@dataclass(frozen=True)
class Probe:
    """Statements and an expression that is worth points.

    Attributes:
        points: above 0.
        rtol, atol: how far from the solution's value a number may be.
        seed: of all random numbers, set before the probe runs.
        path, line: where it is written.
    """

    question: str
    name: str
    points: float
    rtol: float
    atol: float
    seed: int
    code: str
    path: Path
    line: int


@dataclass(frozen=True)
class Mutant:
    """A wrong answer.

    Attributes:
        replaces: which answer cell of its question, from 1.
        also: ids of other questions that may lose points with it.
        path, line: where it is written.
    """

    question: str
    name: str
    replaces: int
    also: tuple[str, ...]
    code: str
    path: Path
    line: int


@dataclass(frozen=True)
class Question:
    """A question: its id ("q1"), its title, and how it is graded."""

    id: str
    title: str
    probes: tuple[Probe, ...]
    mutants: tuple[Mutant, ...]

    @property
    def points(self) -> float:
        """What a right answer gets."""
        return sum(probe.points for probe in self.probes)


@dataclass(frozen=True)
class Homework:
    """A source without problems.

    Attributes:
        id: "hw02".
        name: the file's name without its ending: "hw02_memory".
        chapter: of the book, without an ending: "book/02_memory_bottleneck".
        minutes: that a student needs.
        torch: whether a cell imports torch, which takes seconds.
    """

    path: Path
    id: str
    name: str
    title: str
    chapter: str
    minutes: int
    torch: bool
    cells: tuple[Cell, ...]
    questions: tuple[Question, ...]

    @property
    def root(self) -> Path:
        """The repository, if the source lies where sources lie."""
        return self.path.resolve().parents[2]

    @property
    def points(self) -> float:
        """What all right answers get."""
        return sum(question.points for question in self.questions)

    @property
    def solution(self) -> list[Cell]:
        """The cells of the solution: neither probes nor mutants."""
        return [c for c in self.cells if c.role not in ("hidden", "mutant")]

    def answers(self, question: str) -> list[Cell]:
        """The answer cells of a question."""
        cells = [cell for cell in self.cells if cell.role == "answer"]
        return [cell for cell in cells if cell.question == question]

    @property
    def exercise(self) -> list[Cell]:
        """The cells of the exercise: what explains a solution is not among them."""
        return [c for c in self.solution if c.role != "explain"]


def read(path: Path) -> Homework:
    """A homework from its source.

    Raises:
        SourceError: what is wrong with it, all of it.
    """
    from . import rules

    text, front, cells = _parse(path)
    problems = [
        Problem(path, *found) for found in rules.check(path, text, front, cells)
    ]
    if problems:
        raise SourceError(problems)
    kvq = front["kvq"]
    return Homework(
        path=path,
        id=kvq["homework"],
        name=path.stem,
        title=cells[0].source.split("\n")[0].removeprefix("# ").strip(),
        chapter=kvq["chapter"],
        minutes=kvq["minutes"],
        torch=kvq["torch"],
        cells=tuple(cells),
        questions=tuple(
            Question(f"q{number}", title, *_graded(path, cells, f"q{number}"))
            for number, title in headings(cells)
        ),
    )


def with_hidden(homework: Homework, path: Path) -> Homework:
    """The homework with the probes and mutants of another, private file.

    Each question of which the file has a probe gets its probes from there alone, and
    keeps its points; mutants are added.

    Raises:
        SourceError: what is wrong with the file.
    """
    from . import rules

    _, _, cells = _parse(path)
    cells = [c for c in cells if c.role not in ("text", "explain", "given")]
    problems = [Problem(path, *p) for p in rules.check_private(homework, cells)]
    if problems:
        raise SourceError(problems)
    questions = []
    for question in homework.questions:
        probes, mutants = _graded(path, cells, question.id)
        questions.append(
            dataclasses.replace(
                question,
                probes=probes or question.probes,
                mutants=question.mutants + mutants,
            )
        )
    return dataclasses.replace(homework, questions=tuple(questions))


def headings(cells: Sequence[Cell]) -> list[tuple[int, str]]:
    """Number and title of every question, in the file's order."""
    found = []
    for cell in cells:
        if cell.kind == "markdown":
            match = HEADING.fullmatch(cell.source.split("\n")[0].strip())
            if match:
                found.append((int(match[1]), match[2].strip()))
    return found


def _graded(
    path: Path, cells: Sequence[Cell], question: str
) -> tuple[tuple[Probe, ...], tuple[Mutant, ...]]:
    """Probes and mutants of a question, from cells that follow the rules."""
    own = [cell for cell in cells if cell.question == question]
    probes = (
        Probe(
            question,
            cell.options["name"],
            float(cell.options["points"]),
            float(cell.options.get("rtol", 1e-6)),
            float(cell.options.get("atol", 0)),
            cell.options.get("seed", 0),
            cell.source,
            path,
            cell.line,
        )
        for cell in own
        if cell.role == "hidden"
    )
    mutants = (
        Mutant(
            question,
            cell.options["name"],
            cell.options.get("replaces", 1),
            questions_named(cell.options.get("also", ())),
            cell.source,
            path,
            cell.line,
        )
        for cell in own
        if cell.role == "mutant"
    )
    return tuple(probes), tuple(mutants)


def questions_named(also: "str | Sequence[str]") -> tuple[str, ...]:
    """`also: q2` and `also: [q2, q3]` as a tuple."""
    return (also,) if isinstance(also, str) else tuple(also)


def _parse(path: Path) -> tuple[str, dict, list[Cell]]:
    """Text, front matter and cells of a file, whatever they hold."""
    import nbformat
    import yaml
    from jupytext.myst import MystMetadataParsingError, myst_to_notebook

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError([Problem(path, 1, f"cannot be read: {error}")]) from None
    unreadable = (MystMetadataParsingError, yaml.YAMLError, nbformat.ValidationError)
    try:
        notebook = myst_to_notebook(text, add_source_map=True)
    except unreadable as error:
        line = re.search(r"at line (\d+)", str(error))
        said = " ".join(str(error).split())
        problem = Problem(path, int(line[1]) if line else 1, f"metadata: {said}")
        raise SourceError([problem]) from None
    cells, section = [], 0
    starts = notebook.metadata.pop("source_map")
    for found, start in zip(notebook.cells, starts, strict=True):
        heading = HEADING.match(found.source)
        if found.cell_type == "markdown" and heading:
            section = int(heading[1])
        line = _line_of(text.splitlines(), found.source, start)
        cells.append(
            Cell(found.cell_type, found.source, line, section, dict(found.metadata))
        )
    return text, dict(notebook.metadata), cells


def _line_of(lines: Sequence[str], source: str, start: int) -> int:
    """The line, from 1, where a cell's text begins; jupytext tells that of its fence,
    or of blank lines before the text."""
    wanted = source.splitlines()
    for first in range(start, len(lines)):
        if lines[first : first + len(wanted)] == wanted:
            return first + 1
    return start + 1
