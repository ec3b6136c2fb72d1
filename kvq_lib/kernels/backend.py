"""The Triton backend of the cache: tables at `begin`, launches at `attend`.

Nothing here waits for the device, except `check`, which `commit` calls.
"""

from dataclasses import dataclass

import torch

from ..errors import NonFiniteValue, ValueOutOfRange
from ..schemes import Law
from ..specs import Spec
from ..storage import Quantized, Runs
from ..turns import Turns
from .append import append
from .decode import decode
from .extend import extend
from .launch import (
    NONFINITE,
    OVERFLOW,
    TOO_LARGE,
    refuse_channel_values,
    require,
    require_page,
)
from .seal import seal
from .turn import turn

#: What `PagedKVCache.backend` calls it.
NAME = "triton"


@dataclass(frozen=True)
class Tables:
    """What the queries of a step read, as the kernels take it.

    Attributes:
        law: sinks and window, in pages.
        decode: tables of `decode`; None unless every sequence has one new token.
        extend: tables of `extend`; None where `decode` is not.
    """

    law: tuple[int, int]
    decode: tuple[torch.Tensor, ...] | None
    extend: tuple[torch.Tensor, ...] | None


def require_support(
    device: torch.device, dtype: torch.dtype, specs: list[tuple[Spec, ...]]
) -> None:
    """Refuse a cache that the kernels cannot serve.

    Args:
        device, dtype: of the hot pages.
        specs: every way that keys, and that values, are stored in some layer; empty
            for a cache that seals nothing.

    Raises:
        UnsupportedBackend: says what is missing.
    """
    require(device, dtype)
    if specs:
        refuse_channel_values(*specs[1])


def plan(
    law: Law,
    hot: list[list[int | None]],
    cold: list[list[int | None]],
    starts: list[int],
    lengths: list[int],
    device: torch.device,
) -> Tables:
    """Tables of a step.

    Args:
        law: which pages are read hot and which cold.
        hot, cold: page tables of each sequence; None where there is no such copy.
        starts: position of each sequence's first query.
        lengths: queries of each sequence.
        device: where the tables go.
    """
    size = law.page_size
    hot_rows, cold_rows, hot_tokens, cold_tokens = [], [], [], []
    for hot_ids, cold_ids, start, length in zip(
        hot, cold, starts, lengths, strict=True
    ):
        end = start + length - 1
        first, last = start // size, end // size
        # From the window of the first query to the page of the last one.
        window = range(law.hot(first)[1].start, last + 1)
        hot_read, cold_read = [*law.hot(last)[0], *window], law.cold(last)
        hot_rows.append([hot_ids[j] for j in hot_read])
        cold_rows.append([cold_ids[j] for j in cold_read])
        hot_tokens.append((len(hot_read) - 1) * size + end % size + 1)
        cold_tokens.append(len(cold_read) * size)
    tables = [_table(rows, device) for rows in (cold_rows, hot_rows)]
    reach = (law.sinks, law.window)
    if max(lengths) == 1:
        counts = _ints([cold_tokens, hot_tokens], device)
        return Tables(reach, decode=(*tables, counts), extend=None)
    rows = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ends = (_ints(rows, device), _ints(starts, device))
    return Tables(reach, decode=None, extend=(*tables, *ends))


def _table(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """Rows of page ids, filled up with zeros that no kernel reads."""
    width = max(1, *map(len, rows))
    return _ints([row + [0] * (width - len(row)) for row in rows], device)


def _ints(values, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hot: tuple[torch.Tensor, torch.Tensor],
    cold: "tuple[Quantized | Runs, Quantized] | None",
    turns: Turns | None,
    pages: torch.Tensor,
    slots: torch.Tensor,
    sealing: tuple[torch.Tensor, torch.Tensor],
    tables: Tables,
    flags: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One layer of a step: write the new keys and values, seal, and read.

    Args:
        q: [tokens, heads, dim]; head h reads kv head h // (heads / kv_heads).
        k, v: [tokens, kv_heads, dim].
        hot: key and value pools.
        cold: key and value pools; None for a cache that seals nothing.
        turns: into the coordinates of the pools, and out of them; None where they are
            the model's own.
        pages, slots: int [tokens], the hot page of each token, and its place there.
        sealing: hot and cold page ids, int [pages] each, of the pages that fill.
        tables: from `plan`.
        flags: int32 [kv_heads], a row of `new_flags`.
        scale: factor of the scores.

    Returns:
        [tokens, heads, dim] in the dtype of q. The device may still be at work.

    Raises:
        UnsupportedBackend: a dtype, device or page size that the kernels do not take.
    """
    limit, dtype, kv_heads = None, q.dtype, k.shape[1]
    if cold is not None:
        require_page(hot[0].shape[2])
        limit = torch.finfo(torch.float16).max
    if turns:
        # Into float32, so that `append` rounds once; what q becomes is multiplied.
        k = turn(k, turns.keys, kv_heads, torch.float32, flags)
        v = turn(v, turns.values, kv_heads, torch.float32, flags)
        q = turn(q, turns.queries, kv_heads, dtype, flags)
        if not turns.outputs.still:
            dtype = torch.float32
    append(hot, pages, slots, k, v, flags, limit)
    if len(sealing[0]):
        for pool, store in zip(hot, cold, strict=True):
            seal(pool, sealing[0], store, sealing[1], flags)
    if tables.decode is not None:
        out = decode(q, hot, cold, tables.decode, flags, scale, dtype=dtype)
    else:
        out = extend(q, hot, cold, tables.extend, tables.law, flags, scale, dtype=dtype)
    return turn(out, turns.outputs, kv_heads, q.dtype) if turns else out


def new_flags(layers: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """Flags of a step, int32 [layers, kv_heads], all clear."""
    return torch.zeros(layers, kv_heads, dtype=torch.int32, device=device)


def check(flags: torch.Tensor) -> None:
    """Wait for the device, and raise what the kernels flagged in a step.

    Raises:
        NonFiniteValue, ValueOutOfRange: names the layer and the kv head.
    """
    flags = flags.cpu()
    for bit, error, what in (
        (NONFINITE, NonFiniteValue, "NaN or infinity in q, k or v"),
        (TOO_LARGE, ValueOutOfRange, "a value or a scale does not fit its storage"),
        (OVERFLOW, NonFiniteValue, "scores overflow"),
    ):
        found = (flags & bit).nonzero()
        if len(found):
            layer, head = found[0].tolist()
            raise error(f"{what}, layer {layer}, kv head {head}; nothing was stored")
