"""Prove a homework's key: who is right gets everything, who is wrong does not.

The author's solution must score full marks in every question and pass every check; the
blank exercise must score nothing and pass no check; each mutant must lose points in its
own question, through a wrong value, and nowhere else unless it says so.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...errors import InvalidArgument
from . import author, keys, notebooks
from .build import KEYS
from .score import Score, load, probes, score
from .source import Homework, Mutant, Problem, Question


@dataclass(frozen=True)
class Row:
    """What one notebook scored.

    Attributes:
        name: "solution", "blank" or the mutant's name.
        mutant: if it is one.
        scores: by question, as the grader gives them.
        passed: by question, whether all of its checks pass.
        failed: what became of cells that failed, by their id.
        seconds: that the run took.
    """

    name: str
    mutant: Mutant | None
    scores: Mapping[str, Score]
    passed: Mapping[str, bool]
    failed: Mapping
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether the visible checks of its own question catch a mutant."""
        return self.mutant is not None and not self.passed[self.mutant.question]


@dataclass(frozen=True)
class Verified:
    """A homework, what each notebook scored, and all that should be otherwise."""

    homework: Homework
    rows: list[Row]
    failures: list[Problem]


def verify(
    homework: Homework,
    root: Path,
    jobs: int = 1,
    private: bool = False,
    done: Callable[[], object] = lambda: None,
) -> Verified:
    """Run solution, blank exercise and every mutant.

    Args:
        root: of the repository, with the key.
        jobs: notebooks that run at once.
        private: the probes are not those of the committed key, so it is not read.
        done: called after each notebook.

    Raises:
        SourceError: with private probes, the solution or one of them fails.
    """
    if private:
        key = keys.make(homework, author.values(homework))
    else:
        path = root / KEYS / f"{homework.id}.json"
        advice = f"run `kvq homework build {homework.id}` first"
        try:
            key = load(path)
        except InvalidArgument as error:
            return Verified(homework, [], [Problem(path, 1, f"{error}; {advice}")])
        if not _asks_the_same(homework, key):
            text = f"the key holds other probes than the source; {advice}"
            return Verified(homework, [], [Problem(path, 1, text)])

    def row(tried: tuple) -> Row:
        name, mutant, notebook = tried
        ran = author.run(notebook, probes(key), checks=True)
        done()
        return Row(
            name,
            mutant,
            {found.question: found for found in score(key, ran.transcript)},
            {q: not any(o.failure for o in ran.checks[q]) for q in ran.checks},
            ran.failed,
            ran.transcript.seconds,
        )

    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(row, notebooks_of(homework)))
    failures = [problem for row in rows for problem in _problems(homework, row)]
    return Verified(homework, rows, failures)


def notebooks_of(homework: Homework) -> list[tuple]:
    """(name, mutant or None, notebook) of all that `verify` runs."""
    mutants = [m for question in homework.questions for m in question.mutants]
    return [
        ("solution", None, notebooks.solution(homework)),
        ("blank", None, notebooks.exercise(homework)),
        *((m.name, m, notebooks.with_mutant(homework, m)) for m in mutants),
    ]


def _asks_the_same(homework: Homework, key: Mapping) -> bool:
    fields = ("name", "points", "rtol", "atol", "seed", "code")
    held = [
        (question["id"], *(probe[name] for name in fields))
        for question in key["questions"]
        for probe in question["probes"]
    ]
    asked = author.all_probes(homework)
    return held == [(p.question, *(getattr(p, f) for f in fields)) for p in asked]


# -- what should be otherwise --------------------------------------------------------


def _problems(homework: Homework, row: Row) -> list[Problem]:
    """What a row shows that should be otherwise."""
    if row.mutant is None:
        judge = _of_blank if row.name == "blank" else _of_solution
        cells = homework.exercise if row.name == "blank" else homework.solution
        found = list(_of_answers(row, cells))
        found += [
            (_line(homework, question), text)
            for question in homework.questions
            for text in judge(question, row)
        ]
        return [Problem(homework.path, line, text) for line, text in found]
    name = f"the mutant {row.mutant.name!r} of {row.mutant.question}"
    return [
        Problem(row.mutant.path, row.mutant.line, f"{name} {text}")
        for question in homework.questions
        for text in _of_mutant(question, row, row.mutant)
    ]


def _of_answers(row: Row, cells) -> Iterator[tuple[int, str]]:
    """Answer cells of solution and exercise must run: only calls of a stub raise."""
    for cell, name in zip(cells, notebooks.ids(cells), strict=True):
        if cell.role == "answer" and name in row.failed:
            yield cell.line, f"{row.name}: this cell {author.said(row.failed[name])}"


def _of_solution(question: Question, row: Row) -> Iterator[str]:
    found = row.scores[question.id]
    if found.points < found.most:
        yield f"the solution gets {_shown(found)}: {', '.join(found.failures)}"
    if not row.passed[question.id]:
        yield f"the solution fails the check of {question.id}"


def _of_blank(question: Question, row: Row) -> Iterator[str]:
    found = row.scores[question.id]
    if found.points:
        yield f"the blank exercise gets {_shown(found)}"
    if row.passed[question.id]:
        yield f"the blank exercise passes the check of {question.id}"


def _of_mutant(question: Question, row: Row, mutant: Mutant) -> Iterator[str]:
    found = row.scores[question.id]
    if question.id != mutant.question:
        if found.points < found.most and question.id not in mutant.also:
            yield (
                f"gets {_shown(found)}: keep its error out of there, or say "
                f"`also: [{question.id}]`"
            )
    elif found.points >= found.most:
        yield f"gets {_shown(found)}: no probe sees it"
    elif "wrong" not in found.failures:
        how = ", ".join(found.failures)
        yield f"loses points only by failures ({how}): it must return a wrong value"


def _shown(found: Score) -> str:
    points, most = float(found.points), float(found.most)
    return f"{points:g} of {most:g} points in {found.question}"


def _line(homework: Homework, question: Question) -> int:
    """Where a question begins."""
    section = int(question.id[1:])
    return next(cell.line for cell in homework.cells if cell.section == section)


# -- the table -----------------------------------------------------------------------


def table(found: Verified) -> str:
    """Points by question for each notebook, and how much the visible checks see."""
    homework = found.homework
    if not found.rows:
        return f"{homework.name}: not run"
    ids = [question.id for question in homework.questions]
    lines = [["", *ids, "check"]]
    full = [f"{question.points:g}" for question in homework.questions]
    lines.append([f"{homework.name}, full marks", *full, ""])
    for row in found.rows:
        name, check = row.name, "passes" if all(row.passed.values()) else "fails"
        if row.mutant:
            name = f"{row.mutant.question}: {row.name}"
            check = "catches it" if row.caught else "passes"
        lines.append([name, *(f"{float(row.scores[q].points):g}" for q in ids), check])
    mutants = [row for row in found.rows if row.mutant]
    caught = sum(row.caught for row in mutants)
    seconds = sum(row.seconds for row in found.rows)
    end = (
        f"The visible checks catch {caught} of {len(mutants)} mutants already; "
        f"{len(found.rows)} runs took {seconds:.1f} s together."
    )
    return "\n".join([*_aligned(lines), end])


def _aligned(rows: list[list[str]]) -> list[str]:
    """The first and the last column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(w) for cell, w in zip(row[1:-1], widths[1:-1], strict=True)]
            + [row[-1]]
        ).rstrip()
        for row in rows
    ]
