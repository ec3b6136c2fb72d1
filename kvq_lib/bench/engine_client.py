"""Talking to an OpenAI-compatible server: its metrics, and a bounded load.

Standard library only, and every wait has an end.  The server is one that
`real_engine` started on this machine.
"""

import http.client
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

#: What a name in a timeline is called by the engine.
WATCHED = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
    "used": "vllm:kv_cache_usage_perc",
}

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Sample:
    """One line of a metrics page."""

    name: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str) -> list[Sample]:
    """Every sample of a page in Prometheus' text format.

    Raises:
        ValueError: a line is neither a sample nor a comment.
    """
    found = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = _SAMPLE.match(line)
        if match is None:
            raise ValueError(f"no sample of a metric: {line[:80]!r}")
        name, labels, value = match.groups()
        pairs = {
            key: re.sub(r'\\[\\"n]', lambda m: _ESCAPES[m[0]], raw)
            for key, raw in _LABEL.findall(labels or "")
        }
        found.append(Sample(name, pairs, float(value)))
    return found


def total(samples: Iterable[Sample], name: str) -> float:
    """The sum of a metric over its labels.

    Raises:
        KeyError: the page has no such metric.
    """
    values = [s.value for s in samples if s.name == name]
    if not values:
        raise KeyError(f"no metric {name!r}")
    return sum(values)


@dataclass(frozen=True)
class Server:
    """Where a server listens, and what it calls its model."""

    port: int
    model: str
    host: str = "127.0.0.1"

    def get(self, path: str, seconds: float = 5.0) -> str:
        """The body of a page; raises what `ask` does."""
        return self.ask("GET", path, None, seconds)

    def ask(self, method: str, path: str, body: str | None, seconds: float) -> str:
        """The body of an answer.

        Raises:
            OSError: no connection, or a wait of so many seconds.
            http.client.HTTPException: an answer that is no page.
        """
        link = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        try:
            link.request(method, path, body, JSON if body else {})
            response = link.getresponse()
            content = response.read().decode()
        finally:
            link.close()
        if response.status != 200:
            raise http.client.HTTPException(
                f"{path}: status {response.status}: {content[:200]}"
            )
        return content

    def healthy(self) -> bool:
        """Whether it says that it can be asked."""
        try:
            self.get("/health", 2.0)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def metrics(self) -> list[Sample]:
        """The samples of the metrics page."""
        return parse_metrics(self.get("/metrics"))


@dataclass
class Outcome:
    """What became of one request.

    Attributes:
        sent: seconds on `time.monotonic`; None if it was never sent.
        tokens: ids of the tokens that arrived.
        arrived: when each of them did, on the same clock.
        failure: why it is not complete; None if it is.
    """

    sent: float | None = None
    tokens: list[int] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def first(self) -> float | None:
        """Seconds until the first token."""
        return self.arrived[0] - self.sent if self.arrived else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens; 0 between two that came in one event."""
        pairs = zip(self.arrived, self.arrived[1:], strict=False)
        return [later - sooner for sooner, later in pairs]


def request_body(server: Server, prompt: Sequence[int], max_tokens: int) -> str:
    """A greedy completion of exactly `max_tokens` tokens, streamed with their ids."""
    return json.dumps(
        {
            "model": server.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    )


def complete(
    server: Server, prompt: Sequence[int], max_tokens: int, deadline: float
) -> Outcome:
    """Ask for one completion and time each token.

    Args:
        prompt: token ids.
        deadline: on `time.monotonic`; then the request is given up.

    Returns:
        The outcome. A server that refuses, dies or is slow is a failure in it, never
        an exception.
    """
    outcome = Outcome(sent=time.monotonic())
    link = http.client.HTTPConnection(
        server.host, server.port, timeout=max(0.001, deadline - outcome.sent)
    )
    try:
        link.connect()
        # The answer may take over the connection: its end of time is set through this.
        socket = link.sock
        link.request(
            "POST",
            "/v1/completions",
            request_body(server, prompt, max_tokens),
            JSON,
        )
        response = link.getresponse()
        if response.status != 200:
            said = response.read(200).decode(errors="replace")
            outcome.failure = f"status {response.status}: {said}"
            return outcome
        _read_events(response, socket, outcome, deadline)
        if len(outcome.tokens) != max_tokens and outcome.failure is None:
            outcome.failure = f"{len(outcome.tokens)} of {max_tokens} tokens came"
    except TimeoutError:
        outcome.failure = "time ran out"
    except (OSError, http.client.HTTPException, ValueError, KeyError) as problem:
        outcome.failure = f"{type(problem).__name__}: {problem}"
    finally:
        link.close()
    return outcome


def _read_events(response, socket, outcome: Outcome, deadline: float) -> None:
    """Read a stream of server-sent events into `outcome`, until the last."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        socket.settimeout(left)
        line = response.readline()
        now = time.monotonic()
        if not line:
            outcome.failure = "the stream broke off"
            return
        if not line.startswith(b"data:"):
            continue
        content = line.removeprefix(b"data:").strip()
        if content == b"[DONE]":
            return
        event = json.loads(content)
        if "error" in event:
            outcome.failure = f"error in the stream: {event['error']}"
            return
        for choice in event["choices"]:
            new = choice["token_ids"] or []
            outcome.tokens += new
            outcome.arrived += [now] * len(new)


def log_probabilities(
    server: Server, prompt: Sequence[int], seconds: float
) -> list[float]:
    """What the engine gives to each token of a prompt but the first, in nats.

    Raises:
        OSError: no answer in time.
        http.client.HTTPException: an answer that is no page.
    """
    asked = {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
    }
    answer = server.ask("POST", "/v1/completions", json.dumps(asked), seconds)
    rows = json.loads(answer)["choices"][0]["prompt_logprobs"]
    return [
        row[str(token)]["logprob"]
        for token, row in zip(prompt[1:], rows[1:], strict=True)
    ]


@dataclass(frozen=True)
class Load:
    """How hard a server is driven: nothing about it is unbounded.

    Attributes:
        concurrency: requests at a time; the next one is sent when one ends.
        max_tokens: of each completion, all of which are made.
        seconds: after them every open request is given up.
    """

    concurrency: int
    max_tokens: int
    seconds: float


def drive(
    server: Server, prompts: Sequence[Sequence[int]], load: Load
) -> list[Outcome]:
    """Send each prompt once; one outcome for each, in their order."""
    deadline = time.monotonic() + load.seconds
    outcomes = [Outcome(failure="not sent: time ran out") for _ in prompts]
    todo: queue.SimpleQueue = queue.SimpleQueue()
    for index in range(len(prompts)):
        todo.put(index)

    def work() -> None:
        while time.monotonic() < deadline:
            try:
                index = todo.get_nowait()
            except queue.Empty:
                return
            outcomes[index] = complete(
                server, prompts[index], load.max_tokens, deadline
            )

    threads = [threading.Thread(target=work) for _ in range(load.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


class Watch:
    """Samples a server's metrics while a block runs.

    After it, `timeline` holds lists of equal length: "seconds" since the start, and one
    for each name of `WATCHED`. It ends early where the server stops answering.
    """

    def __init__(self, server: Server, every: float = 0.5):
        self.timeline: dict[str, list[float]] = {"seconds": []}
        self.timeline.update({name: [] for name in WATCHED})
        self._server, self._every = server, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *problem) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while True:
            try:
                samples = self._server.metrics()
                row = {key: total(samples, name) for key, name in WATCHED.items()}
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                return
            row["seconds"] = time.monotonic() - began
            for key, value in row.items():
                self.timeline[key].append(round(value, 3))
            if self._stop.wait(self._every):
                return


QUANTILES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Values at `QUANTILES`, the nearest that occurs; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    last = len(ordered) - 1
    return {f"{q:g}": round(ordered[round(q * last)], 5) for q in QUANTILES}


def summary(outcomes: Sequence[Outcome]) -> dict:
    """Counts, rate and latencies of a load.

    Returns:
        "requests", "complete", "failures" (reason: count), "output_tokens" of all
        requests, "seconds" from the first request to the last token, "tokens_per_s",
        and the quantiles in seconds "first_token" and "token_gap".
    """
    sent = [o.sent for o in outcomes if o.sent is not None]
    arrived = [t for o in outcomes for t in o.arrived]
    seconds = max(arrived) - min(sent) if arrived else None
    failures: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.failure is not None:
            failures[outcome.failure] = failures.get(outcome.failure, 0) + 1
    return {
        "requests": len(outcomes),
        "complete": sum(o.failure is None for o in outcomes),
        "failures": failures,
        "output_tokens": len(arrived),
        "seconds": seconds and round(seconds, 3),
        "tokens_per_s": seconds and round(len(arrived) / seconds, 2),
        "first_token": quantiles([o.first for o in outcomes if o.arrived]),
        "token_gap": quantiles([gap for o in outcomes for gap in o.gaps]),
    }


def wait_until(ready: Callable[[], bool], seconds: float, every: float = 0.25) -> bool:
    """Ask again and again, for so long; whether it came true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            return True
        time.sleep(every)
    return False
