"""Requests that come and go, and what memory they get: a simulation, step by step.

    trace = chat_trace(1000, rate=0.3, seed=0)
    run = simulate(trace, Paged(65536, page_size=16), steps=3000)

All sizes are tokens of one pool. A request brings a prompt, which is written in the
step that admits it, and grows by one token in each step after that until its answer is
complete. Requests are admitted in order of arrival; none overtakes.

`Contiguous` gives each request one piece for all of its life. `Paged` gives it pages as
it grows; these are the page tables of the cache itself (`kvq_lib.pages`).
"""

import bisect
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..checks import real, whole
from ..errors import InvalidArgument, OutOfPages
from ..pages import Pages
from ..schemes import scheme


@dataclass(frozen=True)
class Arrival:
    """A request of a trace.

    Attributes:
        step: when it arrives.
        prompt, answer: its tokens.
    """

    step: int
    prompt: int
    answer: int

    @property
    def total(self) -> int:
        """Tokens that it has at its end."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of lengths, cut off: most are short, a few very long.

    Attributes:
        median: half of the lengths are below it, in tokens.
        sigma: standard deviation of their natural logarithm.
        longest: what is longer is cut to it.
    """

    median: float
    sigma: float
    longest: int

    def draw(self, rng: random.Random) -> int:
        """A length, at least 1."""
        return min(
            self.longest, 1 + int(self.median * rng.lognormvariate(0, self.sigma))
        )


PROMPTS = Lengths(median=200, sigma=1.2, longest=6144)
ANSWERS = Lengths(median=180, sigma=1.0, longest=2048)


def chat_trace(
    count: int,
    rate: float,
    seed: int = 0,
    prompts: Lengths = PROMPTS,
    answers: Lengths = ANSWERS,
) -> list[Arrival]:
    """Requests of strangers: exponential gaps (a Poisson process), random lengths.

    Args:
        count: requests.
        rate: of arrivals, per step.

    Raises:
        InvalidArgument: a count that is no whole number, a rate that is not above 0.
    """
    count, rate = whole("count", count, at_least=0), real("rate", rate, at_least=0)
    if rate == 0:
        raise InvalidArgument("rate must be above 0, got 0")
    rng, time, trace = random.Random(seed), 0.0, []
    for _ in range(count):
        time += rng.expovariate(rate)
        trace.append(Arrival(int(time), prompts.draw(rng), answers.draw(rng)))
    return trace


class Contiguous:
    """One piece of memory for each request, in the first hole that is large enough.

    Args:
        pool: tokens of memory.
        reserve: the size of a request's piece, from its `Arrival`.
    """

    def __init__(self, pool: int, reserve: Callable[[Arrival], int]):
        self.pool = whole("pool", pool, at_least=1)
        self.reserve = reserve
        self.pieces: dict[int, tuple[int, int]] = {}  # key: start, size

    @property
    def allocated(self) -> int:
        """Tokens inside pieces."""
        return sum(size for _, size in self.pieces.values())

    def holes(self) -> list[tuple[int, int]]:
        """Start and size of every hole, from the front."""
        edges = [(0, 0), *sorted(self.pieces.values()), (self.pool, 0)]
        return [
            (start + size, after - start - size)
            for (start, size), (after, _) in itertools.pairwise(edges)
            if after > start + size
        ]

    def suits(self, request: Arrival) -> bool:
        """Whether an empty pool would hold the request to its end."""
        return request.total <= self.reserve(request) <= self.pool

    def place(self, key: int, request: Arrival, length: int) -> bool:
        """Give a request a piece; whether there was a hole."""
        size = self.reserve(request)
        for start, room in self.holes():
            if room >= size:
                self.pieces[key] = (start, size)
                return True
        return False

    def grow(self, keys: Sequence[int]) -> bool:
        """One more token for each: always there, it is reserved."""
        return True

    def remove(self, key: int) -> None:
        """Take a request's piece back."""
        del self.pieces[key]


class Paged:
    """Pages from the cache's own page tables, given as requests grow.

    Args:
        pool: tokens of memory; what does not fill a page is not used.
        page_size: tokens of a page.
    """

    def __init__(self, pool: int, page_size: int):
        self.pool = whole("pool", pool, at_least=1)
        law = scheme("native").law(page_size)
        self.page_size = law.page_size
        self.pages = Pages(law, self.pool // law.page_size, 0)
        self.handles: dict[int, int] = {}

    @property
    def allocated(self) -> int:
        """Tokens that the pages in use could hold."""
        return (self.pages.hot.count - len(self.pages.hot.free)) * self.page_size

    @property
    def entries(self) -> int:
        """Entries of all page tables."""
        return sum(len(self.pages.sequences[h].pages) for h in self.handles.values())

    def suits(self, request: Arrival) -> bool:
        """Whether an empty pool would hold the request to its end."""
        return request.total <= self.pages.hot.count * self.page_size

    def place(self, key: int, request: Arrival, length: int) -> bool:
        """Give a request pages for `length` tokens; whether they were free."""
        handle = self.pages.add()
        if not self._write([handle], [length]):
            self.pages.free(handle)
            return False
        self.handles[key] = handle
        return True

    def grow(self, keys: Sequence[int]) -> bool:
        """One more token for each; False, and none for any, if a page is missing."""
        return self._write([self.handles[key] for key in keys], [1] * len(keys))

    def remove(self, key: int) -> None:
        """Take a request's pages back."""
        self.pages.free(self.handles.pop(key))

    def _write(self, handles: list[int], lengths: list[int]) -> bool:
        try:
            self.pages.commit(self.pages.begin(handles, lengths))
        except OutOfPages:
            return False
        return True


@dataclass(frozen=True)
class Moment:
    """The state after a step.

    Attributes:
        lengths: tokens written so far for each running request.
        later: tokens that these requests will still write.
        allocated: tokens of memory that they hold.
        blocked: tokens of memory that are free although a request waits for some.
        waiting: requests that have arrived and have no memory.
        finished: requests that ended in earlier steps.
    """

    lengths: tuple[int, ...]
    later: int
    allocated: int
    blocked: int
    waiting: int
    finished: int

    @property
    def written(self) -> int:
        """Tokens written."""
        return sum(self.lengths)


@dataclass
class Run:
    """What a simulation saw.

    Attributes:
        moments: one for each step.
        waits: for each request that was admitted, by arrival, steps that it waited.
        finished: requests that are complete.
        preempted: how often a request lost its memory to an earlier one.
        rewritten: tokens that had to be written again for that.
    """

    moments: list[Moment] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    finished: int = 0
    preempted: int = 0
    rewritten: int = 0


@dataclass
class _Job:
    key: int
    request: Arrival
    length: int = 0  # tokens written
    admitted: bool = False


def simulate(trace: Sequence[Arrival], memory: "Contiguous | Paged", steps: int) -> Run:
    """Serve a trace for so many steps.

    When memory runs out while requests grow, the one that arrived last loses its own,
    and waits again in front of those that came after it.

    Args:
        trace: in order of arrival.
        memory: empty.
        steps: how many.

    Raises:
        InvalidArgument: a request that the memory would not hold even alone.
    """
    for request in trace:
        if not memory.suits(request):
            raise InvalidArgument(
                f"{request} does not fit a pool of {memory.pool} tokens"
            )
    coming = deque(_Job(key, request) for key, request in enumerate(trace))
    waiting, running, run = deque(), [], Run()
    for step in range(whole("steps", steps, at_least=0)):
        while coming and coming[0].request.step <= step:
            waiting.append(coming.popleft())
        _grow(memory, running, waiting, run)
        _admit(memory, running, waiting, run, step)
        free = memory.pool - memory.allocated
        run.moments.append(
            Moment(
                lengths=tuple(job.length for job in running),
                later=sum(job.request.total - job.length for job in running),
                allocated=memory.allocated,
                blocked=free if waiting else 0,
                waiting=len(waiting),
                finished=run.finished,
            )
        )
        for job in [job for job in running if job.length == job.request.total]:
            memory.remove(job.key)
            running.remove(job)
            run.finished += 1
    return run


def _grow(memory, running: list[_Job], waiting: deque, run: Run) -> None:
    while running and not memory.grow([job.key for job in running]):
        job = running.pop()
        memory.remove(job.key)
        waiting.appendleft(job)
        run.preempted += 1
        run.rewritten += job.length
    for job in running:
        job.length += 1


def _admit(memory, running: list[_Job], waiting: deque, run: Run, step: int) -> None:
    while waiting:
        job = waiting[0]
        length = job.length or job.request.prompt
        if not memory.place(job.key, job.request, length):
            return
        job.length = length
        if not job.admitted:
            run.waits.append(step - job.request.step)
            job.admitted = True
        bisect.insort(running, waiting.popleft(), key=lambda job: job.key)
