"""The search for pairs of widths: budgets hold, and nothing that is beaten is kept."""

import importlib
import itertools

import pytest
import torch
from helpers import random_calibration, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.fit import side_losses
from kvq_lib.search import PAIRS, front

module = importlib.import_module("kvq_lib.search")

IDS = torch.randint(97, (1, 128), generator=torch.Generator().manual_seed(2))
OTHER = torch.randint(97, (2, 60), generator=torch.Generator().manual_seed(3))
PAGE = 16


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=3, head_dim=32)


@pytest.fixture(scope="module")
def calibration(model):
    return kvq.calibrate(model, IDS)


# -- the front -------------------------------------------------------------------------

NUMBERS = st.integers(0, 8).map(float)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20))
def test_the_front_is_what_no_point_beats(pairs):
    points = [kvq.Point(kvq.scheme("int8"), bits, 0.0, kl) for bits, kl in pairs]
    kept = front(points)
    for a, b in itertools.pairwise(kept):
        assert a.bits < b.bits and a.kl > b.kl
    for point in points:  # each is beaten or equalled by one that is kept
        assert any(k.bits <= point.bits and k.kl <= point.kl for k in kept)
    assert all(any(k is p for p in points) for k in kept)


# -- with a model ----------------------------------------------------------------------


def divergence(model, scheme):
    """KL of the predictions, in float64, from the definition."""
    found = []
    for row in OTHER:
        p, q = (
            kvq.logits(model, row, s, PAGE).double().softmax(-1)
            for s in ("native", scheme)
        )
        found.append((p * (p / q).log()).sum(-1))
    return torch.cat(found).mean().item()


def test_points_are_what_they_say(model, calibration):
    points = kvq.search(
        model, calibration, OTHER, points=6, page_size=PAGE, recent=3, sinks=8
    )
    assert len(points) >= 3
    assert front(points) == points
    losses = [
        side_losses(calibration, side, [pair[i] for pair in PAIRS], PAGE)
        for i, side in enumerate(("key", "value"))
    ]
    for point in points:
        scheme = point.scheme
        assert (scheme.recent, scheme.sinks, len(scheme.layers)) == (3, 8, 3)
        choice = [PAIRS.index(pair) for pair in scheme.layers]
        wanted = sum(
            side[layer][pair] for side in losses for layer, pair in enumerate(choice)
        )
        assert point.predicted == pytest.approx(wanted, rel=1e-9)
        cache = kvq.PagedKVCache(calibration.shape, scheme, PAGE, num_pages=3)
        assert point.bits == pytest.approx(cache.bits_per_element, rel=1e-12)
        assert point.kl == pytest.approx(divergence(model, scheme), rel=1e-3, abs=1e-7)
    assert points[0].bits < points[-1].bits


@pytest.mark.parametrize("budget", [4.0, 5.2, 6.0, 7.7, 10.0, None])
def test_a_budget_is_respected_and_used(model, calibration, budget, monkeypatch):
    monkeypatch.setattr(module, "front", lambda points: points)
    points = kvq.search(model, calibration, OTHER, budget=budget, page_size=PAGE)
    assert len(points) >= 2
    assert all(p.bits <= (budget or 99) for p in points)
    # The pairs that fit the budget are there for all layers, each once.
    equal = [p for p in points if len(set(p.scheme.layers)) == 1]
    smallest = [p.bits for p in map(of_equal_widths, PAIRS) if p.bits <= (budget or 99)]
    assert sorted(p.bits for p in equal) == sorted(smallest)
    # From few bits to many, each of the others predicts less loss than the last one,
    # and no equal widths of as few bits predict less.
    mixed = [p for p in points if p not in equal]
    for a, b in itertools.pairwise(mixed):
        assert a.bits < b.bits and a.predicted > b.predicted
    for a, b in itertools.product(mixed, equal):
        assert b.bits > a.bits or b.predicted >= a.predicted
    most = max(
        (k.nbytes(PAGE, 32) + v.nbytes(PAGE, 32)) * 8 / (2 * PAGE * 32)
        for k, v in PAIRS
    )
    assert max(p.bits for p in points) > min(budget or 99, most) - 1.5


def of_equal_widths(pair):
    """A pair for all layers, as a point that nothing is known about."""
    scheme = kvq.Scheme("equal", *pair)
    return kvq.Point(scheme, scheme.bits_per_element(PAGE, 32), 0.0, 0.0)


def test_equal_widths_win_where_the_estimate_errs(model, calibration, monkeypatch):
    """A measurement in which layers that differ do badly leaves equal ones alone."""

    def differ(model, rows, references, scheme, page_size):
        return float(len(set(scheme.layers))) + 1 / scheme.bits_per_element(PAGE, 32)

    monkeypatch.setattr(module, "_divergence", differ)
    points = kvq.search(model, calibration, OTHER, page_size=PAGE)
    assert len(points) > 2
    assert all(len(set(point.scheme.layers)) == 1 for point in points)


def test_more_budget_never_predicts_more_loss(model, calibration, monkeypatch):
    monkeypatch.setattr(module, "front", lambda points: points)
    monkeypatch.setattr(module, "_divergence", lambda *_: 0.0)
    last = float("inf")
    for budget in (4, 4.5, 4.75, 5, 5.5, 6, 7, 8, 9, 10, 16):
        points = kvq.search(
            model, calibration, OTHER, budget=budget, points=2, page_size=PAGE
        )
        least = min(point.predicted for point in points)
        assert least <= last
        last = least


def test_a_budget_below_every_pair_is_told_the_smallest(model, calibration):
    with pytest.raises(kvq.InvalidArgument, match=r"2\.0 bits.*smallest takes"):
        kvq.search(model, calibration, OTHER, budget=2.0, page_size=PAGE)


def test_pairs_may_need_calibration_and_have_mixed_widths():
    model = tiny_model(head_dim=32)
    calibration = kvq.calibrate(model, IDS)
    pairs = [
        (kvq.Mixed(channels=(16, 0, 16)), kvq.Spec("int8", "static")),
        (kvq.Spec("int4", "token", False, ("feedback",)), kvq.Spec("int8", "token")),
    ]
    found = kvq.search(model, calibration, OTHER, pairs, page_size=PAGE)
    for point in found:
        assert set(point.scheme.layers) <= set(pairs)
        assert point.bits == point.scheme.bits_per_element(PAGE, 32)
    only = kvq.search(model, calibration, OTHER, pairs[:1], page_size=PAGE)
    assert len(only) == 1 and only[0].scheme.layers == (pairs[0],) * 2


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"points": 1}, kvq.InvalidArgument),
        ({"points": 2.5}, kvq.InvalidArgument),
        ({"pairs": []}, kvq.InvalidArgument),
        ({"pairs": None}, kvq.InvalidArgument),
        ({"pairs": 5}, kvq.InvalidArgument),
        ({"pairs": [kvq.Spec("fp16")]}, kvq.UnsupportedScheme),
        ({"pairs": [PAIRS[0], ("int8", "int8")]}, kvq.UnsupportedScheme),
        ({"pairs": [(kvq.Mixed(), kvq.Spec("fp16"))]}, kvq.UnsupportedScheme),
        ({"budget": float("nan")}, kvq.InvalidArgument),
        ({"budget": -1}, kvq.InvalidArgument),
        ({"budget": "6"}, kvq.InvalidArgument),
        ({"page_size": 0}, kvq.InvalidArgument),
        ({"page_size": 2.0}, kvq.InvalidArgument),
        ({"page_size": 60}, kvq.WindowTooShort),
        ({"recent": -1}, kvq.InvalidArgument),
        ({"recent": 100}, kvq.WindowTooShort),
        ({"sinks": 100}, kvq.WindowTooShort),
        ({"calibration": None}, kvq.InvalidArgument),
        ({"calibration": random_calibration(kvq.KVShape(3, 2, 64))}, ValueError),
        ({"input_ids": OTHER.tolist()}, kvq.InvalidArgument),
        ({"input_ids": OTHER[0]}, kvq.InvalidArgument),
        ({"input_ids": OTHER[:0]}, kvq.InvalidArgument),
        ({"input_ids": OTHER + 97}, kvq.InvalidArgument),
        ({"input_ids": OTHER.float()}, kvq.InvalidArgument),
        ({"model": torch.nn.Linear(2, 2)}, kvq.UnsupportedModel),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_cannot_be_searched_is_refused(model, calibration, changes, error):
    given = {"model": model, "calibration": calibration, "input_ids": OTHER}
    with pytest.raises(error) as caught:
        kvq.search(**{**given, "page_size": PAGE, **changes})
    assert isinstance(caught.value, kvq.KVQError)


def test_a_model_that_overflows_is_told(calibration):
    model = tiny_model(num_hidden_layers=3, head_dim=32)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(kvq.NonFiniteValue, match="logits"):
        kvq.search(model, calibration, OTHER, page_size=PAGE)
