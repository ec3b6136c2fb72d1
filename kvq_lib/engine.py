"""Engine: continuous batching on a memory budget in bytes.

Requests come and go; in each step the model reads new tokens of many of them at once:
the next chunk of a long prompt beside single tokens of those that decode. A request is
admitted when pages for all of its tokens are free. When a later page is missing, the
request that arrived last is preempted: its pages are freed, and are recomputed, or
come back from host memory, once there is room. Since what a token sees depends on its
position alone, none of this changes a request's tokens but for rounding.

There is no difference between prefill and decode but the number of tokens that the
model has not read yet: a decoding request has one, the token that came out last.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from .admission import Plan, Room, cache_within
from .attention import CHUNK, _require_plain_positions, forward, on_cache
from .checks import _shown, real, reason, whole
from .errors import InvalidArgument, KVQError, OutOfPages, StepError
from .model import _end_tokens, _pick, check_window
from .schemes import Scheme
from .schemes import scheme as find_scheme
from .serving import (
    Clock,
    EngineMetrics,
    Event,
    Job,
    Request,
    RequestMetrics,
    Result,
    Usage,
    token_ids,
)
from .swap import swap_in, swap_out


class Engine:
    """Serves many requests on one paged cache of a given size.

    Not for several threads at a time: the model's attention is changed in each step.

    Args:
        model, tokenizer: from `load_model` or transformers.
        scheme: a name of `SCHEMES`, or a Scheme.
        memory_bytes: what the pools of the cache may take. Integer page tables are not
            counted, nor the model, its activations and what is swapped to the host.
        page_size: tokens in a page.
        chunk: the most tokens in one step, and the most requests that run at a time.
        preempt: "recompute", or "swap" to host memory, what a preempted request held.
        context: tokens of a typical request, answer included. The budget is divided
            such that hot and cold pages run out together with requests of this length.
        clock: the wall's by default; see `serving.VirtualClock`.

    Attributes:
        cache: the PagedKVCache.
        metrics: totals; see `EngineMetrics`.

    Raises:
        InvalidArgument: a number out of range, a budget that buys too few pages, or no
            tokenizer, policy or clock.
        UnsupportedScheme, UnsupportedModel: as in `generate`.
    """

    def __init__(
        self,
        model,
        tokenizer,
        scheme: "str | Scheme" = "int8",
        *,
        memory_bytes: int,
        page_size: int = 16,
        chunk: int = CHUNK,
        preempt: str = "recompute",
        context: int = 512,
        clock: Clock | None = None,
    ):
        memory_bytes = whole("memory_bytes", memory_bytes, at_least=1)
        self.chunk = whole("chunk", chunk, at_least=1)
        context = whole("context", context, at_least=1)
        if not isinstance(preempt, str) or preempt not in ("recompute", "swap"):
            raise InvalidArgument(
                f'preempt is "recompute" or "swap", got {_shown(preempt)}'
            )
        self.clock = Clock() if clock is None else clock
        if not isinstance(self.clock, Clock):
            raise InvalidArgument(f"clock is a kvq.Clock, got {_shown(clock)}")
        if not callable(getattr(tokenizer, "decode", None)):
            raise InvalidArgument(f"{type(tokenizer).__name__} is no tokenizer")
        check_window(model, [0])  # refuses what is no language model
        self.model, self.tokenizer, self.preempt = model, tokenizer, preempt
        self._ends = _end_tokens(model, tokenizer)
        page_size = whole("page_size", page_size, at_least=1)
        self.cache, chunk_pages = cache_within(
            memory_bytes, model, find_scheme(scheme), page_size, self.chunk, context
        )
        self._room = Room(self.cache, chunk_pages)
        self.metrics = EngineMetrics()
        self._count = 0  # ids that have been given
        self._waiting: list[Job] = []  # both in order of arrival
        self._running: list[Job] = []
        self._events: list[Event] = []  # that no step has returned yet
        self._serving = False  # a run or a stream takes every event

    # -- requests --------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request; `step`, `stream` or `run` serves it.

        Returns:
            Its id, which its events carry.

        Raises:
            OutOfPages: it could never fit the pools, even alone.
            InvalidArgument: a prompt without tokens, with one that the model does not
                know or with too many for it, or a number out of range.
            UnsupportedModel: the model cannot go to that length.
        """
        if not isinstance(request, Request):
            raise InvalidArgument(f"a request is a kvq.Request, got {_shown(request)}")
        new = whole("max_new_tokens", request.max_new_tokens, at_least=1)
        real("temperature", request.temperature, at_least=0)
        seed = whole("seed", request.seed, at_least=0)
        wait = real("arrival", request.arrival, at_least=0)
        tokens = check_window(self.model, token_ids(self.tokenizer, request.prompt))
        _require_plain_positions(self.model, len(tokens) + new)
        self._room.require(len(tokens) + new - 1)  # the last token is not stored
        metrics = RequestMetrics(self.clock.now() + wait)
        draws = torch.Generator().manual_seed(seed)
        job = Job(self._count, request, list(tokens), len(tokens), draws, metrics)
        self._count += 1
        bisect.insort(self._waiting, job, key=Job.order)
        return job.id

    def cancel(self, request: int) -> bool:
        """End a request now and free its pages; its last event says "cancelled".

        Returns:
            Whether it was still there; False for one that has ended.

        Raises:
            InvalidArgument: an id that no request ever had.
        """
        request = whole("request", request, at_least=0)
        if request >= self._count:
            raise InvalidArgument(f"{self._count} requests so far, none is {request}")
        for job in (*self._waiting, *self._running):
            if job.id == request:
                self._end(job, "cancelled")
                return True
        return False

    def stream(self, requests: Iterable[Request] = ()) -> Iterator[Event]:
        """Serve requests, and all that were submitted before; yields every event.

        A request that cannot be served yields an event with an error; the others go
        on. Leaving early, or by an exception, cancels `requests`.

        Raises:
            InvalidArgument: `requests` is no list.
            StepError: a run or a stream is going on.
        """
        yield from self._serve(self._submit_all(requests))

    def run(
        self,
        requests: Iterable[Request],
        on_event: Callable[[Event], None] | None = None,
    ) -> list[Result]:
        """Serve requests, and all that were submitted before, to their ends.

        Args:
            requests: also a trace, by their `arrival`.
            on_event: called with every event, between steps; may submit and cancel.

        Returns:
            One result for each of `requests`, in their order.

        Raises:
            InvalidArgument: `requests` is no list.
            StepError: a run or a stream is going on.
        """
        ids, ended = self._submit_all(requests), {}
        with contextlib.closing(self._serve(ids)) as events:
            for event in events:
                if event.result is not None:
                    ended[event.request] = event.result
                if on_event is not None:
                    on_event(event)
        return [ended[id_] for id_ in ids]

    def _refuse_nesting(self) -> None:
        if self._serving:
            raise StepError(
                "a run or a stream is going on and would lose its events; submit the "
                "request, and it is served there"
            )

    def _submit_all(self, requests) -> list[int]:
        self._refuse_nesting()
        if isinstance(requests, str | bytes) or not isinstance(requests, Iterable):
            raise InvalidArgument(f"requests is a list, got {_shown(requests)}")
        ids = []
        for request in list(requests):
            try:
                ids.append(self.submit(request))
            except KVQError as error:
                ids.append(self._count)
                self._count += 1
                now = self.clock.now()
                metrics = RequestMetrics(now, ended=now)
                result = Result(ids[-1], "refused", [], "", metrics, error)
                self._events.append(Event(ids[-1], None, now, result))
        return ids

    def _serve(self, ids: list[int]) -> Iterator[Event]:
        self._serving = True
        try:
            while self._waiting or self._running or self._events:
                yield from self._step()
                if self._waiting and not self._running and not self._events:
                    self.clock.wait_until(self._waiting[0].metrics.arrival)
        finally:
            self._serving = False
            for id_ in ids:
                self.cancel(id_)
            self._events = [e for e in self._events if e.request not in ids]

    # -- steps -----------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Plan a step, admit whom there is room for, compute, and return what happened
        since the last step. Does not wait for requests that have not arrived yet.

        Raises:
            OutOfPages: others hold pages of this cache, and too many.
            StepError: a run or a stream is going on.
        """
        self._refuse_nesting()
        return self._step()

    def _step(self) -> list[Event]:
        now = self.clock.now()
        plan = self._plan_running()
        self._admit(plan, now)
        if plan.tokens:
            if self.metrics.started is None:
                self.metrics.started = now
            self._compute(plan)
        events, self._events = self._events, []
        return events

    def _plan_running(self) -> Plan:
        """Tokens for the running, in order of arrival; the last ones may lose their
        pages to the first ones."""
        plan = Plan(self._room)
        decoding = sum(self._unread(job) == 1 for job in self._running)
        budget = self.chunk - decoding  # ≥ 1 if one is not: `chunk` bounds the running
        for i, job in enumerate(self._running):  # only shortened behind i
            unread = self._unread(job)
            want = 1 if unread == 1 else min(budget, unread)
            count = plan.affordable(job.seq, want)
            while count < min(want, 1) and len(self._running) > i + 1:
                self._preempt_last()
                count = plan.affordable(job.seq, want)
            # The first one fits alone, or else `begin` says what is in the way.
            plan.put(job.seq, max(count, int(i == 0)))
            budget -= count if unread > 1 else 0
        return plan

    def _admit(self, plan: Plan, now: float) -> None:
        """Start those that wait, in order of arrival, as long as tokens and pages
        last. None overtakes: a large request would wait forever."""
        while (
            self._waiting
            and self._waiting[0].metrics.arrival <= now
            and len(self._running) < self.chunk
            and (budget := self.chunk - sum(plan.tokens.values())) > 0
            and self._enter(self._waiting[0], plan)
        ):
            job = self._waiting.pop(0)
            bisect.insort(self._running, job, key=Job.order)
            if job.metrics.admitted is None:
                job.metrics.admitted = now
            want = min(budget, self._unread(job))
            plan.put(job.seq, plan.affordable(job.seq, want))

    def _enter(self, job: Job, plan: Plan) -> bool:
        """Give a waiting job its sequence, if all of its tokens find room."""
        seq = self.cache.add(job.tokens)
        found = self.cache.length(seq)
        running = [(other.seq, len(other.tokens)) for other in self._running]
        room = plan.hot_room_beside(running, seq, len(job.tokens))
        if room < 0:
            self.cache.free(seq)
            return False
        if job.swapped is not None:
            # Its own pages are reserved; of what is left, `room` are to spare.
            swap_in(self.cache, seq, job.swapped, job.tokens, pages=room + 1)
            job.swapped = None
        job.seq = seq
        job.metrics.prefix_tokens += found
        self.metrics.prefix_tokens += found
        return True

    def _compute(self, plan: Plan) -> None:
        """The model's step, and what comes out of it."""
        running = len(self._running)
        self.metrics.peak_running = max(self.metrics.peak_running, running)
        by_seq = {job.seq: job for job in self._running}
        parts = [(by_seq[seq], count) for seq, count in plan.tokens.items()]
        for (job, count), row in self._forward(parts):
            job.metrics.computed_tokens += count
            self.metrics.computed_tokens += count
            try:
                if isinstance(row, KVQError):
                    raise row
                if self._unread(job) == 0:
                    self._take(job, _pick(row, job.request.temperature, job.draws))
            except KVQError as error:
                self._end(job, "failed", error)
        now, tokens = self.clock.now(), sum(plan.tokens.values())
        waiting = sum(job.metrics.arrival <= now for job in self._waiting)
        usage = Usage(now, *self._room.used, len(self._running), waiting, tokens)
        self.metrics.note(usage)

    def _forward(self, parts: list[tuple[Job, int]]) -> Iterator[tuple]:
        """The model's step: each part, with the logits of its last token, or with the
        error that it raises alone."""
        seqs = [job.seq for job, _ in parts]
        tokens = [
            job.tokens[(start := self.cache.length(job.seq)) : start + count]
            for job, count in parts
        ]
        try:
            with on_cache(self.model):
                rows = forward(self.model, self.cache, seqs, tokens, last_only=True)
        except OutOfPages:
            raise
        except KVQError as error:
            if len(parts) > 1:
                # One of them is to blame; the step is undone, so each goes alone.
                for part in parts:
                    yield from self._forward([part])
                return
            rows = [error]
        self.clock.worked(sum(count for _, count in parts))
        yield from zip(parts, rows, strict=True)

    def _take(self, job: Job, token: int) -> None:
        """A token has come out."""
        now = self.clock.now()
        job.tokens.append(token)
        job.metrics.token_times.append(now)
        self.metrics.new_tokens += 1
        if token in self._ends:
            self._end(job, "stop", token=token)
        elif len(job.tokens) - job.prompt == job.request.max_new_tokens:
            self._end(job, "length", token=token)
        else:
            self._events.append(Event(job.id, token, now))

    def _end(self, job: Job, end: str, error=None, token: int | None = None) -> None:
        """Free what a job holds, and tell."""
        (self._waiting if job.seq is None else self._running).remove(job)
        if job.seq is not None:
            self.cache.free(job.seq)
        now = job.metrics.ended = self.clock.now()
        made, text = job.tokens[job.prompt :], ""
        try:
            text = self.tokenizer.decode(made, skip_special_tokens=True)
        except Exception as problem:  # one text must not end the others
            name, end = type(self.tokenizer).__name__, "failed"
            error = InvalidArgument(f"{name} cannot decode: {reason(problem)}")
        result = Result(job.id, end, made, text, job.metrics, error)
        self._events.append(Event(job.id, token, now, result))

    def _preempt_last(self) -> None:
        """Take the pages of the running job that arrived last; it waits again."""
        job = self._running[-1]
        if self.preempt == "swap":
            job.swapped = swap_out(self.cache, job.seq)
            job.metrics.swaps += 1
            self.metrics.swaps += 1
            self.metrics.swapped_bytes += job.swapped.nbytes
        else:
            self.cache.free(job.seq)
        self._running.pop()
        job.seq = None
        job.metrics.preemptions += 1
        self.metrics.preemptions += 1
        bisect.insort(self._waiting, job, key=Job.order)

    def _unread(self, job: Job) -> int:
        """Tokens of a running job that the model has not read; one or more between
        steps."""
        return len(job.tokens) - self.cache.length(job.seq)
