"""Number formats: what one code means, and how codes pack into bytes.

A *code* is what a cache stores for one number. Integer codes of b bits run from 0 to
2^b - 1 when asymmetric. Symmetric ones mean -(2^(b-1) - 1) to 2^(b-1) - 1 and are
stored with an offset of 2^(b-1), so that every stored code is an unsigned integer.
FP4 (e2m1), FP8 (e4m3) and float16 codes are the bits of the number itself.
"""

from dataclasses import dataclass

import torch

from .errors import InvalidArgument, UnsupportedScheme


@dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
        name: the name used in schemes and in `quantize`.
        bits: bits per code.
        kind: "int" or "float".
        largest: for floats, the largest finite magnitude.
    """

    name: str
    bits: int
    kind: str
    largest: float = 0.0

    @property
    def per_byte(self) -> int:
        """Codes in one byte (1 for formats of a byte or more)."""
        return max(1, 8 // self.bits)

    def packed_width(self, dim: int) -> int:
        """Bytes for `dim` codes.

        Raises:
            InvalidArgument: if `dim` codes do not fill whole bytes.
        """
        if dim % self.per_byte:
            raise InvalidArgument(
                f"{self.name} packs {self.per_byte} channels a byte; dim is {dim}, "
                f"which is not a multiple of {self.per_byte}"
            )
        return dim * self.bits // 8


#: The largest numbers of e2m1 and e4m3.
FP4_LARGEST, FP8_LARGEST = 6.0, 448.0

FORMATS = {
    f.name: f
    for f in (
        Format("int2", 2, "int"),
        Format("int4", 4, "int"),
        Format("int8", 8, "int"),
        Format("fp4", 4, "float", largest=FP4_LARGEST),
        Format("fp8", 8, "float", largest=FP8_LARGEST),
        Format("fp16", 16, "float", largest=65504.0),
    )
}


def format_of(name: str) -> Format:
    """The format called `name`.

    Raises:
        UnsupportedScheme: if there is none.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise UnsupportedScheme(
            f"unknown number format {name!r}; known: {', '.join(FORMATS)}"
        )
    return FORMATS[name]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned codes [..., dim], uint8, into bytes [..., dim * bits / 8].

    Byte i of a row holds channels i, i + n, i + 2n, … where n is the number of bytes,
    the first of them in the lowest bits. A kernel can then multiply contiguous slices
    of the query with each nibble and never interleave.
    """
    if bits == 8:
        return codes
    parts = codes.chunk(8 // bits, dim=-1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], start=1):
        packed |= part << (i * bits)
    return packed


def unpack(
    packed: torch.Tensor, bits: int, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """The inverse of `pack`: bytes [..., dim * bits / 8] to unsigned codes [..., dim].

    `dtype` is that of the result. Codes go to it directly: on a CPU each detour
    through another integer type costs more than the attention that follows.
    """
    if bits == 8:
        return packed.to(dtype)
    width, mask = packed.shape[-1], (1 << bits) - 1
    codes = torch.empty(
        *packed.shape[:-1], width * 8 // bits, dtype=dtype, device=packed.device
    )
    for i in range(8 // bits):
        codes[..., i * width : (i + 1) * width] = (packed >> (i * bits)) & mask
    return codes


def encode_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 (sign, 4 exponent bits, 3 mantissa bits); returns its bits, uint8.

    Values beyond ±448 become ±448: casts of other formats overflow to infinity, so
    the clamp is explicit.
    """
    return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_fp8(codes: torch.Tensor) -> torch.Tensor:
    """Bits of e4m3 numbers, uint8, to float32; exact for all 254 codes but NaN.

    Without FP8 hardware: shift the bits into a float16, whose exponent has one bit
    more and a bias larger by 8, and multiply by 2^8.
    """
    wide = codes.to(torch.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.view(torch.float16).float() * 256.0


def fp8_ceil(x: torch.Tensor) -> torch.Tensor:
    """The smallest positive e4m3 number that is at least x, 0 ≤ x ≤ 448; its bits."""
    codes = encode_fp8(x)
    codes += decode_fp8(codes).to(x.dtype) < x  # bits of positive numbers are in order
    return codes.clamp_min(1)


def encode_fp4(x: torch.Tensor) -> torch.Tensor:
    """Round to e2m1 (sign, 2 exponent bits, 1 mantissa bit); returns its bits, uint8,
    in the low nibble.

    Its numbers are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Ties go to even codes, what is beyond
    ±6 to ±6.
    """
    size = x.abs().clamp(max=FP4_LARGEST)
    # The step is 0.5 below 2, 1 below 4 and 2 from there on. Codes count steps.
    small = (size * 2).round()
    middle = size.round() + 2
    large = (size * 0.5).round() + 4
    code = torch.where(size < 2, small, torch.where(size < 4, middle, large))
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def decode_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Bits of e2m1 numbers, uint8 0 to 15, to float32.

    Shifted into a float16, whose exponent has three bits more and a bias larger by 14,
    and multiplied by 2^14.
    """
    wide = codes.to(torch.int16)
    half = ((wide & 0x8) << 12) | ((wide & 0x7) << 9)
    return half.view(torch.float16).float() * 16384.0


def half_ceil(x: torch.Tensor) -> torch.Tensor:
    """The smallest float16 that is at least x (infinity beyond 65504)."""
    half = x.to(torch.float16)
    bits = half.view(torch.int16)
    successor = torch.where(bits >= 0, bits + 1, bits - 1).view(torch.float16)
    return torch.where(half.to(x.dtype) < x, successor, half)


def half_floor(x: torch.Tensor) -> torch.Tensor:
    """The largest float16 that is at most x (minus infinity below -65504)."""
    return -half_ceil(-x)
