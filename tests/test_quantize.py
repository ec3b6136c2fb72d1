"""Scales and zero points: everything comes back within half a stored step."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.formats import decode_fp8
from kvq_lib.storage import empty

INTS = [
    (fmt, granularity, symmetric)
    for fmt, granularity, symmetric in product(
        ("int2", "int4", "int8"), ("page", "token", "channel"), (False, True)
    )
]
ALL = [*INTS, *(("fp8", g, True) for g in ("page", "token", "channel"))]
LARGEST = {
    ("int2", False): 3,
    ("int4", False): 15,
    ("int8", False): 255,
    ("int2", True): 1,
    ("int4", True): 7,
    ("int8", True): 127,
}
DIMS = {"page": (-2, -1), "token": (-1,), "channel": (-2,)}
EPS = 2.0**-23


def seeded(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def uniform(*shape):
    return torch.rand(
        shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def column(*values):
    """A page whose rows all are `values`, repeated to 16 channels."""
    return torch.tensor(values, dtype=torch.float64).repeat(8, 16 // len(values))


def qwen_like():
    """Keys with a few biased channels, 600 times the median, as Qwen2.5 has."""
    x = seeded(2, 16, 64)
    x[..., 5] += 600 * x.abs().median()
    x[..., 40] -= 921 * x.abs().median()
    return x


HARD = {
    "constant 0.1": torch.full((3, 16, 16), 0.1, dtype=torch.float64),
    "constant -0.1": torch.full((16, 16), -0.1, dtype=torch.float64),
    "constant 1000.3": torch.full((16, 16), 1000.3, dtype=torch.float64),
    "zeros": torch.zeros(16, 16, dtype=torch.float64),
    "5 to 6": 5 + uniform(4, 16, 32),
    "601 to 603": 601 + 2 * uniform(4, 16, 32),
    "-603 to -601": -601 - 2 * uniform(4, 16, 32),
    "key bias": qwen_like(),
    "tiny": 1e-9 * seeded(2, 16, 16),
    "subnormal": 2.0**-24 * seeded(2, 16, 16),
    "one outlier": column(*([0.01] * 7), 3000.0),
    "both ends": column(-65504.0, 65504.0, 0.0, 1.0),
    "near the end": 65504 - uniform(16, 16) * 40,
    "near minus the end": -65504 + uniform(16, 16) * 40,
    "one token": seeded(1, 16),
    "normal": seeded(2, 3, 16, 64),
}


def assert_within_half_a_step(x, z):
    """Every element, in exact arithmetic on what is stored."""
    exact = z.unpack().double() * z.scale.double()
    if z.zero is not None:
        exact = exact + z.zero.double()
    if z.spec.format == "fp8":
        step = fp8_spacing(z.unpack().double()) * z.scale.double()
    else:
        step = z.scale.double().expand_as(exact)
    # The library computes in float32: allow the rounding of one division and one
    # subtraction, far below a step.
    slack = 4 * EPS * x.double().abs() + 64 * EPS * step
    error = (x.double() - exact).abs()
    assert (error <= step / 2 + slack).all(), (error / step).max()


def fp8_spacing(value):
    """Distance from an e4m3 number to the next one further from zero."""
    exponent = torch.frexp(value.abs().clamp_min(2.0**-6)).exponent - 1
    return 2.0 ** (exponent.double() - 3)


def check(x, fmt, granularity, symmetric):
    z = kvq.quantize(x, fmt, granularity=granularity, symmetric=symmetric)
    codes = z.unpack()
    assert codes.shape == x.shape == z.shape
    assert z.codes.dtype == torch.uint8
    assert z.codes.shape[:-1] == x.shape[:-1]
    assert z.scale.dtype == torch.float16
    assert (z.scale >= 2.0**-24).all() and torch.isfinite(z.scale).all()
    assert (z.zero is None) == symmetric
    if fmt != "fp8":
        assert not codes.is_floating_point()
        largest = LARGEST[fmt, symmetric]
        assert codes.min() >= (-largest if symmetric else 0)
        assert codes.max() <= largest
    assert_within_half_a_step(x, z)
    for dtype in (torch.float32, torch.float64):
        back = z.dequantize(dtype)
        assert back.dtype == dtype
        wanted = codes.to(dtype) * z.scale.to(dtype)
        if z.zero is not None:
            wanted += z.zero.to(dtype)
        assert torch.equal(back, wanted)
    return z


@pytest.mark.parametrize(("fmt", "granularity", "symmetric"), ALL)
@pytest.mark.parametrize("name", HARD)
def test_hard_groups_come_back_within_half_a_stored_step(
    name, fmt, granularity, symmetric
):
    for dtype in (torch.float64, torch.float32):
        check(HARD[name].to(dtype), fmt, granularity, symmetric)


@pytest.mark.parametrize(("fmt", "granularity", "symmetric"), ALL)
@settings(max_examples=40)
@given(data=st.data())
def test_any_group_comes_back_within_half_a_stored_step(
    fmt, granularity, symmetric, data
):
    tokens, dim = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([4, 8, 12]))
    number = st.one_of(
        st.floats(-60_000, 60_000, width=32),
        st.floats(-1, 1, width=32),
        st.sampled_from([0.1, -0.1, 601.5, 5.5, 1e-9, 65504.0, -65504.0, 0.0]),
    )
    values = data.draw(st.lists(number, min_size=tokens * dim, max_size=tokens * dim))
    x = torch.tensor(values, dtype=torch.float32).reshape(tokens, dim)
    check(x, fmt, granularity, symmetric)


@pytest.mark.parametrize(("fmt", "granularity", "symmetric"), ALL)
@settings(max_examples=40)
@given(
    center=st.floats(-50_000, 50_000, width=32),
    width=st.floats(2.0**-20, 1000, width=32),
    seed=st.integers(0, 1000),
)
def test_narrow_groups_far_from_zero_come_back_within_half_a_stored_step(
    fmt, granularity, symmetric, center, width, seed
):
    check(center + width * seeded(2, 4, 8, seed=seed), fmt, granularity, symmetric)


@pytest.mark.parametrize("granularity", DIMS)
@pytest.mark.parametrize("fmt", ["int2", "int4", "int8"])
@settings(max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    center=st.sampled_from([0.0, 0.1, 5.5, -602.0, 30_000.0]),
    spread=st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 100.0]),
)
def test_zero_rounds_down_and_scale_rounds_up(fmt, granularity, seed, center, spread):
    # float64 input, so that the reference below is exact but for its last bits.
    x = center + spread * seeded(3, 4, 8, seed=seed)
    z = kvq.quantize(x, fmt, granularity=granularity, symmetric=False)
    lowest = x.amin(DIMS[granularity], keepdim=True).numpy()
    zero = z.zero.numpy()
    assert (zero.astype(np.float64) <= lowest).all()
    above = np.nextafter(zero, np.float16(np.inf)).astype(np.float64)
    assert (above > lowest).all(), "the zero is not the largest float16 below"

    reach = x.amax(DIMS[granularity], keepdim=True).numpy() - zero.astype(np.float64)
    assert_rounded_up(z.scale, reach / LARGEST[fmt, False])


@pytest.mark.parametrize("granularity", DIMS)
@pytest.mark.parametrize("fmt", ["int2", "int4", "int8", "fp8"])
def test_a_symmetric_scale_rounds_up(fmt, granularity):
    x = seeded(5, 16, 32)
    z = kvq.quantize(x, fmt, granularity=granularity, symmetric=True)
    reach = x.abs().amax(DIMS[granularity], keepdim=True).numpy()
    assert_rounded_up(z.scale, reach / LARGEST.get((fmt, True), 448))


def assert_rounded_up(scale, ideal):
    """The scale is the smallest float16 that is at least `ideal`, and 2⁻²⁴ or more."""
    stored, ideal = scale.numpy(), np.maximum(ideal, 2.0**-24)
    assert (stored.astype(np.float64) >= ideal * (1 - 1e-12)).all()
    below = np.nextafter(stored, np.float16(0)).astype(np.float64)
    assert (below < ideal * (1 + 1e-12)).all()


@pytest.mark.parametrize(("fmt", "granularity", "symmetric"), ALL)
def test_a_scale_belongs_to_its_own_group_alone(fmt, granularity, symmetric):
    x = seeded(2, 3, 8, 16)
    z = kvq.quantize(x, fmt, granularity=granularity, symmetric=symmetric)
    shape = {"page": (1, 1), "token": (8, 1), "channel": (1, 16)}[granularity]
    assert z.scale.shape == (2, 3, *shape)
    # Another block's outlier must not touch this one.
    y = x.clone()
    y[1, 2] *= 1000
    other = kvq.quantize(y, fmt, granularity=granularity, symmetric=symmetric)
    for a, b in zip(z.tensors, other.tensors, strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1, :2], b[1, :2])
        alone = kvq.quantize(x[1, 2], fmt, granularity=granularity, symmetric=symmetric)
    for a, b in zip(z.tensors, alone.tensors, strict=True):
        assert torch.equal(a[1, 2], b)


def test_a_biased_channel_costs_its_neighbours_nothing_per_channel():
    # Qwen2.5's key bias ruins 4-bit keys scaled per token; per channel it is harmless.
    x = qwen_like()
    others = [d for d in range(64) if d not in (5, 40)]

    def error(granularity):
        z = kvq.quantize(x, "int4", granularity=granularity, symmetric=False)
        return (x - z.dequantize(torch.float64))[..., others].pow(2).mean().sqrt()

    assert error("channel") < 0.15
    assert error("token") > 5 * error("channel")


@pytest.mark.parametrize(("fmt", "granularity", "symmetric"), ALL)
def test_quantizing_loses_something(fmt, granularity, symmetric):
    # A cache that only bills fewer bits and keeps the numbers would show no error.
    x = seeded(4, 16, 32).float()
    z = kvq.quantize(x, fmt, granularity=granularity, symmetric=symmetric)
    error = (x - z.dequantize()).abs()
    assert (error > 0).double().mean() > 0.5


@pytest.mark.parametrize(("fmt", "granularity", "symmetric"), ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_inputs_are_taken_as_the_numbers_they_are(
    fmt, granularity, symmetric, dtype
):
    x = seeded(3, 8, 16).to(dtype)
    z = check(x, fmt, granularity, symmetric)
    same = kvq.quantize(x.float(), fmt, granularity=granularity, symmetric=symmetric)
    for a, b in zip(z.tensors, same.tensors, strict=True):
        assert torch.equal(a, b)


def test_two_bits_and_four_are_asymmetric_unless_asked():
    x = seeded(4, 8)
    assert kvq.quantize(x, "int2").zero is not None
    assert kvq.quantize(x, "int4").zero is not None
    assert kvq.quantize(x, "int8").zero is None
    assert kvq.quantize(x, "fp8").zero is None


def test_fp16_keeps_the_numbers_rounded_to_nearest():
    x = seeded(2, 4, 8)
    z = kvq.quantize(x, "fp16")
    assert z.codes.dtype == torch.uint8 and z.scale is None and z.zero is None
    assert z.shape == x.shape
    assert z.bits_per_element == 16
    assert torch.equal(z.dequantize(torch.float64), x.half().double())


def test_symmetric_codes_are_stored_with_an_offset():
    x = torch.tensor([[-127.0, 127.0, 0.0, 1.0]])
    z = kvq.quantize(x, "int8", granularity="token")
    assert z.scale.item() == 1.0
    assert z.unpack().tolist() == [[-127, 127, 0, 1]]
    assert z.codes.tolist() == [[1, 255, 128, 129]]


def test_fp8_codes_are_the_bits_of_the_scaled_numbers():
    x = torch.tensor([[448.0, -448.0, 1.0, 0.3]])
    z = kvq.quantize(x, "fp8", granularity="page")
    assert z.scale.item() == 1.0
    assert torch.equal(z.unpack(), decode_fp8(z.codes))
    assert torch.equal(z.codes, x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(
    ("fmt", "granularity", "symmetric", "bits"),
    [
        ("int8", "token", True, 8 + 16 / 64),
        ("int8", "token", False, 8 + 32 / 64),
        ("int4", "token", False, 4 + 32 / 64),
        ("int4", "channel", False, 4 + 32 / 16),
        ("int2", "channel", False, 2 + 32 / 16),
        ("int2", "page", True, 2 + 16 / 1024),
        ("fp8", "page", True, 8 + 16 / 1024),
    ],
)
def test_bytes_and_bits_are_counted_from_the_tensors(fmt, granularity, symmetric, bits):
    z = kvq.quantize(seeded(3, 16, 64), fmt, granularity, symmetric)
    assert z.nbytes == sum(t.numel() * t.element_size() for t in z.tensors)
    assert z.bits_per_element == bits
    stored = empty(z.spec, (3,), 16, 64)
    assert [(t.shape, t.dtype) for t in stored.tensors] == [
        (t.shape, t.dtype) for t in z.tensors
    ]
    assert z.nbytes == 3 * z.spec.nbytes(16, 64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", ["int2", "int4", "int8", "fp8", "fp16"])
def test_what_is_not_finite_is_refused(fmt, bad):
    x = seeded(2, 4, 8)
    x[1, 2, 3] = bad
    with pytest.raises(kvq.NonFiniteValue):
        kvq.quantize(x, fmt)


@pytest.mark.parametrize(
    ("fmt", "symmetric", "value"),
    [
        ("fp16", True, 65520.0),
        ("int8", True, 127 * 65520.0),
        ("int4", False, -65520.0),  # the zero point
        ("int2", False, 3 * 65536.0),  # the scale
        ("fp8", True, 448 * 65520.0),
    ],
)
def test_a_group_beyond_float16_is_refused(fmt, symmetric, value):
    x = torch.zeros(4, 8)
    x[1, 2] = value
    with pytest.raises(kvq.ValueOutOfRange, match="65504"):
        kvq.quantize(x, fmt, symmetric=symmetric)
    x[1, 2] = value / 65520 * 60_000  # and just inside it is taken
    kvq.quantize(x, fmt, symmetric=symmetric)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(8),
        torch.zeros(0, 8),
        torch.zeros(4, 0),
        torch.zeros(4, 8, dtype=torch.int32),
        [[1.0, 2.0]],
        torch.zeros(4, 7),
    ],
    ids=["one dim", "no token", "no channel", "integers", "a list", "odd dim"],
)
def test_what_is_no_block_of_numbers_is_refused(x):
    with pytest.raises(kvq.InvalidArgument):
        kvq.quantize(x, "int4")


@pytest.mark.parametrize(
    ("fmt", "granularity", "symmetric"),
    [
        ("int3", "token", None),
        ("int8", "tensor", None),
        ("int8", None, None),
        ("fp8", "page", False),
        ("fp16", None, False),
    ],
)
def test_what_does_not_exist_is_refused(fmt, granularity, symmetric):
    with pytest.raises(kvq.UnsupportedScheme):
        kvq.quantize(torch.zeros(4, 8), fmt, granularity, symmetric)


def test_the_input_is_left_as_it_was():
    x = seeded(4, 8).float()
    before = x.clone()
    for fmt in ("int2", "int4", "int8", "fp8", "fp16"):
        kvq.quantize(x, fmt)
    assert torch.equal(x, before)
