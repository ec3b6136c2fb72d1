"""Engine: the tokens that each request would get alone, whatever the company, the
budget and the preemptions; no page lost."""

import collections
import random

import pytest
from engines import SHAPE, Letters, alone, assert_no_page_lost, model, new_engine, row
from helpers import recipe, tiny_model
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kvq_lib as kvq

pytestmark = pytest.mark.usefixtures("full_precision")

# -- any trace -------------------------------------------------------------------------

TRACE_SCHEMES = [
    ("native", 0, 0),
    ("fp16", 0, 0),
    ("int8", 0, 0),
    ("int8", 5, 0),
    ("int4", 5, 3),
    ("int4-kivi", 0, 0),
    ("int4-rotated", 0, 5),
    ("k8v4", 3, 0),
    ("nvfp4", 0, 0),
    ("int2-feedback", 4, 2),
]


#: Prompts that share prefixes of several lengths, and one that shares none.
PROMPTS = [
    *(row(1, n) for n in (4, 1, 9, 16)),
    *(row(1, n) + row(n, 5) for n in (3, 8, 12)),
    row(2, 10),
]
LONGEST = 20  # new tokens


def random_trace(seed):
    """Requests in any order of arrival, cancellations, and a tight engine.

    Drawn evenly: left to hypothesis, most traces would be too easy to preempt anyone.
    """
    draw = random.Random(seed)
    count = draw.randint(3, 7)
    requests = [
        kvq.Request(
            draw.choice(PROMPTS),
            max_new_tokens=draw.choice([1, 3, 15, 18, 19, LONGEST]),
            arrival=draw.choice([0, 0, 0, 1, 2.5, 6, 30]),
        )
        for _ in range(count)
    ]
    return {
        "requests": requests,
        "scheme": draw.choice(TRACE_SCHEMES),
        "page": draw.choice([2, 3, 4, 7]),
        "chunk": draw.choice([1, 4, 4, 8, 8, 8, 16, 64]),
        "times": draw.choice([1.0, 1.3, 1.6, 2.0, 2.5, 3.0]),
        # The less of it, the more hot pages, and the sooner cold ones run out.
        "context": draw.choice([4, 8, 16, 32]),
        # After which of all events which request is cancelled.
        "cancel": {
            draw.randint(0, 80): draw.randrange(count)
            for _ in range(draw.choice([0, 0, 1, 2]))
        },
    }


def assert_sums(engine, results):
    """The totals are the sums of what the requests say."""
    for name in ("computed_tokens", "prefix_tokens", "preemptions", "swaps"):
        parts = [getattr(r.metrics, name) for r in results]
        assert getattr(engine.metrics, name) == sum(parts), name
    assert engine.metrics.new_tokens == sum(len(r.tokens) for r in results)
    usage = engine.metrics.usage
    assert sum(u.tokens for u in usage) == engine.metrics.computed_tokens
    assert max((u.running for u in usage), default=0) <= engine.metrics.peak_running
    assert all(0 < u.tokens <= engine.chunk for u in usage)


def serve(trace, preempt):
    """Run a trace; returns its engine and the results."""
    longest = max(len(r.prompt) + r.max_new_tokens - 1 for r in trace["requests"])
    engine = new_engine(
        trace["scheme"],
        trace["page"],
        longest,
        trace["times"],
        trace["context"],
        chunk=trace["chunk"],
        preempt=preempt,
    )
    made, events = collections.defaultdict(list), 0

    def on_event(event):
        nonlocal events
        if events in trace["cancel"]:
            engine.cancel(trace["cancel"][events])
        events += 1
        assert events < 200, "more events than tokens and ends"
        if event.token is not None:
            made[event.request].append(event.token)

    results = engine.run(trace["requests"], on_event)
    assert [made[r.request] for r in results] == [r.tokens for r in results]
    return engine, results


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_every_request_gets_the_tokens_that_it_would_get_alone(preempt):
    seen = collections.Counter()

    # The same traces each time, or shares would vary; a smaller seed is no help.
    @settings(max_examples=120, derandomize=True, phases=[Phase.generate])
    @given(seed=st.integers(0, 2**32))
    def check(seed):
        trace = random_trace(seed)
        engine, results = serve(trace, preempt)
        page, scheme = trace["page"], trace["scheme"]
        for request, result in zip(trace["requests"], results, strict=True):
            wanted = alone(scheme, page, request.prompt, LONGEST)
            wanted = wanted[: request.max_new_tokens]
            if result.end == "cancelled":
                assert result.tokens == wanted[: len(result.tokens)]
            else:
                assert result.tokens == wanted, result.error
                assert result.end == ("stop" if wanted[-1] == 11 else "length")
            seen[result.end] += 1
        assert_no_page_lost(engine)
        assert_sums(engine, results)
        assert engine.metrics.swaps == (
            engine.metrics.preemptions if preempt == "swap" else 0
        )
        seen["traces"] += 1
        seen["preempted"] += engine.metrics.preemptions > 0
        seen["prefix"] += engine.metrics.prefix_tokens > 0
        seen["together"] += engine.metrics.peak_running > 1

    check()
    assert seen["traces"] >= 120
    assert seen["preempted"] >= seen["traces"] / 4
    for what in ("prefix", "together", "stop", "length", "cancelled"):
        assert seen[what] >= 10, what


def test_a_chunk_bounds_a_step_and_mixes_prompts_with_decoding():
    # A reads its prompt of 4 in the first step; then it decodes beside B's chunks.
    engine = new_engine(chunk=4, times=4)
    engine.submit(kvq.Request(row(4, 4), max_new_tokens=6))
    engine.submit(kvq.Request(row(5, 9), max_new_tokens=2))
    steps = []
    while not steps or steps[-1]:
        steps.append([(e.request, e.result is not None) for e in engine.step()])
    assert [u.tokens for u in engine.metrics.usage] == [4, 4, 4, 4, 2, 1]
    assert steps == [
        [(0, False)],
        [(0, False)],
        [(0, False)],
        [(0, False), (1, False)],
        [(0, False), (1, True)],
        [(0, True)],
        [],
    ]


# -- what does not fit -----------------------------------------------------------------


@pytest.mark.parametrize("scheme", [("native", 0, 0), ("int8", 0, 0), ("int4", 9, 5)])
def test_what_can_never_fit_is_refused_at_once_with_numbers(scheme):
    engine = new_engine(scheme, tokens=24)
    total = engine.cache._pages.hot.count, engine.cache._pages.cold.count
    fits = kvq.Request(row(1, 16), max_new_tokens=9)  # 24 are stored: the last is not
    over = kvq.Request(row(1, 90), max_new_tokens=9)
    with pytest.raises(kvq.OutOfPages, match=f"98 tokens need .* {total[0]} and"):
        engine.submit(over)
    results = engine.run([fits, over, fits])
    assert [r.end for r in results] == ["length", "refused", "length"]
    assert isinstance(results[1].error, kvq.OutOfPages)
    assert results[1].metrics.ended == 0.0  # before any step
    for found in (results[0], results[2]):
        assert found.tokens == alone(scheme, 4, row(1, 16), 9)
    assert_no_page_lost(engine)


def test_the_longest_request_that_fits_alone_is_served_and_one_token_more_is_not():
    for scheme in [("native", 0, 0), ("int8", 0, 0), ("int4", 5, 3)]:
        engine = new_engine(scheme, page=4, tokens=24, chunk=3)
        tables = engine.cache._pages
        pages = tables.cold.count + tables.law.sinks if tables.cold.count else 0
        most = 4 * (pages + 1) - 1 if pages else 4 * tables.hot.count
        prompt = row(7, most)
        (found,) = engine.run([kvq.Request(prompt, max_new_tokens=1)])
        assert found.tokens == alone(scheme, 4, prompt, 1)
        with pytest.raises(kvq.OutOfPages, match=f"{most + 1} tokens"):
            engine.submit(kvq.Request(prompt, max_new_tokens=2))


@pytest.mark.parametrize("name", [*kvq.SCHEMES])
@pytest.mark.parametrize("page", [4, 16])
def test_the_pools_stay_within_the_budget_and_use_it(name, page):
    scheme = recipe(name, SHAPE, page)
    for budget in (200_000, 1_000_001):
        for context in (1, 100, 5000):
            engine = kvq.Engine(
                model(),
                Letters(),
                scheme,
                memory_bytes=budget,
                page_size=page,
                context=context,
            )
            assert 0.9 * budget < engine.cache.nbytes <= budget


def test_pages_held_by_others_are_named_and_nothing_is_lost():
    engine = new_engine(("native", 0, 0), tokens=24)
    other = engine.cache.add()
    batch = engine.cache.begin([other], [21])
    engine.submit(kvq.Request(row(1, 9), max_new_tokens=2))
    with pytest.raises(kvq.OutOfPages, match="hot pages needed"):
        for _ in range(3):
            engine.step()
    engine.cache.abort(batch)
    engine.cache.free(other)
    (*_, last) = engine.stream()
    assert last.result.tokens == alone(("native", 0, 0), 4, row(1, 9), 2)
    assert_no_page_lost(engine)


# -- streams, ends and cancellation ----------------------------------------------------


def test_tokens_are_streamed_one_by_one_in_order_of_time():
    engine = new_engine(times=4, chunk=8)
    requests = [
        kvq.Request(row(1, 9), 5),
        kvq.Request(row(2, 3), 7, arrival=2),
        kvq.Request([], 3),
    ]
    events = list(engine.stream(requests))
    times = [e.time for e in events]
    assert times == sorted(times)
    for id_, request in enumerate(requests[:2]):
        mine = [e for e in events if e.request == id_]
        wanted = alone(("int8", 0, 0), 4, request.prompt, request.max_new_tokens)
        assert [e.token for e in mine] == wanted
        assert [e.result is None for e in mine] == [True] * (len(mine) - 1) + [False]
        assert mine[-1].result.tokens == wanted
        assert mine[-1].result.text == " ".join(map(str, wanted))
        assert mine[-1].result.metrics.token_times == [e.time for e in mine]
    refused = [e for e in events if e.request == 2]
    assert [(e.token, e.result.end) for e in refused] == [(None, "refused")]
    assert isinstance(refused[0].result.error, kvq.InvalidArgument)


def test_a_stream_hands_over_a_token_before_the_next_step_is_computed():
    engine = new_engine()
    stream = engine.stream([kvq.Request(row(1, 4), 3)])
    for steps in (1, 2, 3):
        next(stream)
        assert len(engine.metrics.usage) == steps


@pytest.mark.parametrize("after", ["submission", "prefill", "decode", "preemption"])
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_a_request_can_be_cancelled_at_any_time(after, preempt):
    engine = new_engine(("native", 0, 0), tokens=40, chunk=4, preempt=preempt)
    first = engine.submit(kvq.Request(row(7, 8), 24))
    second = engine.submit(kvq.Request(row(8, 9), 24))
    done = {
        "submission": lambda: True,
        "prefill": lambda: 0 < engine.metrics.computed_tokens - 8 < 9,
        "decode": lambda: engine.metrics.new_tokens > 8,
        "preemption": lambda: engine.metrics.preemptions > 0,
    }[after]
    events = []
    while not done():
        assert len(events) < 48
        events += engine.step()
    assert engine.cancel(second)
    assert not engine.cancel(second)
    if after == "preemption":
        assert engine.cache.stats().sequences == 1
    events += engine.stream()
    ends = {e.request: e.result for e in events if e.result}
    wanted = alone(("native", 0, 0), 4, row(7, 8), 24)
    assert ends[first].tokens == wanted
    assert ends[second].end == "cancelled"
    assert bool(ends[second].tokens) == (after in ("decode", "preemption"))
    told = [e.token for e in events if e.request == second and e.token is not None]
    assert told == ends[second].tokens
    assert_no_page_lost(engine)


def test_leaving_a_stream_cancels_its_requests_and_no_others():
    engine = new_engine(times=3)
    kept = engine.submit(kvq.Request(row(1, 9), 6))
    stream = engine.stream([kvq.Request(row(2, 9), 30)])
    next(stream)
    stream.close()
    assert engine.cache.stats().sequences == 1
    results = [e.result for e in engine.stream() if e.result]
    assert [r.request for r in results] == [kept]
    assert_no_page_lost(engine)

    def fail(event):
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="own"):
        engine.run([kvq.Request(row(2, 9), 30)], fail)
    assert_no_page_lost(engine)


def test_what_would_take_another_run_s_events_is_refused():
    engine = new_engine()
    asked = [kvq.Request(row(1, 4), 3)]
    refused = []

    def nest(event):
        for call in (lambda: engine.run(asked), lambda: next(engine.stream(asked))):
            with pytest.raises(kvq.StepError, match="submit the request"):
                call()
        with pytest.raises(kvq.StepError, match="going on"):
            engine.step()
        refused.append(event.request)
        if len(refused) == 1:
            engine.submit(kvq.Request(row(2, 4), 2))

    (alone,) = new_engine().run(asked)
    (result,) = engine.run(asked, nest)
    assert result.tokens == alone.tokens
    assert sorted(refused) == [0, 0, 0, 1, 1]  # what was submitted is served as well
    stream = engine.stream(asked)
    next(stream)
    with pytest.raises(kvq.StepError, match="going on"):
        engine.run(asked)
    stream.close()
    assert engine.run(asked)[0].tokens == alone.tokens


def test_ends_and_limits_are_those_of_generate():
    scheme, prompt = ("int8", 0, 0), row(1, 9)
    wanted = alone(scheme, 4, prompt, LONGEST)
    for new in (1, 2, 7):
        (found,) = new_engine().run([kvq.Request(prompt, new)])
        assert found.tokens == wanted[:new]
    # An end token of the tokenizer's, where the model has none.
    plain = tiny_model(head_dim=16)
    plain.generation_config.eos_token_id = None
    letters = Letters()
    letters.eos_token_id = wanted[3]
    engine = kvq.Engine(plain, letters, memory_bytes=200_000, page_size=4)
    (found,) = engine.run([kvq.Request(prompt, LONGEST)])
    assert found.end == "stop"
    assert found.tokens == wanted[: wanted.index(wanted[3]) + 1]


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_sampling_draws_what_generate_draws_whatever_happens(preempt):
    scheme = ("native", 0, 0)
    engine = new_engine(scheme, tokens=32, times=1.5, preempt=preempt)
    asked = [(row(seed % 2, 6), seed) for seed in range(5)]
    results = engine.run(
        [kvq.Request(prompt, 18, temperature=1.1, seed=seed) for prompt, seed in asked]
    )
    assert engine.metrics.preemptions > 0
    for (prompt, seed), found in zip(asked, results, strict=True):
        assert found.tokens == alone(scheme, 4, prompt, 18, 1.1, seed)
    assert len({tuple(r.tokens) for r in results}) == 5


def test_a_text_goes_through_the_tokenizer():
    (found,) = new_engine().run([kvq.Request("abc", 4)])
    assert found.tokens == alone(("int8", 0, 0), 4, (7, 8, 9), 4)
