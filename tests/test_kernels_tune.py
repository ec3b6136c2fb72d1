"""Tuned tiles, with a clock that the test sets; and decode steps in CUDA graphs."""

import dataclasses
from itertools import chain

import pytest
import torch
from kernel_cases import DEVICE, SCALE, Case, excess, new_flags, put_cold

import kvq_lib as kvq
from kvq_lib.kernels import backend, decode, extend, launch, tune
from kvq_lib.quantize import empty


@pytest.fixture(autouse=True)
def nothing_remembered():
    tune.clear()
    yield
    tune.clear()


def small_case(lengths) -> Case:
    """Two int4 sequences of 70 and 33 tokens, on pages of 16."""
    scheme, ends = kvq.scheme("int4"), [70, 33]
    random = torch.Generator().manual_seed(1)
    hot = tuple(
        torch.randn(1, 8, 16, 64, generator=random).half().to(DEVICE) for _ in range(2)
    )
    cold = tuple(
        empty(spec, (1, 8), 16, 64, DEVICE) for spec in (scheme.keys, scheme.values)
    )
    hot_ids, cold_ids = [[3, 1, 4, 0, 5], [7, 2, 6]], [[1, 5, 2, 6, None], [0, 3, None]]
    for old, new in zip(chain(*hot_ids), chain(*cold_ids), strict=True):
        if new is not None:
            for pool, store in zip(hot, cold, strict=True):
                put_cold(pool, torch.tensor([old], device=DEVICE), store, new)
    q = torch.randn(sum(lengths), 4, 64, generator=random).half().to(DEVICE)
    law = scheme.law(16)
    return Case(law, scheme, ends, lengths, hot, cold, hot_ids, cold_ids, q)


def clock_for(best):
    """A timer that runs what it is given, and finds one tiling the fastest."""
    seen = []

    def timer(function):
        function()
        tiling = seen_tiling(function)
        seen.append(tiling)
        return 1.0 if tiling == best else 2.0

    return timer, seen


def seen_tiling(function) -> tuple[int, int, int, int]:
    """Rows, cold tile, warps and stages of the launches that a timed function runs."""
    (launches,) = (cell.cell_contents for cell in function.__closure__)
    made = launches[0].arguments
    tile = made.get("COLD_TILE", made.get("TILE"))
    return made["ROWS"], tile, launches[0].warps, launches[0].stages


def shape_of(tiling):
    return tiling.rows, tiling.cold, tiling.warps, tiling.stages


@pytest.mark.parametrize("kernel", ["decode", "extend"])
def test_the_fastest_tiles_are_remembered_and_used(kernel):
    case = small_case([1, 1] if kernel == "decode" else [5, 3])
    tables, flags = case.tables, new_flags(1)
    args = (case.q, case.hot, case.cold)
    if kernel == "decode":
        rest, law = (tables.decode, flags, SCALE), None
        default = launch.decode_tiling(80, 4, 64, torch.float16, 4)
        prepare = decode.prepare
    else:
        rest, law = (tables.extend, flags, SCALE), tables.law
        default = launch.extend_tiling(80, 4, 64, torch.float16)
        prepare = extend.prepare

    def chosen():
        step = (rest[0], *rest[1:]) if law is None else (rest[0], law, *rest[1:])
        (first, *_) = prepare(case.q, torch.empty_like(case.q), *args[1:], *step)
        return seen_tiling(timed(first))

    def timed(first):
        launches = [first]
        return lambda: launches

    best = tune.candidates(default, kernel)[-1]
    assert best != default and chosen() == shape_of(default)
    timer, seen = clock_for(shape_of(best))
    found, _ = tune.tune(*args, *rest, law=law, timer=timer)
    assert found == best and chosen() == shape_of(best)
    assert set(seen) == set(map(shape_of, tune.candidates(default, kernel)))
    tune.clear()
    assert chosen() == shape_of(default)


def test_every_candidate_gives_the_same_within_rounding():
    case = small_case([1, 1])
    expected, allowed = case.oracle()
    default = launch.decode_tiling(80, 4, 64, torch.float16, 4)
    for tiling in tune.candidates(default, "decode"):
        for splits in (1, 4):
            out = decode.decode(
                case.q, case.hot, case.cold, case.tables.decode, new_flags(1), SCALE,
                tiling, splits,
            )  # fmt: skip
            assert excess(out, expected, allowed) <= 1
    case = small_case([5, 3])
    expected, allowed = case.oracle()
    tables = case.tables
    default = launch.extend_tiling(80, 4, 64, torch.float16)
    for tiling in tune.candidates(default, "extend"):
        out = extend.extend(
            case.q, case.hot, case.cold, tables.extend, tables.law, new_flags(1), SCALE,
            tiling,
        )  # fmt: skip
        assert excess(out, expected, allowed) <= 1


def test_another_page_size_or_format_has_tiles_of_its_own():
    case = small_case([1, 1])
    key = launch.tiling_key("decode", 80, case.q, case.hot, case.cold)
    wide = tuple(pool.reshape(1, 4, 32, 64) for pool in case.hot)
    others = [
        launch.tiling_key("decode", 90, case.q, case.hot, case.cold),
        launch.tiling_key("extend", 80, case.q, case.hot, case.cold),
        launch.tiling_key("decode", 80, case.q, wide, case.cold),
        launch.tiling_key("decode", 80, case.q, case.hot, None),
        launch.tiling_key("decode", 80, case.q.float(), case.hot, case.cold),
    ]
    assert len({key, *others}) == 6


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a CUDA device")
def test_a_captured_decode_step_follows_changed_tables_and_lengths():
    long = small_case([1, 1])
    short = dataclasses.replace(long, ends=[49, 18])
    tables, flags = long.tables, new_flags(1)
    k, v = (torch.randn(2, 1, 64, device=DEVICE).half() for _ in range(2))
    pages = torch.tensor([5, 6], device=DEVICE)
    slots = torch.tensor([5, 0], device=DEVICE)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)

    def step():
        return backend.attend(
            long.q, k, v, long.hot, long.cold, pages, slots, (nothing, nothing),
            tables, flags, SCALE,
        )  # fmt: skip

    step()  # compiles, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for case in (long, short):
        # Tables of another width: what is left of the old rows is not read.
        for held, new in zip(tables.decode, case.tables.decode, strict=True):
            held[..., : new.shape[-1]].copy_(new)
        graph.replay()
        assert torch.equal(out, step())
        expected, allowed = case.oracle()
        assert excess(out, expected, allowed) <= 1
