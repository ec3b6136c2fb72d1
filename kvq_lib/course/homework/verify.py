"""Prove a homework's key: who is right gets everything, who is wrong does not.

The author's solution must score full marks in every question and pass every check; the
blank exercise must score nothing and pass no check; each mutant must lose points in its
own question, through a wrong value, and nowhere else unless it says so.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from . import author, keys, notebooks
from .build import KEYS
from .compare import same
from .source import Homework, Mutant, Problem


@dataclass
class Row:
    """What one notebook scored.

    Attributes:
        name: "solution", "blank" or the mutant's name.
        mutant: if it is one.
        scores: points by question.
        passed: whether all checks of a question pass, by question.
        run: all that is known of it.
    """

    name: str
    mutant: Mutant | None
    run: author.Run
    scores: dict[str, float] = field(default_factory=dict)
    passed: dict[str, bool] = field(default_factory=dict)

    @property
    def caught(self) -> bool:
        """Whether the visible checks of its own question catch a mutant."""
        return self.mutant is not None and not self.passed[self.mutant.question]


@dataclass
class Verified:
    """A homework, what each notebook scored, and all that should be otherwise."""

    homework: Homework
    rows: list[Row]
    failures: list[Problem]


def verify(
    homework: Homework, root: Path, jobs: int = 1, private: bool = False
) -> Verified:
    """Run solution, blank exercise and every mutant.

    Args:
        root: of the repository, with the key.
        jobs: notebooks that run at once.
        private: the probes are not those of the committed key, so it is not read.

    Raises:
        SourceError: the solution or one of its probes fails.
    """
    solution = notebooks.solution(homework)
    if private:
        key = keys.make(homework, author.values(solution, homework))
    else:
        key = _committed(homework, root)
        if isinstance(key, Problem):
            return Verified(homework, [], [key])
    mutants = [m for question in homework.questions for m in question.mutants]
    tried = [
        ("solution", None, solution),
        ("blank", None, notebooks.exercise(homework)),
    ]
    tried += [(m.name, m, notebooks.with_mutant(homework, m)) for m in mutants]
    with ThreadPoolExecutor(jobs) as pool:
        runs = list(pool.map(lambda t: author.run(t[2], homework, checks=True), tried))
    rows = [Row(name, m, r) for (name, m, _), r in zip(tried, runs, strict=True)]
    for row in rows:
        row.scores = _scores(key, row.run)
        row.passed = {
            question: not any(outcome.failure for outcome in outcomes)
            for question, outcomes in row.run.checks.items()
        }
    failures = [p for row in rows for p in _problems(homework, row, key)]
    return Verified(homework, rows, failures)


def _committed(homework: Homework, root: Path) -> "dict | Problem":
    """The key that was built, if it is of these probes."""
    path = root / KEYS / f"{homework.id}.json"
    advice = f"run `kvq homework build {homework.id}` first"
    try:
        key = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Problem(path, 1, f"no key ({type(error).__name__}): {advice}")
    asked = [(p.question, p.name, p.code) for p in author.all_probes(homework)]
    held = [
        (question["id"], probe["name"], probe["code"])
        for question in key["questions"]
        for probe in question["probes"]
    ]
    if asked != held:
        return Problem(path, 1, f"the key holds other probes: {advice}")
    return key


def _scores(key: Mapping, run: author.Run) -> dict[str, float]:
    return {
        question["id"]: sum(
            probe["points"]
            for probe in question["probes"]
            if _right(probe, run.probes[question["id"], probe["name"]])
        )
        for question in key["questions"]
    }


def _right(probe: Mapping, outcome) -> bool:
    return not outcome.failure and same(
        outcome.value, probe["expected"], probe["rtol"], probe["atol"]
    )


def _problems(homework: Homework, row: Row, key: Mapping) -> list[Problem]:
    """What a row shows that should be otherwise."""
    found = []
    for question in homework.questions:
        line, score = _line(homework, question.id), row.scores[question.id]
        shown = f"{score:g} of {question.points:g} points in {question.id}"
        passes = row.passed[question.id]
        if row.mutant is not None:
            found += _mutant_problems(row, question, shown, key)
        elif row.name == "blank":
            if score:
                found.append((line, f"the blank exercise gets {shown}"))
            if passes:
                found.append((line, f"the blank exercise passes {question.id}'s check"))
        else:
            if score < question.points:
                found.append((line, f"the solution gets {shown}"))
            if not passes:
                found.append((line, f"the solution fails {question.id}'s check"))
    at = row.mutant.path if row.mutant else homework.path
    return [Problem(at, line, text) for line, text in found]


def _mutant_problems(row: Row, question, shown: str, key: Mapping):
    mutant = row.mutant
    if question.id != mutant.question:
        if row.scores[question.id] < question.points and question.id not in mutant.also:
            text = f"the mutant {mutant.name!r} of {mutant.question} gets {shown}: its "
            yield mutant.line, text + f"error spreads, or say `also: [{question.id}]`"
        return
    if row.scores[question.id] >= question.points:
        yield mutant.line, f"the mutant {mutant.name!r} gets {shown}: nothing sees it"
        return
    probes = next(q["probes"] for q in key["questions"] if q["id"] == question.id)
    outcomes = [(p, row.run.probes[question.id, p["name"]]) for p in probes]
    lost = [outcome for p, outcome in outcomes if not _right(p, outcome)]
    if all(outcome.failure for outcome in lost):
        how = author.said(lost[0])
        text = f"the mutant {mutant.name!r} of {question.id} loses points only because "
        yield mutant.line, text + f"it {how}: it must return a wrong value"


def _line(homework: Homework, question: str) -> int:
    """Where a question begins."""
    section = int(question[1:])
    return next(cell.line for cell in homework.cells if cell.section == section)


def table(found: Verified) -> str:
    """Rows of scores, then how much the visible checks see."""
    homework = found.homework
    if not found.rows:
        return f"{homework.name}: not run"
    ids = [question.id for question in homework.questions]
    titles = ["", *ids, "check"]
    full = [
        f"{homework.name}, full marks",
        *(f"{q.points:g}" for q in homework.questions),
    ]
    lines = [titles, [*full, ""]]
    for row in found.rows:
        name = f"{row.mutant.question}: {row.name}" if row.mutant else row.name
        if row.mutant:
            check = "catches it" if row.caught else "passes"
        else:
            check = "passes" if all(row.passed.values()) else "fails"
        lines.append([name, *(f"{row.scores[q]:g}" for q in ids), check])
    mutants = [row for row in found.rows if row.mutant]
    caught = sum(row.caught for row in mutants)
    seconds = sum(row.run.seconds for row in found.rows)
    more = (
        f"{caught} of {len(mutants)} mutants are caught by the visible checks already"
    )
    end = [f"{more}; {len(found.rows)} runs took {seconds:.1f} s."]
    return "\n".join([*_aligned(lines), *end])


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(w) for cell, w in zip(row[1:-1], widths[1:-1], strict=True)]
            + [row[-1]]
        ).rstrip()
        for row in rows
    ]
