"""Run code cells in order, and probes between them, whatever the cells do.

The interface, also for those who compute a key's values:

    from .levels import choose
    from .sandbox import Limits
    from .session import Cell, Probe, run_cells

    sandbox = choose("auto", root)          # once; tries the levels
    cells = [Cell("import math"), Cell(code, "answer", ("q1",), number=3)]
    probes = [Probe("q1", "[square(-3)]", seed=0)]
    transcript = run_cells(cells, probes, sandbox, Limits())
    for probe, outcome in zip(probes, transcript.outcomes):
        outcome.value                       # plain data, if not outcome.failure
        outcome.failure                     # "" or one of FAILURES
        outcome.error                       # "TypeError", if it raised an error
    transcript.cells                        # {number: Outcome} of cells that failed
    transcript.notes                        # sentences for an instructor

With a key, `score.probes(key)` makes the probes and `score.score(key, transcript)`
gives the points of every question.

A cell's role is "given", "answer" or "check".  Checks are never run.  The probes of a
question run where its check stands, as a student runs that: what lies between answer
and check has run.  Where no check follows, they run before the next question's first
answer, or at the end; those of a question that no cell answers run after all cells.
They run in the order given, each in a copy of the namespace, reseeded.
Values are what runner.plain makes: None, bool, int, float, str, list, dict.

A cell that runs out of time or memory, or that ends the process, costs the process: a
new one runs all cells again but that one.  A probe that does so is not repeated.  After
two such probes of one question its other probes count as the second did.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .magics import neutral
from .pipe import Pipe, Stopped
from .sandbox import Limits, Sandbox
from .words import count

#: Why a probe has no value, or what became of a cell.
FAILURES = {
    "raised": "raised an error",
    "blank": "was left as it was",
    "data": "returned something else than numbers, text and lists of them",
    "time": "ran out of time",
    "memory": "ran out of memory",
    "disk": "made too many files",
    "processes": "started too many processes",
    "died": "ended the process",
    "protocol": "disturbed the grader",
    "total": "was not reached in the time for the whole homework",
}
#: Failures that cost the process, if no error says that it lives on.
_FATAL = frozenset({"time", "memory", "disk", "processes", "died", "protocol", "total"})
_PATIENCE = 2  # probes of one question that may cost the process


@dataclass(frozen=True)
class Cell:
    """A code cell.

    Attributes:
        code: its text, magics and all.
        role: "given", "answer" or "check".
        questions: ids of the questions that it answers or checks.
        number: its place in the notebook, from 1, for messages.
    """

    code: str
    role: str = "given"
    questions: tuple[str, ...] = ()
    number: int = 0


@dataclass(frozen=True)
class Probe:
    """Statements and, last, an expression whose value is plain data."""

    question: str
    code: str
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of a probe or a cell: a value, or why there is none."""

    value: object = None
    failure: str = ""
    error: str = ""

    @property
    def fatal(self) -> bool:
        """The process was lost."""
        return self.failure in _FATAL and not self.error


@dataclass
class Transcript:
    """All that is known of a run.

    Attributes:
        outcomes: one for each probe, in order.
        cells: by number, the cells that failed.
        notes: sentences for an instructor, without any text of the cells.
        unanswered: questions of the probes that no cell answers.
        answers: how many cells answer each question.
        seconds: that it took.
        computed: seconds that its processes computed.
        starts: how many processes it took.
    """

    outcomes: list[Outcome]
    cells: dict[int, Outcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    computed: float = 0.0
    starts: int = 0


def run_cells(
    cells: Sequence[Cell],
    probes: Sequence[Probe],
    sandbox: Sandbox,
    limits: Limits | None = None,
) -> Transcript:
    """Run cells and probes as the top of this file says.

    Raises:
        SandboxError: the sandbox itself does not work; no fault of the cells.
    """
    run = _Run(cells, probes, sandbox, limits or Limits())
    try:
        run.all()
    finally:
        run.end()
    return run.transcript


class _Guilty(Exception):
    """A step that was taken already turns out to have cost the process."""

    def __init__(self, step: tuple[str, int]):
        super().__init__(step)
        self.step = step


class _Run:
    """The state of one `run_cells`."""

    def __init__(self, cells, probes, sandbox: Sandbox, limits: Limits):
        self._probes, self._sandbox, self._limits = probes, sandbox, limits
        self._begin = time.monotonic()
        self._until = self._begin + limits.total_seconds
        self._pipe: Pipe | None = None
        self._asked: list[tuple[str, int]] = []  # of this process, in order
        self._outcomes: list[Outcome | None] = [None] * len(probes)
        self._lost: dict[int, Outcome] = {}  # cells not to be run again, by position
        self.transcript = Transcript([])
        self._cells = []
        for cell in cells:
            code, dropped = neutral(cell.code)
            self._cells.append(Cell(code, cell.role, cell.questions, cell.number))
            if dropped and cell.role != "check":
                self._note(
                    f"cell {cell.number}: {count(dropped, 'magic line')} left out"
                )
        self._steps = list(self._plan())

    def all(self) -> None:
        """Take every step."""
        done = 0
        while done < len(self._steps):
            kind, index = self._steps[done]
            take = self._take_cell if kind == "cell" else self._take_probe
            try:
                done += take(index, done)
            except _Guilty as guilty:
                done = self._steps.index(guilty.step) + 1
        self.end()
        self.transcript.outcomes = self._outcomes
        self.transcript.seconds = time.monotonic() - self._begin

    def end(self) -> None:
        """Leave no process."""
        if self._pipe is not None:
            self._pipe.end()
            self.transcript.computed += self._pipe.computed
            self._pipe = None

    def _plan(self):
        """("cell", index) and ("probe", index), in the order in which they run."""
        for cell in self._cells:
            for question in cell.questions if cell.role == "answer" else ():
                before = self.transcript.answers.get(question, 0)
                self.transcript.answers[question] = before + 1
        places = {}
        for question in dict.fromkeys(probe.question for probe in self._probes):
            if question not in self.transcript.answers:
                self.transcript.unanswered.append(question)
            places[question] = self._place(question)
        for index, cell in enumerate([*self._cells, None]):
            for number, probe in enumerate(self._probes):
                if places[probe.question] == index:
                    yield "probe", number
            if cell is not None and cell.role != "check":
                yield "cell", index

    def _place(self, question: str) -> int:
        """The cell before which a question's probes run: nothing of a later question
        has run there."""
        found = end = len(self._cells)
        for index in range(end - 1, -1, -1):
            cell = self._cells[index]
            own = question in cell.questions
            if own and cell.role == "answer":
                return found
            if cell.role == "answer":
                found = end = index
            elif own and cell.role == "check" and found == end:
                found = index  # the last of several
        return len(self._cells)

    def _take_cell(self, index: int, done: int) -> bool:
        """Run a cell; False if it must be tried again."""
        if index in self._lost:
            return True
        if not self._ready(done):
            return self._give_up() and self._lose(index, Outcome(failure="total"))
        found = self._run_cell(index)
        if found.fatal:
            return self._lose(index, found)
        if found.failure:
            self._tell(index, found)
        return True

    def _take_probe(self, index: int, done: int) -> bool:
        probe = self._probes[index]
        fatal = [
            outcome
            for other, outcome in zip(self._probes, self._outcomes, strict=True)
            if outcome and outcome.fatal and other.question == probe.question
        ]
        if len(fatal) >= _PATIENCE:
            self._outcomes[index] = fatal[-1]
            return True
        if not self._ready(done):
            if self._give_up():
                self._outcomes[index] = Outcome(failure="total")
            return self._give_up()
        self._asked.append(("probe", index))
        try:
            value, error = self._pipe.probe(probe.code, probe.seed, self._until)
            self._outcomes[index] = Outcome(value, *_failure(error))
        except Stopped as stopped:
            self._stop(stopped)
            self._outcomes[index] = Outcome(failure=stopped.kind)
        return True

    def _ready(self, done: int) -> bool:
        """Whether a process is there in which all earlier cells have run."""
        if self._give_up():
            return False
        if self._pipe is not None:
            return True
        self._pipe, self._asked = Pipe(self._sandbox, self._limits), []
        self.transcript.starts += 1
        for kind, index in self._steps[:done]:
            if kind == "cell" and index not in self._lost:
                found = self._run_cell(index)
                if found.fatal:
                    self._lose(index, found)
                    return False
        return True

    def _run_cell(self, index: int) -> Outcome:
        self._asked.append(("cell", index))
        try:
            error = self._pipe.cell(self._cells[index].code, self._until)
        except Stopped as stopped:
            self._stop(stopped)
            return Outcome(failure=stopped.kind)
        return Outcome(None, *_failure(error))

    def _stop(self, stopped: Stopped) -> None:
        """Leave the process.

        Raises:
            _Guilty: an earlier step did it; what came after it must be taken again.
        """
        self.end()
        if stopped.back:
            kind, index = step = self._asked[-1 - stopped.back]
            found = Outcome(failure=stopped.kind)
            if kind == "cell":
                self._lose(index, found)
            else:
                self._outcomes[index] = found
            raise _Guilty(step)

    def _lose(self, index: int, found: Outcome) -> bool:
        self._lost[index] = found
        self._tell(index, found)
        return True

    def _tell(self, index: int, found: Outcome) -> None:
        number = self._cells[index].number
        self.transcript.cells[number] = found
        error = f" ({found.error})" if found.error else ""
        self._note(f"cell {number}: {FAILURES[found.failure]}{error}")

    def _note(self, note: str) -> None:
        if note not in self.transcript.notes:
            self.transcript.notes.append(note)

    def _give_up(self) -> bool:
        return time.monotonic() >= self._until


def _failure(error: str) -> tuple[str, str]:
    """(failure, error) for the name of an exception; ("", "") for none."""
    kinds = {
        "": "",  # no error, no failure
        "NotImplementedError": "blank",
        "NotPlainData": "data",
        "MemoryError": "memory",
    }
    return kinds.get(error, "raised"), error
