"""Hot pages into cold ones, bit for bit as `quantize` gives them."""

import torch
import triton
import triton.language as tl

from ..quantize import Quantized
from .common import fp8_bits, half_ceil, half_floor, is_finite, raise_flag, round_even
from .launch import (
    TOO_LARGE,
    Launch,
    padded,
    parts_of,
    require,
    require_page,
    stored_codes,
)


@triton.jit
def seal_kernel(
    hot,
    codes,
    scale,
    zero,
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
    PAGE: tl.constexpr,
):
    """Program (page, kv head). Tensors come as (pointer, strides).

    hot: [kv_heads, pages, page_size, dim]; codes: the same with bytes; scale and zero:
    the same with 1 where a group spans the dim.
    """
    head = tl.program_id(1).to(tl.int64)
    source = tl.load(hot_pages + tl.program_id(0)).to(tl.int64)
    target = tl.load(cold_pages + tl.program_id(0)).to(tl.int64)
    WIDTH: tl.constexpr = DIM // PARTS
    t = tl.arange(0, PAGE)
    d = tl.arange(0, WIDTH_PAD)
    real = (t >= 0)[:, None] & (d < WIDTH)[None, :]
    x = hot[0] + head * hot[1] + source * hot[2]
    x += t[:, None] * hot[3] + d[None, :] * hot[4]
    part_step = WIDTH * hot[4]
    out = codes[0] + head * codes[1] + target * codes[2]
    out += t[:, None] * codes[3] + d[None, :] * codes[4]

    if FORMAT == "fp16":
        value = tl.load(x, mask=real, other=0.0).to(tl.float16)
        raise_flag(flags, tl.program_id(1), is_finite(value) == 0, TOO_LARGE)
        tl.store(out, value, mask=real)
    else:
        # Pass one: the range of each group that spans all parts.
        if GRANULARITY != "channel":
            low, high = part_range(x, real, GRANULARITY)
            for part in tl.static_range(1, PARTS):
                lower, higher = part_range(x + part * part_step, real, GRANULARITY)
                low = tl.minimum(low, lower)
                high = tl.maximum(high, higher)
            s, z = scale_and_zero(low, high, SYMMETRIC, LARGEST)
            store_group(s, scale, head, target, t, GRANULARITY)
            if not SYMMETRIC:
                store_group(z, zero, head, target, t, GRANULARITY)
            raise_flag(flags, tl.program_id(1), unfit(s, z), TOO_LARGE)
        # Pass two: quantize each part and put it into its bits of the byte.
        packed = tl.zeros([PAGE, WIDTH_PAD], tl.int32)
        for part in tl.static_range(PARTS):
            value = tl.load(x + part * part_step, mask=real, other=0.0).to(tl.float32)
            if GRANULARITY == "channel":
                low = tl.min(value, 0)[None, :]
                high = tl.max(value, 0)[None, :]
                s, z = scale_and_zero(low, high, SYMMETRIC, LARGEST)
                channel = part * WIDTH + d
                store_channels(s, scale, head, target, channel, d < WIDTH)
                if not SYMMETRIC:
                    store_channels(z, zero, head, target, channel, d < WIDTH)
                raise_flag(flags, tl.program_id(1), unfit(s, z), TOO_LARGE)
            if not SYMMETRIC:
                value = value - z.to(tl.float32)
            steps = tl.div_rn(value, s.to(tl.float32) + tl.zeros_like(value))
            if FORMAT == "fp8":
                packed = fp8_bits(steps)
            else:
                code = tl.clamp(round_even(steps), LOWEST, LARGEST)
                packed |= (code.to(tl.int32) + OFFSET) << (part * BITS)
        tl.store(out, packed.to(tl.uint8), mask=real)


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
def scale_and_zero(low, high, SYMMETRIC: tl.constexpr, LARGEST: tl.constexpr):
    """Scale and zero point of each group, float16, each rounded to the safe side.

    The scale reaches from the *stored* zero to the maximum. Symmetric: zero is 0.
    """
    if SYMMETRIC:
        z = tl.zeros_like(low).to(tl.float16)
        reach = tl.maximum(high, -low)
    else:
        z = half_floor(low)
        reach = high - z.to(tl.float32)
    ideal = tl.div_rn(reach, tl.full(reach.shape, LARGEST, tl.float32))
    return half_ceil(tl.maximum(ideal, 5.960464477539063e-08)), z  # at least 2^-24


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
    cold: Quantized,
    cold_pages: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    """Quantize full hot pages of keys, or of values, into cold ones.

    Args:
        hot: pool [kv_heads, pages, page_size, dim], any strides.
        hot_pages, cold_pages: int32 or int64 [pages], from where and to where.
        cold: pool of cold pages, any strides; written in place, bit for bit as
            `quantize_as` would.
        flags: int32 [kv_heads]; gets the bit TOO_LARGE where a group does not fit
            float16. What is written to such a page means nothing.

    Raises:
        UnsupportedBackend: a dtype or device that Triton does not run on, or a page
            size that is no power of two.

    Bytes (`budget.seal`): reads N·H·(P·D·h + 16) (scales per token or page: the page
    twice, the second time from cache; 16 for the page ids), writes N·H·(codes + scales
    + zeros of a page), for N pages of P tokens, H kv heads, dim D, h bytes an element.
    """
    for launch in prepare(hot, hot_pages, cold, cold_pages, flags):
        launch.run()


def prepare(hot, hot_pages, cold, cold_pages, flags) -> list[Launch]:
    """The launches of `seal`."""
    kv_heads, _, page_size, dim = hot.shape
    require(hot.device, hot.dtype)
    require_page(page_size)
    spec, codes, parts = cold.spec, stored_codes(cold), parts_of(cold)
    width = padded(dim // parts)
    return [
        Launch(
            seal_kernel,
            (len(hot_pages), kv_heads),
            {
                "hot": (hot, *hot.stride()),
                "codes": (codes, *codes.stride()),
                "scale": placed(cold.scale),
                "zero": placed(cold.zero),
                "hot_pages": hot_pages,
                "cold_pages": cold_pages,
                "flags": flags,
                "TOO_LARGE": TOO_LARGE,
                "FORMAT": spec.format,
                "GRANULARITY": spec.granularity,
                "SYMMETRIC": spec.symmetric,
                "LOWEST": -float(spec.largest_code) if spec.symmetric else 0.0,
                "LARGEST": float(spec.largest_code),
                "OFFSET": spec.offset if spec.fmt.kind == "int" else 0,
                "BITS": spec.fmt.bits,
                "PARTS": parts,
                "DIM": dim,
                "WIDTH_PAD": width,
                "PAGE": page_size,
            },
            warps=8 if page_size * width > 4096 else 4,
        )
    ]


def placed(x: torch.Tensor | None) -> tuple | None:
    """A tensor as the kernel takes it: pointer and strides."""
    return None if x is None else (x, *x.stride())
