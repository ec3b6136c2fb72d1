"""What each scheme does to a model's predictions; recorded by `make measure`.

The functions are the ones that chapter 4 calls again, on less text. Everything is
compared with the same model reading the same tokens through an unquantized cache.
"""

import hashlib
import math
import multiprocessing
import os
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat

import torch
from tqdm import tqdm

import kvq_lib as kvq
from kvq_lib.bench.provenance import RESULTS, record, save
from kvq_lib.checks import whole
from kvq_lib.schemes import Scheme

PAGE_SIZE = 16

_INT8, _INT4 = kvq.Spec("int8", "token"), kvq.Spec("int4", "token", symmetric=False)

#: What is measured: each named scheme that seals and needs no calibration, and variants
#: that isolate a choice.
SCHEMES: tuple[Scheme, ...] = (
    *(s for s in kvq.SCHEMES.values() if s.seals and not s.calibrated),
    kvq.Scheme("int8-page", kvq.Spec("int8", "page"), kvq.Spec("int8", "page")),
    kvq.Scheme(
        "int4-page",
        kvq.Spec("int4", "page", symmetric=False),
        kvq.Spec("int4", "page", symmetric=False),
    ),
    kvq.Scheme("int4-symmetric", *[kvq.Spec("int4", "token", symmetric=True)] * 2),
    kvq.Scheme("k4v8", _INT4, _INT8),
)


def offline_text() -> str:
    """English reference prose that every Python installation carries."""
    from pydoc_data import topics

    return "\n".join(topics.topics.values())


def describe_text() -> str:
    """The name of `offline_text`, for records."""
    import platform

    return f"pydoc_data.topics of Python {platform.python_version()}, English prose"


def text_hash() -> str:
    """SHA-256 of `offline_text`: another Python's documentation is another text."""
    return hashlib.sha256(offline_text().encode()).hexdigest()


def windows(tokenizer, count: int, tokens: int) -> torch.Tensor:
    """The first `count` windows of the offline text, int [count, tokens]."""
    count, tokens = whole("count", count, 1), whole("tokens", tokens, 1)
    ids = tokenizer(offline_text(), return_tensors="pt").input_ids[0]
    if count * tokens > len(ids):
        raise kvq.InvalidArgument(
            f"the text has {len(ids)} tokens, fewer than {count} × {tokens}"
        )
    return ids[: count * tokens].view(count, tokens)


def log_probabilities(model, window, scheme, page_size: int) -> torch.Tensor:
    """log p of every possible next token, [tokens - 1, vocabulary]."""
    return kvq.logits(model, window, scheme, page_size)[:-1].float().log_softmax(-1)


def per_token(p: torch.Tensor, q: torch.Tensor, window) -> dict:
    """How predictions differ, token by token.

    Args:
        p: log probabilities [tokens - 1, vocabulary] under the unquantized cache.
        q: the same under the scheme.
        window: the tokens that were read; row i predicts token i + 1.

    Returns:
        "nll_reference" and "nll" (nats), "kl" (nats, from reference to scheme) and
        "same" (bool: the most likely token is the same), each [tokens - 1], on the CPU.
    """
    target = torch.as_tensor(window[1:], device=p.device).unsqueeze(1)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True)
    found = {
        "nll_reference": -p.gather(1, target).squeeze(1),
        "nll": -q.gather(1, target).squeeze(1),
        "kl": kl.sum(-1).clamp_min(0),
        "same": p.argmax(-1) == q.argmax(-1),
    }
    return {name: numbers.cpu() for name, numbers in found.items()}


def summary(tokens: dict) -> dict:
    """Means over tokens: perplexity, its change, KL, agreement, and the tail."""
    reference, nll = tokens["nll_reference"].double(), tokens["nll"].double()
    kl, moved = tokens["kl"].double(), (nll - reference).exp()
    return {
        "perplexity": math.exp(nll.mean()),
        "delta": math.exp(nll.mean()) - math.exp(reference.mean()),
        "kl": kl.mean().item(),
        "kl_99": kl.quantile(0.99).item(),
        "kl_max": kl.max().item(),
        "agreement": tokens["same"].double().mean().item(),
        # Tokens that became at least twice as unlikely as before.
        "halved": (moved >= 2).double().mean().item(),
    }


def compare(
    model, text: torch.Tensor, schemes: Iterable[Scheme], page_size: int = PAGE_SIZE
) -> dict[str, dict]:
    """Read windows through every scheme; concatenate what `per_token` gives.

    Args:
        text: int [windows, tokens].

    Returns:
        For each scheme's name, tensors [windows, tokens - 1].
    """
    schemes = list(schemes)
    found: dict[str, list] = {s.name: [] for s in schemes}
    with tqdm(total=len(text) * (len(schemes) + 1), unit="window") as bar:
        for window in text.tolist():
            reference = log_probabilities(model, window, "native", page_size)
            bar.update()
            for s in schemes:
                bar.set_description(s.name)
                read = log_probabilities(model, window, s, page_size)
                found[s.name].append(per_token(reference, read, window))
                bar.update()
    return {
        name: {key: torch.stack([t[key] for t in rows]) for key in rows[0]}
        for name, rows in found.items()
    }


def pass_key_prompt(
    tokenizer, tokens: int, depth: float, rng: random.Random
) -> tuple[list[int], list[int]]:
    """A long text with a five-digit pass key hidden in it, and the key's tokens.

    Args:
        tokens: length of prompt and answer together.
        depth: where the key lies, 0 at the start, 1 at the end.
    """
    key = rng.randrange(10_000, 100_000)
    needle, question, answer = (
        tokenizer(part).input_ids
        for part in (
            f"\n\nThe pass key is {key}. Remember it: the pass key is {key}.\n\n",
            "\n\nThe pass key is",
            f" {key}",
        )
    )
    text = tokenizer(" ".join(offline_text().split())).input_ids
    room = tokens - len(needle) - len(question) - len(answer)
    if not 0 < room < len(text):
        raise kvq.InvalidArgument(
            f"{tokens} tokens: a prompt has {tokens - room} of its own, and the text "
            f"{len(text)} to hide the key in"
        )
    start = rng.randrange(len(text) - room)
    hay, cut = text[start : start + room], int(depth * room)
    return hay[:cut] + needle + hay[cut:] + question, answer


def finds_pass_key(model, prompt, answer, scheme, page_size: int = PAGE_SIZE) -> bool:
    """Whether greedy decoding would answer with exactly the key.

    One teacher-forced pass tells: greedy decoding gives the key if and only if every
    token of the key is the most likely one after the tokens before it.
    """
    rows = kvq.logits(model, prompt + answer, scheme, page_size)
    predicted = rows[len(prompt) - 1 : -1].argmax(-1).tolist()
    return predicted == answer


def pass_keys(
    model,
    tokenizer,
    schemes: Sequence["str | Scheme"],
    tokens: int,
    trials: int,
    seed: int = 0,
) -> dict[str, list[bool]]:
    """Trials at evenly spread depths; the same prompts for every scheme."""
    rng = random.Random(seed)
    prompts = [
        pass_key_prompt(tokenizer, tokens, (i + 0.5) / trials, rng)
        for i in range(trials)
    ]
    found = {}
    for s in map(kvq.scheme, schemes):
        bar = tqdm(prompts, desc=f"pass key {s.name} {tokens}")
        found[s.name] = [finds_pass_key(model, p, a, s) for p, a in bar]
    return found


def standard_error(per_window: torch.Tensor) -> float:
    """Of a mean over windows."""
    return (per_window.std() / len(per_window) ** 0.5).item()


#: Tokens of 16-bit window and of sinks that are tried with two schemes.
KEPT = ((0, 16), (128, 0), (128, 16))


def variants() -> list[Scheme]:
    """Everything in the quality table: `SCHEMES`, and some with windows and sinks."""
    return [
        *SCHEMES,
        *(
            Scheme(f"{name} +{recent} +{sinks}", s.keys, s.values, recent, sinks)
            for name in ("int4", "int2-kivi")
            for s in [kvq.SCHEMES[name]]
            for recent, sinks in KEPT
        ),
    ]


def table(model, text: torch.Tensor) -> list[dict]:
    """One row for each variant, over windows of text, int [windows, tokens]."""
    rows = []
    measured = compare(model, text, variants())
    for s in variants():
        tokens = measured[s.name]
        change = (tokens["nll"] - tokens["nll_reference"]).double().mean(1)
        rows.append(
            {
                "scheme": s.name,
                "bits": s.bits_per_element(PAGE_SIZE, model.config.head_dim),
                **summary(tokens),
                "nll_change": change.mean().item(),
                "nll_change_windows": change.tolist(),
                "nll_change_error": standard_error(change),
            }
        )
    return rows


def by_position(model, text: torch.Tensor, bucket: int) -> dict[str, dict]:
    """Means over stretches of `bucket` tokens, for text int [windows, tokens]."""
    names = ("int8", "int4", "int4-kivi", "int2-kivi")
    long = compare(model, text, [kvq.SCHEMES[name] for name in names])
    return {
        name: {
            key: [p.double().mean().item() for p in tokens[key].split(bucket, dim=1)]
            for key in ("nll_reference", "nll", "kl")
        }
        for name, tokens in long.items()
    }


@dataclass(frozen=True)
class Sizes:
    """How much `measure` reads.

    Attributes:
        table, position: windows and tokens of the table, and of damage by position.
        bucket: tokens in a stretch of the latter.
        lengths, trials: tokens of the pass-key prompts, and prompts of each length.
    """

    table: tuple[int, int] = (8, 1024)
    position: tuple[int, int] = (6, 4096)
    bucket: int = 256
    lengths: tuple[int, ...] = (512, 1024)
    trials: int = 20


def _part(name: str, sizes: Sizes):
    """One of the independent parts of the measurement, in a process of its own."""
    torch.set_num_threads(1)
    model, tokenizer = kvq.load_model("smollm2-135m")
    if name == "table":
        return table(model, windows(tokenizer, *sizes.table))
    if name == "position":
        return by_position(model, windows(tokenizer, *sizes.position), sizes.bucket)
    named = ["native", *(s.name for s in SCHEMES if s.name in kvq.SCHEMES)]
    return pass_keys(model, tokenizer, named, int(name), sizes.trials)


def measure(sizes: Sizes | None = None, workers: int | None = None) -> dict:
    """All that chapter 4 draws: the table, damage by position, pass keys.

    Args:
        sizes: how much to read.
        workers: processes; default: one for each core. One thread each is faster than
            many threads in one process, for a model this small.
    """
    sizes = sizes or Sizes()
    names = ["table", "position", *map(str, sizes.lengths)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=spawn) as pool:
        parts = dict(zip(names, pool.map(_part, names, repeat(sizes)), strict=True))
    return {
        "page_size": PAGE_SIZE,
        "windows": list(sizes.table),
        "schemes": parts["table"],
        "position_windows": list(sizes.position),
        "position_bucket": sizes.bucket,
        "by_position": parts["position"],
        "pass_keys": {str(n): parts[str(n)] for n in sizes.lengths},
    }


def main() -> None:
    """Measure everything that chapter 4 draws, and record it."""
    made = record(
        "quality",
        measure(),
        model="SmolLM2-135M-Instruct, float32, weights from 4-bit GGUF",
        text=describe_text(),
        content=offline_text(),
    )
    print(f"Recorded in {save(RESULTS / 'quality.json', made)}")


if __name__ == "__main__":
    main()
