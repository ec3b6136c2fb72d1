"""Run a homework's own notebooks as the grader runs a submission.

Checks are run as a student runs them, which the grader never does: each as one more
probe of its question, so that it sees what stands above it and changes nothing.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbformat import NotebookNode

from .levels import choose
from .sandbox import Limits, Sandbox
from .session import FAILURES, Cell, Outcome, Probe, run_cells
from .source import Homework, Problem, SourceError


@dataclass
class Run:
    """What a notebook gave.

    Attributes:
        probes: outcomes by (id of the question, name of the probe).
        checks: for each question, the outcomes of its check cells.
        cells: outcomes of the cells that failed, by their id.
    """

    probes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    checks: dict[str, list[Outcome]] = field(default_factory=dict)
    cells: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0


@functools.cache
def sandbox() -> Sandbox:
    """The strongest that works here; an author's own code may run in the weakest."""
    return choose("auto", allow_weak=True)


def run(notebook: NotebookNode, homework: Homework, checks: bool = False) -> Run:
    """Run a notebook and all probes of a homework; also its checks, if asked for."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells, check_cells = [], []
    for number, cell in enumerate(code):
        options = cell.metadata.get("kvq", {})
        role = options.get("role", "given")
        asked = (options["question"],) if "question" in options else ()
        cells.append(Cell(cell.source, role, asked, number))
        if role == "check":
            check_cells.append((options["question"], f"{cell.source}\n1"))
    probes = all_probes(homework)
    asked = [Probe(p.question, p.code, p.seed) for p in probes]
    if checks:
        asked += [Probe(question, text) for question, text in check_cells]
    transcript = run_cells(cells, asked, sandbox(), Limits())
    found = Run(seconds=transcript.seconds)
    found.cells = {code[number].id: o for number, o in transcript.cells.items()}
    outcomes = transcript.outcomes
    for probe, outcome in zip(probes, outcomes, strict=False):
        found.probes[probe.question, probe.name] = outcome
    for (question, _), outcome in zip(
        check_cells, outcomes[len(probes) :], strict=False
    ):
        found.checks.setdefault(question, []).append(outcome)
    return found


def said(outcome: Outcome) -> str:
    """What became of a probe that has no value."""
    error = f" ({outcome.error})" if outcome.error else ""
    return f"{FAILURES[outcome.failure]}{error}"


def values(solution: NotebookNode, homework: Homework) -> dict:
    """What each probe gives under the author's solution, by (question, name).

    Raises:
        SourceError: a cell or a probe fails.
    """
    found, problems = run(solution, homework), []
    lines = {
        made.id: cell.line
        for made, cell in zip(solution.cells, homework.shown, strict=True)
    }
    for name, outcome in found.cells.items():
        text = f"the grader's run of this cell {said(outcome)}"
        problems.append(Problem(homework.path, lines[name], text))
    for probe in all_probes(homework):
        outcome = found.probes[probe.question, probe.name]
        if outcome.failure:
            text = f"the probe {probe.name!r} {said(outcome)}"
            problems.append(Problem(probe.path, probe.line, text))
    if problems:
        raise SourceError(problems)
    return {name: outcome.value for name, outcome in found.probes.items()}


def all_probes(homework: Homework) -> Sequence:
    """The probes of all questions, in order."""
    return [probe for question in homework.questions for probe in question.probes]
