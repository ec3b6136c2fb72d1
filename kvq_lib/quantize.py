"""Scales and zero points: a tensor of keys or values to codes and back.

The library's one equation is

    x̂ = code · scale + zero

with the zero point in units of x, and no zero point when symmetric. Scales and zero
points are stored as float16, and rounding them must not cost accuracy: the zero rounds
down, the scale is computed from the *stored* zero and rounds up. Every element then
comes back within half a stored step.
"""

from dataclasses import dataclass, replace

import torch

from .checks import float_dtype, whole
from .errors import InvalidArgument, NonFiniteValue, UnsupportedScheme, ValueOutOfRange
from .formats import (
    Format,
    decode_fp8,
    encode_fp8,
    format_of,
    half_ceil,
    half_floor,
    pack,
    unpack,
)

#: A group is one page, one token or one channel of a [tokens, dim] block. The value is
#: the dims over which its minimum and maximum are taken.
GROUP_DIMS = {"page": (-2, -1), "token": (-1,), "channel": (-2,)}

#: The smallest positive float16. No scale is smaller, so none is ever zero.
SMALLEST_SCALE = 2.0**-24


@dataclass(frozen=True)
class Spec:
    """How one side of the cache, keys or values, is stored.

    Attributes:
        format: "int2", "int4", "int8", "fp8" or "fp16".
        granularity: which numbers share a scale: "page", "token" or "channel".
            None for fp16, which has no scale.
        symmetric: True for no zero point. Floats are always symmetric.

    Raises:
        UnsupportedScheme: for a combination that does not exist.
        InvalidArgument: `symmetric` is neither True nor False.
    """

    format: str
    granularity: str | None = None
    symmetric: bool = True

    def __post_init__(self):
        fmt = format_of(self.format)
        if not isinstance(self.symmetric, bool):
            raise InvalidArgument(f"symmetric is a bool, got {self.symmetric!r}")
        if self.format == "fp16":
            if self.granularity is not None or not self.symmetric:
                raise UnsupportedScheme(
                    "fp16 stores numbers as they are: no granularity, no zero point; "
                    f"got granularity={self.granularity!r}, symmetric={self.symmetric}"
                )
        elif self.granularity not in tuple(GROUP_DIMS):  # it need not be hashable
            raise UnsupportedScheme(
                f"granularity is one of {', '.join(GROUP_DIMS)}; "
                f"got {self.granularity!r} for {self.format}"
            )
        if fmt.kind == "float" and not self.symmetric:
            raise UnsupportedScheme(f"{self.format} is symmetric: it has no zero point")

    @property
    def fmt(self) -> Format:
        """The number format."""
        return format_of(self.format)

    @property
    def offset(self) -> int:
        """What to subtract from a stored integer code to get its signed value."""
        return 1 << (self.fmt.bits - 1) if self.symmetric else 0

    @property
    def largest_code(self) -> float:
        """Magnitude of the largest code: 127 for symmetric int8, 15 for int4, …"""
        if self.fmt.kind == "float":
            return self.fmt.largest
        return (
            (1 << (self.fmt.bits - 1)) - 1
            if self.symmetric
            else ((1 << self.fmt.bits) - 1)
        )

    def scale_shape(self, tokens: int, dim: int) -> tuple[int, int] | None:
        """Shape of the scales of one [tokens, dim] block; None without scales."""
        if self.granularity is None:
            return None
        group = GROUP_DIMS[self.granularity]
        return (1 if -2 in group else tokens, 1 if -1 in group else dim)

    def nbytes(self, tokens: int, dim: int) -> int:
        """Bytes that one [tokens, dim] block takes: codes, scales and zero points.

        Raises:
            InvalidArgument: a size that is not a whole number ≥ 1, or a dim that the
                format cannot pack.
        """
        tokens = whole("tokens", tokens, at_least=1)
        dim = whole("dim", dim, at_least=1)
        codes = tokens * self.fmt.packed_width(dim)
        shape = self.scale_shape(tokens, dim)
        if shape is None:
            return codes
        return codes + shape[0] * shape[1] * (2 if self.symmetric else 4)


@dataclass(frozen=True)
class Quantized:
    """Quantized blocks: what `quantize` returns, and what a pool of cold pages is.

    Attributes:
        codes: packed codes, uint8 [..., tokens, bytes].
        scale: float16, broadcasts against [..., tokens, dim]; None for fp16.
        zero: float16, as scale, in units of x; None when symmetric.
        spec: the recipe that made it.
        shape: shape of the numbers it stands for.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    spec: Spec

    @property
    def shape(self) -> tuple[int, ...]:
        dim = self.codes.shape[-1] * 8 // self.spec.fmt.bits
        return (*self.codes.shape[:-1], dim)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold it: codes, then scale and zero where they exist."""
        return [t for t in (self.codes, self.scale, self.zero) if t is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points, counted from the tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def bits_per_element(self) -> float:
        """Bits stored for each number, scales and zero points included."""
        count = self.codes.numel() * 8 // self.spec.fmt.bits
        return 8 * self.nbytes / count

    def unpack(self) -> torch.Tensor:
        """What the codes mean, [..., tokens, dim], before scale and zero.

        Integers (int16) for integer formats, signed when symmetric; float32 for fp8
        and fp16. `unpack() * scale + zero` is `dequantize()`.
        """
        if self.spec.format == "fp16":
            return self.codes.view(torch.float16).float()
        if self.spec.format == "fp8":
            return decode_fp8(self.codes)
        return unpack(self.codes, self.spec.fmt.bits, torch.int16) - self.spec.offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """x̂ = codes · scale + zero, [..., tokens, dim].

        Computed in float32, or in float64 for that dtype. Rounding x̂ to float32 adds
        up to 2^-24 of its magnitude to the half step of the codes; a smaller dtype adds
        its own rounding, and float16 saturates at 65504.

        Raises:
            InvalidArgument: `dtype` is not one of floats of 16 bits or more.
        """
        float_dtype("dtype", dtype)
        if dtype.itemsize < 4:
            x, limit = self.dequantize(torch.float32), torch.finfo(dtype).max
            return x.clamp_(-limit, limit).to(dtype)
        if self.spec.fmt.kind == "float":
            x = self.unpack().to(dtype)
        else:
            # In place and without integers between: this is the path of every token.
            x = unpack(self.codes, self.spec.fmt.bits, dtype)
            if self.spec.offset:
                x -= self.spec.offset
        if self.scale is not None:
            x *= self.scale.to(dtype)
        if self.zero is not None:
            x += self.zero.to(dtype)
        return x

    def map(self, fn) -> "Quantized":
        """The same with `fn` applied to each tensor (indexing, moving, cloning)."""
        return replace(
            self,
            codes=fn(self.codes),
            scale=None if self.scale is None else fn(self.scale),
            zero=None if self.zero is None else fn(self.zero),
        )


def empty(
    spec: Spec, lead: tuple[int, ...], tokens: int, dim: int, device=None
) -> Quantized:
    """Zero-filled storage for blocks [*lead, tokens, dim] under `spec`."""
    codes = torch.zeros(
        *lead, tokens, spec.fmt.packed_width(dim), dtype=torch.uint8, device=device
    )
    shape = spec.scale_shape(tokens, dim)
    if shape is None:
        return Quantized(codes, None, None, spec)
    scale = torch.zeros(*lead, *shape, dtype=torch.float16, device=device)
    zero = None if spec.symmetric else torch.zeros_like(scale)
    return Quantized(codes, scale, zero, spec)


def quantize(
    x: torch.Tensor,
    format: str = "int8",
    granularity: str | None = "token",
    symmetric: bool | None = None,
) -> Quantized:
    """Quantize keys or values.

    Args:
        x: [..., tokens, dim], float. A scale never spans more than the last two dims.
        format: "int2", "int4", "int8", "fp8" or "fp16".
        granularity: "page" (one scale for all tokens and channels), "token" (one for
            each token), "channel" (one for each channel). Ignored for fp16.
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
    return quantize_as(x, Spec(format, granularity, symmetric))


@torch.no_grad()
def quantize_as(x: torch.Tensor, spec: Spec) -> Quantized:
    """Quantize x [..., tokens, dim] by a `Spec`; see `quantize`."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise InvalidArgument(f"x must be a tensor of floats, got {got}")
    if x.dim() < 2 or x.numel() == 0:
        raise InvalidArgument(
            f"x must be [..., tokens, dim] and not empty, got shape {tuple(x.shape)}"
        )
    if x.is_meta or x.layout != torch.strided:
        raise InvalidArgument(f"x must be a dense tensor, got {x.device}, {x.layout}")
    spec.fmt.packed_width(x.shape[-1])
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    if not torch.isfinite(x).all():
        raise NonFiniteValue("x holds NaN or infinity")
    if spec.format == "fp16":
        half = x.to(torch.float16)
        _must_fit(half, x, "a value")
        return Quantized(half.contiguous().view(torch.uint8), None, None, spec)

    scale, zero = _scale_and_zero(x, spec)
    shifted = x if zero is None else x - zero.to(x.dtype)
    steps = shifted / scale.to(x.dtype)
    if spec.format == "fp8":
        return Quantized(encode_fp8(steps), scale, zero, spec)
    lowest = -spec.largest_code if spec.symmetric else 0
    codes = steps.round().clamp(lowest, spec.largest_code) + spec.offset
    return Quantized(pack(codes.to(torch.uint8), spec.fmt.bits), scale, zero, spec)


def _scale_and_zero(x: torch.Tensor, spec: Spec):
    """Scale and zero point of every group, float16, each rounded to the safe side."""
    dims = GROUP_DIMS[spec.granularity]
    if spec.symmetric:
        zero = None
        reach = x.abs().amax(dims, keepdim=True)
    else:
        lowest = x.amin(dims, keepdim=True)
        zero = half_floor(lowest)
        _must_fit(zero, lowest, "a zero point")
        reach = x.amax(dims, keepdim=True) - zero.to(x.dtype)
    ideal = (reach / spec.largest_code).clamp_min(SMALLEST_SCALE)
    scale = half_ceil(ideal)
    _must_fit(scale, ideal, "a scale")
    return scale, zero


def _must_fit(stored: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.isfinite(stored).all():
        worst = wanted.abs().max().item()
        raise ValueOutOfRange(
            f"{what} of magnitude {worst:.6g} does not fit float16 (largest: 65504)"
        )
