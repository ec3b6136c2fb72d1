"""Hot pages into cold ones, bit for bit as `quantize` gives them."""

import torch
import triton
import triton.language as tl

from ..specs import BLOCK
from ..storage import Quantized, Runs
from .arguments import code_arguments, placed, stored_codes
from .common import (
    fp4_bits,
    fp8_bits,
    fp8_ceil,
    fp8_scaled,
    half_ceil,
    half_floor,
    is_finite,
    raise_flag,
    round_even,
)
from .feedback import feedback_launch
from .launch import (
    TOO_LARGE,
    Launch,
    padded,
    require,
    require_page,
)


@triton.jit
def seal_kernel(
    hot,
    codes,
    scale,
    zero,
    outer,
    clip,
    clipped,
    hot_pages,
    cold_pages,
    flags,
    TOO_LARGE: tl.constexpr,
    FORMAT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    OFFSET: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Program (page, kv head). Tensors come as (pointer, strides).

    hot: [kv_heads, pages, page_size, dim]; codes: the same with bytes; scale and zero:
    the same with 1 where a group spans the dim, or with blocks; outer: the same with 1
    and 1. clip: one for each kv head; clipped: int64 [kv_heads]; None where the range
    is not narrowed, where nothing can be beyond the largest code.
    """
    head = tl.program_id(1).to(tl.int64)
    source = tl.load(hot_pages + tl.program_id(0)).to(tl.int64)
    target = tl.load(cold_pages + tl.program_id(0)).to(tl.int64)
    WIDTH: tl.constexpr = DIM // PARTS
    t = tl.arange(0, PAGE)
    d = tl.arange(0, WIDTH_PAD)
    real = (t >= 0)[:, None] & (d < WIDTH)[None, :]
    page = hot[0] + head * hot[1] + source * hot[2]
    x = page + t[:, None] * hot[3] + d[None, :] * hot[4]
    part_step = WIDTH * hot[4]
    out = codes[0] + head * codes[1] + target * codes[2]
    out += t[:, None] * codes[3] + d[None, :] * codes[4]
    kept = 1.0
    if clip is not None:
        kept = tl.load(clip[0] + head * clip[1])

    if FORMAT == "fp16":
        value = tl.load(x, mask=real, other=0.0).to(tl.float16)
        raise_flag(flags, tl.program_id(1), is_finite(value) == 0, TOO_LARGE)
        tl.store(out, value, mask=real)
    else:
        # Pass one: the scale of each group that spans all parts.
        if GRANULARITY == "static":
            s = tl.load(scale[0] + head * scale[1] + tl.zeros([1, 1], tl.int32))
        elif GRANULARITY == "block":
            b = tl.arange(0, BLOCKS_PAD)
            inside = (t >= 0)[:, None] & (b < DIM // 16)[None, :]
            size = block_size(page, t, b, inside, hot)
            largest = tl.max(tl.max(size, 1), 0, keep_dims=True)[:, None]
            s = safe_scale(largest, LARGEST * 448.0)
            step = fp8_ceil(block_step(size, s, LARGEST))
            at = scale[0] + head * scale[1] + target * scale[2]
            at += t[:, None] * scale[3] + b[None, :] * scale[4]
            tl.store(at, step.to(tl.uint8), mask=inside)
            store_group(s, outer, head, target, t, "page")
            raise_flag(flags, tl.program_id(1), is_finite(s) == 0, TOO_LARGE)
        elif GRANULARITY != "channel":
            low, high = part_range(x, real, GRANULARITY)
            for part in tl.static_range(1, PARTS):
                lower, higher = part_range(x + part * part_step, real, GRANULARITY)
                low = tl.minimum(low, lower)
                high = tl.maximum(high, higher)
            s, z = scale_and_zero(low, high, kept, SYMMETRIC, LARGEST, clip is None)
            store_group(s, scale, head, target, t, GRANULARITY)
            if not SYMMETRIC:
                store_group(z, zero, head, target, t, GRANULARITY)
            raise_flag(flags, tl.program_id(1), unfit(s, z), TOO_LARGE)
        # Pass two: quantize each part and put it into its bits of the byte.
        packed = tl.zeros([PAGE, WIDTH_PAD], tl.int32)
        beyond = tl.zeros([PAGE, WIDTH_PAD], tl.int32)
        for part in tl.static_range(PARTS):
            value = tl.load(x + part * part_step, mask=real, other=0.0).to(tl.float32)
            channel = part * WIDTH + d
            if GRANULARITY == "channel":
                low = tl.min(value, 0)[None, :]
                high = tl.max(value, 0)[None, :]
                s, z = scale_and_zero(low, high, kept, SYMMETRIC, LARGEST, clip is None)
                store_channels(s, scale, head, target, channel, d < WIDTH)
                if not SYMMETRIC:
                    store_channels(z, zero, head, target, channel, d < WIDTH)
                raise_flag(flags, tl.program_id(1), unfit(s, z), TOO_LARGE)
            if not SYMMETRIC:
                value = value - z.to(tl.float32)
            step = s.to(tl.float32) + tl.zeros_like(value)
            if GRANULARITY == "block":
                size = block_size(page, t, channel // 16, real, hot)
                bits = fp8_ceil(block_step(size, s, LARGEST))
                step = fp8_scaled(bits).to(tl.float32) * 256.0 * step
            steps = tl.div_rn(value, step)
            code, outside = code_of(steps, FORMAT, LOWEST, LARGEST, OFFSET)
            packed |= code << (part * BITS)
            beyond += (outside & real).to(tl.int32)
        tl.store(out, packed.to(tl.uint8), mask=real)
        if clipped is not None:
            count = tl.sum(tl.sum(beyond, 1), 0)
            tl.atomic_add(clipped + head, count.to(tl.int64))


@triton.jit
def code_of(
    steps,
    FORMAT: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """The codes of numbers in units of their scale, int32, and where a number is beyond
    the largest code."""
    if FORMAT == "fp8":
        return fp8_bits(steps), tl.abs(steps) > LARGEST
    elif FORMAT == "fp4":
        return fp4_bits(steps), tl.abs(steps) > LARGEST
    else:
        whole = round_even(steps)
        code = tl.clamp(whole, LOWEST, LARGEST)
        return code.to(tl.int32) + OFFSET, whole != code


@triton.jit
def part_range(x, real, GRANULARITY: tl.constexpr):
    """Minimum and maximum of a part, per token [page, 1] or per page [1, 1]."""
    value = tl.load(x, mask=real, other=0.0).to(tl.float32)
    low = tl.min(tl.where(real, value, float("inf")), 1)
    high = tl.max(tl.where(real, value, float("-inf")), 1)
    if GRANULARITY == "page":
        return tl.min(low, 0, keep_dims=True)[:, None], tl.max(high, 0, keep_dims=True)[
            :, None
        ]
    else:
        return low[:, None], high[:, None]


@triton.jit
def block_size(page, t, block, real, hot):
    """The largest magnitude of a block of 16 channels, [page, blocks]; `block` may name
    one several times."""
    x = page + t[:, None] * hot[3] + (block * 16)[None, :] * hot[4]
    size = tl.zeros(real.shape, tl.float32)
    for i in range(16):
        value = tl.load(x + i * hot[4], mask=real, other=0.0).to(tl.float32)
        size = tl.maximum(size, tl.abs(value))
    return size


@triton.jit
def block_step(size, outer, LARGEST: tl.constexpr):
    """What the scale of a block must be at least, in units of the page's scale."""
    wanted = tl.div_rn(size, tl.full(size.shape, LARGEST, tl.float32))
    return tl.div_rn(wanted, outer.to(tl.float32) + tl.zeros_like(size))


@triton.jit
def scale_and_zero(
    low,
    high,
    kept,
    SYMMETRIC: tl.constexpr,
    LARGEST: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Scale and zero point of each group, float16, each rounded to the safe side.

    The scale reaches from the *stored* zero to the maximum. Symmetric: zero is 0. Of
    the range only the part `kept` counts, unless WHOLE.
    """
    if SYMMETRIC:
        z = tl.zeros_like(low).to(tl.float16)
        reach = tl.maximum(high, -low)
        if not WHOLE:
            reach = reach * kept
    else:
        if not WHOLE:
            margin = (high - low) * ((1.0 - kept) * 0.5)
            low = low + margin
            high = high - margin
        z = half_floor(low)
        reach = high - z.to(tl.float32)
    return safe_scale(reach, LARGEST), z


@triton.jit
def safe_scale(reach, LARGEST: tl.constexpr):
    """The float16 scale, 2^-24 or more, whose LARGEST multiple is at least `reach`."""
    ideal = tl.div_rn(reach, tl.full(reach.shape, LARGEST, tl.float32))
    return half_ceil(tl.maximum(ideal, 5.960464477539063e-08))


@triton.jit
def unfit(s, z):
    """Where a scale or a zero point left the range of float16."""
    return (is_finite(s) & is_finite(z)) == 0


@triton.jit
def store_group(value, pool, head, page, t, GRANULARITY: tl.constexpr):
    """Store scales or zeros: [page, 1] per token, [1, 1] per page."""
    place = pool[0] + head * pool[1] + page * pool[2]
    if GRANULARITY == "token":
        tl.store(place + t[:, None] * pool[3], value)
    else:
        tl.store(place + tl.zeros_like(value).to(tl.int32), value)


@triton.jit
def store_channels(value, pool, head, page, channel, real):
    """Store scales or zeros of channels, [1, width]."""
    place = pool[0] + head * pool[1] + page * pool[2] + channel[None, :] * pool[4]
    tl.store(place, value, mask=real[None, :])


def seal(
    hot: torch.Tensor,
    hot_pages: torch.Tensor,
    cold: "Quantized | Runs",
    cold_pages: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    """Quantize full hot pages of keys, or of values, into cold ones.

    Args:
        hot: pool [kv_heads, pages, page_size, dim], any strides.
        hot_pages, cold_pages: int32 or int64 [pages], from where and to where.
        cold: pool of cold pages, any strides; written in place, bit for bit as
            `quantize_as` would. Where numbers can be beyond the largest code, they are
            counted in `clipped`.
        flags: int32 [kv_heads]; gets the bit TOO_LARGE where a group does not fit
            float16. What is written to such a page means nothing.

    Raises:
        UnsupportedBackend: a dtype or device that Triton does not run on, or a page
            size that is no power of two.

    Bytes (`budget.seal`): reads N·H·(P·D·h + 16) (scales per token, block or page: the
    page again, from cache; 16 for the page ids), writes N·H·(codes + scales + zeros of
    a page), for N pages of P tokens, H kv heads, dim D, h bytes an element. Runs of
    channels: the page ids once for each. Error feedback: see `feedback`.
    """
    for launch in prepare(hot, hot_pages, cold, cold_pages, flags):
        launch.run()


def prepare(hot, hot_pages, cold, cold_pages, flags) -> list[Launch]:
    """The launches of `seal`: one for each run of channels, and one more where rounding
    errors are fed back."""
    require(hot.device, hot.dtype)
    require_page(hot.shape[2])
    launches, start = [], 0
    for run in cold.parts:
        width = run.shape[-1]
        channels = hot[..., start : start + width]
        launches.append(plain_launch(channels, hot_pages, run, cold_pages, flags))
        if run.aid.feedback is not None:
            launches.append(feedback_launch(channels, hot_pages, run, cold_pages))
        start += width
    return launches


def plain_launch(hot, hot_pages, cold, cold_pages, flags) -> Launch:
    """Each number to its nearest code."""
    kv_heads, _, page_size, dim = hot.shape
    spec, clip = cold.spec, cold.aid.clip
    parts = spec.fmt.per_byte
    width = padded(dim // parts)
    return Launch(
        seal_kernel,
        (len(hot_pages), kv_heads),
        {
            "hot": placed(hot),
            "codes": placed(stored_codes(cold)),
            "scale": placed(cold.scale),
            "zero": placed(cold.zero),
            "outer": placed(cold.outer),
            "clip": None if clip is None else (clip, clip.stride(0)),
            "clipped": cold.clipped,
            "hot_pages": hot_pages,
            "cold_pages": cold_pages,
            "flags": flags,
            "TOO_LARGE": TOO_LARGE,
            "BLOCKS_PAD": triton.next_power_of_2(-(-dim // BLOCK)),
            **code_arguments(spec),
            "PARTS": parts,
            "DIM": dim,
            "WIDTH_PAD": width,
            "PAGE": page_size,
        },
        warps=8 if page_size * width > 4096 else 4,
        fuse=False,
    )
