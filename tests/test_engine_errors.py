"""Engine: errors harm no one else, wrong arguments are refused, times and counts are
exact."""

import math

import pytest
import torch
from engines import SHAPE, Letters, alone, assert_no_page_lost, model, new_engine, row
from helpers import tiny_model

import kvq_lib as kvq

pytestmark = pytest.mark.usefixtures("full_precision")

# -- errors of one request, and of all -------------------------------------------------


class Faulty:
    """A tokenizer that takes no text with an x, and cannot decode the token `bad`."""

    eos_token_id = None

    def __init__(self, bad):
        self.bad = bad

    def __call__(self, text):
        if "x" in text:
            raise ValueError("no x")
        return Letters()(text)

    def decode(self, tokens, skip_special_tokens):
        if self.bad in tokens:
            raise KeyError(self.bad)
        return ""


def test_an_error_of_one_request_never_harms_the_others():
    good = row(1, 9)
    wanted = alone(("int8", 0, 0), 4, good, 6)
    other = alone(("int8", 0, 0), 4, row(2, 9), 6)
    bad = next(t for t in other if t not in wanted)
    requests = [
        kvq.Request(good, 6),
        kvq.Request("axe", 6),
        kvq.Request([3, 97], 6),
        kvq.Request(good, 0),
        kvq.Request([1.5], 6),
        "no request",
        kvq.Request(good, 300),
        kvq.Request(row(2, 9), 6),  # runs, and cannot be decoded
        kvq.Request(good, 6),
    ]
    engine = kvq.Engine(model(), Faulty(bad), memory_bytes=200_000, page_size=4)
    results = engine.run(requests)
    ends = ["length", *["refused"] * 6, "failed", "length"]
    assert [r.end for r in results] == ends
    said = ["", "no x", "got 97", "got 0", "1.5", "'no request'", "309 tokens", "", ""]
    for found, part in zip(results, said, strict=True):
        assert part in str(found.error)
        assert (found.error is None) == (found.end == "length")
    assert results[0].tokens == results[-1].tokens == wanted
    assert results[7].tokens == other
    assert_no_page_lost(engine)


@pytest.mark.parametrize("name", ["native", "int8"])
def test_a_prompt_that_makes_the_model_overflow_fails_alone(name):
    broken = tiny_model(head_dim=16)
    broken.generation_config.eos_token_id = None
    prompts = [[3, 4, 5], [7, 8], [9] * 9]
    wanted = [
        kvq.generate(broken, Letters(), [p], name, 7, page_size=4)[0].tokens
        for p in (prompts[0], prompts[2])
    ]
    bad = next(t for t in range(90, 10, -1) if t not in {*wanted[0], *wanted[1]})
    prompts[1].append(bad)
    with torch.no_grad():
        broken.get_input_embeddings().weight[bad] = float("nan")
    engine = kvq.Engine(broken, Letters(), name, memory_bytes=200_000, page_size=4)
    results = engine.run([kvq.Request(p, 7) for p in prompts])
    assert [r.end for r in results] == ["length", "failed", "length"]
    assert isinstance(results[1].error, kvq.NonFiniteValue)
    assert [results[0].tokens, results[2].tokens] == wanted
    assert_no_page_lost(engine)


def test_an_error_of_the_model_leaves_the_engine_as_it_was(monkeypatch):
    engine = new_engine(times=3, chunk=5)
    for seed in (1, 2):
        engine.submit(kvq.Request(row(seed, 9), 6))
    events = []
    for failing in (0, 1, 2, 3):
        for _ in range(failing):
            events += engine.step()
        with monkeypatch.context() as patch:

            def fail(*args, **others):
                raise RuntimeError("out of memory")

            patch.setattr(type(model().model.layers[1].mlp), "forward", fail)
            before = engine.cache.stats()
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.step()
            if failing:  # the first step admits, too
                after = engine.cache.stats()
                assert (after.hot, after.cold) == (before.hot, before.cold)
    events += engine.stream()
    made = {e.request: e.result.tokens for e in events if e.result}
    assert made == {i: alone(("int8", 0, 0), 4, row(i + 1, 9), 6) for i in (0, 1)}
    assert_no_page_lost(engine)


ENDLESS = 10**5000


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"memory_bytes": 0}, kvq.InvalidArgument, "memory_bytes .* got 0"),
        (
            {"memory_bytes": 1e9},
            kvq.InvalidArgument,
            "memory_bytes .* got 1000000000.0",
        ),
        ({"memory_bytes": "1 GB"}, kvq.InvalidArgument, "memory_bytes .* '1 GB'"),
        ({"memory_bytes": 1000}, kvq.InvalidArgument, "memory_bytes=1000 buys too few"),
        ({"memory_bytes": 2**59}, kvq.InvalidArgument, "do not fit cpu"),
        ({"page_size": 0}, kvq.InvalidArgument, "page_size .* got 0"),
        ({"page_size": None}, kvq.InvalidArgument, "page_size .* got None"),
        ({"chunk": 0}, kvq.InvalidArgument, "chunk .* got 0"),
        ({"chunk": ENDLESS}, kvq.InvalidArgument, "chunk .* very large int"),
        ({"context": -1}, kvq.InvalidArgument, "context .* got -1"),
        ({"preempt": "drop"}, kvq.InvalidArgument, "preempt is .* got 'drop'"),
        ({"preempt": ENDLESS}, kvq.InvalidArgument, "preempt is .* very large int"),
        ({"preempt": ["swap"]}, kvq.InvalidArgument, "preempt is .* got .'swap'."),
        ({"clock": 3}, kvq.InvalidArgument, "clock is .* got 3"),
        ({"scheme": "int3"}, kvq.UnsupportedScheme, "int3"),
        ({"scheme": "mixed"}, kvq.UnsupportedScheme, "made for one model"),
        ({"tokenizer": None}, kvq.InvalidArgument, "NoneType is no tokenizer"),
        ({"model": torch.nn.Linear(1, 1)}, kvq.UnsupportedModel, "Linear"),
        ({"model": None}, kvq.UnsupportedModel, "NoneType"),
    ],
)
def test_an_engine_of_wrong_arguments_is_refused(options, error, said):
    given = {"model": model(), "tokenizer": Letters(), "memory_bytes": 100_000}
    with pytest.raises(error, match=said):
        kvq.Engine(**{**given, **options})


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (None, "kvq.Request, got None"),
        ([3, 4], r"kvq.Request, got \[3, 4\]"),
        (kvq.Request([]), "no token"),
        (kvq.Request(b"abc"), "row of tokens .* b'abc'"),
        (kvq.Request(7), "row of tokens .* got 7"),
        (kvq.Request([3, -1]), "token ids are 0 to 96, got -1"),
        (kvq.Request([3], max_new_tokens=0), "max_new_tokens .* got 0"),
        (kvq.Request([3], max_new_tokens=2.0), "max_new_tokens .* got 2.0"),
        (kvq.Request([3], temperature=-1), "temperature .* got -1"),
        (kvq.Request([3], temperature=math.nan), "temperature .* got nan"),
        (kvq.Request([3], seed=-1), "seed .* got -1"),
        (kvq.Request([3], seed=None), "seed .* got None"),
        (kvq.Request([3], arrival=-0.5), "arrival .* got -0.5"),
        (kvq.Request([3], arrival=math.inf), "arrival .* got inf"),
        (kvq.Request([3] * 250, max_new_tokens=7), "257 tokens.* 256 positions"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(request_, said):
    engine = new_engine(tokens=256)
    with pytest.raises(kvq.InvalidArgument, match=said):
        engine.submit(request_)
    assert not list(engine.stream())
    assert_no_page_lost(engine)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda e: e.cancel(1), "1 requests so far, none is 1"),
        (lambda e: e.cancel(-1), "request .* got -1"),
        (lambda e: e.cancel("0"), "request .* got '0'"),
        (lambda e: e.run(7), "requests is a list, got 7"),
        (lambda e: e.run("text"), "requests is a list, got 'text'"),
        (lambda e: list(e.stream(None)), "requests is a list, got None"),
        (lambda e: kvq.VirtualClock(-1), "step_seconds .* got -1"),
        (lambda e: kvq.VirtualClock(1, math.nan), "token_seconds .* got nan"),
    ],
)
def test_calls_of_wrong_arguments_are_refused(call, said):
    engine = new_engine()
    engine.submit(kvq.Request([3, 4], 2))
    with pytest.raises(kvq.InvalidArgument, match=said):
        call(engine)
    assert [e.request for e in engine.stream()] == [0, 0]


# -- metrics ---------------------------------------------------------------------------


def test_metrics_are_exact_on_a_small_trace():
    """Steps take 1 s and 0.25 s for each token; native pages of 4, ten of them.

    A (8 tokens, 3 new) and B (4, 2 new, the first 4 of A) come at 0, C (4, 2 new) at
    100. Steps: A reads 8, then A and B one or more each.
    """
    clock = kvq.VirtualClock(step_seconds=1, token_seconds=0.25)
    engine = new_engine(("native", 0, 0), tokens=40, chunk=8, clock=clock)
    long = row(1, 9)[:8]
    a, b, c = engine.run(
        [
            kvq.Request(long, 3),
            kvq.Request(long[:5], 2),
            kvq.Request(row(2, 4), 2, arrival=100),
        ]
    )
    # Step 1, 0 to 3 s: A reads 8. Step 2, 3 to 4.5: A one, B its fifth token; the
    # first 4 are A's. Step 3, 4.5 to 6: one each; both end.
    assert a.metrics == kvq.RequestMetrics(
        arrival=0,
        admitted=0,
        token_times=[3, 4.5, 6],
        ended=6,
        computed_tokens=10,
    )
    assert b.metrics == kvq.RequestMetrics(
        arrival=0,
        admitted=3,
        token_times=[4.5, 6],
        ended=6,
        prefix_tokens=4,
        computed_tokens=2,
    )
    # Step 4, 100 to 102: C reads 4. Step 5, 102 to 103.25: one more.
    assert c.metrics.token_times == [102, 103.25]
    assert (a.metrics.queueing, b.metrics.queueing, c.metrics.queueing) == (0, 3, 0)
    assert b.metrics.time_to_first_token == 4.5
    assert c.metrics.time_to_first_token == 2
    assert a.metrics.inter_token_latencies == [1.5, 1.5]
    assert a.metrics.tokens_per_second == 3 / 6
    total = engine.metrics
    assert total.tokens_per_second == 7 / 103.25
    assert (total.new_tokens, total.computed_tokens) == (7, 17)
    assert (total.prefix_tokens, total.peak_running) == (4, 2)
    assert (total.preemptions, total.swaps, total.swapped_bytes) == (0, 0, 0)
    assert total.usage == [
        kvq.Usage(3, hot=2, cold=0, running=1, waiting=1, tokens=8),
        kvq.Usage(4.5, hot=4, cold=0, running=2, waiting=0, tokens=2),
        kvq.Usage(6, hot=0, cold=0, running=0, waiting=0, tokens=2),
        kvq.Usage(102, hot=1, cold=0, running=1, waiting=0, tokens=4),
        kvq.Usage(103.25, hot=0, cold=0, running=0, waiting=0, tokens=1),
    ]
    assert_no_page_lost(engine)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_the_latest_arrival_is_preempted_and_its_pages_are_counted(preempt):
    # Six native pages of 4: A and B take two each, then three. A fourth one for A is
    # B's; A's 16 tokens and B's 12 together are one page too many.
    engine = new_engine(("native", 0, 0), tokens=24, preempt=preempt)
    a, b = engine.run([kvq.Request(row(i, 7), 9) for i in (1, 2)])
    assert (a.metrics.preemptions, b.metrics.preemptions) == (0, 1)
    assert b.tokens == alone(("native", 0, 0), 4, row(2, 7), 9)
    swapped = preempt == "swap"
    assert b.metrics.swaps == engine.metrics.swaps == swapped
    # Twelve tokens of it were stored; three pages, keys and values in float64.
    page = SHAPE.elements_per_token * 4 * 8
    assert engine.metrics.swapped_bytes == (3 * page if swapped else 0)
    # What is found again, or came back from the host, is not computed again.
    assert a.metrics.computed_tokens == 15
    if swapped:
        assert b.metrics.computed_tokens == 15
    else:
        lost = 12 - b.metrics.prefix_tokens
        assert b.metrics.computed_tokens == 15 + lost and lost > 0
    assert engine.metrics.peak_running == 2
    assert [u.waiting for u in engine.metrics.usage].count(1) == 3


def test_what_never_ran_has_no_times():
    metrics = kvq.RequestMetrics(arrival=3.0)
    assert metrics.queueing is metrics.time_to_first_token is None
    assert metrics.tokens_per_second is None
    assert metrics.inter_token_latencies == []
    assert kvq.EngineMetrics().tokens_per_second is None


def test_the_usage_of_old_steps_is_forgotten(monkeypatch):
    monkeypatch.setattr("kvq_lib.serving.KEPT_STEPS", 3)
    engine = new_engine()
    engine.run([kvq.Request(row(1, 4), 6)])
    assert [u.time for u in engine.metrics.usage] == [4, 5, 6]
    assert engine.metrics.tokens_per_second == 1


def test_the_wall_clock_waits_for_arrivals():
    engine = new_engine(clock=kvq.Clock())
    now, later = engine.run(
        [kvq.Request(row(1, 4), 2), kvq.Request(row(1, 4), 2, arrival=0.3)]
    )
    assert later.metrics.admitted >= later.metrics.arrival
    assert later.metrics.arrival >= now.metrics.arrival + 0.3
    assert 0 < now.metrics.time_to_first_token < now.metrics.ended
