"""Simulated requests: no memory overlaps, none is lost, waste is what it must be."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_lib.course.traces import (
    ANSWERS,
    PROMPTS,
    Arrival,
    Contiguous,
    Lengths,
    Paged,
    chat_trace,
    simulate,
)
from kvq_lib.errors import InvalidArgument

POOL = 64

requests = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prompt=st.integers(1, 20),
    answer=st.integers(0, 12),
)
traces = st.lists(requests, max_size=25).map(
    lambda found: sorted(found, key=lambda request: request.step)
)
memories = st.sampled_from(
    [
        lambda: Contiguous(POOL, lambda request: 32),
        lambda: Contiguous(POOL, lambda request: request.total),
        *(lambda size=size: Paged(POOL, size) for size in (1, 3, 4, 16)),
    ]
)


# Traces


def test_a_seed_gives_the_same_trace_and_another_seed_another_one():
    assert chat_trace(50, 0.5, seed=1) == chat_trace(50, 0.5, seed=1)
    assert chat_trace(50, 0.5, seed=1) != chat_trace(50, 0.5, seed=2)


def test_a_trace_has_the_rate_the_lengths_and_the_tail_that_it_says():
    trace = chat_trace(20000, rate=0.5, seed=3)
    assert trace[-1].step == pytest.approx(20000 / 0.5, rel=0.03)
    assert [r.step for r in trace] == sorted(r.step for r in trace)
    for lengths, drawn in (
        (PROMPTS, [r.prompt for r in trace]),
        (ANSWERS, [r.answer for r in trace]),
    ):
        assert statistics.median(drawn) == pytest.approx(lengths.median, rel=0.05)
        assert min(drawn) >= 1
        assert max(drawn) == lengths.longest  # a heavy tail reaches the cut
        assert statistics.mean(drawn) > 1.3 * lengths.median


def test_lengths_are_cut():
    assert all(r.prompt == 5 for r in chat_trace(9, 1, prompts=Lengths(5000, 0.1, 5)))


@pytest.mark.parametrize("change", [{"count": -1}, {"count": 1.5}, {"rate": 0}])
def test_a_trace_refuses(change):
    with pytest.raises(InvalidArgument):
        chat_trace(**({"count": 1, "rate": 1.0} | change))


# Memory


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=40))
def test_pieces_do_not_overlap_and_go_into_the_first_hole(operations):
    memory = Contiguous(POOL, lambda request: request.total)
    for key, (remove, size) in enumerate(operations):
        if remove and memory.pieces:
            memory.remove(sorted(memory.pieces)[size % len(memory.pieces)])
        else:
            fits = [start for start, room in memory.holes() if room >= size]
            assert memory.place(key, Arrival(0, size, 0), size) is bool(fits)
            if fits:
                assert memory.pieces[key] == (fits[0], size)
        owner = [None] * POOL
        for piece, (start, length) in memory.pieces.items():
            assert owner[start : start + length] == [None] * length
            owner[start : start + length] = [piece] * length
        assert memory.allocated == POOL - owner.count(None)
        for start, length in memory.holes():
            assert owner[start : start + length] == [None] * length
            assert start == 0 or owner[start - 1] is not None
        assert sum(length for _, length in memory.holes()) == owner.count(None)


@given(
    st.sampled_from([1, 3, 4, 16]),
    st.lists(st.tuples(st.sampled_from("prg"), st.integers(1, 30)), max_size=40),
)
def test_pages_are_nobody_elses_and_their_waste_is_exact(size, operations):
    memory, lengths = Paged(POOL, size), {}
    for key, (what, number) in enumerate(operations):
        needed = sum(-(-n // size) for n in lengths.values())
        if what == "p":
            room = POOL // size - needed
            placed = memory.place(key, Arrival(0, number, 0), number)
            assert placed is (-(-number // size) <= room)
            if placed:
                lengths[key] = number
        elif what == "r" and lengths:
            gone = sorted(lengths)[number % len(lengths)]
            memory.remove(gone)
            del lengths[gone]
        elif lengths:
            grown = sum(-(-(n + 1) // size) for n in lengths.values())
            fits = grown <= POOL // size
            assert memory.grow(list(lengths)) is fits
            if fits:
                lengths = {k: n + 1 for k, n in lengths.items()}
        tables = [memory.pages.sequences[h].pages for h in memory.handles.values()]
        ids = [page.hot for table in tables for page in table]
        assert len(ids) == len(set(ids)) == memory.entries
        assert memory.allocated == size * len(ids)
        assert memory.allocated - sum(lengths.values()) == sum(
            -n % size for n in lengths.values()
        )


# The simulation


@settings(deadline=None)
@given(traces, memories, st.integers(0, 60))
def test_no_request_is_lost_and_no_token_is_counted_twice(trace, memory, steps):
    run = simulate(trace, memory(), steps)
    assert len(run.moments) == steps
    for step, moment in enumerate(run.moments):
        arrived = [request for request in trace if request.step <= step]
        assert len(arrived) == moment.finished + len(moment.lengths) + moment.waiting
        assert moment.written <= moment.allocated <= POOL
        assert 0 <= moment.later <= sum(r.answer for r in arrived)
        free = POOL - moment.allocated
        assert moment.blocked == (free if moment.waiting else 0)


@settings(deadline=None)
@given(traces, memories)
def test_every_request_ends_and_all_are_admitted_in_order(trace, memory):
    memory = memory()
    run = simulate(trace, memory, steps=31 + 25 * 26)
    assert run.finished == len(run.waits) == len(trace)
    assert min(run.waits, default=0) >= 0
    admitted = [r.step + wait for r, wait in zip(trace, run.waits, strict=True)]
    assert admitted == sorted(admitted)
    assert memory.allocated == 0
    # Each of a request's lengths is seen once, and once more for each preemption.
    seen = sum(len(moment.lengths) for moment in run.moments)
    lived = sum(r.answer + 1 for r in trace)
    assert lived <= seen <= lived + run.preempted
    if isinstance(memory, Contiguous):
        assert run.preempted == run.rewritten == 0


def test_a_small_case_by_hand():
    trace = [Arrival(0, 5, 2), Arrival(0, 5, 1), Arrival(1, 3, 0)]
    run = simulate(trace, Paged(12, page_size=4), steps=6)
    # Three pages: the first takes two, the second would need two; none overtakes it.
    lengths = [(5,), (6,), (7,), (5, 3), (6,), ()]
    assert [moment.lengths for moment in run.moments] == lengths
    assert [moment.blocked for moment in run.moments] == [4, 4, 4, 0, 0, 0]
    assert [moment.later for moment in run.moments] == [2, 1, 0, 1, 0, 0]
    assert run.waits == [0, 3, 2]
    assert (run.finished, run.preempted) == (3, 0)


def test_the_last_to_arrive_loses_its_pages_by_hand():
    trace = [Arrival(0, 3, 5), Arrival(0, 4, 4)]
    run = simulate(trace, Paged(8, page_size=4), steps=11)
    # In steps 1 and 2 a page is missing. In step 1 the second request fits again at
    # once; from step 2 on the first needs both pages.
    alone = [(5,), (6,), (7,), (8,)]
    again = [(4,), *alone]
    lengths = [(3, 4), (4, 4), *alone, *again]
    assert [moment.lengths for moment in run.moments] == lengths
    assert (run.preempted, run.rewritten, run.finished) == (2, 8, 2)


def test_a_reservation_that_is_too_short_or_too_long_is_refused():
    trace = [Arrival(0, 30, 10)]
    for memory in (
        Contiguous(POOL, lambda request: 32),
        Contiguous(POOL, lambda request: POOL + 1),
        Paged(39, page_size=4),
    ):
        with pytest.raises(InvalidArgument, match="does not fit"):
            simulate(trace, memory, steps=1)
    assert simulate(trace, Paged(40, page_size=4), steps=99).finished == 1
