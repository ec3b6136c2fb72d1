"""What both halves of attention share: products, the softmax, hot tokens, queries.

Names of arguments: `q` and `sums` are tuples with one tile for each slice of the
channels. A pool is (pointer, head stride, page stride); strides inside a page are
constants. How a tile of cold tokens is read is in `cold`.
"""

import triton
import triton.language as tl

from .common import is_finite


@triton.jit
def softmax_step(s, m, total):
    """One step of the online softmax, in powers of two.

    Args: scores [rows, TILE], -inf where masked; running maximum and sum [rows].
    Returns: probabilities relative to the new maximum, the factor that older sums
    shrink by, the new maximum and sum. A row that has seen nothing but -inf stays at
    zero: -inf - -inf, which is NaN, never happens.
    """
    new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(new > float("-inf"), new, 0.0)
    p = tl.exp2(s - safe[:, None])
    alpha = tl.exp2(m - safe)
    return p, alpha, new, total * alpha + tl.sum(p, 1)


@triton.jit
def hot_scores(
    q,
    pool,
    page,
    slot,
    real,
    head,
    TOKEN: tl.constexpr,
    CHANNEL: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """q · k for a tile of hot tokens, in the same parts as cold keys."""
    d = tl.arange(0, WIDTH_PAD)
    row = head * pool[1] + page * pool[2] + slot * TOKEN
    keys = pool[0] + row[None, :] + d[:, None] * CHANNEL
    mask = real[None, :] & (d < WIDTH)[:, None]
    s = dot(q[0], tl.load(keys, mask=mask, other=0.0).to(DTYPE))
    for i in tl.static_range(1, PARTS):
        k = tl.load(keys + i * WIDTH * CHANNEL, mask=mask, other=0.0)
        s += dot(q[i], k.to(DTYPE))
    return s


@triton.jit
def hot_values(
    p,
    alpha,
    reach,
    sums,
    shift,
    pool,
    page,
    slot,
    real,
    head,
    TOKEN: tl.constexpr,
    CHANNEL: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add p · v of a tile of hot tokens; see `cold_values`."""
    d = tl.arange(0, WIDTH_PAD)
    row = head * pool[1] + page * pool[2] + slot * TOKEN
    values = pool[0] + row[:, None] + d[None, :] * CHANNEL
    mask = real[:, None] & (d < WIDTH)[None, :]
    farther = tl.maximum(reach, 1.0)
    keep = (alpha * (reach / farther))[:, None]
    weights = (p / farther).to(DTYPE)
    new = ()
    for i in tl.static_range(PARTS):
        v = tl.load(values + i * WIDTH * CHANNEL, mask=mask, other=0.0)
        new += (sums[i] * keep + dot(weights, v.to(DTYPE)),)
    return farther, new, shift * alpha


@triton.jit
def dot(a, b):
    """a @ b with a float32 sum; float32 operands are not rounded to tf32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def locate(table, start, count, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Page id, slot and validity of TILE tokens from `start` on. A tile is free to be a
    part of a page, or to span several."""
    token = start + tl.arange(0, TILE)
    real = token < count
    page = tl.load(table + token // PAGE, mask=real, other=0).to(tl.int64)
    return page, token % PAGE, real


@triton.jit
def query_factor(
    q,
    rows,
    real,
    CHANNEL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """A power of two above each row's largest magnitude, and its inverse, [rows].

    Also where an element of q is not finite, bool [rows, DIM_PAD].
    """
    d = tl.arange(0, DIM_PAD)
    place = q + rows[:, None] + d[None, :] * CHANNEL
    x = tl.load(place, mask=real[:, None] & (d < DIM)[None, :], other=0.0)
    largest = tl.max(tl.abs(x.to(tl.float32)), 1)
    # The exponent's bits alone are a power of two; kept away from both ends of float32.
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) + 1
    exponent = tl.minimum(tl.maximum(exponent, 27), 227)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return factor, inverse, is_finite(x) == 0


@triton.jit
def query_parts(
    q,
    rows,
    real,
    inverse,
    CHANNEL: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The queries in parts, divided by `query_factor`, and their sum over channels."""
    d = tl.arange(0, WIDTH_PAD)
    mask = real[:, None] & (d < WIDTH)[None, :]
    total = tl.zeros([rows.shape[0]], tl.float32)
    parts = ()
    for i in tl.static_range(PARTS):
        place = q + rows[:, None] + (i * WIDTH + d)[None, :] * CHANNEL
        x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        x = (x * inverse[:, None]).to(DTYPE)
        total += tl.sum(x.to(tl.float32), 1)
        parts += (x,)
    return parts, total


@triton.jit
def empty_sums(ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """What a query has gathered before it has read anything, in parts."""
    sums = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros([ROWS, WIDTH_PAD], tl.float32),)
    return sums
