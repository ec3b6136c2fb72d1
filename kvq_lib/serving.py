"""What goes into the engine and what comes out: requests, events, results, metrics.

And the clocks that say when: the wall's, or a virtual one for simulations and tests.
All times are seconds on the engine's clock.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .checks import _shown, real, reason
from .errors import InvalidArgument, KVQError
from .swap import Swapped

#: Steps whose usage is kept: a day at about one a second; an engine may run for months.
KEPT_STEPS = 100_000


@dataclass(frozen=True)
class Request:
    """A prompt to continue; the engine checks it when it is submitted.

    Attributes:
        prompt: a text, or token ids, at least one.
        max_new_tokens: the most tokens to add.
        temperature: 0 takes the most likely token; above 0 samples.
        seed: of the sampling; unused at temperature 0.
        arrival: seconds from its submission until it arrives, for traces.
    """

    prompt: str | Sequence[int]
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    arrival: float = 0.0


@dataclass
class RequestMetrics:
    """What a request went through.

    Attributes:
        arrival: when it arrived.
        admitted: when it was first given pages; None if never.
        token_times: when each of its tokens came out.
        ended: when it ended; None before.
        preemptions: how often it lost its pages to an earlier request.
        swaps: how many of these times they went to host memory.
        prefix_tokens: tokens found in the cache, at every admission.
        computed_tokens: tokens that the model read for it, recomputed ones included.
    """

    arrival: float
    admitted: float | None = None
    token_times: list[float] = field(default_factory=list)
    ended: float | None = None
    preemptions: int = 0
    swaps: int = 0
    prefix_tokens: int = 0
    computed_tokens: int = 0

    @property
    def queueing(self) -> float | None:
        """Seconds from arrival to admission."""
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds from each token to the next one."""
        return [b - a for a, b in itertools.pairwise(self.token_times)]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over the time from arrival to end; None without such a time."""
        if self.ended is None or self.ended <= self.arrival:
            return None
        return len(self.token_times) / (self.ended - self.arrival)


@dataclass(eq=False)
class Job:
    """What the engine keeps of a request until it ends.

    Attributes:
        id: the request's.
        request: as it was submitted.
        tokens: those of the prompt, then those that came out.
        prompt: how many are the prompt's.
        draws: for sampling.
        metrics: what it went through.
        seq: its sequence in the cache, while it runs.
        swapped: its pages, while they are on the host.
    """

    id: int
    request: Request
    tokens: list[int]
    prompt: int
    draws: torch.Generator
    metrics: RequestMetrics
    seq: int | None = None
    swapped: Swapped | None = None

    def order(self) -> tuple[float, int]:
        """First come, first served."""
        return self.metrics.arrival, self.id


@dataclass(frozen=True)
class Result:
    """How a request ended.

    Attributes:
        request: its id.
        end: "stop" at an end token, "length" at `max_new_tokens`, "cancelled",
            "refused" before it was admitted, or "failed" in a step.
        tokens: its new token ids, the closing end token included.
        text: the same as text, without special tokens.
        metrics: what it went through.
        error: why it was refused or failed; else None.
    """

    request: int
    end: str
    tokens: list[int]
    text: str
    metrics: RequestMetrics
    error: KVQError | None = None


@dataclass(frozen=True)
class Event:
    """A new token of a request, its end, or both.

    Attributes:
        request: the id of the request.
        token: the new token; None when it ends without one.
        time: when.
        result: how it ended; None while it goes on.
    """

    request: int
    token: int | None
    time: float
    result: Result | None = None


@dataclass(frozen=True)
class Usage:
    """The state after one step.

    Attributes:
        time: when the step ended.
        hot, cold: pages that running sequences need.
        running, waiting: requests with pages, and requests that wait for some.
        tokens: tokens that the model read in the step.
    """

    time: float
    hot: int
    cold: int
    running: int
    waiting: int
    tokens: int


@dataclass
class EngineMetrics:
    """Totals over all requests, the running ones included.

    Attributes:
        new_tokens: tokens that came out.
        computed_tokens: tokens that the model read, recomputed ones included.
        prefix_tokens: tokens found in the cache.
        preemptions: how often a request lost its pages.
        swaps: how many of these times they went to host memory.
        swapped_bytes: bytes that went there.
        peak_running: the most sequences in one step.
        usage: one entry for each of the latest `KEPT_STEPS` steps.
        started: when the first step began; None before.
    """

    new_tokens: int = 0
    computed_tokens: int = 0
    prefix_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    swapped_bytes: int = 0
    peak_running: int = 0
    usage: list[Usage] = field(default_factory=list)
    started: float | None = None

    def note(self, usage: Usage) -> None:
        """Keep a step's usage, and forget the oldest beyond `KEPT_STEPS`."""
        self.usage.append(usage)
        del self.usage[:-KEPT_STEPS]

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens over the time from the first step's begin to the last one's end;
        None without such a time."""
        if not self.usage or self.usage[-1].time <= self.started:
            return None
        return self.new_tokens / (self.usage[-1].time - self.started)


def token_ids(tokenizer, prompt):
    """The token ids of a text; what is no text is left to other checks.

    Raises:
        InvalidArgument: the tokenizer does not take it.
    """
    if not isinstance(prompt, str):
        return prompt
    try:
        return tokenizer(prompt).input_ids
    except Exception as error:  # one text must not end the others
        name = type(tokenizer).__name__
        raise InvalidArgument(
            f"{name} does not take {_shown(prompt)}: {reason(error)}"
        ) from error


class Clock:
    """The wall clock, in seconds since it was made.

    Another clock is a subclass.
    """

    def __init__(self):
        self._start = time.monotonic()

    def now(self) -> float:
        """The time."""
        return time.monotonic() - self._start

    def wait_until(self, when: float) -> None:
        """Return at `when`; the engine has nothing to do before."""
        time.sleep(max(0.0, when - self.now()))

    def worked(self, tokens: int) -> None:
        """The engine has computed a step of so many tokens; a real clock knows."""


class VirtualClock(Clock):
    """A clock that stands still but for steps and waiting.

    Args:
        step_seconds: what a step takes.
        token_seconds: what each of its tokens adds.

    Raises:
        InvalidArgument: a time that is negative or not finite.
    """

    def __init__(self, step_seconds: float = 1.0, token_seconds: float = 0.0):
        self.step_seconds = real("step_seconds", step_seconds, at_least=0)
        self.token_seconds = real("token_seconds", token_seconds, at_least=0)
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait_until(self, when: float) -> None:
        self.time = max(self.time, when)

    def worked(self, tokens: int) -> None:
        self.time += self.step_seconds + self.token_seconds * tokens
