"""Tensors and constants as the kernels take them."""

from typing import Any

import torch
import triton.language as tl

from ..errors import InvalidArgument
from ..specs import Spec
from ..storage import Quantized, Runs
from .launch import DTYPES, NONFINITE, OVERFLOW, padded


def pool_arguments(pool: torch.Tensor) -> tuple[tuple, tuple[int, int]]:
    """A hot pool as a kernel takes it, and its strides inside a page."""
    return (pool, pool.stride(0), pool.stride(1)), (pool.stride(2), pool.stride(3))


def placed(x: torch.Tensor | None) -> tuple | None:
    """A tensor as a kernel takes it: pointer and strides."""
    return None if x is None else (x, *x.stride())


def cold_arguments(
    cold: Quantized, parts: int, start: int = 0, first: int = 0
) -> tuple[tuple, tuple]:
    """Cold keys or values, or a run of them, as a kernel takes them: pools of codes,
    scales, zeros and outer scales, and their constant SIDE; see `cold`.

    Args:
        parts: slices of channels to read them in.
        start: the first channel.
        first: the first of the query's slices.
    """
    spec, codes = cold.spec, stored_codes(cold)
    granularity = spec.granularity or "none"
    if granularity == "static":
        granularity = "page"  # that its pages lie in one place is in the strides

    def place(x):
        return None if x is None else (x, x.stride(0), x.stride(1))

    def step(x):
        return 0 if x is None else x.stride(3 if granularity == "channel" else 2)

    width = cold.shape[-1] // parts
    side = (
        spec.format,
        granularity,
        spec.offset,
        spec.symmetric,
        2.0 if spec.format == "fp8" else 2.0**spec.fmt.bits,
        codes.stride(2),
        codes.stride(3),
        step(cold.scale),
        step(cold.zero),
        spec.fmt.per_byte,
        unit_of(spec),
        parts,
        width,
        padded(width),
        start,
        first,
        cold.scale.stride(3) if granularity == "block" else 0,
    )
    pools = (codes, cold.scale, cold.zero, cold.outer)
    return tuple(map(place, pools)), side


def code_arguments(spec: Spec) -> dict[str, Any]:
    """What the kernels that make codes are told about them."""
    return {
        "FORMAT": spec.format,
        "GRANULARITY": spec.granularity,
        "SYMMETRIC": spec.symmetric,
        "LOWEST": -float(spec.largest_code) if spec.symmetric else 0.0,
        "LARGEST": float(spec.largest_code),
        "OFFSET": spec.offset,
        "BITS": spec.fmt.bits,
    }


def unit_of(spec: Spec) -> float:
    """What `small_numbers` divides by; for fp4, what the scales of blocks are in."""
    if spec.fmt.kind == "float":
        return 1.0 if spec.format == "fp16" else 256.0
    return 512.0 if spec.fmt.per_byte > 1 and not spec.offset else 1.0


def run_arguments(keys: "Quantized | Runs", most: int) -> tuple[tuple, tuple]:
    """The runs of cold keys, each as `cold_arguments` gives it, in slices of `most`
    channels. The SIDEs are three, None where there is no run."""
    pools, sides, start, first = (), (), 0, 0
    for run in keys.parts:
        width = run.shape[-1]
        parts = sliced(width, run.spec.fmt.per_byte, most)
        pool, side = cold_arguments(run, parts, start, first)
        pools, sides = (*pools, pool), (*sides, side)
        start, first = start + width, first + parts
    return pools, (*sides, None, None)[:3]


def sliced(width: int, parts: int, most: int) -> int:
    """How many slices of at most `most` channels: `parts`, or twice, four times, …"""
    while width // parts > most and width % (2 * parts) == 0:
        parts *= 2
    return parts


def stored_codes(cold: Quantized) -> torch.Tensor:
    """The codes in their own dtype: bytes, or float16 for fp16."""
    if cold.spec.format != "fp16":
        return cold.codes
    try:
        return cold.codes.view(torch.float16)
    except RuntimeError as error:
        raise InvalidArgument(f"pool of float16 bytes: {error}") from None


def attention_arguments(q, hot, keys, values, tiling) -> dict[str, Any]:
    """What `decode` and `extend` take alike."""
    dim, kv_heads = q.shape[2], hot[0].shape[0]
    hot_k, inner_k = pool_arguments(hot[0])
    hot_v, inner_v = pool_arguments(hot[1])
    cold_k, cold_v, key_sides, value_side = None, None, (None,) * 3, None
    k_parts, v_parts = sliced(dim, 1, tiling.slice), 1
    if keys is not None:
        cold_k, key_sides = run_arguments(keys, tiling.slice)
        v_parts = values.spec.fmt.per_byte
        cold_v, value_side = cold_arguments(values, v_parts)
        if len(keys.parts) == 1:
            # Hot keys in the same slices: then the query is held in one form.
            k_parts = sliced(dim, keys.parts[0].spec.fmt.per_byte, tiling.slice)
    cold_dot, hot_dot = dot_dtypes(q, hot[0])
    return {
        "hot_k": hot_k,
        "hot_v": hot_v,
        "cold_k": cold_k,
        "cold_v": cold_v,
        "NONFINITE": NONFINITE,
        "OVERFLOW": OVERFLOW,
        "KEYS": key_sides[0],
        "KEYS_2": key_sides[1],
        "KEYS_3": key_sides[2],
        "VALUES": value_side,
        "HOT_K": inner_k,
        "HOT_V": inner_v,
        "CHANNEL": q.stride(2),
        "K_PARTS": k_parts,
        "V_PARTS": v_parts,
        "K_PAD": padded(dim // k_parts),
        "V_PAD": padded(dim // v_parts),
        "DIM": dim,
        "DIM_PAD": padded(dim),
        "GROUP": q.shape[1] // kv_heads,
        "ROWS": tiling.rows,
        "PAGE": hot[0].shape[2],
        "COLD_DOT": cold_dot,
        "HOT_DOT": hot_dot,
    }


def dot_dtypes(q: torch.Tensor, hot: torch.Tensor) -> tuple:
    """Triton dtypes of the products with cold and with hot pages.

    Codes are exact in float16, and `tiles` keeps q in its range, for bfloat16 models
    too. Hot pages are multiplied in their own dtype, unless q has more bits.
    """
    if q.dtype == torch.float32:
        return tl.float32, tl.float32
    if hot.dtype == torch.float16 or hot.dtype == q.dtype:
        return tl.float16, DTYPES[hot.dtype]
    return tl.float16, tl.float32
