"""The `append` and `seal` kernels against PyTorch, bit for bit."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    DEVICE,
    DTYPES,
    NAN,
    cases,
    made_up,
    new_flags,
    poisoned,
    strided,
)

import kvq_lib as kvq
from kvq_lib.kernels import reference
from kvq_lib.kernels.append import append
from kvq_lib.kernels.launch import NONFINITE, TOO_LARGE
from kvq_lib.kernels.seal import seal
from kvq_lib.quantize import quantize_as
from kvq_lib.storage import empty

DIMS = st.sampled_from([64, 80, 96, 128, 256])
PAGES = st.sampled_from([16, 32, 64])
SPECS = [
    kvq.Spec(name, granularity, symmetric)
    for name in ("int2", "int4", "int8")
    for granularity in ("page", "token", "channel")
    for symmetric in (True, False)
]
SPECS += [kvq.Spec("fp8", g) for g in ("page", "token", "channel")]
SPECS += [kvq.Spec("fp16"), kvq.Spec("fp4", "block")]
SPECS += [kvq.Spec(name, "static") for name in ("int4", "int8", "fp8")]


@st.composite
def stored_sides(draw, dim: int, aids: tuple[str, ...]):
    """A way to store pages of `dim` channels: of one spec, or of runs of channels; with
    aids, as far as it can have them."""
    spec = draw(st.sampled_from([*SPECS, *[kvq.Spec("fp4", "block"), None] * 3]))
    if spec is None:
        wide = 16 * draw(st.integers(0, min(2, dim // 16)))
        middle = 16 * draw(st.integers(0, (dim - wide) // 16))
        return kvq.Mixed(channels=(wide, middle, dim - wide - middle), aids=aids)
    try:
        return dataclasses.replace(spec, aids=aids)
    except kvq.UnsupportedScheme:
        return spec


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor: NaN equals itself, and -0 differs from 0."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@cases()
def test_append_writes_each_token_to_its_place(dtype, data):
    draw = data.draw
    tokens, kv_heads = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    dim, size, pages = draw(DIMS), draw(PAGES), 6
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    hot_dtype = draw(st.sampled_from(DTYPES))
    pools = [
        strided(draw, (kv_heads, pages, size, dim), hot_dtype, NAN) for _ in range(2)
    ]
    new = [strided(draw, (tokens, kv_heads, dim), dtype, 0.0) for _ in range(2)]
    for x in new:
        x.copy_(torch.randn(x.shape, generator=random))
    places = torch.randperm(pages * size, generator=random)[:tokens].to(DEVICE)
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    at = ((places // size).to(index), (places % size).to(index))

    expected = [pool.clone() for pool in pools]
    for pool, x in zip(expected, new, strict=True):
        reference.append(pool, places // size, places % size, x.to(hot_dtype))
    flags = new_flags(kv_heads)
    append(tuple(pools), *at, *new, flags)
    for pool, want in zip(pools, expected, strict=True):
        assert torch.equal(bits(pool), bits(want))
    assert flags.tolist() == [0] * kv_heads


@pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize(
    ("bad", "bit"),
    [
        (NAN, NONFINITE),
        (float("inf"), NONFINITE),
        (-float("inf"), NONFINITE),
        (1e6, TOO_LARGE),
        (-65520.0, TOO_LARGE),
        (65519.0, 0),
    ],
)
def test_append_flags_what_it_cannot_store(side, bad, bit):
    new = [torch.zeros(20, 2, 64, device=DEVICE) for _ in range(2)]
    new[side][17, 1, 33] = bad
    pools = tuple(
        torch.zeros(2, 2, 16, 64, dtype=torch.float16, device=DEVICE) for _ in range(2)
    )
    at = torch.arange(20, device=DEVICE)
    flags = new_flags(2)
    append(pools, at // 16, at % 16, *new, flags)
    assert flags.tolist() == [0, bit]


@pytest.mark.parametrize("hot_dtype", DTYPES, ids=str)
def test_append_flags_what_no_cold_page_could_hold(hot_dtype):
    new = [torch.zeros(3, 2, 64, device=DEVICE) for _ in range(2)]
    pools = [torch.zeros(2, 2, 16, 64, dtype=hot_dtype, device=DEVICE) for _ in new]
    at = torch.arange(3, device=DEVICE)
    for value, bit in ((65504.0, 0), (-65504.0, 0), (70000.0, TOO_LARGE)):
        new[1][2, 1, 33] = value
        flags = new_flags(2)
        append(tuple(pools), at // 16, at % 16, *new, flags, 65504.0)
        assert flags.tolist() == [0, bit]


def extreme(draw, shape, dtype, random) -> torch.Tensor:
    """Numbers of all sizes: spikes per channel, constants, subnormals, zeros."""
    kind = draw(st.sampled_from(["normal", "spikes", "constant", "tiny", "ties"]))
    x = torch.randn(shape, generator=random)
    if kind == "spikes":
        x *= 10 ** (1.5 * torch.randn(*shape[:2], 1, shape[3], generator=random))
    if kind == "constant":
        x = torch.randn(*shape[:2], 1, 1, generator=random).expand(shape)
    if kind == "tiny":
        x *= 1e-7
    if kind == "ties":
        x = torch.randint(-20, 21, shape, generator=random) / -2  # -0, too
    return x.clamp(-60000, 60000).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@cases()
def test_seal_gives_the_bits_of_quantize(dtype, data):
    dim, size = data.draw(DIMS), data.draw(PAGES)
    aids = data.draw(st.sampled_from([(), ("clip",)]))
    seal_and_compare(data.draw, data.draw(stored_sides(dim, aids)), dtype, dim, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@cases(16)  # channel after channel, which takes the interpreter long
def test_seal_feeds_errors_back_as_quantize_does(dtype, data):
    dim, size = data.draw(st.sampled_from([16, 48, 64, 80])), data.draw(PAGES)
    aids = data.draw(st.sampled_from([("feedback",), ("clip", "feedback")]))
    seal_and_compare(data.draw, data.draw(stored_sides(dim, aids)), dtype, dim, size)


def seal_and_compare(draw, side, dtype, dim, size) -> None:
    kv_heads, pages = draw(st.integers(1, 2)), 4
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    hot = strided(draw, (kv_heads, pages, size, dim), dtype, NAN)
    count = draw(st.integers(1, 2))
    source, target = (
        torch.randperm(pages, generator=random)[:count].to(DEVICE) for _ in range(2)
    )
    hot[:, source] = extreme(draw, (kv_heads, count, size, dim), dtype, random)
    aids = made_up(side, kv_heads, dim, random)
    cold = poisoned(draw, side, (kv_heads, pages), size, dim, aids)
    expected = [t.clone() for t in cold.tensors]
    aids = [run.aid for run in cold.parts]  # where the pages are
    sealed = quantize_as(hot[:, source], side, aids)
    for store, new in zip(expected, sealed.tensors, strict=True):
        store[:, target] = new
    flags = new_flags(kv_heads)
    for times in (1, 2):
        seal(hot, source, cold, target, flags)
        for got, want in zip(cold.tensors, expected, strict=True):
            assert torch.equal(bits(got), bits(want))
        for got, want in zip(cold.parts, sealed.parts, strict=True):
            assert (got.clipped is None) == (want.clipped is None)
            if got.clipped is not None:  # counted on
                assert torch.equal(got.clipped, times * want.clipped)
    assert flags.tolist() == [0] * kv_heads


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_seal_flags_a_group_that_does_not_fit(spec):
    hot = torch.zeros(2, 2, 16, 64, device=DEVICE)
    # A scale, a zero point or a value beyond float16, in the second head alone.
    hot[1, 1, 5, 40], hot[1, 1, 6, 40] = 3e8, -3e8
    aids = made_up(spec, 2, 64, torch.Generator())
    cold = empty(spec, (2, 2), 16, 64, DEVICE, aids)
    flags = new_flags(2)
    pages = torch.tensor([0, 1], device=DEVICE)
    seal(hot, pages, cold, pages, flags)
    if spec.granularity == "static":  # such a scale takes anything, and counts it
        assert flags.tolist() == [0, 0] and cold.clipped.tolist() == [0, 2]
        return
    assert flags.tolist() == [0, TOO_LARGE]
    with pytest.raises(kvq.ValueOutOfRange):
        quantize_as(hot, spec)


def test_every_e2m1_number_and_every_tie_rounds_as_pytorch_rounds():
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([numbers, ties, ties * (1 + 2**-20), ties * (1 - 2**-20)])
    near = torch.cat([near, -near])
    # 6 · 448 in a block of its own makes the page's scale 1; 6 makes each block's.
    page = torch.zeros(16, 64)
    page[-1, -1] = 6 * 448.0
    page[:, :48].unflatten(1, (3, 16))[..., 0] = 6.0
    places = page[:, :48].unflatten(1, (3, 16))[:2, :, 1:]
    places.copy_(torch.nn.functional.pad(near, (0, 90 - len(near))).view(2, 3, 15))
    hot, spec = page.view(1, 1, 16, 64).to(DEVICE), kvq.Spec("fp4", "block")
    cold, at = empty(spec, (1, 1), 16, 64, DEVICE), torch.zeros(1, dtype=torch.int64)
    seal(hot, at.to(DEVICE), cold, at.to(DEVICE), new_flags(1))
    assert cold.outer.item() == 1.0 and (cold.scale[0, 0, :2, :3] == 56).all()
    assert torch.equal(cold.codes, quantize_as(hot, spec).codes)
    back = cold.dequantize()[0, 0, :2, :48].unflatten(1, (3, 16))[..., 1:].cpu()
    assert set(back.abs().unique().tolist()) == set(numbers.tolist())


def test_every_e4m3_number_and_every_tie_rounds_as_pytorch_rounds():
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat(
        [numbers, ties, ties * (1 + 2**-20), ties * (1 - 2**-20), -numbers * 0.0]
    )
    # 448 in every page makes the scale 1, so that the steps are the numbers.
    pages = torch.zeros(-(-len(near) // (16 * 64 - 1)), 16 * 64)
    for page, part in zip(pages, near.split(16 * 64 - 1), strict=True):
        page[: len(part)], page[-1] = part, 448.0
    hot = pages.view(1, -1, 16, 64).to(DEVICE)
    spec = kvq.Spec("fp8", "page")
    cold = empty(spec, hot.shape[:2], 16, 64, DEVICE)
    at = torch.arange(hot.shape[1], device=DEVICE)
    seal(hot, at, cold, at, new_flags(1))
    assert torch.equal(cold.scale, torch.ones_like(cold.scale))
    assert torch.equal(cold.codes, quantize_as(hot, spec).codes)
