"""A real language model on the cache: loading, perplexity, generation."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from .attention import CHUNK, cache_for, forward, on_cache
from .checks import float_dtype, real, reason, token_ids, usable_device, whole
from .errors import (
    InvalidArgument,
    NonFiniteValue,
    UnsupportedModel,
    WindowTooShort,
)
from .schemes import Scheme
from .schemes import scheme as find_scheme
from .weights import find_weights


def load_model(
    name: str = "smollm2-135m", device=None, dtype: torch.dtype | None = None
):
    """Load a decoder model and its tokenizer, ready for evaluation.

    Args:
        name: "smollm2-135m", a Hugging Face id, or a local folder. The first comes
            from an installed package, without network; where the package is missing,
            from the hub.
        device: default: "cuda" where there is one, else "cpu".
        dtype: default: float32 on a CPU; on a GPU the model's own, but float16 where
            the GPU has no bfloat16.

    Returns:
        (model, tokenizer), both of transformers.

    Raises:
        InvalidArgument: no model of that name can be had, or a dtype of another kind.
        UnsupportedBackend: PyTorch has no such device here.
    """
    import transformers

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = usable_device(device)
    if dtype is not None:
        float_dtype("dtype", dtype)
    else:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    source, quiet = find_weights(name)
    try:
        with quiet:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype
            )
    except Exception as error:  # files may be missing, damaged or of another kind
        raise InvalidArgument(
            f"cannot load {str(name)!r}, neither from a folder of that name nor from "
            f"the hub: {reason(error)}"
        ) from error
    if model.dtype == torch.bfloat16 and not _has_bfloat16(device):
        model = model.to(torch.float16)
    return model.to(device).eval(), tokenizer


def _has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16; Turing GPUs such as the T4 do not."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class Completion:
    """What `generate` returns for one prompt.

    Attributes:
        text: the continuation, without special tokens.
        tokens: its token ids, the closing end-of-sequence token included.
        stopped: True if it ended by itself, False at `max_new_tokens`.
    """

    text: str
    tokens: list[int]
    stopped: bool


def perplexity(
    model,
    input_ids: torch.Tensor,
    scheme: "str | Scheme" = "int8",
    page_size: int = 16,
    chunk: int | None = None,
    progress: bool | None = None,
) -> float:
    """exp of the mean negative log likelihood, every token read through the cache.

    Each window is teacher-forced on a cache of its own; its first token is not scored.
    Every other token is, padding included: give windows of equal length, not padded.

    Args:
        model: a decoder model of transformers.
        input_ids: int [windows, tokens].
        scheme: a name of `SCHEMES`, or a Scheme.
        page_size: tokens in a page.
        chunk: tokens of one forward pass. Any size gives the same result up to
            rounding; a small one needs less memory and more time. Default: 512.
        progress: show a bar; None for only on a terminal, and after two seconds.

    Raises:
        WindowTooShort: no scored token would read a sealed page.
        NonFiniteValue: the model's own numbers overflow.
        InvalidArgument: input_ids is not an integer matrix with two columns or more,
            holds a token that the model does not know, or is too long for it.
        UnsupportedModel: the model's attention does what the cache does not.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise InvalidArgument(
            f"input_ids must be a tensor, got {type(input_ids).__name__}"
        )
    if input_ids.dim() != 2 or input_ids.shape[0] < 1 or input_ids.shape[1] < 2:
        raise InvalidArgument(
            "input_ids must be [windows ≥ 1, tokens ≥ 2], got shape "
            f"{list(input_ids.shape)}"
        )
    rows = [check_window(model, window) for window in input_ids]
    recipe = find_scheme(scheme)
    windows, tokens = input_ids.shape
    # The query at position tokens - 2 is the last one whose prediction is scored.
    if recipe.seals and not recipe.law(page_size).cold((tokens - 2) // page_size):
        raise WindowTooShort(
            f"in a window of {tokens} tokens with page_size={page_size}, "
            f"recent={recipe.recent} and sinks={recipe.sinks} no scored token reads a "
            "sealed page; use a longer window"
        )
    total = 0.0
    with tqdm(total=windows * tokens, unit="tok", **_bar(progress)) as bar:
        for window in rows:
            for start, found in _teacher_forced(
                model, window, recipe, page_size, chunk
            ):
                targets = window[start + 1 : start + 1 + len(found)]
                bar.update(len(found))
                if targets:
                    log_p = found[: len(targets)].double().log_softmax(-1)
                    targets = torch.tensor(targets, device=log_p.device).unsqueeze(1)
                    total -= log_p.gather(1, targets).sum().item()
    mean = total / (windows * (tokens - 1))
    if not math.isfinite(mean):
        raise NonFiniteValue("the model's logits hold NaN or infinity")
    return math.exp(mean) if mean < 709 else math.inf  # exp(710) is beyond float64


def logits(
    model,
    tokens: Sequence[int],
    scheme: "str | Scheme" = "int8",
    page_size: int = 16,
    chunk: int | None = None,
) -> torch.Tensor:
    """The model's predictions for one window read through the cache.

    Args:
        tokens: one window of token ids, a list or a 1-d tensor; the rest as in
            `perplexity`.

    Returns:
        [tokens, vocabulary], in the model's dtype. Row i predicts token i + 1.

    Raises:
        InvalidArgument, UnsupportedModel: as in `perplexity`.
    """
    window = check_window(model, tokens)
    recipe = find_scheme(scheme)
    parts = _teacher_forced(model, window, recipe, page_size, chunk)
    return torch.cat([rows for _, rows in parts])


def generate(
    model,
    tokenizer,
    prompts: Sequence[str | Sequence[int]],
    scheme: "str | Scheme" = "int8",
    max_new_tokens: int = 64,
    seed: int = 0,
    temperature: float = 0.0,
    page_size: int = 16,
    progress: bool | None = None,
) -> list[Completion]:
    """Continue prompts on one paged cache, all of them in each decoding step.

    Prompts of different lengths need no padding. A prompt's continuation does not
    depend on its company but for rounding: every prompt draws from its own generator,
    seeded alike. In float32 the model's own products round differently in a batch, and
    a coarse scheme can turn that into another token.

    Args:
        model, tokenizer: from `load_model` or transformers.
        prompts: texts, or lists of token ids, at least one token each.
        scheme: a name of `SCHEMES`, or a Scheme.
        max_new_tokens: the most tokens to add to each.
        seed: of the sampling; unused at temperature 0.
        temperature: 0 takes the most likely token; above 0 samples.
        page_size: tokens in a page.
        progress: as in `perplexity`.

    Raises:
        InvalidArgument: no prompt, an empty one, one with a token that the model does
            not know or with too many for it, or a number out of range.
        UnsupportedModel: the model's attention does what the cache does not.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise InvalidArgument("prompts must be a list of one or more prompts")
    max_new_tokens = whole("max_new_tokens", max_new_tokens, at_least=1)
    temperature = real("temperature", temperature, at_least=0)
    if not callable(getattr(tokenizer, "decode", None)):
        raise InvalidArgument(f"{type(tokenizer).__name__} is no tokenizer")
    seed = whole("seed", seed, at_least=0)
    rows = [
        check_window(model, tokenizer(p).input_ids if isinstance(p, str) else p)
        for p in prompts
    ]
    if not rows:
        raise InvalidArgument("prompts must be a list of one or more prompts")
    recipe = find_scheme(scheme)
    cache = cache_for(model, recipe, page_size, [len(r) + max_new_tokens for r in rows])
    draws = [torch.Generator().manual_seed(seed) for _ in rows]
    ends = _end_tokens(model, tokenizer)
    made: list[list[int]] = [[] for _ in rows]
    with (
        tqdm(total=len(rows) * max_new_tokens, unit="tok", **_bar(progress)) as bar,
        on_cache(model),
    ):
        running = {}  # prompt -> its sequence
        for i, row in enumerate(rows):
            seq = running[i] = cache.add(row)
            for start in range(cache.length(seq), len(row), CHUNK):
                part = row[start : start + CHUNK]
                last = forward(model, cache, [seq], [part], last_only=True)
            made[i].append(_pick(last[0], temperature, draws[i]))
        while True:
            bar.update(len(running))
            for i in list(running):
                if made[i][-1] in ends or len(made[i]) == max_new_tokens:
                    cache.free(running.pop(i))
            if not running:
                break
            new = [[made[i][-1]] for i in running]
            last = forward(model, cache, list(running.values()), new, last_only=True)
            for i, row in zip(running, last, strict=True):
                made[i].append(_pick(row, temperature, draws[i]))
    return [
        Completion(
            tokenizer.decode(tokens, skip_special_tokens=True),
            tokens,
            tokens[-1] in ends,
        )
        for tokens in made
    ]


def _teacher_forced(
    model, window: list[int], scheme: Scheme, page_size: int, chunk: int | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Feed a window chunk by chunk; yields (position of the first row, logits)."""
    chunk = whole("chunk", CHUNK if chunk is None else chunk, at_least=1)
    chunk = min(chunk, len(window))
    cache = cache_for(model, scheme, page_size, [len(window)], chunk)
    seq = cache.add()
    for start in range(0, len(window), chunk):
        part = window[start : start + chunk]
        with on_cache(model):
            rows = forward(model, cache, [seq], [part])
        yield start, rows


def check_window(model, tokens) -> list[int]:
    """One row of token ids as plain integers, each in the model's vocabulary.

    Raises:
        UnsupportedModel: no language model of transformers.
        InvalidArgument: no row of whole numbers, an empty one, or an unknown token.
    """
    if not hasattr(model, "can_generate") or not model.can_generate():
        raise UnsupportedModel(
            f"{type(model).__name__} is no language model of transformers: load one "
            "with kvq.load_model or AutoModelForCausalLM"
        )
    row = token_ids(tokens)
    if not row:
        raise InvalidArgument("the prompt or window has no token")
    known = model.get_input_embeddings().num_embeddings
    for token in (min(row), max(row)):
        if not 0 <= token < known:
            raise InvalidArgument(f"token ids are 0 to {known - 1}, got {token}")
    return row


def _pick(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """The next token from logits [vocabulary]."""
    best = logits.max().item()  # NaN where there is one
    if not math.isfinite(best):
        raise NonFiniteValue("the model's logits hold NaN or infinity")
    if temperature == 0:
        return int(logits.argmax())
    # Zero for the best one: a tiny temperature then overflows to -inf, never to NaN.
    behind = logits.double().cpu() - best
    weights = (behind / temperature).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator))


def _end_tokens(model, tokenizer) -> set[int]:
    """Tokens that end a sequence: the model's own, else the tokenizer's."""
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    return set() if ends is None else set(torch.as_tensor(ends).flatten().tolist())


def _bar(progress: bool | None) -> dict:
    """Options of a tqdm bar; None shows it on a terminal only, after two seconds."""
    return {"disable": None if progress is None else not progress, "delay": 2}
