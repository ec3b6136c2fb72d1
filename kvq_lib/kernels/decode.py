"""Attention of one query token per sequence over its cold and hot pages."""

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
    capability,
    code_bits,
    decode_tiling,
    refuse_channel_values,
    require,
    split_count,
    tiling_key,
)
from .merge import merge_launch
from .tiles import (
    empty_sums,
    hot_scores,
    hot_values,
    locate,
    query_factor,
    query_parts,
    softmax_step,
)


@triton.jit
def decode_kernel(
    q,
    out,
    partial,
    hot_k,
    hot_v,
    cold_k,
    cold_v,
    cold_table,
    hot_table,
    counts,
    flags,
    scale_log2,
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
    COLD_TILE: tl.constexpr,
    HOT_TILE: tl.constexpr,
    COLD_DOT: tl.constexpr,
    HOT_DOT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (sequence, kv head, split): all query heads of one kv head, as rows.

    q, out: (pointer, token stride, head stride). partial: (sums, maxima, totals), used
    where SPLITS > 1: [sequences, heads, SPLITS, dim] and [sequences, heads, SPLITS].
    cold_table, hot_table: (pointer, row stride), page ids in reading order. counts:
    int32 [2, sequences], cold and hot tokens to read.
    """
    if KEYS is not None:
        # Triton 3.6 copies names into branches and loops, and of constants deep inside
        # an argument it keeps none; in a tuple made here it keeps them.
        cold_v = (cold_v[0], cold_v[1], cold_v[2], cold_v[3])
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    row = tl.arange(0, ROWS)
    real_row = row < GROUP
    q_rows = sequence * q[1] + (head * GROUP + row) * q[2]
    factor, inverse, bad = query_factor(q[0], q_rows, real_row, CHANNEL, DIM, DIM_PAD)
    raise_flag(flags, tl.program_id(1), bad, NONFINITE)
    units = (factor * scale_log2)[:, None]

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    sums = empty_sums(ROWS, V_PARTS, V_PAD)
    reach = 5.960464477539063e-08  # 2^-24, the smallest scale

    if KEYS is not None:
        count = tl.load(counts + sequence)
        table = cold_table[0] + sequence * cold_table[1]
        parts, qsums = query_runs(
            q[0], q_rows, real_row, inverse, CHANNEL, KEYS, KEYS_2, KEYS_3, COLD_DOT
        )
        first, last = share(count, split, COLD_TILE, SPLITS)
        for start in range(first, last, COLD_TILE):
            s = cold_scores(
                parts, qsums, cold_k, table, head, start, count,
                KEYS, KEYS_2, KEYS_3, PAGE, COLD_TILE, COLD_DOT,
            )  # fmt: skip
            real = (start + tl.arange(0, COLD_TILE)) < count
            s = tl.where(real[None, :], s * units, float("-inf"))
            p, alpha, m, total = softmax_step(s, m, total)
            reach, sums, shift = cold_values(
                p, alpha, reach, sums, shift, cold_v, table, head, start, count,
                VALUES, PAGE, COLD_TILE, COLD_DOT,
            )  # fmt: skip
        reach, sums = settle(reach, sums, VALUES)

    count = tl.load(counts + tl.num_programs(0) + sequence)
    table = hot_table[0] + sequence * hot_table[1]
    parts, _ = query_parts(
        q[0], q_rows, real_row, inverse, CHANNEL, K_PARTS, DIM // K_PARTS, K_PAD,
        HOT_DOT,
    )  # fmt: skip
    first, last = share(count, split, HOT_TILE, SPLITS)
    for start in range(first, last, HOT_TILE):
        page, slot, real = locate(table, start, count, PAGE, HOT_TILE)
        s = hot_scores(
            parts, hot_k, page, slot, real, head,
            HOT_K[0], HOT_K[1], K_PARTS, DIM // K_PARTS, K_PAD, HOT_DOT,
        )  # fmt: skip
        s = tl.where(real[None, :], s * units, float("-inf"))
        p, alpha, m, total = softmax_step(s, m, total)
        reach, sums, shift = hot_values(
            p, alpha, reach, sums, shift, hot_v, page, slot, real, head,
            HOT_V[0], HOT_V[1], V_PARTS, DIM // V_PARTS, V_PAD, HOT_DOT,
        )  # fmt: skip

    # A score that overflowed, or cancelled to NaN, is in the sum of the probabilities;
    # and whoever reads the query's own token, the last one, has seen a score.
    overflow = (is_finite(total) == 0) | (
        (total == 0) & (first < last) & (last == count)
    )
    overflow = overflow & real_row
    if tl.max(overflow.to(tl.int32), 0) != 0:
        tl.atomic_or(flags + tl.program_id(1), OVERFLOW)

    heads = tl.num_programs(1) * GROUP
    d = tl.arange(0, V_PAD)
    mask = real_row[:, None] & (d < DIM // V_PARTS)[None, :]
    if SPLITS == 1:
        place = out[0] + (sequence * out[1] + (head * GROUP + row) * out[2])[:, None]
        for i in tl.static_range(V_PARTS):
            value = (sums[i] * reach + shift[:, None]) / total[:, None]
            channel = (i * (DIM // V_PARTS) + d)[None, :]
            value = rounded(value, out[0].dtype.element_ty)
            tl.store(place + channel * out[3], value, mask=mask)
    else:
        cell = (sequence * heads + head * GROUP + row) * SPLITS + split
        for i in tl.static_range(V_PARTS):
            value = sums[i] * reach + shift[:, None]
            channel = (i * (DIM // V_PARTS) + d)[None, :]
            tl.store(partial[0] + (cell * DIM)[:, None] + channel, value, mask=mask)
        tl.store(partial[1] + cell, m, mask=real_row)
        tl.store(partial[2] + cell, total, mask=real_row)


@triton.jit
def share(count, split, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """The tokens that one split reads: whole tiles, as evenly as they go."""
    tiles = tl.cdiv(count, TILE)
    each = tl.cdiv(tiles, SPLITS) * TILE
    return split * each, tl.minimum(count, (split + 1) * each)


def decode(
    q: torch.Tensor,
    hot: tuple[torch.Tensor, torch.Tensor],
    cold: "tuple[Quantized | Runs, Quantized] | None",
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    flags: torch.Tensor,
    scale: float,
    tiling: Tiling | None = None,
    splits: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention of one query token per sequence.

    Args:
        q: [sequences, heads, dim], any strides; float16, bfloat16 or float32. Head h
            reads kv head h // (heads / kv_heads).
        hot: key and value pools [kv_heads, pages, page_size, dim], any strides.
        cold: key and value pools of cold pages, any strides; None where none exist.
        tables: page ids in reading order, int32 [sequences, width], for cold pages and
            for hot ones (sinks, window, the query's own page), and int32
            [2, sequences], the cold and hot tokens to read. The numbers are read on
            the device: they may change between replays of a CUDA graph.
        flags: int32 [kv_heads]; gets the bit NONFINITE where q holds NaN or infinity,
            OVERFLOW where scores overflow.
        scale: factor of the scores.
        tiling: shape of the work; default: what `tune` found, or `decode_tiling`.
        splits: programs that share the pages of one sequence and kv head, a power of
            two; default: `split_count`.
        dtype: of the output; default: q's.

    Returns:
        [sequences, heads, dim].

    Raises:
        UnsupportedBackend: a dtype, device or granularity that is not implemented.

    Bytes (`budget.decode`): reads the cold pages (codes, scales, zeros) and hot pages
    in the tables once, the tables and q once a split; writes the output, and for
    several splits S writes and reads sequences·heads·S·(D + 2)·4 bytes of partial sums.
    """
    out = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.device)
    for launch in prepare(q, out, hot, cold, tables, flags, scale, tiling, splits):
        launch.run()
    return out


def prepare(
    q, out, hot, cold, tables, flags, scale, tiling=None, splits=None, target=None
) -> list[Launch]:
    """The launches of `decode`: the kernel, and `merge` where there are splits.

    Args:
        out: as q; written.
        target: compute capability times ten to choose tiles for; default: q's device.
    """
    keys, values = cold or (None, None)
    require(q.device, q.dtype, *(pool.dtype for pool in hot))
    refuse_channel_values(values and values.spec)
    sequences, heads, dim = q.shape
    kv_heads, _, page_size, _ = hot[0].shape
    group = heads // kv_heads
    target = target or capability(q.device)
    tiling = (
        tiling
        or FASTEST.get(tiling_key("decode", target, q, hot, cold))
        or decode_tiling(target, group, dim, q.dtype, code_bits(cold))
    )
    cold_table, hot_table, counts = tables
    if splits is None:
        tokens = page_size * max(cold_table.shape[1], hot_table.shape[1])
        tile = max(tiling.cold, tiling.hot)
        splits = split_count(sequences * kv_heads, tokens, tile, q.device)
    partial = (None, None, None)
    if splits > 1:
        cells = q.new_empty((sequences, heads, splits), dtype=torch.float32)
        sums = q.new_empty((sequences, heads, splits, dim), dtype=torch.float32)
        partial = (sums, cells, torch.empty_like(cells))
    launches = [
        Launch(
            decode_kernel,
            (sequences, kv_heads, splits),
            {
                "q": (q, q.stride(0), q.stride(1)),
                "out": (out, *out.stride()),
                "partial": partial,
                "cold_table": (cold_table, cold_table.stride(0)),
                "hot_table": (hot_table, hot_table.stride(0)),
                "counts": counts,
                "flags": flags,
                "scale_log2": scale * LOG2_E,
                "COLD_TILE": tiling.cold,
                "HOT_TILE": tiling.hot,
                "SPLITS": splits,
                **attention_arguments(q, hot, keys, values, tiling),
            },
            tiling.warps,
            tiling.stages,
        )
    ]
    if splits > 1:
        launches.append(merge_launch(partial, out))
    return launches
