"""Error feedback: codes of sealed pages made anew, channel by channel.

Each channel's rounding error is pushed into the channels after it, as
`quantize._codes_with_feedback` does, bit for bit. Scales and zero points stay what
`seal` has stored.
"""

import triton
import triton.language as tl

from .arguments import code_arguments, placed
from .common import fp4_bits, fp4_scaled, fp8_bits, fp8_scaled, round_even
from .launch import Launch, padded


@triton.jit
def feedback_kernel(
    hot,
    codes,
    scale,
    zero,
    outer,
    feedback,
    hot_pages,
    cold_pages,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    OFFSET: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Program (page, kv head). Tensors come as (pointer, strides).

    hot: [kv_heads, pages, page_size, dim]; the others as in `seal`; feedback:
    [kv_heads, dim, dim].
    """
    head = tl.program_id(1).to(tl.int64)
    source = tl.load(hot_pages + tl.program_id(0)).to(tl.int64)
    target = tl.load(cold_pages + tl.program_id(0)).to(tl.int64)
    t = tl.arange(0, PAGE)
    c = tl.arange(0, DIM_PAD)
    x = hot[0] + head * hot[1] + source * hot[2]
    x += t[:, None] * hot[3] + c[None, :] * hot[4]
    rest = tl.load(x, mask=(c < DIM)[None, :], other=0.0).to(tl.float32)
    w = tl.arange(0, WIDTH_PAD)
    packed = tl.zeros([PAGE, WIDTH_PAD], tl.int32)
    for d in range(DIM):
        # As bits, for the sum of 0 and -0 is 0, and FP codes have a sign.
        whole = rest.to(tl.int32, bitcast=True)
        column = tl.sum(tl.where((c == d)[None, :], whole, 0), 1)
        column = column.to(tl.float32, bitcast=True)
        at = group(scale, head, target, t, d, GRANULARITY)
        step = tl.load(at)
        if GRANULARITY == "block":
            page = tl.load(group(outer, head, target, t, d, "page")).to(tl.float32)
            step = fp8_scaled(step).to(tl.float32) * 256.0 * page
        step = step.to(tl.float32)
        value = column
        if not SYMMETRIC:
            z = tl.load(group(zero, head, target, t, d, GRANULARITY)).to(tl.float32)
            value = column - z
        steps = tl.div_rn(value, step)
        if FORMAT == "fp8":
            code = fp8_bits(steps)
            number = fp8_scaled(code).to(tl.float32) * 256.0 * step
        elif FORMAT == "fp4":
            code = fp4_bits(steps)
            number = fp4_scaled(code, 0).to(tl.float32) * 16384.0 * step
        else:
            signed = tl.clamp(round_even(steps), LOWEST, LARGEST)
            code = signed.to(tl.int32) + OFFSET
            number = signed * step
        if not SYMMETRIC:
            number = number + z
        row = feedback[0] + head * feedback[1] + d * feedback[2] + c * feedback[3]
        share = tl.load(row, mask=(c > d) & (c < DIM), other=0.0)
        rest = rest - share[None, :] * (column - number)[:, None]
        mine = (w == d % WIDTH)[None, :]
        packed |= tl.where(mine, (code << (d // WIDTH * BITS))[:, None], 0)
    out = codes[0] + head * codes[1] + target * codes[2]
    out += t[:, None] * codes[3] + w[None, :] * codes[4]
    tl.store(out, packed.to(tl.uint8), mask=(w < WIDTH)[None, :])


@triton.jit
def group(pool, head, page, t, d, GRANULARITY: tl.constexpr):
    """Where the scale, or the zero point, of channel d of each token is, [page]."""
    place = pool[0] + head * pool[1] + page * pool[2] + tl.zeros_like(t)
    if GRANULARITY == "token":
        place += t * pool[3]
    elif GRANULARITY == "channel":
        place += d * pool[4]
    elif GRANULARITY == "block":
        place += t * pool[3] + d // 16 * pool[4]
    return place


def feedback_launch(hot, hot_pages, cold, cold_pages) -> Launch:
    """The launch that makes the codes of sealed pages anew; arguments as `seal` has
    them, for one run of channels.

    Bytes: reads a page, its scales and zeros, and D·D·4 of the shares (from cache, but
    for the first page of a kv head); writes the codes of a page a second time.
    """
    kv_heads, _, page_size, dim = hot.shape
    width = cold.codes.shape[-1]
    return Launch(
        feedback_kernel,
        (len(hot_pages), kv_heads),
        {
            "hot": placed(hot),
            "codes": placed(cold.codes),
            "scale": placed(cold.scale),
            "zero": placed(cold.zero),
            "outer": placed(cold.outer),
            "feedback": placed(cold.aid.feedback),
            "hot_pages": hot_pages,
            "cold_pages": cold_pages,
            **code_arguments(cold.spec),
            "DIM": dim,
            "DIM_PAD": padded(dim),
            "WIDTH": width,
            "WIDTH_PAD": padded(width),
            "PAGE": page_size,
        },
        warps=8 if page_size * padded(dim) > 4096 else 4,
        fuse=False,
    )
