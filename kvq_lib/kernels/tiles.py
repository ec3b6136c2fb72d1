"""How attention reads one tile of tokens: the inner steps of `decode` and `extend`.

Scales and zero points fold into small things; they are not expanded over the codes:

    score[t] = q · (c[t] · s + z)     sum of values = Σ p[t] · (c[t] · s[t] + z[t])

- A scale per token or page multiplies a column of scores, its zero adds (Σq) · z.
- A scale per channel multiplies q where a tile lies in one page and has more tokens
  than rows of q; otherwise the codes, in registers. q · z is a product of its own: a
  zero may be hundreds of steps, and adding it in half precision would cost the codes'
  last bits.
- A value's scale multiplies its probability, its zero adds Σ p · z to all channels.

The dots take halves and add up in float32. Three things keep the halves in range: each
row of q is divided by a power of two (`query_factor`), codes that meet a scale are
divided by `BOUND`, and probabilities times scales are divided by `reach`, the largest
scale so far.

The last one has a limit. A value's scale counts towards `reach` whatever its
probability, and a tile is read whole: a value some 10^5 times as large as the others
costs their last bits in float16, even where its probability is zero or the law hides
it. At 10^6 nothing of them may be left. Float32 models do not have this limit.

Names of arguments: `q` and `sums` are tuples with one tile for each part of the
channels. A pool is (pointer, head stride, page stride); strides inside a page are
constants, so that the compiler can prove alignment where a row is not a multiple of 16
bytes. What else is constant about cold keys, or values, is the tuple SIDE, below.
"""

import triton
import triton.language as tl

from .common import is_finite, numbers, small_numbers

# Places in the tuple SIDE. BOUND is a power of two that no code reaches, and UNIT
# the one that `small_numbers` divides by.
FORMAT = tl.constexpr(0)
GRANULARITY = tl.constexpr(1)
OFFSET = tl.constexpr(2)
SYMMETRIC = tl.constexpr(3)
BOUND = tl.constexpr(4)
TOKEN_STRIDE = tl.constexpr(5)
CHANNEL_STRIDE = tl.constexpr(6)
SCALE_STEP = tl.constexpr(7)
ZERO_STEP = tl.constexpr(8)
PER_BYTE = tl.constexpr(9)
UNIT = tl.constexpr(10)


@triton.jit
def cold_scores(
    q,
    qsum,
    pools,
    table,
    head,
    start,
    count,
    SIDE: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """q · k̂ for TILE cold tokens from `start` on: float32 [rows, TILE]."""
    codes, scale, zero = pools
    CODES: tl.constexpr = SIDE[PER_BYTE]
    SLICES: tl.constexpr = PARTS // CODES  # of a row of bytes
    page, slot, real = locate(table, start, count, PAGE, TILE)
    d = tl.arange(0, WIDTH_PAD)
    row = head * codes[1] + page * codes[2] + slot * SIDE[TOKEN_STRIDE]
    keys = codes[0] + row[None, :] + d[:, None] * SIDE[CHANNEL_STRIDE]
    mask = real[None, :] & (d < WIDTH)[:, None]
    s = tl.zeros([q[0].shape[0], TILE], tl.float32)
    for j in tl.static_range(SLICES):
        raw = tl.load(keys + j * WIDTH * SIDE[CHANNEL_STRIDE], mask=mask, other=0)
        for i in tl.static_range(CODES):
            if SIDE[GRANULARITY] != "channel":
                number = small_numbers(raw, i, SIDE[FORMAT], SIDE[OFFSET], DTYPE)
                s += dot(q[i * SLICES + j], number)
            else:
                channel = (i * SLICES + j) * WIDTH + d
                args = q[i * SLICES + j], raw, scale, zero, table, head, start, count
                if TILE <= PAGE:
                    s += in_one_page(args, channel, d < WIDTH, i, SIDE, PAGE)
                else:
                    s += in_several_pages(args, channel, d < WIDTH, i, SIDE, PAGE)
    if SIDE[GRANULARITY] == "token" or SIDE[GRANULARITY] == "page":
        step = per_token(scale, head, page, slot, real, SIDE, SCALE_STEP)
        s *= (step * SIDE[UNIT])[None, :]
        if not SIDE[SYMMETRIC]:
            z = per_token(zero, head, page, slot, real, SIDE, ZERO_STEP)
            s += qsum[:, None] * z[None, :]
    return s


@triton.jit
def in_one_page(
    args,
    channel,
    real,
    PART: tl.constexpr,
    SIDE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One part's scores of a tile inside one page. The scale multiplies the smaller of
    the two: (q ∘ s) · codes + q · z, or q · (codes ∘ s) + q · z."""
    q, raw, scale, zero, table, head, start, _ = args
    DTYPE: tl.constexpr = q.dtype
    page = tl.load(table + start // PAGE).to(tl.int64)
    place = scale[0] + head * scale[1] + page * scale[2] + channel * SIDE[SCALE_STEP]
    step = tl.load(place, mask=real, other=0.0).to(DTYPE)
    if q.shape[0] <= raw.shape[1]:
        number = numbers(raw, PART, SIDE[FORMAT], SIDE[OFFSET], 1.0, DTYPE)
        s = dot(q * step[None, :], number)
    else:
        FACTOR: tl.constexpr = 1.0 / SIDE[BOUND]
        number = numbers(raw, PART, SIDE[FORMAT], SIDE[OFFSET], FACTOR, DTYPE)
        s = dot(q, number * step[:, None]) * SIDE[BOUND]
    if SIDE[FORMAT] == "fp8":
        s *= 256.0  # which `numbers` left out
    if not SIDE[SYMMETRIC]:
        place = zero[0] + head * zero[1] + page * zero[2] + channel * SIDE[ZERO_STEP]
        z = tl.load(place, mask=real, other=0.0).to(tl.float32)
        s += tl.sum(q.to(tl.float32) * z[None, :], 1)[:, None]
    return s


@triton.jit
def in_several_pages(
    args,
    channel,
    real,
    PART: tl.constexpr,
    SIDE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One part's scores of a tile of several pages: q · (codes ∘ s) + q · z.

    Scales and zero points are loaded once a page, and q · z is one small dot with the
    pages as columns.
    """
    q, raw, scale, zero, table, head, start, count = args
    DTYPE: tl.constexpr = q.dtype
    ROWS: tl.constexpr = q.shape[0]
    WIDE: tl.constexpr = raw.shape[0]
    TILE: tl.constexpr = raw.shape[1]
    PAGES: tl.constexpr = TILE // PAGE
    order = start // PAGE + tl.arange(0, PAGES)
    page = tl.load(table + order, mask=order * PAGE < count, other=0).to(tl.int64)
    mask = real[:, None] & (order * PAGE < count)[None, :]
    place = scale[0] + (head * scale[1] + page * scale[2])[None, :]
    place += (channel * SIDE[SCALE_STEP])[:, None]
    step = tl.load(place, mask=mask, other=0.0).to(DTYPE)
    step = tl.broadcast_to(step[:, :, None], (WIDE, PAGES, PAGE))
    number = numbers(raw, PART, SIDE[FORMAT], SIDE[OFFSET], 1.0 / SIDE[BOUND], DTYPE)
    s = dot(q, number * tl.reshape(step, (WIDE, TILE)))
    s *= SIDE[BOUND] * (256.0 if SIDE[FORMAT] == "fp8" else 1.0)
    if not SIDE[SYMMETRIC]:
        place = zero[0] + (head * zero[1] + page * zero[2])[None, :]
        place += (channel * SIDE[ZERO_STEP])[:, None]
        z = dot(q, tl.load(place, mask=mask, other=0.0).to(DTYPE))
        z = tl.broadcast_to(z[:, :, None], (ROWS, PAGES, PAGE))
        s += tl.reshape(z, (ROWS, TILE))
    return s


@triton.jit
def cold_values(
    p,
    alpha,
    reach,
    sums,
    shift,
    pools,
    table,
    head,
    start,
    count,
    SIDE: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add p · v̂ of TILE cold tokens to what the queries have gathered.

    That is sums · reach + shift, once `settle` has seen it; `alpha` is what the softmax
    rescales it by.
    """
    codes, scale, zero = pools
    page, slot, real = locate(table, start, count, PAGE, TILE)
    d = tl.arange(0, WIDTH_PAD)
    row = head * codes[1] + page * codes[2] + slot * SIDE[TOKEN_STRIDE]
    raw = tl.load(
        codes[0] + row[:, None] + d[None, :] * SIDE[CHANNEL_STRIDE],
        mask=real[:, None] & (d < WIDTH)[None, :],
        other=0,
    )
    if SIDE[GRANULARITY] == "none":
        farther = tl.maximum(reach, 1.0)
        weights = p / farther
    else:
        s = per_token(scale, head, page, slot, real, SIDE, SCALE_STEP) * SIDE[UNIT]
        farther = tl.maximum(reach, tl.max(s, 0))
        weights = p * (s / farther)[None, :]
    weights = weights.to(DTYPE)
    if not SIDE[SYMMETRIC]:
        z = per_token(zero, head, page, slot, real, SIDE, ZERO_STEP)
        shift = shift * alpha + tl.sum(p * z[None, :], 1)
    keep = (alpha * (reach / farther))[:, None]
    new = ()
    for i in tl.static_range(PARTS):
        number = small_numbers(raw, i, SIDE[FORMAT], SIDE[OFFSET], DTYPE)
        new += (sums[i] * keep + dot(weights, number),)
    return farther, new, shift


@triton.jit
def settle(reach, sums, SIDE: tl.constexpr, PARTS: tl.constexpr):
    """Take the units of cold codes out of `reach`, once all cold values are read: hot
    values have none."""
    new = ()
    for i in tl.static_range(PARTS):
        new += (sums[i] * (SIDE[UNIT]),)
    return reach / SIDE[UNIT], new


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


# -- what the steps above stand on -----------------------------------------------------


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
def per_token(
    pool,
    head,
    page,
    slot,
    real,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """The scale or zero point of each token of a tile, float32; 0 beyond the end."""
    place = pool[0] + head * pool[1] + page * pool[2]
    if SIDE[GRANULARITY] == "token":
        place += slot * SIDE[STEP]
    return tl.load(place, mask=real, other=0.0).to(tl.float32)


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
