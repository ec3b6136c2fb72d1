"""Serving under one memory budget: how many requests run at a time, how fast tokens
come out and how long people wait, as the offered load grows; for chapter 7.

Recorded by `make measure`, in about five minutes on two cores. Every scheme gets the
same bytes, the same prompts and the same times of arrival.
"""

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from tqdm import tqdm

import kvq_lib as kvq
from kvq_lib.bench.provenance import RESULTS, record, save
from kvq_lib.bench.quality import describe_text, offline_text, windows

SCHEMES = ("fp16", "int8", "int4", "int4-kivi")

#: Requests of a run, tokens of each prompt and each answer, and of a step.
REQUESTS, PROMPT, NEW, CHUNK = 16, 128, 32, 128

#: The budget holds so many sequences in 16 bits.
SEQUENCES = 4

#: Offered loads, in what 16 bits can serve; None for all requests at once.
LOADS = (0.5, 1.0, 2.0, None)


def budget(config) -> int:
    """Bytes that hold `SEQUENCES` sequences in 16 bits, and what a chunk takes."""
    row = planned(config, 2**40)[0]
    return SEQUENCES * (row.sequence_bytes + row.step_bytes) + row.chunk_bytes


def planned(config, memory: int) -> tuple[kvq.SchemePlan, ...]:
    """What the planner makes of a budget."""
    return kvq.plan(
        config,
        memory,
        PROMPT + NEW,
        SCHEMES,
        weights=0,
        utilization=1.0,
        chunk=CHUNK,
        dtype=torch.float16,
    ).schemes


def arrivals(rate: float | None, count: int, seed: int = 0) -> list[float]:
    """Seconds from the start at which requests arrive: at random, `rate` a second on
    average, exactly so over all of them; all at 0 for None."""
    if rate is None:
        return [0.0] * count
    gaps = torch.empty(count).exponential_(
        1.0, generator=torch.Generator().manual_seed(seed)
    )
    times = gaps.cumsum(0) - gaps[0]
    return (times / times[-1] * (count - 1) / rate).tolist()


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that is not below `share` of all."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def serve(model, tokenizer, scheme: str, memory: int, prompts, times, new: int) -> dict:
    """One run of the engine; seconds are the wall's.

    Args:
        memory: bytes of the pools.
        prompts: token ids of each request.
        times: when each arrives, seconds.
        new: tokens of each answer.

    Returns:
        What is recorded of it, and "steps": running requests, tokens and seconds of
        every step.
    """
    engine = kvq.Engine(
        model,
        tokenizer,
        scheme,
        memory_bytes=memory,
        chunk=CHUNK,
        context=len(prompts[0]) + new,
    )
    requests = [
        kvq.Request(prompt, new, arrival=when)
        for prompt, when in zip(prompts, times, strict=True)
    ]
    begun = time.monotonic()
    results = engine.run(requests)
    seconds = time.monotonic() - begun
    if any(result.error for result in results):
        raise next(result.error for result in results if result.error)
    metrics = [result.metrics for result in results]
    first = [m.time_to_first_token for m in metrics]
    gaps = [gap for m in metrics for gap in m.inter_token_latencies]
    usage = engine.metrics.usage
    return {
        "scheme": scheme,
        "seconds": seconds,
        "requests_per_second": len(results) / seconds,
        "tokens_per_second": engine.metrics.new_tokens / seconds,
        "first_token": [statistics.mean(first), percentile(first, 0.95)],
        "inter_token": [statistics.mean(gaps), percentile(gaps, 0.95)],
        "peak_running": engine.metrics.peak_running,
        "preemptions": engine.metrics.preemptions,
        "computed_tokens": engine.metrics.computed_tokens,
        "pool_bytes": engine.cache.nbytes,
        "steps": [
            (b.tokens, a.running, b.time - a.time) for a, b in itertools.pairwise(usage)
        ],
    }


def decode_steps(runs: list[dict]) -> dict[str, list]:
    """Of steps in which each running request read one token: for each number of them,
    how many steps and their median seconds."""
    found = defaultdict(list)
    for run in runs:
        for tokens, running, seconds in run["steps"]:
            if tokens == running:
                found[running].append(seconds)
    return {
        str(n): [len(times), statistics.median(times)]
        for n, times in sorted(found.items())
    }


def measure(requests: int = REQUESTS, schemes=SCHEMES, loads=LOADS) -> dict:
    """Everything that chapter 7 takes from a record."""
    model, tokenizer = kvq.load_model("smollm2-135m")
    model.generation_config.eos_token_id = -1  # answers of one length: none ends itself
    memory = budget(model.config)
    prompts = windows(tokenizer, requests, PROMPT).tolist()

    def run(scheme, rate):
        times = arrivals(rate, requests)
        return serve(model, tokenizer, scheme, memory, prompts, times, NEW)

    run(schemes[0], None)  # warms up
    capacity = run(schemes[0], None)["requests_per_second"]
    made = []
    # In turns, so that a busy moment of the machine hits all of them.
    for load in tqdm(loads, desc="load"):
        for scheme in schemes:
            rate = None if load is None else load * capacity
            made.append({"load": load, "rate": rate, **run(scheme, rate)})
    steps = {s: decode_steps([r for r in made if r["scheme"] == s]) for s in schemes}
    for found in made:
        del found["steps"]
    return {
        "memory": memory,
        "requests": requests,
        "prompt": PROMPT,
        "new": NEW,
        "chunk": CHUNK,
        "threads": torch.get_num_threads(),
        "capacity": capacity,
        "planned": {row.scheme: row.max_batch for row in planned(model.config, memory)},
        "runs": made,
        "decode_steps": steps,
    }


def main() -> None:
    """Measure, print, and record unless it is a trial."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a trial: no record")
    quick = parser.parse_args().quick
    data = measure(6, loads=(1.0, None)) if quick else measure()
    for run in data["runs"]:
        print(
            f"{run['scheme']:10} load {run['load'] or 'all at once'!s:11} "
            f"{run['tokens_per_second']:6.1f} tokens/s, first token after "
            f"{run['first_token'][0]:5.2f} s, at most {run['peak_running']} at a time"
        )
    if not quick:
        made = record(
            "serving",
            data,
            model="SmolLM2-135M-Instruct, float32, weights from 4-bit GGUF",
            text=describe_text(),
            content=offline_text(),
        )
        print(f"Recorded in {save(RESULTS / 'serving.json', made)}")


if __name__ == "__main__":
    main()
