"""The `decode` and `merge` kernels against PyTorch in float64."""

import pytest
import torch
from hypothesis import assume, given, note
from hypothesis import strategies as st
from kernel_bounds import SUM_STEPS, UNIT, excess
from kernel_cases import DEVICE, DTYPES, NAN, SCALE, caches, cases, new_flags

from kvq_lib.errors import UnsupportedBackend
from kvq_lib.kernels import decode, launch, merge
from kvq_lib.kernels.launch import Tiling


@st.composite
def tilings(draw, group):
    """Tiles smaller than a page, as large, and larger; sliced and whole channels."""
    rows = max(draw(st.sampled_from([1, 16])), 1 << (group - 1).bit_length())
    return Tiling(
        rows,
        cold=draw(st.sampled_from([16, 32, 64, 128])),
        hot=draw(st.sampled_from([16, 32, 64])),
        slice=draw(st.sampled_from([256, 32])),
    )


def run(case, tiling=None, splits=None):
    flags = new_flags(case.hot[0].shape[0])
    out = torch.full_like(case.q, NAN)
    for step in decode.prepare(
        case.q,
        out,
        case.hot,
        case.cold,
        case.tables.decode,
        flags,
        SCALE,
        tiling,
        splits,
    ):
        for buffer in step.arguments["partial"]:
            if buffer is not None and step.kernel is decode.decode_kernel:
                buffer.fill_(NAN)
        step.run()
    assert flags.tolist() == [0] * len(flags)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@cases()
def test_decode_is_attention_over_hot_and_cold_pages(dtype, data):
    case = data.draw(caches(dtype, chunks=False))
    tiling = data.draw(tilings(case.q.shape[1] // case.hot[0].shape[0]))
    splits = data.draw(st.sampled_from([1, 1, 2, 4, 8]))
    used = excess(run(case, tiling, splits), *case.oracle())
    note(f"{used:.2f} of the allowed error")
    assert used <= 1


@pytest.mark.parametrize("name", ["int4", "int4-kivi", "int2-kivi", "page-int4"])
@pytest.mark.parametrize("tile", [16, 32, 128])
@given(data=st.data())
@cases(8)
def test_each_way_of_reading_a_page(name, tile, data):
    # Part of a page, one page, several: each folds scales and zero points differently.
    case = data.draw(caches(torch.float32, False, most=1, name=name, size=32))
    assume(case.ends[0] > 32)
    group = case.q.shape[1] // case.hot[0].shape[0]
    rows = data.draw(st.sampled_from([16, 64]))  # fewer than the tile, or more
    tiling = Tiling(max(rows, 1 << (group - 1).bit_length()), cold=tile, hot=16)
    assert excess(run(case, tiling, splits=1), *case.oracle()) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@cases(20)
def test_decode_agrees_with_full_attention_on_the_dequantized_cache(dtype, data):
    case = data.draw(caches(dtype, chunks=False))
    _, allowed = case.oracle()
    assert excess(run(case), case.full_attention(), allowed) <= 1


@given(data=st.data())
@cases(10)
def test_splits_and_tiles_change_nothing_but_rounding(data):
    case = data.draw(caches(torch.float32, chunks=False))
    group = case.q.shape[1] // case.hot[0].shape[0]
    one, other = (
        run(case, data.draw(tilings(group)), splits).double() for splits in (1, 8)
    )
    assert excess(one, other, 2 * case.oracle()[1]) <= 1  # both round


def test_a_query_that_is_not_finite_sets_the_flag_of_its_head():
    case = caches(torch.float32, chunks=False).example()
    for bad in (NAN, float("inf"), -float("inf")):
        kv_heads = case.hot[0].shape[0]
        group = case.q.shape[1] // kv_heads
        q = case.q.clone()
        q[-1, (kv_heads - 1) * group, -1] = bad
        flags = new_flags(kv_heads)
        decode.decode(q, case.hot, case.cold, case.tables.decode, flags, SCALE)
        # NaN in the scores is told, too.
        assert flags.tolist()[:-1] == [0] * (len(flags) - 1)
        assert flags[-1] & launch.NONFINITE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    sequences=st.integers(1, 3),
    heads=st.integers(1, 3),
    splits=st.sampled_from([2, 4, 8, 64]),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    seed=st.integers(0, 2**31),
)
@cases()
def test_merge_is_log_sum_exp(dtype, sequences, heads, splits, dim, seed):
    random = torch.Generator().manual_seed(seed)
    maxima = 40 * torch.randn(sequences, heads, splits, generator=random)
    totals = 1 + 10 * torch.rand(sequences, heads, splits, generator=random)
    sums = torch.randn(sequences, heads, splits, dim, generator=random) + 2
    # Splits that read nothing: maximum -inf; what their sums hold must not matter.
    idle = torch.rand(sequences, heads, splits, generator=random) < 0.4
    idle[..., 0] = False
    maxima[idle], totals[idle], sums[idle] = -float("inf"), 0.0, NAN
    weights = torch.exp2((maxima - maxima.amax(-1, keepdim=True)).double())
    expected = (sums.nan_to_num() * weights.unsqueeze(-1)).sum(2)
    expected /= (totals * weights).sum(-1, keepdim=True)
    # Channels every other place of a wider tensor: strides are the caller's.
    wide = torch.full((sequences, heads, 2 * dim), NAN, dtype=dtype, device=DEVICE)
    out = wide[..., ::2]
    merge.merge(tuple(x.to(DEVICE) for x in (sums, maxima, totals)), out)
    # Roundings: weights and products in float32, and the output.
    absolute = (sums.nan_to_num().abs() * weights.unsqueeze(-1)).sum(2)
    absolute /= (totals * weights).sum(-1, keepdim=True)
    allowed = SUM_STEPS * UNIT[torch.float32] * absolute.norm(dim=-1)
    allowed += UNIT[dtype] * expected.norm(dim=-1)
    assert excess(out, expected.to(DEVICE), allowed.to(DEVICE)) <= 1
    assert wide[..., 1::2].isnan().all()


def test_bfloat16_is_refused_in_the_interpreter():
    if not launch.interpreted():
        assert launch.require(torch.device(DEVICE), torch.float16) is None
        return
    with pytest.raises(UnsupportedBackend, match="bfloat16"):
        launch.require(torch.device("cpu"), torch.bfloat16)
