"""The law of hot and cold pages: what a token sees depends on its position alone."""

import pytest
import torch
from helpers import (
    SCHEMES,
    SEALING,
    UNTURNED,
    WINDOWS,
    advance,
    cold_bytes,
    cold_pools,
    expected,
    fits,
    hot_pools,
    poison,
    read_through,
    same_bits,
    scatter_free_pages,
    stream,
    table,
)
from helpers import recipe as recipe_for
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq_lib as kvq

SHAPE = kvq.KVShape(num_layers=2, num_kv_heads=2, head_dim=32)
#: The bitwise claims, for each kind of storage, with and without hot extras.
RECIPES = [(name, 0, 0) for name in SCHEMES] + [(name, 16, 8) for name in SEALING]


def new_cache(recipe, shape=SHAPE, page_size=8, pages=64, dtype=torch.float32):
    name, recent, sinks = recipe
    scheme = recipe_for(name, shape, page_size, recent=recent, sinks=sinks)
    return kvq.PagedKVCache(shape, scheme, page_size, num_pages=pages, dtype=dtype)


def assert_close(found, wanted, tolerance=1e-9):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < tolerance


# -- against the oracle --------------------------------------------------------------


@settings(max_examples=150)
@given(data=st.data())
def test_attention_is_what_the_law_says(data):
    """Random shapes, chunkings, companies, prefix hits, forks and page tables."""
    page = data.draw(st.sampled_from([4, 8, 16, 32]), label="page size")
    shape = kvq.KVShape(
        num_layers=data.draw(st.integers(1, 2)),
        num_kv_heads=data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.sampled_from([8, 16, 24, 40, 64])),
    )
    groups = data.draw(st.integers(1, 8), label="query heads per kv head")
    names = [name for name in SCHEMES if fits(name, shape.head_dim)]
    scheme = recipe_for(
        data.draw(st.sampled_from(names)),
        shape,
        page,
        recent=data.draw(st.sampled_from([0, 1, page, 2 * page + 1])),
        sinks=data.draw(st.sampled_from([0, 1, page, page + 1])),
    )
    cache = kvq.PagedKVCache(shape, scheme, page, num_pages=80, dtype=torch.float64)
    if data.draw(st.booleans(), label="page tables with holes"):
        scatter_free_pages(cache, stream(shape, 2 * page + 1, groups, seed=99))

    longest = 4 * page + 3
    one, two = (stream(shape, longest, groups, seed) for seed in (1, 2))
    live = [[cache.add(), one], [cache.add(), two]]
    wanted = {
        id(one): expected(one, scheme, page),
        id(two): expected(two, scheme, page),
    }
    for _ in range(data.draw(st.integers(1, 5), label="steps")):
        event = data.draw(st.sampled_from(["", "", "fork", "prefix"]))
        seq, s = live[data.draw(st.integers(0, len(live) - 1), label="which")]
        if event == "fork":
            live.append([cache.fork(seq), s])
        elif event == "prefix":  # the same tokens again: all full pages may be shared
            live.append([cache.add(s.tokens), s])
        room = [(q, s, longest - cache.length(q)) for q, s in live]
        room = [entry for entry in room if entry[2]]
        if not room:
            break
        some = st.lists(st.integers(0, len(room) - 1), min_size=1, unique=True)
        parts = [
            (q, s, data.draw(st.one_of(st.just(1), st.integers(1, most))))
            for q, s, most in (room[i] for i in data.draw(some, label="batch"))
        ]
        starts = [cache.length(q) for q, _, _ in parts]
        poison(cache)  # what no sequence holds must not be read
        outs = advance(cache, *parts, named=True)
        for (_, s, n), start, out in zip(parts, starts, outs, strict=True):
            assert_close(out, wanted[id(s)][:, start : start + n])


@pytest.mark.parametrize(("recent", "sinks"), WINDOWS)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_length_modulo_the_page_and_every_chunk_give_the_same(
    name, recent, sinks
):
    page, tokens = 8, 67
    s = stream(SHAPE, tokens, seed=3)
    wanted = expected(
        s, recipe_for(name, SHAPE, page, recent=recent, sinks=sinks), page
    )
    chunkings = [[1] * tokens, [page] * 8 + [3], [5] * 13 + [2], [tokens]]
    # First a chunk of each length, then single tokens over the next page boundary.
    chunkings += [[n] + [1] * (page + 1) for n in range(1, 2 * page + 2)]
    for chunks in chunkings:
        cache = new_cache((name, recent, sinks), dtype=torch.float64)
        out = read_through(cache, cache.add(), s, chunks)
        assert_close(out, wanted[:, : sum(chunks)])


@pytest.mark.parametrize(("recent", "sinks"), [(0, 0), (300, 20)])
@pytest.mark.parametrize("name", ["native", "int8", "int2-kivi"])
@pytest.mark.parametrize("chunks", [[700], [300, 1, 399], [256, 257, 187]])
def test_chunks_longer_than_a_tile_of_queries_obey_the_law(name, recent, sinks, chunks):
    s = stream(SHAPE, 700, seed=4)
    scheme = kvq.scheme(name, recent=recent, sinks=sinks)
    cache = kvq.PagedKVCache(SHAPE, scheme, 16, num_pages=64, dtype=torch.float64)
    scatter_free_pages(cache, s)
    out = read_through(cache, cache.add(), s, chunks)
    assert_close(out, expected(s, scheme, 16))


@pytest.mark.parametrize("name", UNTURNED)
@pytest.mark.parametrize("hot_dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_hot_pages_hold_what_is_attended_to(name, hot_dtype):
    s = stream(SHAPE, 61, seed=5)
    scheme = recipe_for(name, SHAPE, 8, recent=9, sinks=3)
    for dtype in (torch.float32, hot_dtype):
        given = stream(SHAPE, 61, seed=5, dtype=dtype)
        cache = kvq.PagedKVCache(SHAPE, scheme, 8, num_pages=16, dtype=hot_dtype)
        out = read_through(cache, cache.add(), given, [20, 1, 1, 39])
        assert out.dtype == dtype
        wanted = expected(given, scheme, 8, hot_dtype)
        # float32 arithmetic; 16-bit outputs are rounded once, at the end.
        limit = 1e-5 + wanted.abs().max() * torch.finfo(dtype).eps
        assert_close(out.double(), wanted, limit)
    # And the hot copies matter: in float64 the result would be another.
    assert (expected(s, scheme, 8) - wanted).abs().max() > 1e-5


def test_the_scale_of_the_scores_is_the_callers_if_given():
    s = stream(SHAPE, 20, seed=6)
    cache = new_cache(("int8", 0, 0), dtype=torch.float64)
    batch = cache.begin([cache.add()], [20])
    for layer in range(2):
        out = cache.attend(layer, batch, 2 * s.q[layer], s.k[layer], s.v[layer], 0.25)
        doubled = type(s)(s.q * 0.5 * SHAPE.head_dim**0.5, s.k, s.v, s.tokens)
        assert_close(out, expected(doubled, kvq.scheme("int8"), 8)[layer])


# -- bit by bit, at `attend` -----------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_shared_prefix_gives_bitwise_the_output_of_an_unshared_one(recipe):
    s = stream(SHAPE, 45, seed=7, dtype=torch.float32)
    ids = s.tokens
    shared = new_cache(recipe)
    first = shared.add()
    read_through(shared, first, s, [24, 9], named=True)
    second = shared.add(ids[:33])
    assert shared.length(second) == 32
    assert shared.stats().shared >= 4

    unshared = new_cache(recipe)
    alone = unshared.add()
    read_through(unshared, alone, s, [32])
    for n in (1, 5, 7):
        (a,), (b,) = (
            advance(shared, (second, s, n)),
            advance(unshared, (alone, s, n)),
        )
        assert same_bits(a, b)
    # The first owner reads on undisturbed.
    unshared.free(alone)
    alone = unshared.add()
    read_through(unshared, alone, s, [24, 9])
    assert same_bits(
        advance(shared, (first, s, 12))[0], advance(unshared, (alone, s, 12))[0]
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_removal_from_the_middle_leaves_the_others_bitwise_unchanged(recipe):
    streams = [stream(SHAPE, 60, seed=i, dtype=torch.float32) for i in (8, 9, 10, 11)]
    first_lengths, later = (13, 30, 8, 21), [(1, 1, 1), (5, 1, 9), (1, 8, 3), (1, 1, 1)]

    def outputs(with_middle):
        cache = new_cache(recipe)
        seqs = [cache.add() for _ in streams]
        advance(cache, *zip(seqs, streams, first_lengths, strict=True))
        if not with_middle:
            cache.free(seqs[1])
            poison(cache)
            newcomer = cache.add()  # takes over the pages that became free
        outs = []
        for lengths in later:
            parts = [
                (seqs[i], streams[i], n)
                for i, n in zip((0, 2, 3), lengths, strict=True)
            ]
            if with_middle:
                parts.insert(1, (seqs[1], streams[1], 2))
            else:
                parts.append((newcomer, streams[1], 11))
            got = advance(cache, *parts)
            outs += got[:1] + got[2:] if with_middle else got[:3]
        return outs

    for a, b in zip(outputs(True), outputs(False), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("tokens", [5, 8, 29, 32])
def test_twins_go_their_own_ways_bitwise(recipe, tokens):
    one = stream(SHAPE, 60, seed=12, dtype=torch.float32)
    two = one.then(tokens, stream(SHAPE, 60, seed=13, dtype=torch.float32))
    cache, alone = new_cache(recipe), new_cache(recipe)
    seq = cache.add()
    read_through(cache, seq, one, [tokens])
    twin = cache.fork(seq)
    assert cache.length(twin) == tokens
    poison(cache)
    apart = [alone.add(), alone.add()]
    for other, s in zip(apart, (one, two), strict=True):
        read_through(alone, other, s, [tokens])
    for n in (1, 4, 17):
        got = advance(cache, (seq, one, n), (twin, two, n))
        wanted = advance(alone, (apart[0], one, n), (apart[1], two, n))
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
    cache.free(seq)
    poison(cache)
    (a,), (b,) = advance(cache, (twin, two, 1)), advance(alone, (apart[1], two, 1))
    assert same_bits(a, b)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r[0] in SEALING], ids=str)
def test_codes_never_change_after_they_are_written(recipe):
    shape = kvq.KVShape(1, 2, 32)
    s = stream(shape, 1000, groups=1, seed=14, dtype=torch.float32)
    cache = new_cache(recipe, shape, pages=160)
    seq, written, length = cache.add(), {}, 0
    sinks = -(-recipe[2] // 8)
    for n in [1, 7, 8, 20, 3, 100] * 7 + [1] * 27:
        if length % 3 == 0:  # an aborted step writes beside them, not over them
            cache.abort(cache.begin([seq], [n]))
        advance(cache, (seq, s, n))
        length += n
        pages = table(cache, seq)
        for j in range(sinks, length // 8):
            now = cold_bytes(cache, pages[j])
            assert all(map(same_bits, written.setdefault(j, now), now)), j
    assert length == 1000 and len(written) == 125 - sinks


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_freed_pages_never_reach_an_output(recipe):
    s = stream(SHAPE, 60, seed=15, dtype=torch.float32)
    clean = new_cache(recipe)
    wanted = read_through(clean, clean.add(), s, [19, 1, 30, 1, 9])
    cache = new_cache(recipe, pages=24)
    for seed in range(3):  # fill the pool, and free it
        old = cache.add()
        advance(cache, (old, stream(SHAPE, 60, seed=seed, dtype=torch.float32), 60))
        cache.free(old)
    seq, outs = cache.add(), []
    for n in (19, 1, 30, 1, 9):
        poison(cache)
        outs += advance(cache, (seq, s, n))
    out = torch.cat(outs, dim=1)
    assert torch.isfinite(out).all()
    assert same_bits(out, wanted)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r[0] in SEALING], ids=str)
def test_scales_move_with_their_pages(recipe):
    s = stream(SHAPE, 33, seed=16, dtype=torch.float32)
    cache = new_cache(recipe)
    seq = cache.add()
    read_through(cache, seq, s, [33], named=True)
    before = [cold_bytes(cache, p) for p in table(cache, seq) if p.cold is not None]
    assert before
    assert all(any(t.any() for t in page) for page in before)
    twin, reader = cache.fork(seq), cache.add(s.tokens)
    cache.free(seq)
    poison(cache)
    other = cache.add()  # writes where the first owner's own pages were
    advance(cache, (other, stream(SHAPE, 40, seed=17, dtype=torch.float32), 40))
    for user in (twin, reader):
        now = [cold_bytes(cache, p) for p in table(cache, user) if p.cold is not None]
        for a, b in zip(before, now, strict=True):
            assert all(map(same_bits, a, b))


def test_a_page_table_with_holes_gives_the_bits_of_one_in_a_row():
    s = stream(SHAPE, 60, seed=18, dtype=torch.float32)
    for recipe in RECIPES:
        row, holes = new_cache(recipe), new_cache(recipe)
        scatter_free_pages(holes, s)
        chunks = [1, 25, 1, 1, 30]
        a = read_through(row, row.add(), s, chunks)
        b = read_through(holes, holes.add(), s, chunks)
        assert same_bits(a, b), recipe


def test_keys_that_carry_gradients_leave_none_in_the_pools():
    # A pool that remembers how it was computed would keep every past step alive.
    s = stream(SHAPE, 20, seed=19, dtype=torch.float32)
    cache = new_cache(("int8", 0, 0))
    q, k, v = (x.clone().requires_grad_() for x in (s.q, s.k, s.v))
    seq = cache.add()
    for _ in range(2):
        batch = cache.begin([seq], [10])
        for layer in range(2):
            rows = slice(0, 10)
            cache.attend(layer, batch, q[layer, rows], k[layer, rows], v[layer, rows])
        cache.commit(batch)
    assert not any(p.requires_grad for p in [*hot_pools(cache), *cold_pools(cache)])
