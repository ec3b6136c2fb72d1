"""The planner and the engine, which count by one rule: how many sequences fit a budget,
and to the byte what its pools take."""

import functools

import pytest
from helpers import recipe
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.course.idle import NoText, idle_model, prompts

NAMES = ("native", "fp16", "int8", "int4", "int4-kivi", "int4-feedback")
HEADS, DIM, LAYERS = 2, 64, 1


@functools.cache
def model():
    return idle_model(HEADS, DIM, LAYERS)


@functools.cache
def scheme_of(name, page):
    return recipe(name, kvq.KVShape(LAYERS, HEADS, DIM), page)


def planned(name, page, context, chunk, memory):
    (found,) = kvq.plan(
        model().config,
        memory,
        context,
        scheme_of(name, page),
        weights=0,
        utilization=1.0,
        page_size=page,
        chunk=chunk,
    ).schemes
    return found


def engine_of(name, page, context, chunk, memory):
    return kvq.Engine(
        model(),
        NoText(),
        scheme_of(name, page),
        memory_bytes=memory,
        page_size=page,
        chunk=chunk,
        context=context,
        clock=kvq.VirtualClock(),
    )


@settings(max_examples=100)
@given(
    name=st.sampled_from(NAMES),
    page=st.sampled_from([1, 3, 16, 64]),
    context=st.integers(1, 3000),
    chunk=st.integers(1, 1500),
    batch=st.integers(1, 40),
)
def test_the_pools_take_the_planned_bytes(name, page, context, chunk, batch):
    """A budget that is used up: so many sequences, and a whole chunk."""
    probe = planned(name, page, context, chunk, 2**45)
    each = probe.sequence_bytes + probe.step_bytes
    whole = probe.chunk_bytes
    if batch * each < 5 * each + 4 * whole:  # the chunk wants over a quarter
        batch += 5 + 4 * whole // each
    budget = batch * each + whole
    found = planned(name, page, context, chunk, budget)
    assert (found.max_batch, found.chunk_bytes) == (batch, whole)
    assert (found.cache_bytes, found.left_bytes) == (budget, 0)
    engine = engine_of(name, page, context, chunk, budget)
    assert engine.cache.nbytes == found.cache_bytes
    hot = kvq.KVShape(LAYERS, HEADS, DIM).elements_per_token * page * 2
    assert engine._room.chunk * hot == found.chunk_bytes
    hot_pages, cold_pages = engine._room.total
    kept = (hot_pages - engine._room.chunk) // batch
    assert hot_pages == kept * batch + engine._room.chunk
    assert cold_pages % batch == 0


@settings(max_examples=100)
@given(
    name=st.sampled_from(NAMES),
    page=st.sampled_from([1, 3, 16, 64]),
    context=st.integers(1, 3000),
    chunk=st.integers(1, 5000),
    budget=st.integers(2**18, 2**24),
)
def test_the_pools_are_enough_for_the_planned_batch_and_not_for_one_more(
    name, page, context, chunk, budget
):
    found = planned(name, page, context, chunk, budget)
    try:
        engine = engine_of(name, page, context, chunk, budget)
    except kvq.InvalidArgument:  # not one page of each kind
        assert found.max_batch == 0
        return
    assert 0 <= budget - engine.cache.nbytes
    room, batch = engine._room, found.max_batch
    one = room._most_hot(context), max(1, len(room.law.sealed(context)))
    hot, cold = room.total
    assert batch * one[0] + room.chunk <= hot
    enough = (batch + 1) * one[0] + room.chunk <= hot
    if room.cache.scheme.seals:
        assert batch * one[1] <= cold
        enough &= (batch + 1) * one[1] <= cold
    assert not enough
    assert (batch == 0) == (one[0] + room.chunk > hot or one[1] > cold > 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_scheduler_runs_the_planned_batch(name):
    """Requests that end in the page in which their prompts end take no further page, so
    what they need at once is what they need at the end."""
    seen = set()

    @settings(max_examples=12, derandomize=True, phases=[Phase.generate])
    @given(
        page=st.sampled_from([16, 32, 64]),
        pages=st.integers(4, 12),
        part=st.sampled_from([1, 2]),
        times=st.floats(1.0, 6.9),
    )
    def check(page, pages, part, times):
        prompt, new = page * pages + 1, page - 1
        context, chunk = prompt + new - 1, 2 * page * pages // part
        probe = planned(name, page, context, chunk, 2**45)
        each = probe.sequence_bytes + probe.step_bytes
        budget = int(times * each + min(probe.chunk_bytes, each * (times - 1) / 3))
        found = planned(name, page, context, chunk, budget)
        engine = engine_of(name, page, context, chunk, budget)
        asked = prompts(found.max_batch + 2, prompt)
        results = engine.run([kvq.Request(tokens, new) for tokens in asked])
        assert {r.end for r in results} == {"length"}
        assert engine.metrics.peak_running == found.max_batch
        assert engine.metrics.preemptions == engine.metrics.prefix_tokens == 0
        seen.add(found.max_batch)

    check()
    assert len(seen) >= 4
