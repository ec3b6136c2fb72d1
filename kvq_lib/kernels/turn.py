"""Keys, queries, values and outputs into other coordinates; see `turns`.

Bit for bit what `turns.turn` gives: the Hadamard transform takes sums and differences
of pairs, log2(block) times, in the same order.
"""

import torch
import triton
import triton.language as tl

from ..turns import Turn
from .arguments import placed
from .common import is_finite, raise_flag
from .launch import NONFINITE, TOO_LARGE, Launch, padded, require


@triton.jit
def turn_kernel(
    x,
    out,
    before,
    gain,
    order,
    after,
    flags,
    rows,
    NONFINITE: tl.constexpr,
    TOO_LARGE: tl.constexpr,
    LIMIT: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (tile of rows, kv head). A token's heads that share the kv head are rows
    side by side. Tensors come as (pointer, strides).

    x, out: [tokens, heads, dim]; before, gain, order, after: [kv_heads, dim], or None.
    """
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, DIM_PAD)
    token = (row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    real = (row < rows)[:, None] & (d < DIM)[None, :]
    place = x[0] + (token * x[1] + head * x[2])[:, None] + (d * x[3])[None, :]
    y = tl.load(place, mask=real, other=0.0).to(tl.float32)
    good = is_finite(y)
    if before is not None:
        y = y - of_channels(before, kv_head, d, DIM)
    if gain is not None:
        y = y * of_channels(gain, kv_head, d, DIM)
    for stage in tl.static_range(STAGES):
        y = butterfly(y, 1 << stage)
    if STAGES > 0:
        y = y * FACTOR
    if order is not None:
        source = of_channels(order, kv_head, d, DIM).to(tl.int32)
        y = tl.gather(y, tl.broadcast_to(source, (TILE, DIM_PAD)), 1)
    if after is not None:
        y = y + of_channels(after, kv_head, d, DIM)
    if flags is not None:
        raise_flag(flags, tl.program_id(1), good == 0, NONFINITE)
        # One bad number spreads over its row: there, nothing else is to blame.
        sound = tl.min(good.to(tl.int32), 1)[:, None] != 0
        fits = tl.abs(y) <= LIMIT
        raise_flag(flags, tl.program_id(1), real & sound & (fits == 0), TOO_LARGE)
    # What does not fit is flagged, or more than a mean by a rounding: the largest does.
    y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
    place = out[0] + (token * out[1] + head * out[2])[:, None] + (d * out[3])[None, :]
    tl.store(place, y.to(out[0].dtype.element_ty), mask=real)


@triton.jit
def of_channels(pool, head, d, DIM: tl.constexpr):
    """What a kv head has for each channel, [1, dim]; 0 beyond the end."""
    place = pool[0] + head * pool[1] + d * pool[2]
    return tl.load(place, mask=d < DIM, other=0)[None, :]


@triton.jit
def butterfly(y, HALF: tl.constexpr):
    """Sums and differences of channels that lie HALF apart, [rows, channels]."""
    ROWS: tl.constexpr = y.shape[0]
    PAIRS: tl.constexpr = y.shape[1] // (2 * HALF)
    y = tl.permute(tl.reshape(y, (ROWS, PAIRS, 2, HALF)), (0, 1, 3, 2))
    a, b = tl.split(y)
    y = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(y, (ROWS, 2 * PAIRS * HALF))


def turn(
    x: torch.Tensor,
    how: Turn,
    kv_heads: int,
    dtype: torch.dtype,
    flags: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn x [tokens, heads, dim] into other coordinates, in `dtype`.

    Args:
        x: any strides; float16, bfloat16 or float32.
        how: what to do; its tensors are on x's device.
        kv_heads: head h has the channels of kv head h // (heads / kv_heads).
        flags: int32 [kv_heads]; gets the bit NONFINITE where x holds NaN or infinity,
            and TOO_LARGE where finite numbers turn into one that `dtype` cannot hold.
            What is stored then means nothing. None for outputs of attention, which
            saturate: only a rounding can bring them beyond the largest number.

    Returns:
        Contiguous, as x otherwise. x itself where there is nothing to do.

    Raises:
        UnsupportedBackend: a dtype or device that Triton does not run on.

    Bytes (`budget.turn`): reads and writes x once; the tables of the channels come from
    cache.
    """
    if how.still and x.dtype == dtype:
        return x
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    for launch in prepare(x, out, how, kv_heads, flags):
        launch.run()
    return out


def prepare(x, out, how, kv_heads, flags) -> list[Launch]:
    """The launch of `turn`."""
    tokens, heads, dim = x.shape
    require(x.device, x.dtype, out.dtype)
    group, wide = heads // kv_heads, padded(dim)
    tile = max(1, 2048 // wide)
    return [
        Launch(
            turn_kernel,
            (-(-tokens * group // tile), kv_heads),
            {
                "x": placed(x),
                "out": placed(out),
                "before": placed(how.before),
                "gain": placed(how.gain),
                "order": placed(how.order),
                "after": placed(how.after),
                "flags": flags,
                "rows": tokens * group,
                "NONFINITE": NONFINITE,
                "TOO_LARGE": TOO_LARGE,
                "LIMIT": torch.finfo(out.dtype).max,
                "STAGES": how.block.bit_length() - 1,
                "FACTOR": how.block**-0.5,
                "GROUP": group,
                "DIM": dim,
                "DIM_PAD": wide,
                "TILE": tile,
            },
            fuse=False,
        )
    ]
