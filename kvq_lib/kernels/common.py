"""Device functions that several kernels share: codes to numbers and back.

A *part* is a slice of channels that one shift brings out of the packed bytes: int4 has
two (d and d + D/2), int2 four, wider formats one. Kernels work part by part, so that
channels are never interleaved.
"""

import triton
import triton.language as tl


@triton.jit
def numbers(
    raw,
    PART: tl.constexpr,
    FORMAT: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTOR: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What the codes of one part mean, times FACTOR (a power of two), in DTYPE.

    Exact. fp8 numbers come out divided by 256 (see `fp8_scaled`), fp4 numbers by 2^14:
    the caller has that in the scale. A float16 with the bits 0x6400 | c is 1024 + c,
    and with the code still shifted 1024 + UP · c: mask, or, and one multiply-add cost
    less than a shift and a conversion from integer.
    """
    if FORMAT == "fp16":
        return raw.to(DTYPE)
    elif FORMAT == "fp8":
        return (fp8_scaled(raw) * FACTOR).to(DTYPE)
    elif FORMAT == "fp4":
        return (fp4_scaled(raw, PART) * FACTOR).to(DTYPE)
    else:
        BITS: tl.constexpr = 2 if FORMAT == "int2" else (4 if FORMAT == "int4" else 8)
        UP: tl.constexpr = 1 << (PART * BITS)
        code = raw.to(tl.int16)
        if BITS < 8:
            code = code & (((1 << BITS) - 1) * UP)
        shifted = (code | 0x6400).to(tl.float16, bitcast=True)
        number = shifted * (FACTOR / UP) - (1024 / UP + OFFSET) * FACTOR
        return number.to(DTYPE)


@triton.jit
def small_numbers(
    raw,
    PART: tl.constexpr,
    FORMAT: tl.constexpr,
    OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What the codes of one part mean, divided by SIDE[UNIT] (see `tiles`), in DTYPE.

    Codes of 2 and 4 bits without an offset: their bits, read as a float16, are a
    subnormal number, 2^-24 times the code, or more for a part that lies higher in the
    byte. One multiplication makes all of them code / 512, exactly: one instruction less
    than `numbers`, which does the rest.
    """
    if OFFSET == 0 and (FORMAT == "int2" or FORMAT == "int4"):
        BITS: tl.constexpr = 2 if FORMAT == "int2" else 4
        UP: tl.constexpr = 1 << (PART * BITS)
        code = raw.to(tl.int16) & (((1 << BITS) - 1) * UP)
        return (code.to(tl.float16, bitcast=True) * (32768.0 / UP)).to(DTYPE)
    else:
        return numbers(raw, PART, FORMAT, OFFSET, 1.0, DTYPE)


@triton.jit
def fp8_scaled(raw):
    """e4m3 bits to float16, divided by 256: shift them; the exponent's bias differs."""
    wide = raw.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def fp4_scaled(raw, PART: tl.constexpr):
    """e2m1 bits, the low or the high ones of a byte, to float16, divided by 2^14."""
    wide = raw.to(tl.int16)
    if PART == 0:
        bits = ((wide & 0x8) << 12) | ((wide & 0x7) << 9)
    else:
        bits = ((wide & 0x80) << 8) | ((wide & 0x70) << 5)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def fp8_bits(x):
    """Round float32 to e4m3, to nearest even, saturating at 448; its bits, int32.

    By integer arithmetic on the float32's bits: Triton has no e4m3 below sm_89.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    # Normal: keep 3 of 23 mantissa bits, and move the exponent's bias from 127 to 7.
    odd = (size_bits >> 20) & 1
    normal = ((size_bits + 0x7FFFF + odd) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, the unit in the last place of 2^14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return ((bits >> 24) & 0x80) | tl.where(size < 0.015625, small, normal)


@triton.jit
def fp8_ceil(x):
    """The smallest positive e4m3 number that is at least x, 0 ≤ x ≤ 448; its bits."""
    bits = fp8_bits(x)
    bits += (fp8_scaled(bits).to(tl.float32) * 256.0 < x).to(tl.int32)
    return tl.maximum(bits, 1)


@triton.jit
def fp4_bits(x):
    """Round float32 to e2m1, to nearest even, saturating at 6; its bits, int32.

    The step is 0.5 below 2, 1 below 4 and 2 from there on. Codes count steps.
    """
    size = tl.minimum(tl.abs(x), 6.0)
    far = tl.where(size < 4.0, round_even(size) + 2.0, round_even(size * 0.5) + 4.0)
    code = tl.where(size < 2.0, round_even(size * 2.0), far).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 0x8)


@triton.jit
def half_ceil(x):
    """The smallest float16 that is at least x, a float32 (infinity beyond 65504)."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    successor = tl.where(bits >= 0, bits + 1, bits - 1).to(tl.int16)
    above = successor.to(tl.float16, bitcast=True)
    return tl.where(half.to(tl.float32) < x, above, half)


@triton.jit
def half_floor(x):
    """The largest float16 that is at most x, a float32."""
    return (-half_ceil(-x).to(tl.float32)).to(tl.float16)


@triton.jit
def round_even(x):
    """Round float32 below 2^22 to the nearest integer, ties to even.

    Adding 1.5 · 2^23 leaves no room for a fraction.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round float32 to DTYPE. Float16 saturates: a mean of values that float16 holds
    can pass 65504 by what quantizing and summing them added, less than a rounding."""
    if DTYPE == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(DTYPE)


@triton.jit
def is_finite(x):
    """False for NaN and infinities."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def raise_flag(flags, index, bad, BIT: tl.constexpr):
    """Set BIT of flags[index] if any of `bad`, a bool tile [n, m], is true."""
    found = tl.max(tl.max(bad.to(tl.int32), 1), 0)
    if found != 0:
        tl.atomic_or(flags + index, BIT)
