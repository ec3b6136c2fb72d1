"""Swapping: a sequence that left comes back bit by bit, and leaves no page behind."""

import itertools

import pytest
import torch
from helpers import (
    SCHEMES,
    advance,
    assert_unchanged,
    cold_bytes,
    frozen,
    hot_pools,
    poison,
    read_through,
    same_bits,
    stream,
    table,
)
from helpers import recipe as recipe_for
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.swap import swap_in, swap_out

SHAPE = kvq.KVShape(num_layers=2, num_kv_heads=2, head_dim=16)
PAGE = 4
RECIPES = [(name, 0, 0) for name in SCHEMES]
RECIPES += [(name, 9, 5) for name in ("fp16", "int8", "int4-kivi", "nvfp4", "mixed")]


def new_cache(recipe=("int8", 9, 5), pages=20, hot=None):
    name, recent, sinks = recipe
    scheme = recipe_for(name, SHAPE, PAGE, recent=recent, sinks=sinks)
    return kvq.PagedKVCache(
        SHAPE, scheme, PAGE, num_pages=pages, num_hot_pages=hot, dtype=torch.float32
    )


def numbers(seed=0, tokens=80):
    return stream(SHAPE, tokens, seed=seed, dtype=torch.float32)


def held(cache, seq):
    """All bytes that the law may still read of a sequence, page by page."""
    length = cache.length(seq)
    law, pages = cache.scheme.law(PAGE), table(cache, seq)
    cold = [cold_bytes(cache, pages[j]) for j in law.sealed(length)]
    hot = []
    for j in itertools.chain(*law.kept_hot(length)):
        tokens = min(PAGE, length - j * PAGE)
        hot.append([p[:, :, pages[j].hot, :tokens].clone() for p in hot_pools(cache)])
    return cold, hot


def assert_same_bytes(a, b):
    for one, two in zip(a, b, strict=True):  # cold, then hot
        for page, other in zip(one, two, strict=True):
            assert all(map(same_bits, page, other))


def overwrite(cache):
    """Let another sequence take every page that is free or idle."""
    seq, s = cache.add(), numbers(99, 160)
    while True:
        try:
            advance(cache, (seq, s, PAGE))
        except kvq.OutOfPages:
            cache.free(seq)
            return


@pytest.mark.parametrize(
    ("recipe", "gone"),
    [(recipe, "all pages") for recipe in RECIPES]
    + [(recipe, "no page") for recipe in RECIPES if recipe[1]],
    ids=str,
)
def test_swapping_out_and_in_gives_bitwise_the_same_cache(recipe, gone):
    for length in (24, 39):
        s = numbers(1)
        stayed, swapped = new_cache(recipe), new_cache(recipe)
        seqs = [stayed.add(), swapped.add()]
        for cache, seq in zip((stayed, swapped), seqs, strict=True):
            read_through(cache, seq, s, [length], named=True)
        before = held(swapped, seqs[1])
        saved = swap_out(swapped, seqs[1])
        assert saved.nbytes == sum(
            t.numel() * t.element_size() for t in (*saved.hot, *saved.cold)
        )
        assert swapped.stats().sequences == 0
        if gone == "all pages":
            overwrite(swapped)
        poison(swapped)
        seq = swapped.add(s.tokens[:length])
        if gone == "all pages":  # but for a few that the other one could not use
            assert swapped.length(seq) < max(length, 9) / 2
        swap_in(swapped, seq, saved, s.tokens, pages=2)
        assert swapped.length(seq) == length
        assert_same_bytes(held(swapped, seq), before)
        poison(swapped)
        for n in (1, 11):  # outputs, and what they seal, to the last bit
            (a,) = advance(stayed, (seqs[0], s, n), named=True)
            (b,) = advance(swapped, (seq, s, n), named=True)
            assert same_bits(a, b)
        assert_same_bytes(held(stayed, seqs[0]), held(swapped, seq))
        swapped.free(seq)
        stats = swapped.stats()
        assert (stats.hot, stats.cold) == (0, 0)


@settings(max_examples=40)
@given(data=st.data())
def test_the_prefix_index_never_finds_what_was_not_restored(data):
    """Whoever shares tokens with a restored sequence reads the same numbers as alone;
    its hot copies are found only where they hold something."""
    recipe = data.draw(
        st.sampled_from([("int8", 9, 0), ("int4", 4, 5), ("fp16", 0, 0)])
    )
    length = data.draw(st.integers(1, 60))
    s = numbers(2)
    cache = new_cache(recipe, hot=20)
    seq = cache.add()
    read_through(cache, seq, s, [length], named=True)
    saved = swap_out(cache, seq)
    if data.draw(st.booleans(), label="overwrite"):
        overwrite(cache)
    poison(cache)
    seq = cache.add(s.tokens[:length])
    swap_in(cache, seq, saved, s.tokens, pages=data.draw(st.integers(1, 8)))
    if data.draw(st.booleans(), label="free"):
        cache.free(seq)
    upto = data.draw(st.integers(1, 70))
    reader = cache.add(s.tokens[:upto])
    start = cache.length(reader)
    other = new_cache(recipe)
    wanted = read_through(other, other.add(), s, [start, 9] if start else [9])
    (found,) = advance(cache, (reader, s, 9), named=True)
    assert (found - wanted[:, start:]).abs().max() < 1e-5


def test_restoring_needs_few_hot_pages():
    s = numbers(3)
    cache = new_cache(hot=8)  # 6 of them are held: 2 of sinks, 3 of window, its own
    seq = cache.add()
    for _ in range(15):
        advance(cache, (seq, s, 4), named=True)
    before = held(cache, seq)
    saved = swap_out(cache, seq)
    overwrite(cache)
    seq = cache.add(s.tokens[:60])
    swap_in(cache, seq, saved, s.tokens, pages=1)
    assert_same_bytes(held(cache, seq), before)
    assert cache.stats().hot == 5


@pytest.mark.parametrize("recipe", [("int8", 9, 5), ("native", 0, 0)], ids=str)
def test_running_out_of_pages_loses_none_and_can_be_tried_again(recipe):
    s = numbers(4)
    cache = new_cache(recipe, pages=20)
    seq = cache.add()
    read_through(cache, seq, s, [60], named=True)
    before = held(cache, seq)
    saved = swap_out(cache, seq)
    overwrite(cache)
    # Half of it fits: the first steps are done, and undone.
    other = cache.add()
    advance(cache, (other, numbers(5), 40))
    poison(cache)
    back = cache.add(s.tokens[:60])
    with pytest.raises(kvq.OutOfPages, match="pages needed"):
        swap_in(cache, back, saved, s.tokens, pages=2)
    with pytest.raises(kvq.UnknownSequence):
        cache.length(back)
    assert cache.stats().sequences == 1
    # What the index finds of the first steps is good.
    reader = cache.add(s.tokens[:9])
    cache.free(other)
    fresh = new_cache(recipe)
    wanted = read_through(fresh, fresh.add(), s, [cache.length(reader) or 1, 9])
    if cache.length(reader):
        (found,) = advance(cache, (reader, s, 9), named=True)
        assert (found - wanted[:, -9:]).abs().max() < 1e-5
    cache.free(reader)
    back = cache.add(s.tokens[:60])
    swap_in(cache, back, saved, s.tokens, pages=2)
    assert_same_bytes(held(cache, back), before)
    cache.free(back)
    stats = cache.stats()
    assert (stats.hot, stats.cold) == (0, 0)
    assert stats.free_hot + stats.cached_hot == 20


def test_a_longer_prefix_that_another_sequence_left_is_taken_as_it_is():
    s = numbers(6)
    cache = new_cache()
    seq = cache.add()
    read_through(cache, seq, s, [10], named=True)
    saved = swap_out(cache, seq)
    longer = cache.add()
    read_through(cache, longer, s, [30], named=True)
    seq = cache.add(s.tokens[:29])
    assert cache.length(seq) == 28
    swap_in(cache, seq, saved, s.tokens[:29])
    assert cache.length(seq) == 28


def test_what_cannot_be_swapped_is_refused_and_nothing_changes():
    s = numbers(7)
    cache = new_cache()
    seq = cache.add()
    advance(cache, (seq, s, 10), named=True)
    with pytest.raises(kvq.UnknownSequence):
        swap_out(cache, seq + 1000)
    batch = cache.begin([seq], [1])
    before = frozen(cache)
    with pytest.raises(kvq.SequenceBusy):
        swap_out(cache, seq)
    assert_unchanged(cache, before)
    cache.abort(batch)
    saved = swap_out(cache, seq)
    seq = cache.add()
    advance(cache, (seq, s, 3))
    before = frozen(cache)
    for tokens, pages, said in (
        (s.tokens[:9], 1, "9 tokens given, 10 were saved"),
        (s.tokens, 1, "has 3 tokens"),
        (s.tokens, 0, "pages is a whole number"),
        ("tokens", 1, "row of tokens"),
    ):
        with pytest.raises(kvq.InvalidArgument, match=said):
            swap_in(cache, seq, saved, tokens, pages)
    assert_unchanged(cache, before)
