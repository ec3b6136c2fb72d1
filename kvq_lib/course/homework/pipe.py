"""One runner in its sandbox, and the talk with it.

Requests and replies are JSON objects, one a line, one at a time:

    {"op": "cell", "n": 5, "code": "..."}
        -> {"n": 5, "ok": true} or {"n": 5, "ok": false, "error": "NameError"}
    {"op": "probe", "n": 9, "code": "...", "seed": 0}
        -> {"n": 9, "value": plain data} or {"n": 9, "error": "TypeError"}

Numbers are drawn at random, so that no reply can be written before its request.  What
comes back was written by a stranger: anything but the one line asked for ends it.
"""

import builtins
import json
import math
import os
import secrets
import select
import subprocess
import threading
import time

from . import watch
from .runner import MAX_REPLY
from .sandbox import MEMORY_DISKS, Limits, Sandbox, SandboxError

_TICK = 0.05  # seconds between looks at memory
_HELPERS = 4  # processes of the sandbox itself
_START = 60.0  # seconds for a runner to start on a machine that is busy
#: A cell that does not compute may take so many times its seconds.  On a busy machine,
#: an honest one waits for its turn.
WAIT = 3

#: Names of errors that may leave the sandbox: no one can write a message into them.
ERRORS = {
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
} | {"NotPlainData"}


class Stopped(Exception):
    """The runner had to be killed, or died.

    Attributes:
        kind: "time", "memory", "disk", "processes", "died" or "protocol".
        back: how many requests ago the one was made that did it; 0 for the last.
    """

    def __init__(self, kind: str, back: int = 0):
        super().__init__(kind)
        self.kind = kind
        self.back = back


class Interrupted(Exception):
    """The grader is about to end."""


interrupted = threading.Event()


class Pipe:
    """A running sandbox; a context manager that kills it at the end.

    Attributes:
        computed: seconds that it has computed, known at the end.

    Raises:
        SandboxError: the runner did not start.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, stderr=subprocess.DEVNULL):
        self._limits = limits
        self.computed = 0.0
        self._started = sandbox.start(limits, stderr)
        self._rest = b""
        self._numbers: list[int] = []
        self._looked = 0.0
        self._own_kernel = False
        self._computed: float | None = None
        try:
            hello = self._receive(0, time.monotonic() + _START)
        except Interrupted:
            self.end()
            raise
        except Stopped as stopped:
            said = self._last_words(stderr)
            self.end()
            why = f"{stopped.kind} {said}".strip()
            raise SandboxError(f"{sandbox.level} does not start: {why}") from None
        if hello.get("ok") is not True:
            self.end()
            raise SandboxError(f"{sandbox.level} does not start: no greeting")
        self._own_kernel = sandbox.level != "limits"

    def __enter__(self) -> "Pipe":
        return self

    def __exit__(self, *what) -> None:
        self.end()

    def end(self) -> None:
        """Kill the sandbox with all that is in it."""
        self.computed = watch.seconds(self._inside())
        self._started.end()

    def cell(self, code: str, until: float = math.inf) -> str:
        """Run a cell; the name of the error it raised, or "".

        Args:
            until: the time of time.monotonic at which all ends.

        Raises:
            Stopped: the process is lost.
        """
        reply = self._ask({"op": "cell", "code": code}, until)
        return "" if reply.get("ok") is True else _name(reply)

    def probe(
        self, code: str, seed: int, until: float = math.inf
    ) -> tuple[object, str]:
        """Run a probe; (its value, "") or (None, the name of the error it raised).

        Raises:
            Stopped: the process is lost.
        """
        reply = self._ask({"op": "probe", "code": code, "seed": seed}, until)
        if "value" in reply:
            return reply["value"], ""
        return None, _name(reply)

    def _ask(self, request: dict, until: float) -> dict:
        until = min(until, time.monotonic() + WAIT * self._limits.seconds)
        self._computed = None
        number = secrets.randbits(50)
        self._numbers.append(number)
        line = json.dumps({**request, "n": number}).encode("ascii") + b"\n"
        self._send(line, until)
        return self._receive(number, until)

    def _send(self, data: bytes, until: float) -> None:
        """Write without waiting longer than allowed: nobody may be reading."""
        while data:
            _, ready, _ = select.select([], [self._started.requests], [], self._tick())
            if ready:
                try:
                    data = data[os.write(self._started.requests, data) :]
                except BlockingIOError:
                    continue
                except OSError:
                    raise Stopped("died") from None
            elif time.monotonic() > until:
                raise Stopped("time")

    def _receive(self, number: int, until: float) -> dict:
        while b"\n" not in self._rest:
            replies = self._started.replies
            ready, _, _ = select.select([replies], [], [], self._tick())
            if ready:
                more = os.read(replies, 65536)
                if not more:
                    raise Stopped("died")
                self._rest += more
                if len(self._rest) > MAX_REPLY:
                    raise Stopped("protocol")
            elif self._started.process.poll() is not None:
                raise Stopped("died")
            if b"\n" not in self._rest and time.monotonic() > until:
                raise Stopped("time")
        line, self._rest = self._rest.split(b"\n", 1)
        if self._rest:
            raise Stopped("protocol")
        reply = _object(line)
        if reply["n"] in self._numbers[:-1]:  # a second reply to an older request
            raise Stopped("protocol", self._numbers[::-1].index(reply["n"]))
        if reply["n"] != number:
            raise Stopped("protocol")
        return reply

    def _tick(self) -> float:
        """Look at what the sandbox holds, not too often; seconds until the next look.

        Raises:
            Stopped: it holds too much.
            Interrupted: nobody waits any more.
        """
        if interrupted.is_set():
            raise Interrupted
        now = time.monotonic()
        if now - self._looked >= _TICK:
            self._looked = now
            pids = self._inside()
            if len(pids) > self._limits.processes + _HELPERS:
                raise Stopped("processes")
            files, size, sockets = self._kernel_holds(pids)
            if files > self._limits.files:
                raise Stopped("disk")
            left = self._limits.memory - size
            if sockets > self._limits.sockets or watch.memory(pids, left) > left:
                raise Stopped("memory")
            computed = watch.seconds(pids)
            if self._computed is None:
                self._computed = computed
            if computed - self._computed > self._limits.seconds:
                raise Stopped("time")
        return _TICK

    def watched(self) -> int:
        """How many processes are watched: the one started, and those inside."""
        return len(self._inside())

    def _inside(self) -> list[int]:
        """The process that was started, and all that it started."""
        most = self._limits.processes + _HELPERS + 1
        return watch.tree(self._started.process.pid, most)

    def _kernel_holds(self, pids: list[int]) -> tuple[int, int, int]:
        """(files, their bytes, sockets): memory of the sandbox, but of no process.
        Outside of one, and when nothing is left inside, they are everybody's."""
        if not self._own_kernel or len(pids) == 1:
            return 0, 0, 0
        first = pids[1]  # it lives as long as the sandbox: others may be dead already
        return *watch.held(first, MEMORY_DISKS), watch.sockets(first)

    def _last_words(self, stderr: int) -> str:
        if stderr != subprocess.PIPE:
            return ""
        process = self._started.process
        process.kill()
        said = process.stderr.read(4000).decode("utf-8", "replace")
        process.stderr.close()
        return " ".join(said.split())


def _object(line: bytes) -> dict:
    """A reply with a number."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError, MemoryError):
        raise Stopped("protocol") from None
    if not isinstance(reply, dict) or type(reply.get("n")) is not int:
        raise Stopped("protocol")
    return reply


def _name(reply: dict) -> str:
    name = reply.get("error")
    return name if isinstance(name, str) and name in ERRORS else "Exception"
