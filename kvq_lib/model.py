"""A real language model on the cache: loading, perplexity, generation.

Attention reaches the cache through the function that transformers lets a program
register, so the model's own code runs unchanged, whatever the decoder model. All
sequences of a step are flattened into one row of tokens with their own positions.

This module imports transformers only inside its functions: the rest of the library
works without it.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from .cache import Batch, PagedKVCache
from .errors import InvalidArgument, StepError, UnsupportedModel, WindowTooShort
from .memory import KVShape
from .schemes import Scheme
from .schemes import scheme as find_scheme
from .weights import find_weights

#: Tokens of one forward pass, where the caller leaves it to us.
CHUNK = 512

#: The name under which transformers knows our attention.
_ATTENTION = "kvq"

#: Arguments of attention functions that change the result and that we do not implement.
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask", "alibi")


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
    """
    import transformers

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    source, quiet = find_weights(name)
    with quiet:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
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
        InvalidArgument: input_ids is not an integer matrix with two columns or more.
        UnsupportedModel: the model's attention does what the cache does not.
    """
    if (
        not isinstance(input_ids, torch.Tensor)
        or input_ids.dim() != 2
        or input_ids.is_floating_point()
        or input_ids.shape[0] < 1
        or input_ids.shape[1] < 2
    ):
        raise InvalidArgument(
            "input_ids must be an integer tensor [windows, tokens ≥ 2]; got "
            f"{list(input_ids.shape) if torch.is_tensor(input_ids) else input_ids!r}"
        )
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
        for window in input_ids.tolist():
            for start, rows in _teacher_forced(model, window, recipe, page_size, chunk):
                targets = window[start + 1 : start + 1 + len(rows)]
                bar.update(len(rows))
                if targets:
                    log_p = rows[: len(targets)].double().log_softmax(-1)
                    targets = torch.tensor(targets, device=log_p.device).unsqueeze(1)
                    total -= log_p.gather(1, targets).sum().item()
    return math.exp(total / (windows * (tokens - 1)))


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
    """
    window = [int(t) for t in tokens]
    if not window:
        raise InvalidArgument("the window has no token")
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
    depend on its company: every prompt draws from its own generator, seeded alike.

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
        InvalidArgument: no prompt, an empty one, or a number out of range.
        UnsupportedModel: the model's attention does what the cache does not.
    """
    if isinstance(prompts, str) or not len(prompts):
        raise InvalidArgument("prompts must be a list of one or more prompts")
    if max_new_tokens < 1 or temperature < 0:
        raise InvalidArgument(
            "max_new_tokens must be at least 1 and temperature at least 0, got "
            f"{max_new_tokens} and {temperature}"
        )
    rows = [
        tokenizer(p).input_ids if isinstance(p, str) else [int(t) for t in p]
        for p in prompts
    ]
    if not all(rows):
        raise InvalidArgument("a prompt has no token")
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


# -- the model's attention on the cache ----------------------------------------------


@contextlib.contextmanager
def on_cache(model) -> Iterator[None]:
    """Let the model's attention be ours; afterwards it is what it was."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _attention)
    # The law hides what a query must not see, so the model need not build a mask.
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    was_training = model.training
    model.set_attn_implementation(_ATTENTION)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(was_training)


def _attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, **others
):
    """The function that transformers calls in every layer.

    query is [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim]; returns
    [1, tokens, heads, dim] and no weights.
    """
    name = type(module).__name__
    if others.get("kvq_step") is None:
        raise UnsupportedModel(
            f"{name} was called outside of kvq_lib's functions, or its model does not "
            "pass keyword arguments on to its attention"
        )
    cache, batch = others["kvq_step"]
    given = [arg for arg in _REFUSED if others.get(arg) is not None]
    if given or attention_mask is not None or dropout:
        given += ["attention_mask"] * (attention_mask is not None)
        given += ["dropout"] * bool(dropout)
        raise UnsupportedModel(f"{name} asks for {', '.join(given)}")
    window = others.get("sliding_window")
    longest = int(batch.positions.max()) + 1
    if window is not None and window < longest:
        raise UnsupportedModel(
            f"{name} slides a window of {window} over a context of {longest} tokens"
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"{name} is not causal")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return cache.attend(module.layer_idx, batch, q, k, v, scaling).unsqueeze(0), None


@torch.inference_mode()
def forward(
    model,
    cache: PagedKVCache,
    seqs: list[int],
    tokens: list[list[int]],
    last_only: bool = False,
) -> torch.Tensor:
    """One step of the model for new tokens of some sequences.

    Returns:
        Logits [tokens, vocabulary] of all new tokens, or of each sequence's last.
    """
    batch = cache.begin(seqs, [len(t) for t in tokens], token_ids=tokens)
    try:
        keep = {"logits_to_keep": _last_rows(batch)} if last_only else {}
        flat = [[t for row in tokens for t in row]]
        out = model(
            input_ids=torch.tensor(flat, device=model.device),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            kvq_step=(cache, batch),
            **keep,
        ).logits[0]
        cache.commit(batch)
    except StepError as error:
        raise UnsupportedModel(
            f"{type(model).__name__} does not call each layer's attention once: {error}"
        ) from error
    finally:
        if batch.step.open:
            cache.abort(batch)
    return out


def _last_rows(batch: Batch) -> torch.Tensor:
    """The row of each sequence's last token in the flattened step."""
    return torch.tensor(batch.lengths, device=batch.positions.device).cumsum(0) - 1


def _teacher_forced(
    model, window: list[int], scheme: Scheme, page_size: int, chunk: int | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Feed a window chunk by chunk; yields (position of the first row, logits)."""
    chunk = CHUNK if chunk is None else chunk
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise InvalidArgument(f"chunk is a whole number ≥ 1, got {chunk!r}")
    chunk = min(chunk, len(window))
    cache = cache_for(model, scheme, page_size, [len(window)], chunk)
    seq = cache.add()
    for start in range(0, len(window), chunk):
        part = window[start : start + chunk]
        with on_cache(model):
            rows = forward(model, cache, [seq], [part])
        yield start, rows


def cache_for(
    model, scheme: Scheme, page_size: int, lengths: list[int], chunk: int = CHUNK
) -> PagedKVCache:
    """A cache just large enough for sequences of these final lengths."""
    _require_fixed_phases(model.config, max(lengths))
    law = scheme.law(page_size)
    pages = [-(-n // page_size) for n in lengths]
    if scheme.seals:
        # A sequence keeps its sinks, its window and its last page, and the pages of
        # the chunk that is being read, of which there is one at a time.
        most = law.sinks + law.window + 1
        hot = sum(min(n, most) for n in pages) + -(-chunk // page_size) + 1
        dtype = torch.float16 if model.dtype == torch.float32 else model.dtype
    else:
        hot, dtype = sum(pages), model.dtype
    return PagedKVCache(
        KVShape.of(model.config),
        scheme,
        page_size,
        num_pages=max(1, sum(len(law.sealed(n)) for n in lengths)),
        num_hot_pages=hot,
        device=model.device,
        dtype=dtype,
    )


def _require_fixed_phases(config, longest: int) -> None:
    """Refuse rotary phases that depend on more than a token's own position.

    Two kinds of rotary scaling change all frequencies once a context outgrows the
    trained one. Keys written before and after would not fit together.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for part in kinds:
        kind = part.get("rope_type")
        trained = (
            part.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if kind in ("dynamic", "longrope") and longest > trained:
            raise UnsupportedModel(
                f"{config.model_type} changes its rotary phases ({kind}) beyond "
                f"{trained} tokens; {longest} were asked for"
            )


def _pick(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """The next token from logits [vocabulary]."""
    if temperature == 0:
        return int(logits.argmax())
    weights = (logits.float().cpu() / temperature).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator))


def _end_tokens(model, tokenizer) -> set[int]:
    """Tokens that end a sequence: the model's own, else the tokenizer's."""
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, list) else {ends}


def _bar(progress: bool | None) -> dict:
    """Options of a tqdm bar; None shows it on a terminal only, after two seconds."""
    return {"disable": None if progress is None else not progress, "delay": 2}
