"""Attention of a chunk of query tokens per sequence, each as the law says."""

import torch
import triton
import triton.language as tl

from ..storage import Quantized, Runs
from .arguments import attention_arguments
from .cold import cold_scores, cold_values, query_runs, settle
from .common import is_finite, raise_flag, rounded
from .launch import (
    FASTEST,
    LOG2_E,
    Launch,
    Tiling,
    by_channel,
    capability,
    extend_tiling,
    refuse_channel_values,
    require,
    tiling_key,
)
from .tiles import (
    empty_sums,
    hot_scores,
    hot_values,
    query_factor,
    query_parts,
    softmax_step,
)

#: More pages than a sequence has; twice of it still fits in an int32.
FAR = 1 << 24


@triton.jit
def extend_kernel(
    q,
    out,
    hot_k,
    hot_v,
    cold_k,
    cold_v,
    cold_table,
    hot_table,
    rows,
    positions,
    flags,
    scale_log2,
    sequences,
    sinks,
    window,
    NONFINITE: tl.constexpr,
    OVERFLOW: tl.constexpr,
    KEYS: tl.constexpr,
    KEYS_2: tl.constexpr,
    KEYS_3: tl.constexpr,
    VALUES: tl.constexpr,
    HOT_K: tl.constexpr,
    HOT_V: tl.constexpr,
    CHANNEL: tl.constexpr,
    K_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    COLD_DOT: tl.constexpr,
    HOT_DOT: tl.constexpr,
    SEQUENCES_PAD: tl.constexpr,
):
    """Program (query tile, kv head). A tile has ROWS // GROUP queries of one sequence;
    the query heads of a query that share the kv head are rows side by side.

    rows: int32 [sequences + 1], where each sequence starts in the flattened step.
    positions: int32 [sequences], position of each sequence's first query. cold_table:
    (pointer, row stride), page ids from the first page after the sinks. hot_table: the
    sinks, then from the window of the first query to the page of the last one.
    """
    if KEYS is not None:
        # Triton 3.6 copies names into branches and loops, and of constants deep inside
        # an argument it keeps none; in a tuple made here it keeps them.
        cold_v = (cold_v[0], cold_v[1], cold_v[2], cold_v[3])
    QUERIES: tl.constexpr = ROWS // GROUP
    # Which sequence is this tile's? Each has at most tokens // QUERIES + 1 tiles.
    each = tl.arange(0, SEQUENCES_PAD)
    first_tile = tl.load(rows + each, mask=each < sequences, other=0) // QUERIES + each
    mine = (first_tile <= tl.program_id(0)) & (each < sequences)
    sequence = tl.sum(mine.to(tl.int32), 0) - 1
    first_row = tl.load(rows + sequence)
    length = tl.load(rows + sequence + 1) - first_row
    first = (tl.program_id(0) - first_row // QUERIES - sequence) * QUERIES
    if first >= length:
        return

    start_position = tl.load(positions + sequence)
    row = tl.arange(0, ROWS)
    index = first + row // GROUP
    real_row = (row < QUERIES * GROUP) & (index < length)
    position = start_position + index
    query_page = position // PAGE
    last_position = start_position + tl.minimum(first + QUERIES, length) - 1
    last_page = last_position // PAGE

    head = tl.program_id(1).to(tl.int64)
    token = (first_row + index).to(tl.int64)
    query_head = head * GROUP + row % GROUP
    q_rows = token * q[1] + query_head * q[2]
    factor, inverse, bad = query_factor(q[0], q_rows, real_row, CHANNEL, DIM, DIM_PAD)
    raise_flag(flags, tl.program_id(1), bad, NONFINITE)
    units = (factor * scale_log2)[:, None]

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    sums = empty_sums(ROWS, V_PARTS, V_PAD)
    reach = 5.960464477539063e-08  # 2^-24, the smallest scale

    if KEYS is not None:
        # A query sees the cold pages from the sinks to its window: a prefix.
        visible = tl.maximum(query_page - window - sinks, 0) * PAGE
        count = tl.maximum(last_page - window - sinks, 0) * PAGE
        table = cold_table[0] + sequence.to(tl.int64) * cold_table[1]
        parts, qsums = query_runs(
            q[0], q_rows, real_row, inverse, CHANNEL, KEYS, KEYS_2, KEYS_3, COLD_DOT
        )
        for start in range(0, count, TILE):
            s = cold_scores(
                parts, qsums, cold_k, table, head, start, count,
                KEYS, KEYS_2, KEYS_3, PAGE, TILE, COLD_DOT,
            )  # fmt: skip
            seen = (start + tl.arange(0, TILE))[None, :] < visible[:, None]
            s = tl.where(seen, s * units, float("-inf"))
            p, alpha, m, total = softmax_step(s, m, total)
            reach, sums, shift = cold_values(
                p, alpha, reach, sums, shift, cold_v, table, head, start, count,
                VALUES, PAGE, TILE, COLD_DOT,
            )  # fmt: skip
        reach, sums = settle(reach, sums, VALUES)

    # Hot pages to read: the sinks, then the window of the tile's first query to the
    # page of its last one. Both are runs of the table; tiles cross the seam.
    table = hot_table[0] + sequence.to(tl.int64) * hot_table[1]
    sinks_read = tl.minimum(sinks, last_page + 1)
    near = tl.maximum(sinks, (start_position + first) // PAGE - window)
    sinks_held = tl.minimum(sinks, (start_position + length - 1) // PAGE + 1)
    held = tl.maximum(sinks, start_position // PAGE - window)
    pages = sinks_read + tl.maximum(last_page + 1 - near, 0)
    parts, _ = query_parts(
        q[0], q_rows, real_row, inverse, CHANNEL, K_PARTS, DIM // K_PARTS, K_PAD,
        HOT_DOT,
    )  # fmt: skip
    for start in range(0, pages * PAGE, TILE):
        order = (start + tl.arange(0, TILE)) // PAGE
        slot = (start + tl.arange(0, TILE)) % PAGE
        in_sinks = order < sinks_read
        logical = tl.where(in_sinks, order, order - sinks_read + near)
        entry = tl.where(in_sinks, order, logical - held + sinks_held)
        key = logical * PAGE + slot
        real = (order < pages) & (key <= last_position)
        page = tl.load(table + entry, mask=real, other=0).to(tl.int64)
        s = hot_scores(
            parts, hot_k, page, slot, real, head,
            HOT_K[0], HOT_K[1], K_PARTS, DIM // K_PARTS, K_PAD, HOT_DOT,
        )  # fmt: skip
        seen = in_sinks[None, :] | (logical[None, :] >= (query_page - window)[:, None])
        seen = seen & (key[None, :] <= position[:, None]) & real[None, :]
        s = tl.where(seen, s * units, float("-inf"))
        p, alpha, m, total = softmax_step(s, m, total)
        reach, sums, shift = hot_values(
            p, alpha, reach, sums, shift, hot_v, page, slot, real, head,
            HOT_V[0], HOT_V[1], V_PARTS, DIM // V_PARTS, V_PAD, HOT_DOT,
        )  # fmt: skip

    # A score that overflowed, or cancelled to NaN, is in the sum of the probabilities;
    # and every query sees itself, so the sum is not zero.
    overflow = ((is_finite(total) == 0) | (total == 0)) & real_row
    if tl.max(overflow.to(tl.int32), 0) != 0:
        tl.atomic_or(flags + tl.program_id(1), OVERFLOW)

    d = tl.arange(0, V_PAD)
    mask = real_row[:, None] & (d < DIM // V_PARTS)[None, :]
    place = out[0] + (token * out[1] + query_head * out[2])[:, None]
    for i in tl.static_range(V_PARTS):
        value = (sums[i] * reach + shift[:, None]) / total[:, None]
        channel = (i * (DIM // V_PARTS) + d)[None, :]
        value = rounded(value, out[0].dtype.element_ty)
        tl.store(place + channel * out[3], value, mask=mask)


def extend(
    q: torch.Tensor,
    hot: tuple[torch.Tensor, torch.Tensor],
    cold: "tuple[Quantized | Runs, Quantized] | None",
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    law: tuple[int, int],
    flags: torch.Tensor,
    scale: float,
    tiling: Tiling | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention of a chunk of query tokens per sequence, laid one after the other.

    A query on page p reads hot: the first `sinks` pages, and the pages from p - window
    to p, up to itself; cold: the pages between.

    Args:
        q: [tokens, heads, dim], any strides; float16, bfloat16 or float32. Head h reads
            kv head h // (heads / kv_heads).
        hot: key and value pools [kv_heads, pages, page_size, dim], any strides.
        cold: key and value pools of cold pages, any strides; None where none exist.
        tables: int32 tensors. Cold page ids [sequences, width], from the first page
            after the sinks on. Hot page ids [sequences, width]: the sinks, then from
            the window of the chunk's first query to the page of its last one. Where
            each sequence starts in the step [sequences + 1]. The position of each
            sequence's first query [sequences].
        law: sinks and window, in pages.
        flags: int32 [kv_heads]; gets the bit NONFINITE where q holds NaN or infinity,
            OVERFLOW where scores overflow.
        scale: factor of the scores.
        tiling: shape of the work (`hot` is not used); default: what `tune` found, or
            `extend_tiling`.
        dtype: of the output; default: q's.

    Returns:
        [tokens, heads, dim].

    Raises:
        UnsupportedBackend: a dtype, device or granularity that is not implemented.

    Bytes (`budget.extend`): each tile of queries reads the pages that its last query
    sees, once a kv head; q is read twice where both hot and cold pages are, and the
    output written once.
    """
    out = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.device)
    for launch in prepare(q, out, hot, cold, tables, law, flags, scale, tiling):
        launch.run()
    return out


def prepare(
    q, out, hot, cold, tables, law, flags, scale, tiling=None, target=None
) -> list[Launch]:
    """The launch of `extend`; see `decode.prepare`."""
    keys, values = cold or (None, None)
    require(q.device, q.dtype, *(pool.dtype for pool in hot))
    refuse_channel_values(values and values.spec)
    tokens, heads, dim = q.shape
    kv_heads = hot[0].shape[0]
    group = heads // kv_heads
    target = target or capability(q.device)
    tiling = (
        tiling
        or FASTEST.get(tiling_key("extend", target, q, hot, cold))
        or extend_tiling(target, group, dim, q.dtype, by_channel(cold))
    )
    cold_table, hot_table, rows, positions = tables
    sequences = len(positions)
    tiles = tokens // (tiling.rows // group) + sequences
    return [
        Launch(
            extend_kernel,
            (tiles, kv_heads),
            {
                "q": (q, q.stride(0), q.stride(1)),
                "out": (out, *out.stride()),
                "cold_table": (cold_table, cold_table.stride(0)),
                "hot_table": (hot_table, hot_table.stride(0)),
                "rows": rows,
                "positions": positions,
                "flags": flags,
                "scale_log2": scale * LOG2_E,
                "sequences": sequences,
                "sinks": min(law[0], FAR),
                "window": min(law[1], FAR),
                "TILE": tiling.cold,
                "SEQUENCES_PAD": triton.next_power_of_2(sequences),
                **attention_arguments(q, hot, keys, values, tiling),
            },
            tiling.warps,
            tiling.stages,
        )
    ]
