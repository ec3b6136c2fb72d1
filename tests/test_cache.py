"""PagedKVCache: what it refuses, what it restores, and what it counts."""

import dataclasses
import math

import pytest
import torch
from helpers import (
    SCHEMES,
    SEALING,
    UNTURNED,
    advance,
    assert_unchanged_but_free_cold,
    attend,
    begin,
    cold_pools,
    frozen,
    hot_pools,
    poison,
    read_through,
    recipe,
    same_bits,
    stream,
    table,
)

import kvq_lib as kvq

SHAPE = kvq.KVShape(num_layers=2, num_kv_heads=2, head_dim=32)
PAGE = 8


def new_cache(scheme="int8", pages=16, dtype=torch.float32, **options):
    scheme = recipe(scheme, SHAPE, PAGE)
    return kvq.PagedKVCache(
        SHAPE, scheme, PAGE, num_pages=pages, dtype=dtype, **options
    )


def filled(cache, lengths=(21, 8), seed=0):
    """Some sequences, their streams, and room to go on."""
    parts = [
        (cache.add(), stream(SHAPE, 60, seed=seed + i, dtype=torch.float32), n)
        for i, n in enumerate(lengths)
    ]
    advance(cache, *parts, named=True)
    return parts


# -- numbers that are refused ----------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_not_finite_is_refused_with_its_layer_and_head(name, which, bad):
    cache = new_cache(name)
    parts = filled(cache)
    step = [(seq, s, 13) for seq, s, _ in parts]
    before = frozen(cache)
    batch, starts = begin(cache, step)
    q, k, v = (
        torch.cat(
            [
                getattr(s, x)[1, start : start + n]
                for (_, s, n), start in zip(step, starts, strict=True)
            ]
        )
        for x in "qkv"
    )
    given = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
    given[which][17, 1, 3] = bad
    with pytest.raises(kvq.NonFiniteValue, match=f"in {which}.*layer 1.*head 1"):
        cache.attend(1, batch, **given)
    # The step is still open: with good numbers it goes on.
    cache.attend(1, batch, q, k, v)
    cache.abort(batch)
    after = frozen(cache)
    assert after[0][5] == before[0][5] and after[1] == before[1]
    assert_same_step_as_in_a_fresh_cache(cache, step)


def assert_same_step_as_in_a_fresh_cache(cache, step):
    """What the sequences read is what it would be had nothing gone wrong."""
    fresh = new_cache(cache.scheme)
    twins = filled(fresh)
    got = advance(cache, *step)
    wanted = advance(
        fresh, *((t[0], s, n) for t, (_, s, n) in zip(twins, step, strict=True))
    )
    assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("name", UNTURNED)
def test_a_float32_beyond_float16_is_refused_with_its_layer_and_head(name, which):
    cache = new_cache(name, dtype=torch.float16)
    s = stream(SHAPE, 20, dtype=torch.float32)
    seq = cache.add()
    advance(cache, (seq, s, 5))
    before = frozen(cache)
    batch = cache.begin([seq], [10])
    given = {x: getattr(s, x)[0, 5:15].clone() for x in "qkv"}
    given[which][9, 1, 0] = -65520.0
    with pytest.raises(kvq.ValueOutOfRange, match=f"{which} .*layer 0, head 1"):
        cache.attend(0, batch, **given)
    cache.abort(batch)
    assert_unchanged_but_free_cold(cache, before)
    given[which][9, 1, 0] = -65504.0
    batch = cache.begin([seq], [10])
    assert torch.isfinite(cache.attend(0, batch, **given)).all()


@pytest.mark.parametrize("which", ["k", "v"])
def test_what_only_turning_makes_too_large_is_refused(which):
    cache = new_cache("int4-rotated", dtype=torch.float16)
    given = {x: torch.zeros(3, 2, 32) for x in "qkv"}
    given[which][1, 1] = 11_000.0  # the first turned channel holds √32 times as much
    batch = cache.begin([cache.add()], [3])
    assert torch.isfinite(cache.attend(0, batch, **given)).all()
    given[which][1, 1] = 12_000.0
    with pytest.raises(kvq.ValueOutOfRange, match=f"{which} .*layer 1, head 1"):
        cache.attend(1, batch, **given)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("name", SEALING)
def test_a_page_that_does_not_fit_its_format_names_layer_and_head(name, which):
    # Hot pages of float32 hold it; the scale, zero point or half of the cold page not.
    cache = new_cache(name)
    s = stream(SHAPE, 20, dtype=torch.float32)
    seq = cache.add()
    advance(cache, (seq, s, 5))
    before = frozen(cache)
    batch = cache.begin([seq], [10])
    given = {x: getattr(s, x)[1, 5:15].clone() for x in "qkv"}
    given[which][1, 1, 0] = -1e8
    with pytest.raises(kvq.ValueOutOfRange, match=r"layer 1.*head 1"):
        cache.attend(1, batch, **given)
    cache.abort(batch)
    assert_unchanged_but_free_cold(cache, before)
    assert cache.length(seq) == 5


# -- abort ---------------------------------------------------------------------------


@pytest.mark.parametrize("recent", [0, 8])
@pytest.mark.parametrize("name", SCHEMES)
def test_abort_restores_everything(name, recent):
    cache = new_cache(recipe(name, SHAPE, PAGE, recent=recent))
    parts = [(seq, s, 19) for seq, s, _ in filled(cache)]
    before = frozen(cache)
    batch, starts = begin(cache, parts, named=True)
    first = attend(cache, batch, parts, starts)
    cache.abort(batch)
    assert_unchanged_but_free_cold(cache, before)
    poison(cache)
    second = advance(cache, *parts, named=True)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_abort_before_any_layer_and_of_one_step_among_two():
    cache = new_cache()
    (one, s, _), (two, t, _) = filled(cache)
    before = frozen(cache)
    first, second = cache.begin([one], [30]), cache.begin([two], [9])
    cache.abort(first)
    out = attend(cache, second, [(two, t, 9)], [8])[0]
    cache.abort(second)
    assert_unchanged_but_free_cold(cache, before)
    assert same_bits(advance(cache, (two, t, 9))[0], out)
    assert cache.length(one) == 21
    advance(cache, (one, s, 1))


# -- counting ------------------------------------------------------------------------


def test_stats_count_pages_by_what_they_are_for():
    cache = new_cache(kvq.scheme("int8", recent=8), pages=20, num_hot_pages=12)
    assert dataclasses.asdict(cache.stats()) == {
        "sequences": 0,
        "tokens": 0,
        "hot": 0,
        "cold": 0,
        "shared": 0,
        "cached_hot": 0,
        "cached_cold": 0,
        "free_hot": 12,
        "free_cold": 20,
        "waste": 0,
    }
    s = stream(SHAPE, 60, dtype=torch.float32)
    seq = cache.add()
    read_through(cache, seq, s, [21], named=True)  # 2 full pages, 5 tokens
    stats = cache.stats()
    assert (stats.sequences, stats.tokens, stats.shared) == (1, 21, 0)
    assert (stats.hot, stats.cold) == (2, 2)  # window and tail hot; both full ones cold
    assert (stats.cached_hot, stats.free_hot, stats.free_cold) == (1, 9, 18)
    token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, channels, float32
    assert stats.waste == 3 * token

    twin = cache.fork(seq)
    stats = cache.stats()
    assert (stats.sequences, stats.tokens, stats.shared) == (2, 26, 2)
    assert (stats.hot, stats.cold) == (3, 2)
    assert stats.waste == 6 * token
    cache.free(seq)
    cache.free(twin)
    stats = cache.stats()
    assert (stats.hot, stats.cold, stats.tokens, stats.waste) == (0, 0, 0, 0)
    assert (stats.cached_hot, stats.cached_cold) == (2, 2)


def test_reserved_pages_count_as_used():
    cache = new_cache(pages=9)
    batch = cache.begin([cache.add()], [20])
    assert (cache.stats().hot, cache.stats().cold, cache.stats().tokens) == (3, 2, 0)
    cache.abort(batch)
    assert (cache.stats().hot, cache.stats().cold) == (0, 0)


@pytest.mark.parametrize("name", SCHEMES)
def test_effective_bits_count_every_live_byte_once(name):
    cache = new_cache(name, pages=40, dtype=torch.float16)
    assert math.isnan(cache.effective_bits)
    s = stream(SHAPE, 60, dtype=torch.float16)
    seq = cache.add()
    read_through(cache, seq, s, [37], named=True)
    cache.fork(seq)
    cache.add(s.tokens)
    gone = cache.add()
    read_through(cache, gone, stream(SHAPE, 60, seed=1, dtype=torch.float16), [30])
    cache.free(gone)

    stats = cache.stats()
    live = stats.hot * sum(p.nbytes // p.shape[2] for p in hot_pools(cache))
    live += stats.cold * sum(p.nbytes // p.shape[1] for p in cold_pools(cache))
    tokens = 32 + 5 + 5  # the full pages once, each twin's tail
    assert stats.tokens == tokens
    elements = tokens * SHAPE.elements_per_token
    entries = 5 + 5 + 4
    assert live + 4 * entries <= cache.effective_bits * elements / 8
    assert cache.effective_bits * elements / 8 <= live + 16 * entries


@pytest.mark.parametrize("name", SCHEMES)
def test_a_cache_never_grows(name):
    cache = new_cache(name)
    before, places = cache.nbytes, [p.data_ptr() for p in hot_pools(cache)]
    parts = filled(cache)
    assert cache.nbytes == before
    assert [p.data_ptr() for p in hot_pools(cache)] == places
    for seq, _, _ in parts:
        cache.free(seq)
    assert cache.nbytes == before


def test_hot_copies_that_no_query_can_see_are_dropped_at_commit():
    cache = new_cache(kvq.scheme("int8", recent=8, sinks=8), pages=16)
    seq, s = cache.add(), stream(SHAPE, 60, dtype=torch.float32)
    for n in [1] * 60:
        advance(cache, (seq, s, n))
        length, pages = cache.length(seq), table(cache, seq)
        own = length // PAGE
        hot = {j for j, p in enumerate(pages) if p.hot is not None}
        assert hot == {j for j in range(len(pages)) if j < 1 or own - j <= 1}
        cold = {j for j, p in enumerate(pages) if p.cold is not None}
        assert cold == set(range(1, own))
