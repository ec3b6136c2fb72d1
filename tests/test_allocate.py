"""Bits under a budget: the best of all choices, found without trying them all."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.allocate import allocations, widths_of


@st.composite
def problems(draw, most_layers=4):
    layers = draw(st.integers(1, most_layers))
    rows = [draw(st.integers(1, 4)) for _ in range(layers)]
    unit = draw(st.sampled_from([1, 3, 16]))
    cost = st.integers(0, 12).map(lambda n: n * unit)
    # Whole numbers: their sums are exact, in any order.
    loss = st.integers(0, 50).map(float)
    costs = [draw(st.lists(cost, min_size=n, max_size=n)) for n in rows]
    losses = [draw(st.lists(loss, min_size=n, max_size=n)) for n in rows]
    return costs, losses


def total(rows, choice):
    return sum(row[i] for row, i in zip(rows, choice, strict=True))


def tried(costs, losses):
    """(cost, loss) of every choice."""
    choices = itertools.product(*(range(len(row)) for row in costs))
    return [(total(costs, c), total(losses, c)) for c in choices]


@settings(max_examples=300)
@given(problem=problems(), budget=st.integers(0, 700))
def test_no_other_choice_within_the_budget_loses_less(problem, budget):
    costs, losses = problem
    within = [loss for cost, loss in tried(costs, losses) if cost <= budget]
    if not within:
        with pytest.raises(kvq.InvalidArgument, match="too small"):
            kvq.allocate(costs, losses, budget)
        return
    choice = kvq.allocate(costs, losses, budget)
    assert len(choice) == len(costs)
    assert total(costs, choice) <= budget
    assert total(losses, choice) == min(within)


@settings(max_examples=200)
@given(problem=problems(), budgets=st.lists(st.floats(0, 700), min_size=2, max_size=20))
def test_more_budget_never_loses_more(problem, budgets):
    costs, losses = problem
    least, last = sum(map(min, costs)), math.inf
    for budget in sorted(b for b in budgets if b >= least):
        choice = kvq.allocate(costs, losses, budget)
        assert total(costs, choice) <= budget
        assert total(losses, choice) <= last
        last = total(losses, choice)


@settings(max_examples=200)
@given(problem=problems(most_layers=3), budget=st.none() | st.integers(0, 500))
def test_allocations_are_the_front_of_all_choices(problem, budget):
    costs, losses = problem
    most = math.inf if budget is None else budget
    found = allocations(costs, losses, most)
    front, least = [], math.inf
    for cost, loss in sorted(tried(costs, losses)):
        if loss < least and cost <= most:
            front, least = [*front, (cost, loss)], loss
    assert [(total(costs, c), total(losses, c)) for c in found] == front


def test_numbers_of_numpy_are_taken():
    assert kvq.allocate(np.array([[3, 1]]), np.array([[0.5, 2.0]]), 2) == [1]
    assert kvq.allocate([[3, 1]], [[0.5, 2.0]], np.float32(3)) == [0]
    assert kvq.allocate([[0, 0]], [[2, 1]], 0) == [1]


@pytest.mark.parametrize(
    ("costs", "losses", "budget"),
    [
        ([], [], 1),
        ([[]], [[]], 1),
        ([[1], []], [[1], []], 1),
        ([[1.5]], [[1]], 2),
        ([[-1]], [[1]], 2),
        ([[True]], [[1]], 2),
        ([[1]], [[1, 2]], 2),
        ([[1]], [[1], [2]], 5),
        ([[1]], [[math.nan]], 2),
        ([[1]], [[math.inf]], 2),
        ([[1]], [["1"]], 2),
        (None, [[1]], 2),
        ([1], [1], 2),
        ("ab", [[1]], 2),
        ([[1]], [[1]], math.nan),
        ([[1]], [[1]], -math.inf),
        ([[1]], [[1]], -1),
        ([[1]], [[1]], None),
        ([[1]], [[1]], "9"),
    ],
    ids=str,
)
def test_what_is_no_table_of_options_is_refused(costs, losses, budget):
    with pytest.raises(kvq.InvalidArgument):
        kvq.allocate(costs, losses, budget)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_widths_are_all_ways_to_fill_the_channels_in_sixteens(dim):
    ways = [way.channels for way in widths_of(dim)]
    sixteens = range(0, dim + 1, 16)
    wanted = {c for c in itertools.product(sixteens, repeat=3) if sum(c) == dim}
    assert set(ways) == wanted and len(ways) == len(wanted)


@pytest.mark.parametrize("dim", [1, 8, 24, 40, 100])
def test_other_head_dims_have_no_mixed_widths(dim):
    with pytest.raises(kvq.UnsupportedScheme, match="16"):
        widths_of(dim)
