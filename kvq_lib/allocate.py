"""Bits under a budget: one option for each layer, for the least loss in all."""

import math
from collections.abc import Sequence

import numpy as np

from .checks import real, whole
from .errors import InvalidArgument, UnsupportedScheme
from .specs import BLOCK, Mixed


def widths_of(dim: int) -> list[Mixed]:
    """Every way to give 16, 8 and 4 bits to multiples of 16 channels.

    Raises:
        UnsupportedScheme: a head dim that is no multiple of 16.
    """
    if dim % BLOCK:
        raise UnsupportedScheme(f"mixed widths want a multiple of {BLOCK} channels")
    n = dim // BLOCK
    return [
        Mixed(channels=(BLOCK * a, BLOCK * b, BLOCK * (n - a - b)))
        for a in range(n + 1)
        for b in range(n + 1 - a)
    ]


def allocate(
    costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: float
) -> list[int]:
    """One option for each layer: the least total loss at a total cost within budget.

    Exact, by dynamic programming over the budget; so more budget never gives more loss.

    Args:
        costs: bytes of each layer's options, whole numbers.
        losses: of each layer's options.
        budget: the most that the chosen options may cost together.

    Raises:
        InvalidArgument: the cheapest options together cost more than the budget; no
            layer, or one without options; costs that are no whole numbers, or losses
            that are not finite; not as many losses as costs.
    """
    found = allocations(costs, losses, budget)
    if not found:
        least = sum(min(row) for row in costs)
        raise InvalidArgument(
            f"a budget of {budget:.6g} bytes is too small: the cheapest choice takes "
            f"{least}"
        )
    return found[-1]


def allocations(
    costs: Sequence[Sequence[int]],
    losses: Sequence[Sequence[float]],
    budget: float = math.inf,
) -> list[list[int]]:
    """The best options for every budget up to the given one, from the smallest: each
    has less loss than all that cost no more. See `allocate`."""
    costs, losses = _checked(costs, losses)
    if budget != math.inf:
        budget = real("budget", budget, at_least=0)
    unit = math.gcd(*(cost for row in costs for cost in row)) or 1
    most = sum(max(row) for row in costs)
    room = int(min(budget, most) // unit)
    # best[c]: the least loss of the layers so far at a cost of exactly c units.
    best = np.full(room + 1, np.inf)
    best[0] = 0.0
    picks = []
    for row, row_losses in zip(costs, losses, strict=True):
        tried = np.full((len(row), room + 1), np.inf)
        for option, (cost, loss) in enumerate(zip(row, row_losses, strict=True)):
            units = cost // unit
            if units <= room:
                tried[option, units:] = best[: room + 1 - units] + loss
        picks.append(tried.argmin(0))
        best = tried.min(0)
    found, least = [], math.inf
    for spent in range(room + 1):
        if best[spent] < least:
            least = best[spent]
            found.append(_traced(picks, costs, unit, spent))
    return found


def _checked(costs, losses) -> tuple[list[list[int]], list[list[float]]]:
    """Costs and losses as plain numbers, row for row alike."""
    try:
        costs = [[whole("a cost", x, at_least=0) for x in row] for row in costs]
        losses = [[real("a loss", x) for x in row] for row in losses]
    except TypeError:
        raise InvalidArgument(
            "costs and losses are lists, for each layer, of a number for each option"
        ) from None
    options = [len(row) for row in costs]
    if not options or 0 in options or options != [len(row) for row in losses]:
        raise InvalidArgument(
            "costs and losses are of the same options, at least one for each layer; "
            f"got costs of {options} and losses of {[len(row) for row in losses]}"
        )
    return costs, losses


def _traced(picks, costs, unit: int, spent: int) -> list[int]:
    """The options that led to a cost of `spent` units, first layer first."""
    chosen = []
    for row, pick in zip(reversed(costs), reversed(picks), strict=True):
        option = int(pick[spent])
        chosen.append(option)
        spent -= row[option] // unit
    return chosen[::-1]
