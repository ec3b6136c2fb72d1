"""Tuned tiles, with a clock that the test sets; and decode steps in CUDA graphs."""

import dataclasses
from itertools import chain

import pytest
import torch
from kernel_bounds import excess
from kernel_cases import DEVICE, FITTED, FREE, SCALE, Case, fitted, new_flags, put_cold

import kvq_lib as kvq
from kvq_lib.kernels import backend, decode, extend, launch, tune
from kvq_lib.storage import empty
from kvq_lib.turns import Found, turns_of


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
    # How pages are sealed is no matter to who reads them.
    aided = dataclasses.replace(case.scheme.keys, aids=("clip",))
    keys = dataclasses.replace(case.cold[0], spec=aided)
    same = launch.tiling_key("decode", 80, case.q, case.hot, (keys, case.cold[1]))
    assert same == key


def captured(step, monkeypatch):
    """The output of a step, and a function that repeats its launches on the very same
    tensors: a CUDA graph on a GPU, and elsewhere the launches one by one."""
    step()  # compiles, which a capture must not
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        return out, graph.replay
    launches, run = [], launch.Launch.run
    with monkeypatch.context() as patch:
        patch.setattr(launch.Launch, "run", lambda self: launches.append(self))
        out = step()
    assert len(launches) >= 2
    return out, lambda: [run(one) for one in launches]


def test_a_captured_decode_step_follows_changed_tables_and_lengths(monkeypatch):
    long = small_case([1, 1])
    short = dataclasses.replace(long, ends=[49, 18])
    tables, flags = long.tables, new_flags(1)
    k, v = (torch.randn(2, 1, 64, device=DEVICE).half() for _ in range(2))
    pages = torch.tensor([5, 6], device=DEVICE)
    slots = torch.tensor([5, 0], device=DEVICE)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)

    def step():
        return backend.attend(
            long.q, k, v, long.hot, long.cold, None, pages, slots, (nothing, nothing),
            tables, flags, SCALE,
        )  # fmt: skip

    out, replay = captured(step, monkeypatch)
    for case in (long, short):
        # Tables of another width: what is left of the old rows is not read.
        for held, new in zip(tables.decode, case.tables.decode, strict=True):
            held[..., : new.shape[-1]].copy_(new)
        out.fill_(torch.nan)
        replay()
        assert torch.equal(out, step())
        expected, allowed = case.oracle()
        assert excess(out, expected, allowed) <= 1


@pytest.mark.parametrize("lengths", [[1, 1], [20, 3]], ids=["decode", "extend"])
@pytest.mark.parametrize("name", [*FREE, *FITTED])
def test_no_layer_of_a_step_waits_for_the_device(name, lengths, monkeypatch):
    # Tensors without storage: whoever reads a number of them on the host fails.
    scheme, meta = fitted(name, 2, 64), torch.device("meta")
    ran = []
    monkeypatch.setattr(launch.Launch, "run", lambda self: ran.append(self.kernel))
    hot = tuple(
        torch.empty(2, 8, 16, 64, dtype=torch.float16, device=meta) for _ in range(2)
    )
    found = scheme.fit[0] if scheme.fit else (Found(), Found())
    cold = None
    if scheme.seals:
        cold = tuple(
            empty(side, (2, 8), 16, 64, meta, what.aids)
            for side, what in zip(scheme.sides(0), found, strict=True)
        )
    turns = turns_of(*scheme.sides(0), 64, meta, found)
    q = torch.empty(sum(lengths), 4, 64, dtype=torch.float16, device=meta)
    k = torch.empty(sum(lengths), 2, 64, dtype=torch.float16, device=meta)
    ids = torch.empty(sum(lengths), dtype=torch.int64, device=meta)
    full = ids[: 1 if cold else 0]
    ends = [40, 33]
    pages, law = [[0, 1, 2], [3, 4, 5]], scheme.law(16)
    starts = [end - n for end, n in zip(ends, lengths, strict=True)]
    tables = backend.plan(law, pages, pages, starts, lengths, meta)
    flags = backend.new_flags(1, 2, meta)[0]
    out = backend.attend(
        q, k, k, hot, cold, turns, ids, ids, (full, full), tables, flags, SCALE
    )
    assert out.shape == q.shape and len(ran) >= 2
    with pytest.raises(RuntimeError, match="meta"):
        ids[0].item()
