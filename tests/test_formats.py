"""Number formats: what a code means, and where it lies in a byte."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.formats import (
    FORMATS,
    decode_fp4,
    decode_fp8,
    encode_fp4,
    encode_fp8,
    format_of,
    fp8_ceil,
    half_ceil,
    half_floor,
    pack,
    unpack,
)

INTS = [2, 4, 8]

#: Every float16 but NaN, in order of size; infinities included.
HALVES = np.sort(np.arange(65536, dtype=np.uint16).view(np.float16))
HALVES = HALVES[~np.isnan(HALVES)]


@pytest.mark.parametrize("bits", INTS)
@given(data=st.data())
def test_packing_and_unpacking_gives_the_codes_back(bits, data):
    dim = data.draw(st.integers(1, 24)) * 8 // bits
    rows = data.draw(st.integers(1, 4))
    seed = data.draw(st.integers(0, 2**32))
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (3, rows, dim), generator=draw).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, rows, dim * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


def test_packing_leaves_its_input_as_it_was():
    codes = torch.arange(16, dtype=torch.uint8)
    pack(codes, 4)
    assert torch.equal(codes, torch.arange(16, dtype=torch.uint8))


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [2, 4])
def test_a_byte_holds_channels_that_are_one_nth_of_the_row_apart(bits, dim):
    # int4: d and d + D/2; int2: d, d + D/4, d + D/2, d + 3D/4; low bits first.
    per_byte = 8 // bits
    codes = torch.randint(1 << bits, (dim,), dtype=torch.uint8)
    packed = pack(codes, bits).tolist()
    assert len(packed) == dim // per_byte
    for d, byte in enumerate(packed):
        for n in range(per_byte):
            found = (byte >> (n * bits)) % (1 << bits)
            assert found == codes[d + n * dim // per_byte].item()


def test_fp8_decoding_is_exact_for_all_254_codes_that_are_not_nan():
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).float()
    number = ~torch.isnan(wanted)
    assert number.sum() == 254
    found = decode_fp8(codes)[number]
    assert torch.equal(found, wanted[number])
    # torch.equal takes -0 for 0: the sign must survive, too.
    assert torch.equal(torch.signbit(found), torch.signbit(wanted[number]))


def test_fp8_codes_of_numbers_decode_to_themselves():
    codes = torch.arange(256, dtype=torch.uint8)
    number = (codes & 0x7F) != 0x7F
    assert torch.equal(encode_fp8(decode_fp8(codes[number])), codes[number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp8_rounds_to_the_nearest_number(dtype):
    codes = torch.arange(0x7F, dtype=torch.uint8)
    numbers = decode_fp8(codes).double()
    x = torch.rand(20_000, dtype=torch.float64) * 460
    x[:10_000] = x[:10_000] / 4096  # half of them where the format is subnormal
    found = decode_fp8(encode_fp8(x.to(dtype))).double()
    nearest = (x[:, None] - numbers).abs().amin(dim=1)
    assert ((x - found).abs() <= nearest + 1e-5).all()
    assert torch.equal(decode_fp8(encode_fp8(-x.to(dtype))).double(), -found)


# -- fp4 -------------------------------------------------------------------------------

#: Magnitudes of e2m1 by the definition: exponent bias 1, codes 0 and 1 are subnormal.
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_fp4_decodes_to_the_numbers_of_e2m1():
    found = decode_fp4(torch.arange(16, dtype=torch.uint8))
    assert found.dtype == torch.float32
    assert found.tolist() == [*FP4, *(-x for x in FP4)]
    assert torch.signbit(found).tolist() == [False] * 8 + [True] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp4_codes_of_numbers_encode_to_themselves(dtype):
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(encode_fp4(decode_fp4(codes).to(dtype)), codes)


@pytest.mark.parametrize("code", range(7))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp4_ties_go_to_even_codes_and_the_rest_to_the_nearest(code, dtype):
    low, high = FP4[code], FP4[code + 1]
    tie = torch.tensor((low + high) / 2, dtype=dtype)
    below = torch.nextafter(tie, torch.zeros_like(tie))
    above = torch.nextafter(tie, torch.full_like(tie, 9))
    x = torch.stack([below, tie, above])
    even = code if code % 2 == 0 else code + 1
    assert encode_fp4(x).tolist() == [code, even, code + 1]
    assert encode_fp4(-x).tolist() == [8 + code, 8 + even, 9 + code]


@given(st.floats(-10, 10, width=32))
def test_fp4_rounds_to_the_nearest_number(x):
    found = decode_fp4(encode_fp4(torch.tensor([x]))).item()
    assert abs(found - x) == min(abs(s * y - x) for y in FP4 for s in (1, -1))
    assert found * x >= 0


@pytest.mark.parametrize("value", [6.0, 6.1, 7.0, 8.0, 1e6, 3e38, float("inf")])
def test_fp4_clamps_what_is_too_large(value):
    codes = encode_fp4(torch.tensor([value, -value]))
    assert codes.tolist() == [7, 15]


# -- fp8 upwards -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp8_ceil_is_the_smallest_positive_number_that_is_no_smaller(dtype):
    numbers = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers.to(dtype)  # all positive ones but NaN, in order
    codes = torch.arange(1, 0x7F, dtype=torch.uint8)
    assert numbers[-1] == 448
    assert torch.equal(fp8_ceil(numbers), codes)
    assert torch.equal(fp8_ceil(torch.nextafter(numbers, 0 * numbers)), codes)
    # From just above a number up to the next one: the next one.
    above = torch.nextafter(numbers[:-1], numbers[1:])
    assert torch.equal(fp8_ceil(above), codes[1:])
    for part in (0.25, 0.5, 0.75):
        between = numbers[:-1] + part * numbers.diff()
        assert torch.equal(fp8_ceil(between), codes[1:])


def test_fp8_ceil_is_never_zero():
    x = torch.tensor([0.0, 1e-45, 2.0**-10, 2.0**-9])
    assert decode_fp8(fp8_ceil(x)).tolist() == [2.0**-9] * 4


@pytest.mark.parametrize("value", [448.0, 449.0, 464.0, 480.0, 500.0, 1e30, 6e4])
@pytest.mark.parametrize("sign", [1, -1])
def test_fp8_clamps_what_is_too_large(value, sign):
    x = torch.tensor([sign * value])
    assert decode_fp8(encode_fp8(x)).item() == sign * 448.0


def test_rounding_to_half_leaves_every_float16_as_it_is():
    for dtype in (torch.float32, torch.float64):
        x = torch.from_numpy(HALVES).to(dtype)
        for rounded in (half_ceil(x), half_floor(x)):
            assert rounded.dtype == torch.float16
            assert torch.equal(rounded.to(dtype), x)


@pytest.mark.parametrize("part", [0.001, 0.25, 0.5, 0.75, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_between_neighbours_rounding_takes_the_upper_or_the_lower_one(dtype, part):
    finite = HALVES[np.isfinite(HALVES)].astype(np.float64)
    finite = np.unique(finite)  # -0 and 0 are one number
    low, high = finite[:-1], finite[1:]
    x = torch.from_numpy(low + part * (high - low)).to(dtype)
    exact = x.double().numpy()
    between = (exact > low) & (exact < high)
    assert between.sum() > 60_000
    ceil, floor = (f(x).double().numpy()[between] for f in (half_ceil, half_floor))
    assert np.array_equal(ceil, high[between])
    assert np.array_equal(floor, low[between])


@given(st.floats(-70_000, 70_000, width=32))
def test_ceil_and_floor_enclose_any_number_tightly(value):
    x = torch.tensor([value], dtype=torch.float64)
    i = np.searchsorted(HALVES.astype(np.float64), value)
    assert half_ceil(x).double().item() == HALVES[i].astype(np.float64)
    j = np.searchsorted(HALVES.astype(np.float64), value, side="right") - 1
    assert half_floor(x).double().item() == HALVES[j].astype(np.float64)


@pytest.mark.parametrize("tiny", [1e-45, 1e-30, 1e-9, 2.0**-25])
def test_the_smallest_numbers_round_to_the_smallest_half_or_to_zero(tiny):
    x = torch.tensor([tiny], dtype=torch.float64)
    assert half_ceil(x).item() == 2.0**-24
    assert half_floor(x).item() == 0.0
    assert half_ceil(-x).item() == 0.0
    assert half_floor(-x).item() == -(2.0**-24)


def test_beyond_float16_there_is_only_infinity():
    x = torch.tensor([65505.0, 1e9])
    assert half_ceil(x).tolist() == [float("inf")] * 2
    assert half_floor(x).tolist() == [65504.0] * 2
    assert half_floor(-x).tolist() == [-float("inf")] * 2


@pytest.mark.parametrize(
    ("name", "dim", "width"),
    [
        ("int2", 80, 20),
        ("int4", 80, 40),
        ("int8", 80, 80),
        ("fp4", 80, 40),
        ("fp8", 80, 80),
        ("fp16", 80, 160),
    ],
)
def test_a_row_of_codes_takes_the_bytes_of_its_bits(name, dim, width):
    assert FORMATS[name].packed_width(dim) == width
    assert FORMATS[name].per_byte == max(1, dim // width)


@pytest.mark.parametrize(("name", "dim"), [("int4", 7), ("int2", 6), ("int2", 1)])
def test_a_row_that_ends_inside_a_byte_is_refused(name, dim):
    with pytest.raises(kvq.InvalidArgument, match=f"{dim}"):
        FORMATS[name].packed_width(dim)


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(
        kvq.UnsupportedScheme, match=r"int3.*int2, int4, int8, fp4, fp8"
    ):
        format_of("int3")
