"""Scales that are codes, scales that calibration fixed, and mixed widths."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.quantize import quantize_as
from kvq_lib.storage import Aid, Runs, empty

#: Numbers of e2m1, and those of e4m3 that a scale can be.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
FP8 = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def normal(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def ones(x):
    return torch.ones(4, 32, dtype=torch.float64) * x


def only(row, channel, value):
    x = torch.zeros(4, 32, dtype=torch.float64)
    x[row, channel] = value
    return x


# -- fp4 with a scale for every block --------------------------------------------------

HARD = {
    "normal": normal(2, 3, 16, 64),
    "zeros": ones(0.0),
    "constant": ones(0.1),
    "constant, negative": ones(-1000.3),
    "one-sided": normal(5, 48).abs() + 3,
    "one number": only(2, 17, 5.0),
    "a page of outliers": only(0, 0, 65504.0) + normal(4, 32),
    "subnormal": 2.0**-24 * normal(4, 32),
    "tiny": 1e-9 * normal(4, 32),
    "blocks far apart": torch.cat([normal(8, 16), 1e-4 * normal(8, 16)], dim=1),
    "near the end": ones(65504.0 * 2600),
    "one token": normal(1, 16),
}


def check_fp4(x):
    """Half the distance between neighbours of e2m1, in units of the block's scale;
    everything recomputed in float64 from the bytes."""
    z = kvq.quantize(x, "fp4")
    assert z.shape == x.shape
    assert z.scale.shape == (*x.shape[:-1], x.shape[-1] // 16)
    assert z.outer.shape == (*x.shape[:-2], 1, 1) and z.outer.dtype == torch.float16
    assert z.scale.dtype == torch.uint8
    # Page and block scales: the smallest that serve.
    blocks = x.double().abs().unflatten(-1, (-1, 16)).amax(-1)
    largest = blocks.amax((-2, -1), keepdim=True)
    outer = z.outer.double()
    assert (outer * 2688 >= largest * (1 - 1e-6)).all() and (outer >= 2.0**-24).all()
    below = torch.from_numpy(np.nextafter(z.outer.numpy(), np.float16(0))).double()
    assert ((below * 2688 < largest * (1 + 1e-6)) | (outer == 2.0**-24)).all()
    inner = z.scale.view(torch.float8_e4m3fn).double()
    wanted = blocks / 6 / outer
    assert (inner >= wanted * (1 - 1e-6)).all()
    smaller = torch.searchsorted(FP8, inner) - 1
    assert ((smaller < 0) | (FP8[smaller.clamp_min(0)] < wanted * (1 + 1e-6))).all()
    # Codes: the nearest number of e2m1.
    step = (inner * outer).repeat_interleave(16, -1)
    back = z.dequantize(torch.float64)
    steps = (back / step).abs()
    assert (torch.isin(steps, FP4)).all()
    nearest = ((x.double() / step).abs().unsqueeze(-1) - FP4).abs().amin(-1)
    assert ((x.double() - back).abs() <= (nearest + 1e-5) * step).all()
    place = torch.searchsorted(FP4, (x.double() / step).abs().clamp(max=5.999))
    gap = FP4[place] - FP4[(place - 1).clamp_min(0)]
    assert ((x.double() - back).abs() <= (gap / 2 + 1e-5) * step).all()
    assert torch.equal(z.dequantize(), back.float())
    return z


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp4_comes_back_within_half_the_step_of_its_block(name, dtype):
    check_fp4(HARD[name].to(dtype))


@settings(max_examples=100)
@given(data=st.data())
def test_any_page_of_fp4_comes_back_within_half_the_step_of_its_block(data):
    tokens, dim = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([16, 32]))
    number = st.one_of(
        st.floats(-60_000, 60_000, width=32),
        st.floats(-1, 1, width=32),
        st.sampled_from([0.0, 1e-9, 65504.0, -65504.0]),
    )
    values = data.draw(st.lists(number, min_size=tokens * dim, max_size=tokens * dim))
    check_fp4(torch.tensor(values).reshape(tokens, dim))


def test_a_block_of_zeros_is_zero_and_costs_its_page_nothing():
    x = HARD["normal"].clone()
    x[..., 16:32] = 0
    back = check_fp4(x).dequantize()
    assert (back[..., 16:32] == 0).all()
    others = [*range(16), *range(32, 64)]
    wanted = check_fp4(HARD["normal"][..., others]).dequantize()
    assert torch.equal(back[..., others], wanted)


def test_an_outlier_costs_its_own_block_alone():
    x = normal(16, 64)
    x[3, 20] = 300.0
    error = (x - kvq.quantize(x, "fp4").dequantize(torch.float64)).abs()
    clean = (x - kvq.quantize(x / 1, "int4", "token").dequantize(torch.float64)).abs()
    others = [d for d in range(64) if not 16 <= d < 32]
    assert error[3, others].max() < 0.6
    assert clean[3, others].max() > 1  # a scale per token is ruined by it


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_fp4_refuses_what_is_not_finite(bad):
    with pytest.raises(kvq.NonFiniteValue):
        kvq.quantize(only(1, 1, bad), "fp4")


def test_fp4_refuses_what_no_scale_can_reach():
    with pytest.raises(kvq.ValueOutOfRange, match="65504"):
        kvq.quantize(only(1, 1, 2688 * 65520.0), "fp4")
    check_fp4(only(1, 1, 2688 * 65504.0))


@pytest.mark.parametrize("dim", [8, 24, 40, 63, 72])
def test_fp4_wants_whole_blocks(dim):
    with pytest.raises(kvq.InvalidArgument, match=f"{dim}"):
        kvq.quantize(torch.zeros(4, dim), "fp4")
    with pytest.raises(kvq.InvalidArgument, match=f"{dim}"):
        kvq.Spec("fp4", "block").nbytes(16, dim)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 7, 16, 64])
def test_fp4_takes_four_bits_and_a_sixteenth_byte(dim, tokens):
    z = kvq.quantize(normal(3, tokens, dim), "fp4")
    wanted = tokens * dim // 2 + tokens * dim // 16 + 2
    assert z.nbytes == 3 * wanted == sum(t.nbytes for t in z.tensors)
    assert kvq.Spec("fp4", "block").nbytes(tokens, dim) == wanted
    assert z.bits_per_element == 8 * wanted / (tokens * dim)
    stored = empty(z.spec, (3,), tokens, dim)
    kinds = [(t.shape, t.dtype) for t in z.tensors]
    assert [(t.shape, t.dtype) for t in stored.tensors] == kinds


# -- static scales ---------------------------------------------------------------------


def static(fmt, *scales):
    aid = Aid(scale=torch.tensor(scales, dtype=torch.float16).view(-1, 1, 1, 1))
    return kvq.Spec(fmt, "static"), [aid]


def test_static_int8_codes_are_multiples_of_each_heads_own_scale():
    spec, aids = static("int8", 0.5, 0.25)
    x = torch.tensor([0.0, 0.24, 0.26, -1.0, 63.5, 63.8, 99.0, -1e5])
    x = x.expand(2, 1, 1, 8)
    z = quantize_as(x, spec, aids)
    assert z.unpack()[0].flatten().tolist() == [0, 0, 1, -2, 127, 127, 127, -127]
    assert z.unpack()[1].flatten().tolist() == [0, 1, 1, -4, 127, 127, 127, -127]
    assert z.dequantize()[0].flatten()[4] == 63.5
    # 63.8 / 0.5 = 127.6 rounds to 128: clipped. 63.5 is 127 exactly: not.
    assert z.clipped.tolist() == [3, 4]
    assert z.nbytes == 16 and z.bits_per_element == 8


def test_static_fp8_codes_are_e4m3_in_units_of_the_scale():
    spec, aids = static("fp8", 2.0)
    x = torch.tensor([0.0, 2.0, 3.1, -896.0, 897.0, 1e4]).view(1, 1, 1, 6)
    z = quantize_as(x, spec, aids)
    wanted = (x / 2).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(z.codes, wanted.view(torch.uint8))
    assert torch.equal(z.dequantize(), wanted.float() * 2)
    assert z.clipped.tolist() == [2]


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), fmt=st.sampled_from(["int2", "int4", "int8"]))
def test_clipped_counts_what_rounds_beyond_the_largest_code(seed, fmt):
    spec, aids = static(fmt, 0.013, 0.004)
    x = normal(2, 3, 5, 8, seed=seed).numpy()
    z = quantize_as(torch.from_numpy(x), spec, aids)
    largest = {"int2": 1, "int4": 7, "int8": 127}[fmt]
    scale = aids[0].scale.numpy().astype(np.float64)
    counted = (np.abs(np.rint(x / scale)) > largest).sum((1, 2, 3))
    assert z.clipped.tolist() == counted.tolist()
    assert counted.sum() > 0
    wanted = np.clip(np.rint(x / scale), -largest, largest)
    assert (z.unpack().numpy() == wanted).all()


def test_what_follows_the_data_never_clips():
    for spec in (kvq.Spec("int8", "token"), kvq.Spec("fp4", "block")):
        assert quantize_as(normal(2, 3, 4, 16), spec).clipped is None
    shape = kvq.KVShape(1, 2, 16)
    assert kvq.PagedKVCache(shape, "int4", num_pages=2).clipped.sum() == 0


# -- clip ------------------------------------------------------------------------------


def clip(*parts):
    return [Aid(clip=torch.tensor(parts, dtype=torch.float32).view(-1, 1, 1, 1))]


@pytest.mark.parametrize("granularity", ["page", "token", "channel"])
@pytest.mark.parametrize("fmt", ["int2", "int4", "int8"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_clip_keeps_its_part_of_each_groups_range(fmt, granularity, symmetric):
    dims = {"page": (-2, -1), "token": (-1,), "channel": (-2,)}[granularity]
    x, parts = normal(2, 3, 16, 32), (0.6, 0.85)
    spec = kvq.Spec(fmt, granularity, symmetric, ("clip",))
    z = quantize_as(x, spec, clip(*parts))
    keep = torch.tensor(parts, dtype=torch.float32).double().view(-1, 1, 1, 1)
    bits = int(fmt[3:])
    if symmetric:
        codes = 2 ** (bits - 1) - 1
        low, high = 0, x.abs().amax(dims, keepdim=True) * keep
    else:
        codes = 2**bits - 1
        low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
        margin = (high - low) * (1 - keep) / 2
        low, high = low + margin, high - margin
        zero = z.zero.double()
        assert (zero <= low + 1e-9).all()  # rounded down, by less than a float16 step
        assert (zero > low - low.abs() * 2.0**-10 - 2.0**-24).all()
        low = zero
    ideal = (high - low) / codes
    scale = z.scale.double()
    assert (scale >= ideal * (1 - 1e-6)).all()
    assert (scale <= ideal * (1 + 2.0**-10) + 2.0**-24).all()
    steps = ((x - low) / scale).round()
    least, most = (-codes, codes) if symmetric else (0, codes)
    beyond = (steps < least) | (steps > most)
    assert beyond.any()
    assert z.clipped.tolist() == beyond.flatten(1).sum(1).tolist()
    assert torch.equal(z.unpack().double(), steps.clamp(least, most))


def test_a_clip_of_one_changes_nothing():
    x = normal(2, 3, 16, 32)
    for symmetric in (True, False):
        plain = kvq.Spec("int4", "token", symmetric)
        clipping = kvq.Spec("int4", "token", symmetric, ("clip",))
        a, b = quantize_as(x, plain), quantize_as(x, clipping, clip(1.0, 1.0))
        assert all(map(torch.equal, a.tensors, b.tensors))
        assert b.clipped.tolist() == [0, 0]


# -- mixed widths ----------------------------------------------------------------------

WAYS = {
    64: (16, 16, 32),
    80: (0, 48, 32),
    96: (96, 0, 0),
    128: (32, 0, 96),
    256: (64, 128, 64),
}


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("dim", WAYS)
def test_mixed_bytes_and_bits_are_counted_from_the_tensors(dim, tokens):
    a, b, c = WAYS[dim]
    mixed = kvq.Mixed(channels=WAYS[dim])
    z = quantize_as(normal(2, 3, tokens, dim), mixed)
    wanted = tokens * (2 * a + b + c // 2 + 2 * (b > 0) + 4 * (c > 0))
    assert isinstance(z, Runs) and z.shape == (2, 3, tokens, dim)
    assert z.nbytes == 6 * wanted == sum(t.nbytes for t in z.tensors)
    assert mixed.nbytes(tokens, dim) == wanted
    assert z.bits_per_element == pytest.approx(8 * wanted / (tokens * dim), rel=1e-12)
    stored = empty(mixed, (2, 3), tokens, dim)
    kinds = [(t.shape, t.dtype) for t in z.tensors]
    assert [(t.shape, t.dtype) for t in stored.tensors] == kinds


@pytest.mark.parametrize("dim", WAYS)
def test_each_run_comes_back_as_stored_by_itself(dim):
    x = normal(2, 3, 16, dim)
    z = quantize_as(x, kvq.Mixed(channels=WAYS[dim]))
    recipes = [("fp16", None, True), ("int8", "token", True), ("int4", "token", False)]
    start, parts = 0, []
    for width, how in zip(WAYS[dim], recipes, strict=True):
        if width:
            parts.append(kvq.quantize(x[..., start : start + width], *how))
        start += width
    assert [p.spec.format for p in z.parts] == [p.spec.format for p in parts]
    assert all(map(torch.equal, z.tensors, [t for p in parts for t in p.tensors]))
    back = torch.cat([p.dequantize() for p in parts], dim=-1)
    assert torch.equal(z.dequantize(), back)


def test_mixed_widths_of_another_head_dim_are_refused():
    mixed = kvq.Mixed(channels=(16, 16, 32))
    with pytest.raises(kvq.UnsupportedScheme, match="80 channels"):
        quantize_as(torch.zeros(4, 80), mixed)
    with pytest.raises(kvq.UnsupportedScheme, match=r"kvq\.fit"):
        kvq.Mixed().nbytes(16, 64)


def test_as_many_aids_as_runs():
    mixed = kvq.Mixed(channels=(16, 16, 32))
    with pytest.raises(kvq.InvalidArgument, match="2 aids for 3 runs"):
        quantize_as(torch.zeros(1, 1, 4, 64), mixed, [Aid(), Aid()])
