"""A model's attention on the cache.

transformers lets a program register an attention function, so the model's own code
runs unchanged, whatever the decoder model. All sequences of a step are flattened into
one row of tokens with their own positions.

This module imports transformers only inside its functions: the rest of the library
works without it.
"""

import contextlib
import inspect
from collections.abc import Iterator

import torch

from .cache import Batch, PagedKVCache
from .errors import InvalidArgument, StepError, UnsupportedModel
from .memory import KVShape
from .schemes import Scheme

#: Tokens of one forward pass, where the caller leaves it to us.
CHUNK = 512

#: The name under which transformers knows our attention.
_ATTENTION = "kvq"

#: Arguments of attention functions that change the result and that we do not implement.
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask", "alibi")


@contextlib.contextmanager
def on_cache(model) -> Iterator[None]:
    """Let the model's attention be ours; afterwards it is what it was.

    The model itself is changed meanwhile: one thread at a time may use it.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, _mask)
    before = model.config._attn_implementation
    training = [module for module in model.modules() if module.training]
    model.set_attn_implementation(_ATTENTION)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for module in training:
            module.training = True


def _mask(*args, local_size: int | None = None, **others) -> int | None:
    """What transformers hands to the layers as their mask: the reach of a sliding
    window, None for all. The law hides the future, so there is no mask to build."""
    return local_size


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
    given += ["attention_mask"] * isinstance(attention_mask, torch.Tensor)
    given += ["dropout"] * bool(dropout)
    if given:
        raise UnsupportedModel(f"{name} asks for {', '.join(given)}")
    # Some layers know their window themselves, some only by their mask.
    windows = [w for w in (others.get("sliding_window"), attention_mask) if w]
    if windows:
        longest = int(batch.positions.max()) + 1
        if min(windows) < longest:
            raise UnsupportedModel(
                f"{name} slides a window of {min(windows)} over a context of {longest} "
                "tokens"
            )
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedModel(f"{name} is not causal")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    try:
        out = cache.attend(module.layer_idx, batch, q, k, v, scaling)
    except InvalidArgument as error:  # tensors that its config does not announce
        raise UnsupportedModel(f"{name}: {error}") from error
    return out.unsqueeze(0), None


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
        if last_only and len(out) != len(seqs):  # a model that knows no such argument
            out = out[_last_rows(batch)]
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


def cache_for(
    model, scheme: Scheme, page_size: int, lengths: list[int], chunk: int = CHUNK
) -> PagedKVCache:
    """A cache just large enough for sequences of these final lengths.

    Args:
        chunk: the most tokens of a sequence in one step.

    Raises:
        UnsupportedModel: the model's positions or its cache are of another kind.
        InvalidArgument: a length beyond the context that the model is made for.
    """
    shape = KVShape.of(model.config)
    kind = model.config.model_type
    if not getattr(model.config, "is_causal", True):
        raise UnsupportedModel(f"{kind} is not causal")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{kind} counts positions by itself, anew in each call")
    _require_plain_positions(model, max(lengths))
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
        shape,
        scheme,
        page_size,
        num_pages=max(1, sum(len(law.sealed(n)) for n in lengths)),
        num_hot_pages=hot,
        device=model.device,
        dtype=dtype,
    )


def _require_plain_positions(model, longest: int) -> None:
    """Refuse positions that are not simply 0, 1, 2, … up to the model's context.

    The first kind of model counts from its padding token's id on. The second changes
    all rotary frequencies once a context outgrows the trained one: keys written before
    and after would not fit together.
    """
    config = model.config
    kind = config.model_type
    for name, part in model.named_modules():
        learned = isinstance(part, torch.nn.Embedding) and "position" in name
        if learned and part.padding_idx is not None:
            raise UnsupportedModel(f"{kind} does not count its positions from 0 on")
    context = getattr(config, "max_position_embeddings", None)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        trained = (
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or context
        )
        if rope.get("rope_type") in ("dynamic", "longrope") and longest > trained:
            raise UnsupportedModel(
                f"{kind} changes its rotary phases ({rope['rope_type']}) beyond "
                f"{trained} tokens; {longest} were asked for"
            )
    if context is not None and longest > context:
        raise InvalidArgument(
            f"{longest} tokens, prompt and continuation together, exceed the "
            f"{context} positions that this {kind} is made for"
        )
