"""Run a homework's own notebooks as the grader runs a submission.

Checks are run as a student runs them, which the grader never does: each as one more
probe of its question, so that it sees what stands above it and changes nothing.
"""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from . import notebooks, submission
from .levels import choose
from .sandbox import Limits, Sandbox
from .session import FAILURES, Outcome, Transcript, run_cells
from .session import Probe as Asked
from .source import Homework, Probe, Problem, SourceError


@dataclass(frozen=True)
class Run:
    """What a notebook gave.

    Attributes:
        transcript: as the grader gets it.
        failed: outcomes of the cells that failed, by their id.
        checks: for each question, the outcomes of its check cells.
    """

    transcript: Transcript
    failed: dict[str, Outcome]
    checks: dict[str, list[Outcome]]


# A busy machine is slow, not wrong: three times what submissions get.
LIMITS = Limits(seconds=60, total_seconds=540)


@functools.cache
def sandbox() -> Sandbox:
    """The strongest that works here; an author's own code may run in the weakest."""
    return choose("auto", allow_weak=True)


def run(notebook: NotebookNode, asked: Sequence[Asked], checks: bool = False) -> Run:
    """Hand a notebook in: its cells, some probes, and its checks if wanted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "notebook.ipynb"
        path.write_bytes(notebooks.write(notebook))
        cells = submission.read(path).cells
    own = [cell for cell in cells if cell.role == "check"] if checks else []
    more = [Asked(cell.questions[0], f"{cell.code}\n1") for cell in own]
    transcript = run_cells(cells, [*asked, *more], sandbox(), LIMITS)
    found: dict[str, list[Outcome]] = {}
    for cell, outcome in zip(own, transcript.outcomes[len(asked) :], strict=True):
        found.setdefault(cell.questions[0], []).append(outcome)
    failed = {notebook.cells[n - 1].id: o for n, o in transcript.cells.items()}
    return Run(transcript, failed, found)


def said(outcome: Outcome) -> str:
    """What became of a cell or a probe that failed."""
    error = f" ({outcome.error})" if outcome.error else ""
    return f"{FAILURES[outcome.failure]}{error}"


def values(homework: Homework) -> dict:
    """What each probe gives under the author's solution, by (question, name).

    Raises:
        SourceError: a cell or a probe fails.
    """
    solution, probes = notebooks.solution(homework), all_probes(homework)
    found = run(solution, [Asked(p.question, p.code, p.seed) for p in probes])
    problems = []
    cells = homework.solution
    for name, cell in zip(notebooks.ids(cells), cells, strict=True):
        if name in found.failed:
            text = f"the grader's run of this cell {said(found.failed[name])}"
            problems.append(Problem(homework.path, cell.line, text))
    outcomes = dict(zip(probes, found.transcript.outcomes, strict=True))
    for probe, outcome in outcomes.items():
        if outcome.failure:
            text = f"the probe {probe.name!r} {said(outcome)}"
            problems.append(Problem(probe.path, probe.line, text))
    if problems:
        raise SourceError(problems)
    return {(p.question, p.name): outcome.value for p, outcome in outcomes.items()}


def all_probes(homework: Homework) -> list[Probe]:
    """The probes of all questions, in order."""
    return [probe for question in homework.questions for probe in question.probes]
