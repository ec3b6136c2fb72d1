"""How attention reads one tile of cold tokens: inner steps of `decode` and `extend`.

Scales and zero points fold into small things; they are not expanded over the codes:

    score[t] = q · (c[t] · s + z)     sum of values = Σ p[t] · (c[t] · s[t] + z[t])

- A scale per token or page multiplies a column of scores, its zero adds (Σq) · z. A
  static scale is one per page, and all pages' lies in one place.
- A scale per channel multiplies q where a tile lies in one page and has more tokens
  than rows of q; otherwise the codes, in registers. q · z is a product of its own: a
  zero may be hundreds of steps, and adding it in half precision would cost the codes'
  last bits.
- A scale per block of channels multiplies the codes, in registers. An FP4 number times
  an FP8 number is exact in float16. The page's own scale is then one per page.
- A value's scale multiplies its probability, its zero adds Σ p · z to all channels.
- Keys may be several runs of channels, each stored in its own way: their scores add up.

The dots take halves and add up in float32. Three things keep the halves in range: each
row of q is divided by a power of two (`query_factor`), codes that meet a scale are
divided by `BOUND`, and probabilities times scales are divided by `reach`, the largest
scale so far.

The last one has a limit. A value's scale counts towards `reach` whatever its
probability, and a tile is read whole: a value some 10^5 times as large as the others
costs their last bits in float16, even where its probability is zero or the law hides
it. At 10^6 nothing of them may be left. Float32 models do not have this limit.

A pool is (pointer, head stride, page stride); strides inside a page are constants, so
that the compiler can prove alignment where a row is not a multiple of 16 bytes. What
else is constant about cold values, or a run of cold keys, is the tuple SIDE, below: for
keys KEYS, and KEYS_2 and KEYS_3 where there are several runs. Pools come as (codes,
scales, zeros, scales of pages).
"""

import triton
import triton.language as tl

from .common import fp8_scaled, numbers, small_numbers
from .tiles import dot, locate, query_parts

# Places in the tuple SIDE. BOUND is a power of two that no code reaches, and UNIT
# the one that `small_numbers` divides by. The channels are read in PARTS slices of
# WIDTH, a tile each, of WIDTH_PAD; a byte holds one channel of PER_BYTE of them. START
# is the first channel, FIRST the first of the query's slices. FORMAT is a text, which
# Triton 3.6 passes on only as a constant with a name.
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
PARTS = tl.constexpr(11)
WIDTH = tl.constexpr(12)
WIDTH_PAD = tl.constexpr(13)
START = tl.constexpr(14)
FIRST = tl.constexpr(15)
BLOCK_STEP = tl.constexpr(16)


@triton.jit
def query_runs(
    q,
    rows,
    real,
    inverse,
    CHANNEL: tl.constexpr,
    KEYS: tl.constexpr,
    KEYS_2: tl.constexpr,
    KEYS_3: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The queries' slices for each run of cold keys, one after the other, and their
    sum over the channels of each run."""
    parts, total = run_query(q, rows, real, inverse, CHANNEL, KEYS, DTYPE)
    sums = (total,)
    if KEYS_2 is not None:
        more, total = run_query(q, rows, real, inverse, CHANNEL, KEYS_2, DTYPE)
        parts += more
        sums += (total,)
    if KEYS_3 is not None:
        more, total = run_query(q, rows, real, inverse, CHANNEL, KEYS_3, DTYPE)
        parts += more
        sums += (total,)
    return parts, sums


@triton.jit
def run_query(
    q,
    rows,
    real,
    inverse,
    CHANNEL: tl.constexpr,
    SIDE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The queries' slices for one run of cold keys; see `query_parts`."""
    return query_parts(
        q + SIDE[START] * CHANNEL, rows, real, inverse, CHANNEL,
        SIDE[PARTS], SIDE[WIDTH], SIDE[WIDTH_PAD], DTYPE,
    )  # fmt: skip


@triton.jit
def cold_scores(
    q,
    qsums,
    pools,
    table,
    head,
    start,
    count,
    KEYS: tl.constexpr,
    KEYS_2: tl.constexpr,
    KEYS_3: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """q · k̂ for TILE cold tokens from `start` on: float32 [rows, TILE].

    q, qsums: from `query_runs`. pools: those of each run.
    """
    at = table, head, start, count
    s = run_scores(q, qsums[0], pools[0], at, KEYS, PAGE, TILE, DTYPE)
    if KEYS_2 is not None:
        s += run_scores(q, qsums[1], pools[1], at, KEYS_2, PAGE, TILE, DTYPE)
    if KEYS_3 is not None:
        s += run_scores(q, qsums[2], pools[2], at, KEYS_3, PAGE, TILE, DTYPE)
    return s


@triton.jit
def run_scores(
    q,
    qsum,
    pools,
    at,
    SIDE: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The scores that one run of channels adds; see `cold_scores`."""
    table, head, start, count = at
    codes, scale, zero, _ = pools
    KIND: tl.constexpr = SIDE[FORMAT]
    CODES: tl.constexpr = SIDE[PER_BYTE]
    SLICES: tl.constexpr = SIDE[PARTS] // CODES  # of a row of bytes
    NARROW: tl.constexpr = SIDE[WIDTH]
    page, slot, real = locate(table, start, count, PAGE, TILE)
    d = tl.arange(0, SIDE[WIDTH_PAD])
    row = head * codes[1] + page * codes[2] + slot * SIDE[TOKEN_STRIDE]
    keys = codes[0] + row[None, :] + d[:, None] * SIDE[CHANNEL_STRIDE]
    mask = real[None, :] & (d < NARROW)[:, None]
    s = tl.zeros([q[SIDE[FIRST]].shape[0], TILE], tl.float32)
    for j in tl.static_range(SLICES):
        raw = tl.load(keys + j * NARROW * SIDE[CHANNEL_STRIDE], mask=mask, other=0)
        for i in tl.static_range(CODES):
            part = q[SIDE[FIRST] + i * SLICES + j]
            if SIDE[GRANULARITY] == "channel":
                channel = (i * SLICES + j) * NARROW + d
                args = part, raw, scale, zero, table, head, start, count
                if TILE <= PAGE:
                    s += in_one_page(args, channel, d < NARROW, i, SIDE, PAGE)
                else:
                    s += in_several_pages(args, channel, d < NARROW, i, SIDE, PAGE)
            else:
                number = small_numbers(raw, i, KIND, SIDE[OFFSET], DTYPE)
                if SIDE[GRANULARITY] == "block":
                    lines = scale[0] + head * scale[1] + page * scale[2]
                    lines += slot * SIDE[SCALE_STEP]
                    channel = (i * SLICES + j) * NARROW
                    step = block_scales(lines, real, channel, SIDE, True)
                    number = (number * step).to(DTYPE)
                s += dot(part, number)
    if SIDE[GRANULARITY] != "none" and SIDE[GRANULARITY] != "channel":
        step = token_scale(pools, head, page, slot, real, SIDE)
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
    KIND: tl.constexpr = SIDE[FORMAT]
    DTYPE: tl.constexpr = q.dtype
    page = tl.load(table + start // PAGE).to(tl.int64)
    place = scale[0] + head * scale[1] + page * scale[2] + channel * SIDE[SCALE_STEP]
    step = tl.load(place, mask=real, other=0.0).to(DTYPE)
    if q.shape[0] <= raw.shape[1]:
        number = numbers(raw, PART, KIND, SIDE[OFFSET], 1.0, DTYPE)
        s = dot(q * step[None, :], number)
    else:
        FACTOR: tl.constexpr = 1.0 / SIDE[BOUND]
        number = numbers(raw, PART, KIND, SIDE[OFFSET], FACTOR, DTYPE)
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
    KIND: tl.constexpr = SIDE[FORMAT]
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
    number = numbers(raw, PART, KIND, SIDE[OFFSET], 1.0 / SIDE[BOUND], DTYPE)
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
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add p · v̂ of TILE cold tokens to what the queries have gathered.

    That is sums · reach + shift, once `settle` has seen it; `alpha` is what the softmax
    rescales it by.
    """
    codes, scale, zero, _ = pools
    KIND: tl.constexpr = SIDE[FORMAT]
    SLICES: tl.constexpr = SIDE[PARTS]
    NARROW: tl.constexpr = SIDE[WIDTH]
    page, slot, real = locate(table, start, count, PAGE, TILE)
    d = tl.arange(0, SIDE[WIDTH_PAD])
    row = head * codes[1] + page * codes[2] + slot * SIDE[TOKEN_STRIDE]
    raw = tl.load(
        codes[0] + row[:, None] + d[None, :] * SIDE[CHANNEL_STRIDE],
        mask=real[:, None] & (d < NARROW)[None, :],
        other=0,
    )
    if SIDE[GRANULARITY] == "none":
        farther = tl.maximum(reach, 1.0)
        weights = p / farther
    else:
        s = token_scale(pools, head, page, slot, real, SIDE) * SIDE[UNIT]
        farther = tl.maximum(reach, tl.max(s, 0))
        weights = p * (s / farther)[None, :]
    weights = weights.to(DTYPE)
    if not SIDE[SYMMETRIC]:
        z = per_token(zero, head, page, slot, real, SIDE, ZERO_STEP)
        shift = shift * alpha + tl.sum(p * z[None, :], 1)
    keep = (alpha * (reach / farther))[:, None]
    new = ()
    for i in tl.static_range(SLICES):
        number = small_numbers(raw, i, KIND, SIDE[OFFSET], DTYPE)
        if SIDE[GRANULARITY] == "block":
            lines = scale[0] + head * scale[1] + page * scale[2]
            lines += slot * SIDE[SCALE_STEP]
            step = block_scales(lines, real, i * NARROW, SIDE, False)
            number = (number * step).to(DTYPE)
        new += (sums[i] * keep + dot(weights, number),)
    return farther, new, shift


@triton.jit
def settle(reach, sums, SIDE: tl.constexpr):
    """Take the units of cold codes out of `reach`, once all cold values are read: hot
    values have none."""
    SLICES: tl.constexpr = SIDE[PARTS]
    new = ()
    for i in tl.static_range(SLICES):
        new += (sums[i] * (SIDE[UNIT]),)
    return reach / SIDE[UNIT], new


@triton.jit
def token_scale(pools, head, page, slot, real, SIDE: tl.constexpr):
    """What multiplies all codes of a token, float32; 0 beyond the end."""
    if SIDE[GRANULARITY] == "block":
        return per_token(pools[3], head, page, slot, real, SIDE, SCALE_STEP)
    else:
        return per_token(pools[1], head, page, slot, real, SIDE, SCALE_STEP)


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
def block_scales(
    rows,
    real,
    CHANNEL: tl.constexpr,
    SIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Scales of blocks, repeated for each channel of a slice from CHANNEL on.

    Times 2^14 / 256, float16, exact: FP4 numbers come divided by 2^14, and 256 is in
    SIDE[UNIT].

    Args:
        rows: places of the scales of each token, [tokens].
        real: which tokens are.

    Returns:
        [tokens, width]; [width, tokens] where TRANSPOSED.
    """
    TOKENS: tl.constexpr = rows.shape[0]
    WIDE: tl.constexpr = SIDE[WIDTH_PAD]
    # A block is 16 channels. Where a slice starts in the middle of one, each channel
    # loads its own scale.
    EACH: tl.constexpr = 1 if SIDE[WIDTH] % 16 else 16
    at = tl.arange(0, WIDE // EACH)
    place = (CHANNEL + at * EACH) // 16 * SIDE[BLOCK_STEP]
    inside = at * EACH < SIDE[WIDTH]
    if TRANSPOSED:
        mask = inside[:, None] & real[None, :]
        raw = tl.load(rows[None, :] + place[:, None], mask=mask, other=0)
        step = fp8_scaled(raw) * 16384.0
        step = tl.broadcast_to(step[:, None, :], (WIDE // EACH, EACH, TOKENS))
        return tl.reshape(step, (WIDE, TOKENS))
    else:
        mask = real[:, None] & inside[None, :]
        raw = tl.load(rows[:, None] + place[None, :], mask=mask, other=0)
        step = fp8_scaled(raw) * 16384.0
        step = tl.broadcast_to(step[:, :, None], (TOKENS, WIDE // EACH, EACH))
        return tl.reshape(step, (TOKENS, WIDE))
