"""Pictures of page tables show what the cache holds."""

import matplotlib
import pytest
import torch

matplotlib.use("Agg")

import matplotlib.pyplot as plt

import kvq_lib as kvq
from kvq_lib.course.paging import Entry, draw_tables, owners, page_table

SIZE = 4
SHAPE = kvq.KVShape(1, 1, 16)


def cache_of(scheme="int8", **changes):
    sizes = {"page_size": SIZE, "num_pages": 12, "num_hot_pages": 8} | changes
    return kvq.PagedKVCache(SHAPE, scheme, **sizes)


def write(cache, seq, tokens):
    """Append tokens, with random keys and values."""
    batch = cache.begin([seq], [len(tokens)], token_ids=[tokens])
    cache.attend(0, batch, *torch.randn(3, len(tokens), 1, 16).half())
    cache.commit(batch)


def sequence(cache, tokens):
    """A new sequence, which starts with the prefix that is there."""
    seq = cache.add(tokens)
    write(cache, seq, tokens[cache.length(seq) :])
    return seq


def test_a_table_tells_cold_pages_from_the_hot_last_one():
    cache = cache_of()
    first = sequence(cache, list(range(10)))
    table = page_table(cache, first)
    assert [entry.tokens for entry in table] == [4, 4, 2]
    assert [entry.hot is None for entry in table] == [True, True, False]
    assert [entry.cold is None for entry in table] == [False, False, True]
    twin = cache.fork(first)
    assert [entry.sequences for entry in page_table(cache, first)] == [2, 2, 1]
    assert page_table(cache, twin)[:2] == page_table(cache, first)[:2]
    assert page_table(cache, twin)[2].hot != table[2].hot


def test_a_window_has_both_copies_and_sinks_one():
    cache = cache_of(kvq.scheme("int8", recent=SIZE, sinks=SIZE))
    table = page_table(cache, sequence(cache, list(range(4 * SIZE))))
    kinds = [(entry.hot is not None, entry.cold is not None) for entry in table]
    assert kinds == [(True, False), (False, True), (False, True), (True, True)]


def test_an_unquantized_cache_is_all_hot():
    cache = cache_of("native")
    table = page_table(cache, sequence(cache, list(range(5))))
    assert [entry.cold for entry in table] == [None, None]
    assert Entry(hot=table[0].hot, cold=None, tokens=4, sequences=1) == table[0]


def test_owners_are_those_whose_tables_hold_the_page():
    cache = cache_of()
    shared = list(range(2 * SIZE))
    named = {
        "A": sequence(cache, [*shared, 50]),
        "B": sequence(cache, [*shared, 60, 61, 62, 63, 64]),
        "C": sequence(cache, [99, *shared]),
    }
    whose = owners(cache, named, "cold")
    assert sorted(whose, key=len)[-2:] == [[0, 1], [0, 1]]
    assert whose.count([1]) == 1
    assert whose.count([2]) == 2
    assert len(whose) == 12
    assert sum(map(bool, whose)) == cache.stats().cold
    assert sum(map(bool, owners(cache, named, "hot"))) == cache.stats().hot
    cache.free(named.pop("A"))
    assert [0, 1] not in owners(cache, named, "cold")
    with pytest.raises(kvq.UnknownSequence):
        owners(cache, {"A": 0}, "cold")


@pytest.mark.parametrize("scheme", ["native", "int8"])
def test_a_line_leads_from_every_logical_page_to_each_copy(scheme):
    cache = cache_of(scheme)
    named = {"A": sequence(cache, list(range(10))), "hot": sequence(cache, [7, 8])}
    fig, ax = plt.subplots()
    draw_tables(ax, cache, named)
    tables = [entry for seq in named.values() for entry in page_table(cache, seq)]
    copies = sum((e.hot is not None) + (e.cold is not None) for e in tables)
    assert len(ax.lines) == copies
    pages = 8 + (12 if scheme == "int8" else 0)
    assert len(ax.texts) == len(tables) + pages
    ends = {round(x - 0.45) for line in ax.lines for x in line.get_xdata()}
    wanted = {e.hot for e in tables} | {e.cold for e in tables}
    assert wanted - {None} <= ends
    labels = [label.get_text() for label in ax.get_yticklabels()]
    pools = ["cold pool", "hot pool"] if scheme == "int8" else ["pool"]
    assert sorted(labels) == sorted(["A", "hot", *pools])
    fig.canvas.draw()
    plt.close(fig)
