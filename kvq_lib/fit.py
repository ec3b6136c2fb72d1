"""From a calibration to a scheme that is made for one model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .allocate import allocate, widths_of
from .calibrate import Calibration
from .checks import real, reason, whole
from .errors import InvalidArgument
from .quantize import quantize_as, safe_scale
from .schemes import Scheme
from .schemes import scheme as find_scheme
from .specs import WIDTHS, Mixed, Side, Spec
from .storage import Aid
from .turns import Found, Turn, turn, turns_of

#: Parts of a group's range that "clip" chooses from.
CLIPS = tuple(1 - i / 40 for i in range(21))


@dataclass(frozen=True)
class _Options:
    """What `fit` was asked for; see there."""

    page_size: int
    smoothing: float
    damping: float
    percentile: float | None


@dataclass(frozen=True)
class _Layer:
    """One side of one layer, in the coordinates that it is stored in.

    Attributes:
        sample: float32 [kv_heads, tokens, dim].
        cost: float32 [kv_heads, dim, dim], what errors cost; see `calibrate`.
        moment: the matrix that "feedback" rounds under, the same shape.
        largest: float32 [kv_heads], the largest magnitude.
    """

    sample: torch.Tensor
    cost: torch.Tensor
    moment: torch.Tensor
    largest: torch.Tensor

    def run(self, start: int, width: int) -> "_Layer":
        """A run of its channels."""
        at = slice(start, start + width)
        square = (slice(None), at, at)
        part = self.sample[..., at]
        largest = part.abs().amax((1, 2))
        return _Layer(part, self.cost[square], self.moment[square], largest)

    def loss(self, side: Side, aids: Sequence[Aid], page_size: int) -> torch.Tensor:
        """What quantizing the sample costs per token: float64 [kv_heads]."""
        pages = paged(self.sample, page_size)
        error = pages - quantize_as(pages, side, aids).dequantize()
        return expected_cost(error.flatten(1, 2), self.cost)


def fit(
    scheme: "str | Scheme",
    calibration: Calibration,
    page_size: int = 16,
    smoothing: float = 0.5,
    damping: float = 0.01,
    percentile: float | None = None,
) -> Scheme:
    """A scheme with all that it needs to know about one model.

    Args:
        scheme: a name of `SCHEMES`, or a Scheme. One that needs no calibration is
            returned as it is.
        calibration: from `calibrate`.
        page_size: tokens in a page, for choices that depend on it: clips and widths.
        smoothing: for "smooth": 1 gives all key channels the same range, 0 all query
            channels the same mean square.
        damping: for "feedback": what is added to the diagonal of the matrix, in units
            of its mean.
        percentile: of magnitudes, above 0 up to 100: what a static scale must hold,
            and what "clip" keeps of a group's range. None for the largest magnitude
            seen, and for the clip that costs least on the sample.

    Raises:
        UnsupportedScheme: an unknown scheme, or one for another number of layers; mixed
            widths for a head dim that is no multiple of 16.
        InvalidArgument: a number out of range; a budget of `Mixed` that is too small; a
            sample that does not fill a page.
        ValueOutOfRange: a scale that exceeds float16.
    """
    recipe = find_scheme(scheme)
    if not isinstance(calibration, Calibration):
        raise InvalidArgument(
            f"calibration comes from kvq.calibrate, got {type(calibration).__name__}"
        )
    if percentile is not None:
        percentile = real("percentile", percentile, at_least=0)
        if not 0 < percentile <= 100:
            raise InvalidArgument(f"percentile is above 0 to 100, got {percentile}")
    smoothing = real("smoothing", smoothing, at_least=0)
    if smoothing > 1:
        raise InvalidArgument(f"smoothing is 0 to 1, got {smoothing}")
    options = _Options(
        whole("page_size", page_size, at_least=1),
        smoothing,
        real("damping", damping, at_least=1e-6),
        percentile,
    )
    layers = range(calibration.shape.num_layers)
    recipe = replace(recipe, fit=None)
    recipe.require_layers(len(layers))
    if not recipe.calibrated:
        return recipe
    pairs = [recipe.sides(i) for i in layers]
    prepared = [
        (
            _prepared(keys, _keys(calibration, i), options),
            _prepared(values, _values(calibration, i), options),
        )
        for i, (keys, values) in enumerate(pairs)
    ]
    if any(isinstance(keys, Mixed) and not keys.channels for keys, _ in pairs):
        layers_of_keys = [keys for (_, keys), _ in prepared]
        pairs = _allocated(pairs, layers_of_keys, loudness(calibration), options)
    found = tuple(
        tuple(
            replace(
                found, aids=_aids(side, layer, options), dim=calibration.shape.head_dim
            )
            for side, (found, layer) in zip(pair, both, strict=True)
        )
        for pair, both in zip(pairs, prepared, strict=True)
    )
    same = recipe.layers == () and not isinstance(recipe.keys, Mixed)
    return replace(recipe, layers=() if same else tuple(pairs), fit=found)


@dataclass(frozen=True)
class _Side:
    """One side of one layer, as calibration found it; see `Calibration`."""

    sample: torch.Tensor
    mean: torch.Tensor
    largest: torch.Tensor
    cost: torch.Tensor
    moment: torch.Tensor
    query: torch.Tensor | None  # root mean square of the queries' channels


def _keys(c: Calibration, layer: int) -> _Side:
    moment = c.query_moment[layer]
    return _Side(
        c.keys[layer].float(),
        c.key_mean[layer],
        torch.maximum(c.key_low[layer].abs(), c.key_high[layer].abs()),
        c.key_cost[layer],
        moment,
        moment.diagonal(dim1=-2, dim2=-1).sqrt(),
    )


def _values(c: Calibration, layer: int) -> _Side:
    return _Side(
        c.values[layer].float(),
        c.value_mean[layer],
        torch.maximum(c.value_low[layer].abs(), c.value_high[layer].abs()),
        c.value_cost[layer],
        c.output_gram[layer],
        None,
    )


def _prepared(side: Side, raw: _Side, options: _Options) -> tuple[Found, _Layer]:
    """Coordinates of a side, and what is known about it there."""
    center = raw.mean if "center" in side.aids else None
    factor = None
    if "smooth" in side.aids:
        centered = raw.sample if center is None else raw.sample - center.unsqueeze(1)
        reach = centered.abs().amax(1)
        factor = _smoothing_factor(reach, raw.query, options.smoothing)
    found = Found(center, factor)
    layer = _turned(side, raw, found)
    if isinstance(side, Mixed):
        # Scales belong to tokens, so a channel costs by its weight and by its reach.
        weight = layer.cost.diagonal(dim1=-2, dim2=-1).sqrt()
        need = weight * layer.sample.abs().amax(1)
        found = replace(found, order=need.argsort(dim=-1, descending=True, stable=True))
        layer = _turned(side, raw, found)
    return found, layer


def _smoothing_factor(reach, query, smoothing: float) -> torch.Tensor:
    """What key channels are divided by, [kv_heads, dim].

    SmoothQuant's formula (Xiao and others, 2022), with a geometric mean of about 1 in
    each head, and rounded to powers of two: neither keys nor queries lose a bit by it.
    """
    logs = smoothing * reach.clamp_min(1e-6).log2()
    logs = logs - (1 - smoothing) * query.clamp_min(1e-6).log2()
    return (logs - logs.mean(-1, keepdim=True)).round().clamp(-8, 8).exp2()


def _turned(side: Side, raw: _Side, found: Found) -> _Layer:
    """What is known about a side, in the coordinates of `found`."""
    dim, is_keys = raw.sample.shape[-1], raw.query is not None
    if is_keys:
        turns = turns_of(side, WIDTHS[0], dim, raw.sample.device, (found, Found()))
        ways = turns and (turns.keys, turns.queries)
    else:
        turns = turns_of(WIDTHS[0], side, dim, raw.sample.device, (Found(), found))
        ways = turns and (turns.values, replace(turns.outputs, after=None))
    if ways is None:
        return _Layer(raw.sample, raw.cost, raw.moment, raw.largest.amax(-1))
    sample = _turn(raw.sample, ways[0])
    # Row d of T is channel d in the new coordinates: an error e' there is T e' here.
    identity = torch.eye(dim).expand(len(raw.cost), dim, dim)
    t = _turn(identity, ways[1])
    cost, moment = (t.mT @ m @ t for m in (raw.cost, raw.moment))
    return _Layer(sample, cost, moment, sample.abs().amax((1, 2)))


def _turn(x: torch.Tensor, way: Turn) -> torch.Tensor:
    """`turn` of x [kv_heads, tokens, dim]."""
    return turn(x.transpose(0, 1), way).transpose(0, 1)


def _aids(side: Side, layer: _Layer, options: _Options) -> tuple[Aid, ...]:
    """What the codes of each run of channels need."""
    aids, start = [], 0
    for spec, width in side.runs(layer.sample.shape[-1]):
        part = layer
        if isinstance(side, Mixed):
            part = layer.run(start, width)
        aids.append(_aid(spec, part, options))
        start += width
    return tuple(aids)


def _aid(spec: Spec, layer: _Layer, options: _Options) -> Aid:
    scale = clip = feedback = None
    if spec.granularity == "static":
        reach = layer.largest
        if options.percentile is not None:
            reach = _percentile(layer.sample.abs(), options.percentile)
        scale = safe_scale(reach / spec.largest_code).view(-1, 1, 1, 1)
    if "clip" in spec.aids:
        clip = _best_clip(spec, layer, options).view(-1, 1, 1, 1)
    if "feedback" in spec.aids:
        feedback = feedback_shares(layer.moment, options.damping)
    return Aid(scale, clip, feedback)


def _percentile(x: torch.Tensor, percentile: float) -> torch.Tensor:
    """Of x [kv_heads, …], for each head."""
    return x.flatten(1).quantile(percentile / 100, dim=1)


def _best_clip(spec: Spec, layer: _Layer, options: _Options) -> torch.Tensor:
    """The part of each group's range to keep, float32 [kv_heads]."""
    plain = Spec(spec.format, spec.granularity, spec.symmetric, ("clip",))
    heads = len(layer.sample)
    if options.percentile is not None:
        whole_range = Aid(clip=torch.ones(heads, 1, 1, 1))
        q = quantize_as(paged(layer.sample, options.page_size), plain, [whole_range])
        reach = q.scale.float() * (spec.largest_code / (1 if spec.symmetric else 2))
        middle = 0.0 if spec.symmetric else q.zero.float() + reach
        pages = paged(layer.sample, options.page_size)
        kept = _percentile((pages - middle).abs() / reach, options.percentile)
        return kept.clamp(CLIPS[-1], 1.0)
    tried = torch.stack(
        [
            layer.loss(
                plain, [Aid(clip=torch.full((heads, 1, 1, 1), c))], options.page_size
            )
            for c in CLIPS
        ]
    )
    return torch.tensor(CLIPS)[tried.argmin(0)]


def feedback_shares(moment: torch.Tensor, damping: float) -> torch.Tensor:
    """What an error in a channel takes away from each channel after it.

    Rounding channel d by an error of 1 is best answered, in the sense of eᵀ M e, by
    changes of the channels after d that are a row of the inverse's Cholesky factor
    (GPTQ, Frantar and others, 2022).

    Args:
        moment: M, [kv_heads, dim, dim], positive semidefinite.
        damping: added to the diagonal, in units of its mean.

    Returns:
        float32 [kv_heads, dim, dim], strictly upper triangular.

    Raises:
        InvalidArgument: M is not positive semidefinite.
    """
    m = moment.double()
    mean = m.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)
    m = m + damping * mean.view(-1, 1, 1) * torch.eye(m.shape[-1], dtype=m.dtype)
    try:
        upper = torch.linalg.cholesky(torch.linalg.inv(m), upper=True)
    except torch.linalg.LinAlgError as error:
        raise InvalidArgument(
            f"feedback wants a positive semidefinite matrix: {reason(error)}"
        ) from None
    shares = upper / upper.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return shares.triu(1).float()


def paged(sample: torch.Tensor, page_size: int) -> torch.Tensor:
    """A sample [kv_heads, tokens, dim] in pages [kv_heads, pages, page_size, dim].

    Raises:
        InvalidArgument: the sample does not fill a page.
    """
    pages = sample.shape[1] // page_size
    if pages == 0:
        raise InvalidArgument(
            f"the calibration's sample has {sample.shape[1]} tokens, fewer than a page "
            f"of {page_size}"
        )
    return sample[:, : pages * page_size].unflatten(1, (pages, page_size))


def expected_cost(error: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """The mean of eᵀ M e over tokens: error [kv_heads, tokens, dim], float64
    [kv_heads]."""
    error, cost = error.double(), cost.double()
    return ((error @ cost) * error).sum(-1).mean(-1)


def side_losses(
    calibration: Calibration, which: str, sides: Sequence[Side], page_size: int = 16
) -> list[list[float]]:
    """What storing keys, or values, in each of some ways costs each layer.

    Args:
        which: "key" or "value".
        sides: ways to store them. Of their aids, "clip" and "feedback" are left out.
        page_size: tokens in a page.

    Returns:
        For each layer the cost of each side, summed over kv heads: the expected squared
        change of the layer's output per token, on the calibration's sample, in units of
        the layer's `loudness`.
    """
    options = _Options(page_size, 0.5, 0.01, None)
    raw = {"key": _keys, "value": _values}[which]
    losses, loud = [], loudness(calibration)
    for layer in range(calibration.shape.num_layers):
        row = []
        for side in sides:
            _, known = _prepared(side, raw(calibration, layer), options)
            plain = replace(side, aids=())
            aids = _aids(plain, known, options)
            row.append(float(known.loss(plain, aids, page_size).sum()) / loud[layer])
        losses.append(row)
    return losses


def loudness(calibration: Calibration) -> list[float]:
    """How much each layer's attention can say: the mean of |W v|² over the tokens of
    the sample, summed over kv heads, for values v and the output projection W.

    Layers add to one stream that grows from layer to layer, and what reads it divides
    by its size. So an error of a given size does more harm in a quiet layer, and costs
    of different layers are compared in units of this.
    """
    means = [
        expected_cost(values.float(), gram).sum()
        for values, gram in zip(
            calibration.values, calibration.output_gram, strict=True
        )
    ]
    # A layer that says nothing has nothing to lose.
    return [max(float(mean), torch.finfo(torch.float32).tiny) for mean in means]


def _allocated(
    pairs, layers: list[_Layer], loud: list[float], options: _Options
) -> list:
    """The pairs with channels given to each `Mixed` without, by what errors cost."""
    keys = [pair[0] for pair in pairs]
    mixed = [
        i
        for i, side in enumerate(keys)
        if isinstance(side, Mixed) and not side.channels
    ]
    dim, size = layers[0].sample.shape[-1], options.page_size
    ways = widths_of(dim)
    nbytes = [way.nbytes(size, dim) for way in ways]
    losses = [
        [float(layers[i].loss(way, (), size).sum()) / loud[i] for way in ways]
        for i in mixed
    ]
    budget = sum(keys[i].bits for i in mixed) * size * dim / 8
    least = 8 * min(nbytes) / (size * dim)
    if budget < len(mixed) * min(nbytes):
        raise InvalidArgument(
            f"a budget of {budget * 8 / (len(mixed) * size * dim):.4g} bits is too "
            f"small: keys of {least:.4g} are the fewest"
        )
    chosen = allocate([nbytes] * len(mixed), losses, budget)
    pairs = list(pairs)
    for i, choice in zip(mixed, chosen, strict=True):
        given = replace(keys[i], channels=ways[choice].channels)
        pairs[i] = (given, pairs[i][1])
    return pairs
