"""The `extend` kernel against PyTorch in float64."""

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from kernel_bounds import excess
from kernel_cases import DTYPES, NAN, SCALE, caches, cases, new_flags

from kvq_lib.kernels import extend, launch
from kvq_lib.kernels.launch import Tiling


def run(case, tiling=None, tables=None):
    flags = new_flags(case.hot[0].shape[0])
    out = torch.full_like(case.q, NAN)
    tables = tables or case.tables
    for step in extend.prepare(
        case.q,
        out,
        case.hot,
        case.cold,
        tables.extend,
        tables.law,
        flags,
        SCALE,
        tiling,
    ):
        step.run()
    assert flags.tolist() == [0] * len(flags)
    return out


@st.composite
def chunked(draw, dtype, longest=200):
    """A case in which some sequence has two queries or more."""
    case = draw(caches(dtype, chunks=True, longest=longest, most=2))
    if max(case.lengths) > 1:
        return case
    return draw(chunked(dtype, longest))


@st.composite
def tilings(draw):
    tile = draw(st.sampled_from([16, 32, 64]))
    slices = draw(st.sampled_from([256, 32]))
    return Tiling(draw(st.sampled_from([32, 64])), tile, tile, slice=slices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@cases()
def test_every_query_of_a_chunk_reads_what_the_law_says(dtype, data):
    case = data.draw(chunked(dtype))
    tiling = data.draw(tilings())
    used = excess(run(case, tiling), *case.oracle())
    note(f"{used:.2f} of the allowed error")
    assert used <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@cases(20)
def test_extend_agrees_with_full_attention_on_the_dequantized_cache(dtype, data):
    case = data.draw(chunked(dtype, longest=70))
    _, allowed = case.oracle()
    out = run(case, Tiling(64, 32, 32))
    assert excess(out, case.full_attention(), allowed) <= 1


def test_a_query_that_is_not_finite_sets_the_flag_of_its_head():
    case = chunked(torch.float16, longest=40).example()
    kv_heads = case.hot[0].shape[0]
    q = case.q.clone()
    q[-1, 0, 0] = NAN
    flags, tables = new_flags(kv_heads), case.tables
    extend.extend(q, case.hot, case.cold, tables.extend, tables.law, flags, SCALE)
    # NaN in the scores is told, too.
    assert flags.tolist()[1:] == [0] * (kv_heads - 1)
    assert flags[0] & launch.NONFINITE
