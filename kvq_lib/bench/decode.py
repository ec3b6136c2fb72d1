"""Decode speed on a CPU beside transformers' own caches; printed by `make bench`.

One sequence, one token a step, after a context of 4,096 tokens. All caches read the
same text on the same model in one run, in turns, so that a busy moment of the machine
hits all of them.
"""

import argparse
import contextlib
import inspect
import statistics
import time

import torch
from tqdm import tqdm

import kvq_lib as kvq
from kvq_lib.attention import CHUNK, cache_for, forward, on_cache
from kvq_lib.bench.provenance import machine, versions
from kvq_lib.bench.quality import windows

SCHEMES = ("native", "fp16", "int8", "int4", "int4-kivi")


class Ours:
    """A sequence on a PagedKVCache."""

    def __init__(self, model, scheme: str, room: int):
        self.name = f"kvq {scheme}"
        self.model = model
        self.cache = cache_for(model, kvq.scheme(scheme), 16, [room])
        self.seq = self.cache.add()

    def ready(self):
        """What a program enters once, and not with each token."""
        return on_cache(self.model)

    def step(self, tokens: list[int]) -> None:
        forward(self.model, self.cache, [self.seq], [tokens], last_only=True)


class Theirs:
    """A sequence on one of transformers' caches."""

    def __init__(self, model, name: str, cache):
        self.name, self.model, self.cache = name, model, cache

    def ready(self):
        return contextlib.nullcontext()

    @torch.inference_mode()
    def step(self, tokens: list[int]) -> None:
        # Newer releases of transformers call the argument "cache".
        renamed = "cache" in inspect.signature(self.model.forward).parameters
        self.model(
            torch.tensor([tokens]),
            **{"cache" if renamed else "past_key_values": self.cache},
            use_cache=True,
            logits_to_keep=1,
        )


def contenders(model, room: int) -> list:
    """All caches of the comparison, empty."""
    from transformers import DynamicCache, QuantizedCache

    config = model.config
    found = [Ours(model, name, room) for name in SCHEMES]
    found.append(Theirs(model, "transformers DynamicCache", DynamicCache()))
    for bits in (4, 2):
        cache = QuantizedCache(
            backend="quanto", config=config, nbits=bits, q_group_size=64
        )
        found.append(Theirs(model, f"transformers quanto int{bits}", cache))
    return found


def measure(model, context: list[int], steps: int) -> dict[str, float]:
    """Median seconds of one decoding step for each cache.

    Args:
        model: of transformers, on the CPU.
        context: token ids that every cache reads first.
        steps: decoding steps, timed one by one.
    """
    caches = contenders(model, len(context) + steps + 2)
    with tqdm(total=len(caches) * (len(context) + steps), unit="tok") as bar:
        for cache in caches:
            bar.set_description(f"{cache.name}, prefill")
            with cache.ready():
                for start in range(0, len(context), CHUNK):
                    cache.step(context[start : start + CHUNK])
                    bar.update(min(CHUNK, len(context) - start))
                cache.step([0])  # the first step after a prefill allocates
        times: dict[str, list[float]] = {cache.name: [] for cache in caches}
        bar.set_description("decode")
        for i in range(steps):
            for cache in caches:
                with cache.ready():
                    start = time.perf_counter()
                    cache.step([context[i % len(context)]])
                    times[cache.name].append(time.perf_counter() - start)
                bar.update()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print tokens per second, and where they were measured."""
    parser = argparse.ArgumentParser(prog="python -m kvq_lib.bench.decode")
    parser.add_argument("--context", type=int, default=4096, help="tokens read first")
    parser.add_argument("--steps", type=int, default=32, help="tokens timed")
    options = parser.parse_args()
    if options.context < 1 or options.steps < 1:
        parser.error("--context and --steps are at least 1")
    model, tokenizer = kvq.load_model("smollm2-135m")
    context = windows(tokenizer, 1, options.context)[0].tolist()
    seconds = measure(model, context, options.steps)
    base = seconds["transformers DynamicCache"]
    print(f"\nSmolLM2-135M, float32, batch 1, {options.context} tokens of context")
    print(f"{'cache':28} {'ms/token':>9} {'tokens/s':>9} {'vs DynamicCache':>16}")
    for name, value in seconds.items():
        print(f"{name:28} {value * 1e3:9.1f} {1 / value:9.1f} {base / value:15.2f}×")
    here, with_ = machine(), versions()
    print(f"\n{here['cpu']}, {here['cores']} cores, {torch.get_num_threads()} threads")
    print(", ".join(f"{k} {v}" for k, v in with_.items() if v))


if __name__ == "__main__":
    main()
