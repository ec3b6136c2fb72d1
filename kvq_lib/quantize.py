"""Scales and zero points: a tensor of keys or values to codes and back.

The library's one equation is

    x̂ = code · scale + zero

with the zero point in units of x, and no zero point when symmetric. Scales and zero
points are stored as float16, and rounding them must not cost accuracy: the zero rounds
down, the scale is computed from the *stored* zero and rounds up. Every element then
comes back within half a stored step. Static scales and "clip" give that up beyond their
range, and "feedback" everywhere: it moves an element before it is rounded.
"""

from collections.abc import Sequence

import torch

from .errors import InvalidArgument, NonFiniteValue, ValueOutOfRange
from .formats import (
    FP4_LARGEST,
    FP8_LARGEST,
    decode_fp4,
    decode_fp8,
    encode_fp4,
    encode_fp8,
    fp8_ceil,
    half_ceil,
    half_floor,
    pack,
)
from .specs import BLOCK, GROUP_DIMS, Mixed, Side, Spec
from .storage import Aid, Quantized, Runs, checked_aids, clips, step_of

#: The smallest positive float16. No scale is smaller, so none is ever zero.
SMALLEST_SCALE = 2.0**-24


def quantize(
    x: torch.Tensor,
    format: str = "int8",
    granularity: str | None = "token",
    symmetric: bool | None = None,
) -> Quantized:
    """Quantize keys or values.

    Args:
        x: [..., tokens, dim], float. A scale never spans more than the last two dims.
        format: "int2", "int4", "int8", "fp4", "fp8" or "fp16".
        granularity: "page" (one scale for all tokens and channels), "token" (one for
            each token), "channel" (one for each channel). Ignored for fp16 and fp4,
            which have none and their own.
        symmetric: no zero point. Default: False for int2 and int4, True for the rest.

    Raises:
        InvalidArgument: x is not a float tensor of two dims or more, or is empty.
        NonFiniteValue: x holds NaN or infinity.
        ValueOutOfRange: a scale or zero point exceeds float16.
        UnsupportedScheme: unknown format or granularity.
    """
    if symmetric is None:
        symmetric = format not in ("int2", "int4")
    if format == "fp16":
        granularity = None
    if format == "fp4":
        granularity = "block"
    return quantize_as(x, Spec(format, granularity, symmetric))


@torch.no_grad()
def quantize_as(
    x: torch.Tensor, side: Side, aids: Sequence[Aid] = ()
) -> Quantized | Runs:
    """Quantize x [..., tokens, dim] by a `Spec`, or by a `Mixed`; see `quantize`.

    Args:
        aids: what calibration found, one for each run of `side`; then x is
            [kv_heads, pages, tokens, dim], in the coordinates that the aids are for.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise InvalidArgument(f"x must be a tensor of floats, got {got}")
    if x.dim() < 2 or x.numel() == 0:
        raise InvalidArgument(
            f"x must be [..., tokens, dim] and not empty, got shape {tuple(x.shape)}"
        )
    if x.is_meta or x.layout != torch.strided:
        raise InvalidArgument(f"x must be a dense tensor, got {x.device}, {x.layout}")
    runs = side.runs(x.shape[-1])
    aids = checked_aids(side, x.shape[-1], aids)
    for spec, width in runs:
        spec.fmt.packed_width(width)
        spec.scale_shape(x.shape[-2], width)
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    if not torch.isfinite(x).all():
        raise NonFiniteValue("x holds NaN or infinity")
    slices = x.split([width for _, width in runs], dim=-1)
    parts = [
        _quantize(part, spec, aid)
        for part, (spec, _), aid in zip(slices, runs, aids, strict=True)
    ]
    return Runs(tuple(parts), side) if isinstance(side, Mixed) else parts[0]


def _quantize(x: torch.Tensor, spec: Spec, aid: Aid) -> Quantized:
    if spec.format == "fp16":
        half = x.to(torch.float16)
        _must_fit(half, x, "a value")
        return Quantized(half.contiguous().view(torch.uint8), None, None, spec)
    scale, zero, outer = _scale_and_zero(x, spec, aid)
    step = step_of(scale, outer, x.dtype)
    shift = None if zero is None else zero.to(x.dtype)
    clipped = None
    if clips(spec):
        steps = (x if shift is None else x - shift) / step
        steps = steps.round() if spec.fmt.kind == "int" else steps
        beyond = steps != steps.clamp(*_code_range(spec))
        clipped = beyond.flatten(1).sum(1)
    if aid.feedback is not None:
        codes = _codes_with_feedback(x, step, shift, spec, aid.feedback)
    else:
        codes = _codes(x, step, shift, spec)
    packed = pack(codes, spec.fmt.bits)
    return Quantized(packed, scale, zero, spec, outer, aid, clipped)


def _scale_and_zero(x: torch.Tensor, spec: Spec, aid: Aid):
    """Scale and zero point of every group, float16, each rounded to the safe side; and
    the scale of the page, for fp4."""
    dims = GROUP_DIMS[spec.granularity]
    if spec.granularity == "static":
        return aid.scale.expand(*x.shape[:-2], 1, 1), None, None
    if spec.granularity == "block":
        return _block_scales(x)
    if spec.symmetric:
        zero = None
        reach = x.abs().amax(dims, keepdim=True)
        if aid.clip is not None:
            reach = reach * aid.clip
    else:
        low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
        if aid.clip is not None:
            margin = (high - low) * ((1 - aid.clip) * 0.5)
            low, high = low + margin, high - margin
        zero = half_floor(low)
        _must_fit(zero, low, "a zero point")
        reach = high - zero.to(x.dtype)
    scale = safe_scale(reach / spec.largest_code)
    return scale, zero, None


def _block_scales(x: torch.Tensor):
    """Scales of fp4: e4m3 for each block of channels, float16 for the page.

    The page's scale is such that e4m3's largest number serves its largest block.
    """
    size = x.abs().unflatten(-1, (-1, BLOCK)).amax(-1)
    largest = size.amax((-2, -1), keepdim=True)
    outer = safe_scale(largest / (FP8_LARGEST * FP4_LARGEST))
    return fp8_ceil(size / FP4_LARGEST / outer.to(x.dtype)), None, outer


def _code_range(spec: Spec) -> tuple[float, float]:
    return (-spec.largest_code if spec.symmetric else 0), spec.largest_code


def _codes(x, step, shift, spec: Spec) -> torch.Tensor:
    """Codes before packing, uint8, of x [...]; step and shift broadcast against it."""
    steps = (x if shift is None else x - shift) / step
    if spec.format == "fp8":
        return encode_fp8(steps)
    if spec.format == "fp4":
        return encode_fp4(steps)
    codes = steps.round().clamp(*_code_range(spec)) + spec.offset
    return codes.to(torch.uint8)


def _numbers(codes, step, shift, spec: Spec) -> torch.Tensor:
    """x̂ of codes before packing, in step's dtype."""
    if spec.format == "fp8":
        x = decode_fp8(codes).to(step.dtype)
    elif spec.format == "fp4":
        x = decode_fp4(codes).to(step.dtype)
    else:
        x = codes.to(step.dtype) - spec.offset
    x = x * step
    return x if shift is None else x + shift


def _codes_with_feedback(x, step, shift, spec: Spec, feedback) -> torch.Tensor:
    """Codes of x [kv_heads, ..., dim], channel by channel: each one's rounding error is
    taken out of the channels after it, by `Aid.feedback`.

    GPTQ (Frantar and others, 2022) rounds weights this way; here it is keys or values.
    """

    def by_channel(t):
        return t.expand_as(x).movedim(-1, 0).contiguous()

    rest, step = by_channel(x).clone(), by_channel(step)
    shift = None if shift is None else by_channel(shift)
    codes = torch.empty(rest.shape, dtype=torch.uint8, device=x.device)
    # [channel, later channel, kv_heads, 1, …]
    shares = feedback.to(x.dtype).permute(1, 2, 0)
    shares = shares.reshape(*shares.shape, *[1] * (x.dim() - 2))
    for d, column in enumerate(rest):
        z = None if shift is None else shift[d]
        codes[d] = _codes(column, step[d], z, spec)
        error = column - _numbers(codes[d], step[d], z, spec)
        rest[d + 1 :] -= shares[d, d + 1 :] * error
    return codes.movedim(0, -1).contiguous()


def safe_scale(ideal: torch.Tensor) -> torch.Tensor:
    """The float16 scale that is at least `ideal`, and at least the smallest."""
    ideal = ideal.clamp_min(SMALLEST_SCALE)
    scale = half_ceil(ideal)
    _must_fit(scale, ideal, "a scale")
    return scale


def _must_fit(stored: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.isfinite(stored).all():
        worst = wanted.abs().max().item()
        raise ValueOutOfRange(
            f"{what} of magnitude {worst:.6g} does not fit float16 (largest: 65504)"
        )
