"""Bits for keys and values, layer by layer: the best pairs for every budget.

In the manner of KVTuner (Li and others, 2025): layers differ in what an error costs, so
they get different pairs of widths. What a pair costs is estimated from a calibration,
which makes every budget's best choice one table away; what it really does to the
model's predictions is then measured, for some of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .allocate import allocations
from .calibrate import Calibration
from .checks import real, whole
from .errors import InvalidArgument, NonFiniteValue, WindowTooShort
from .fit import fit, side_losses
from .memory import KVShape
from .model import check_window, logits
from .schemes import Scheme
from .specs import Side, Spec

#: Pairs of KVTuner's kind: 8, 4 and 2 bits for keys and for values, in any combination.
PAIRS: tuple[tuple[Side, Spec], ...] = tuple(
    (keys, values)
    for keys in (
        Spec("int8", "token"),
        Spec("int4", "channel", symmetric=False),
        Spec("int2", "channel", symmetric=False),
    )
    for values in (
        Spec("int8", "token"),
        Spec("int4", "token", symmetric=False),
        Spec("int2", "token", symmetric=False),
    )
)


@dataclass(frozen=True)
class Point:
    """A scheme, and what was measured with it.

    Attributes:
        scheme: ready to use.
        bits: per cold element, scales included.
        predicted: what its errors cost by the calibration; comparable within a search.
        kl: mean KL divergence of the model's predictions from the unquantized ones, in
            nats per token.
    """

    scheme: Scheme
    bits: float
    predicted: float
    kl: float


def search(
    model,
    calibration: Calibration,
    input_ids: torch.Tensor,
    pairs: Sequence[tuple[Side, Spec]] = PAIRS,
    budget: float | None = None,
    points: int = 8,
    page_size: int = 16,
    recent: int = 0,
    sinks: int = 0,
) -> list[Point]:
    """The Pareto front of schemes that give each layer one of `pairs`.

    Args:
        model: the model that was calibrated.
        calibration: from `calibrate`.
        input_ids: int [windows, tokens], what divergence is measured on; another text
            than the calibration's.
        pairs: storage of keys and values to choose from.
        budget: the most bits per element; None for any.
        points: how many of the schemes that the estimate prefers are measured, evenly
            spread over the budgets. Each pair for all layers is measured, too: where
            the estimate errs, equal widths may win.
        page_size, recent, sinks: of the schemes.

    Returns:
        From few bits to many, the points that no other one beats in both bits and
        divergence.

    Raises:
        InvalidArgument: fewer than two points, no pair, a budget below all pairs, a
            calibration of another model, or windows that are no integer matrix.
        UnsupportedScheme: a pair that is no storage of keys and values, or keys of
            mixed widths without channels.
        WindowTooShort: no token would read a sealed page.
        NonFiniteValue: the model's own numbers overflow.
    """
    points = whole("points", points, at_least=2)
    page_size = whole("page_size", page_size, at_least=1)
    rows = _windows(model, input_ids)
    if not isinstance(calibration, Calibration):
        raise InvalidArgument(
            f"calibration comes from kvq.calibrate, got {type(calibration).__name__}"
        )
    shape = calibration.shape
    if shape != KVShape.of(model.config):
        raise InvalidArgument(
            f"the calibration is of a model of shape {shape}, "
            f"not {KVShape.of(model.config)}"
        )
    if not isinstance(pairs, Sequence) or not pairs:
        raise InvalidArgument(
            f"pairs are storage of keys and values to choose from, got {pairs!r}"
        )
    # A scheme of these layers: it refuses what is no pair.
    pairs = Scheme("pairs", Spec("fp16"), Spec("fp16"), layers=tuple(pairs)).layers
    draft = Scheme("draft", *pairs[0], recent, sinks)
    last = (len(rows[0]) - 1) // page_size
    if not draft.law(page_size).cold(last):
        raise WindowTooShort(
            f"in a window of {len(rows[0])} tokens with page_size={page_size}, "
            f"recent={recent} and sinks={sinks} no token reads a sealed page; "
            "use a longer window"
        )
    nbytes = [
        sum(side.nbytes(page_size, shape.head_dim) for side in pair) for pair in pairs
    ]
    elements = 2 * page_size * shape.head_dim * shape.num_layers
    losses = [
        [sum(of_pair) for of_pair in zip(*of_layer, strict=True)]
        for of_layer in zip(
            side_losses(calibration, "key", [k for k, _ in pairs], page_size),
            side_losses(calibration, "value", [v for _, v in pairs], page_size),
            strict=True,
        )
    ]
    most = float("inf")
    if budget is not None:
        most = real("budget", budget, at_least=0) * elements / 8
    choices = allocations([nbytes] * shape.num_layers, losses, most)
    if not choices:
        raise InvalidArgument(
            f"a budget of {budget} bits is below that of every pair: the smallest "
            f"takes {8 * min(nbytes) * shape.num_layers / elements:.3g}"
        )
    measured = []
    references = [logits(model, row, "native", page_size) for row in rows]
    if not all(torch.isfinite(reference).all() for reference in references):
        raise NonFiniteValue("the model's logits hold NaN or infinity")
    chosen = _spread(choices, nbytes, points)
    equal = [[i] * shape.num_layers for i in range(len(pairs))]
    chosen += [
        choice
        for choice in equal
        if choice not in chosen and sum(nbytes[i] for i in choice) <= most
    ]
    for choice in chosen:
        spent = sum(nbytes[i] for i in choice)
        bits = 8 * spent / elements
        layers = tuple(pairs[i] for i in choice)
        scheme = Scheme(
            f"pairs-{bits:.2f}", *layers[0], draft.recent, draft.sinks, layers
        )
        scheme = fit(scheme, calibration, page_size)
        loss = sum(row[i] for row, i in zip(losses, choice, strict=True))
        kl = _divergence(model, rows, references, scheme, page_size)
        measured.append(Point(scheme, bits, loss, kl))
    return front(measured)


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both bits and divergence, by bits."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bits, p.kl)):
        if not kept or point.kl < kept[-1].kl:
            kept.append(point)
    return kept


def _windows(model, input_ids) -> list[list[int]]:
    """The rows of input_ids, checked as in `perplexity`."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        raise InvalidArgument("input_ids must be a tensor [windows, tokens]")
    if 0 in input_ids.shape:
        raise InvalidArgument(f"input_ids is empty, got {list(input_ids.shape)}")
    return [check_window(model, window) for window in input_ids]


def _spread(choices: list[list[int]], nbytes: list[int], count: int) -> list[list[int]]:
    """`count` of the choices, as evenly spread over what they spend as there are."""
    spent = [sum(nbytes[i] for i in choice) for choice in choices]
    low, high = spent[0], spent[-1]
    wanted = [low + (high - low) * i / (count - 1) for i in range(count)]
    nearest = {
        min(range(len(spent)), key=lambda i, w=w: abs(spent[i] - w)) for w in wanted
    }
    return [choices[i] for i in sorted(nearest)]


@torch.no_grad()
def _divergence(model, rows, references, scheme: Scheme, page_size: int) -> float:
    """Mean KL divergence from reference to scheme, nats per token."""
    total = count = 0.0
    for row, reference in zip(rows, references, strict=True):
        p = reference.float().log_softmax(-1)
        q = logits(model, row, scheme, page_size).float().log_softmax(-1)
        total += (p.exp() * (p - q)).sum().item()
        count += len(p)
    return total / count
