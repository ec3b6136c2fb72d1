"""What a model's keys, values and queries look like, and what an error in them costs.

Calibration reads a text once, unquantized. What it keeps is a description of every
layer and kv head; `fit` turns it into scales, factors, orders and roundings.

The cost of an error is the expected squared change of a layer's output, after its
output projection W. Let a query q give token t the probability p_t, and let out be its
sum of values. To first order

- an error e in key t changes the output by p_t (v_t - out) (q · e) s, with s the factor
  of the scores. So errors cost eᵀ K e, with K the mean over queries of
  q qᵀ · s² Σ_t p_t² |W (v_t - out)|².
- an error e in value t changes it by p_t W e. So errors cost eᵀ V e, with V the mean of
  Wᵀ W · Σ_t p_t².

Both are in the same unit, which is what makes bits for keys and bits for values
comparable.
"""

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from .attention import cache_for, forward, on_cache
from .checks import reason, usable_device, whole
from .errors import (
    InvalidArgument,
    NonFiniteValue,
    UnsupportedModel,
    ValueOutOfRange,
)
from .memory import KVShape
from .model import check_window
from .schemes import scheme

#: Tokens of a sample that lie side by side: whole pages of any usual size.
STRETCH = 64

#: Tokens of keys and values kept as a sample, per layer and kv head.
SAMPLE = 512

#: Queries whose probabilities are held at once.
_TILE = 256

#: Names of the projection behind attention.
_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj")


@dataclass(frozen=True, eq=False)
class Calibration:
    """What `calibrate` found. L layers, H kv heads, D channels, S sampled tokens.

    Attributes:
        key_mean, key_low, key_high, key_square: float32 [L, H, D]: mean, least, largest
            and mean square of each key channel, over all tokens.
        value_mean, value_low, value_high, value_square: the same of values.
        query_moment: float32 [L, H, D, D], the mean of q qᵀ over the queries of a kv
            head.
        key_cost: float32 [L, H, D, D], the matrix K above, summed over query heads.
        output_gram: float32 [L, H, D, D], Wᵀ W, summed over query heads.
        value_cost: float32 [L, H, D, D], the matrix V above, summed over query heads.
        keys, values: float16 [L, H, S, D], samples in stretches of 64 tokens; without
            the first 64 of a window, among them the sink.
        model: the model's name.
        text: SHA-256 of the token ids that were read.
        tokens: how many.

    Raises:
        InvalidArgument: tensors whose shapes do not fit together, of another dtype, or
            with numbers that are not finite; a least number above the largest; a matrix
            that is not symmetric or has a negative diagonal; words that are no texts.
    """

    key_mean: torch.Tensor
    key_low: torch.Tensor
    key_high: torch.Tensor
    key_square: torch.Tensor
    value_mean: torch.Tensor
    value_low: torch.Tensor
    value_high: torch.Tensor
    value_square: torch.Tensor
    query_moment: torch.Tensor
    key_cost: torch.Tensor
    output_gram: torch.Tensor
    value_cost: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    model: str
    text: str
    tokens: int

    def __post_init__(self):
        lead = getattr(self.key_mean, "shape", ())
        if len(lead) != 3 or 0 in lead:
            raise InvalidArgument(f"key_mean is [L, H, D], got shape {list(lead)}")
        sampled = getattr(self.keys, "shape", ())[-2:-1]
        if sampled in ((), (0,)) or sampled[0] % STRETCH:
            raise InvalidArgument(
                f"keys are samples in stretches of {STRETCH} tokens, "
                f"got {list(sampled)} tokens"
            )
        for name in _TENSORS:
            t, shape, dtype = getattr(self, name), lead, torch.float32
            if name in _MATRICES:
                shape = (*lead, lead[-1])
            elif name in ("keys", "values"):
                shape, dtype = (*lead[:-1], *sampled, lead[-1]), torch.float16
            if not isinstance(t, torch.Tensor) or t.shape != torch.Size(shape):
                found = list(getattr(t, "shape", ()))
                raise InvalidArgument(f"{name} is {list(shape)}, got shape {found}")
            if t.dtype != dtype or t.is_meta:
                got = f"{t.dtype}, {t.device}"
                raise InvalidArgument(f"{name} is of {dtype}, got {got}")
            if not torch.isfinite(t).all():
                raise InvalidArgument(f"{name} holds NaN or infinity")
        self._require_sense()

    def _require_sense(self) -> None:
        """Refuse numbers that no text could have given."""
        for side in ("key", "value"):
            low, high = getattr(self, f"{side}_low"), getattr(self, f"{side}_high")
            if (low > high).any():
                raise InvalidArgument(f"{side}_low is above {side}_high")
            if (getattr(self, f"{side}_square") < 0).any():
                raise InvalidArgument(f"{side}_square, a mean of squares, is negative")
        for name in _MATRICES:
            m = getattr(self, name)
            apart = (m - m.mT).abs().amax((-2, -1))
            if (apart > 1e-3 * m.abs().amax((-2, -1))).any():
                raise InvalidArgument(f"{name} is not symmetric")
            if (m.diagonal(dim1=-2, dim2=-1) < 0).any():
                raise InvalidArgument(f"{name} has a negative diagonal")
        for name in ("model", "text"):
            if not isinstance(getattr(self, name), str):
                raise InvalidArgument(f"{name} is a text, got {getattr(self, name)!r}")
        whole("tokens", self.tokens, at_least=1)

    @property
    def shape(self) -> KVShape:
        """The model's shape."""
        return KVShape(*self.key_mean.shape)

    def save(self, path: "str | Path") -> None:
        """Write a safetensors file: numbers and three words, never code.

        Raises:
            InvalidArgument: it cannot be written there.
        """
        from safetensors.torch import save_file

        if not isinstance(path, str | Path):
            raise InvalidArgument(f"path is a text or a Path, got {path!r}")
        words = {name: str(getattr(self, name)) for name in _WORDS}
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        try:
            save_file(tensors, str(path), metadata=words)
        except Exception as error:  # safetensors raises its own kind, and OSError
            raise InvalidArgument(f"cannot write {path}: {reason(error)}") from error

    @classmethod
    def load(cls, path: "str | Path") -> "Calibration":
        """Read what `save` wrote.

        Raises:
            InvalidArgument: there is no such file, or it holds something else.
        """
        from safetensors import safe_open

        try:
            with safe_open(str(path), "pt") as file:
                words = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in _TENSORS}
            given = {name: words[name] for name in _WORDS}
            return cls(**tensors, **{**given, "tokens": int(given["tokens"])})
        except Exception as error:  # of the file, of safetensors, or a missing name
            raise InvalidArgument(
                f"{path} holds no calibration: {reason(error)}"
            ) from error


_WORDS = ("model", "text", "tokens")
_TENSORS = tuple(f.name for f in fields(Calibration) if f.name not in _WORDS)
_MATRICES = ("query_moment", "key_cost", "output_gram", "value_cost")


def calibrate(model, input_ids: torch.Tensor, name: str | None = None) -> Calibration:
    """Read a text once, unquantized, and describe what passes through the cache.

    Args:
        model: a decoder model of transformers.
        input_ids: int [windows, tokens], at least 128 tokens in a window. A few
            thousand tokens are enough; they should not be those that you measure on.
        name: the model's name, for the record; default: what transformers calls it.

    Raises:
        InvalidArgument: input_ids is no integer matrix, has windows that are too short,
            or a token that the model does not know.
        UnsupportedModel: the model's attention does what the cache does not, or its
            output projection is not found.
        NonFiniteValue: the model's own numbers overflow.
        ValueOutOfRange: its keys or values exceed float16.
        UnsupportedBackend: the model is on a device without numbers.
    """
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"name is a text, got {name!r}")
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        raise InvalidArgument("input_ids must be a tensor [windows, tokens]")
    windows, tokens = input_ids.shape
    if windows < 1 or tokens < 2 * STRETCH:
        raise InvalidArgument(
            f"windows of at least {2 * STRETCH} tokens are wanted, "
            f"got shape {list(input_ids.shape)}"
        )
    rows = [check_window(model, window) for window in input_ids]
    usable_device(model.device)
    notes = _Notes(KVShape.of(model.config), _output_projections(model))
    notes.stretches = _stretches(windows, tokens)
    native = scheme("native")
    for index, row in enumerate(rows):
        notes.window = index
        cache = _Listener(cache_for(model, native, STRETCH, [tokens], tokens), notes)
        with on_cache(model):
            forward(model, cache, [cache.add()], [row], last_only=True)
    if name is None:
        name = Path(model.config.name_or_path or model.config.model_type).name
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return notes.calibration(model=name, text=digest, tokens=windows * tokens)


def _stretches(windows: int, tokens: int) -> dict[int, list[int]]:
    """Where samples are taken: window → first tokens of stretches, evenly spread."""
    places = [
        (window, start)
        for window in range(windows)
        for start in range(STRETCH, tokens - STRETCH + 1, STRETCH)
    ]
    wanted = min(len(places), SAMPLE // STRETCH)
    found: dict[int, list[int]] = {}
    for i in range(wanted):
        window, start = places[(2 * i + 1) * len(places) // (2 * wanted)]
        found.setdefault(window, []).append(start)
    return found


class _Listener:
    """A cache that notes what is attended, and otherwise is the cache."""

    def __init__(self, cache, notes: "_Notes"):
        self._cache, self._notes = cache, notes

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def attend(self, layer, batch, q, k, v, scale=None):
        out = self._cache.attend(layer, batch, q, k, v, scale)  # refuses what is wrong
        self._notes.hear(layer, q, k, v, scale)
        return out


class _Notes:
    """Sums over tokens, layer by layer, while the model reads."""

    def __init__(self, shape: KVShape, projections: list[torch.Tensor]):
        self.shape, self.projections = shape, projections
        self.window, self.stretches = 0, {}
        lead = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        self.sums = {
            f"{side}_{what}": torch.zeros(lead, dtype=torch.float64)
            for side in ("key", "value")
            for what in ("mean", "square")
        }
        self.sums |= {
            name: torch.zeros(*lead, lead[-1], dtype=torch.float64)
            for name in ("query_moment", "key_cost", "value_cost")
        }
        self.low = {side: torch.full(lead, torch.inf) for side in ("key", "value")}
        self.high = {side: torch.full(lead, -torch.inf) for side in ("key", "value")}
        self.samples: dict[str, list[list[torch.Tensor]]] = {
            side: [[] for _ in range(shape.num_layers)] for side in ("key", "value")
        }
        self.tokens = [0] * shape.num_layers

    def hear(self, layer: int, q, k, v, scale: float | None) -> None:
        """Note one layer of a window: q [tokens, heads, dim], k and v [tokens,
        kv_heads, dim]."""
        q, k, v = (x.detach().float().cpu().transpose(0, 1) for x in (q, k, v))
        if not all(torch.isfinite(x).all() for x in (q, k, v)):
            raise NonFiniteValue(f"NaN or infinity in layer {layer}")
        self.tokens[layer] += k.shape[1]
        for side, x in (("key", k), ("value", v)):
            self.sums[f"{side}_mean"][layer] += x.double().sum(1)
            self.sums[f"{side}_square"][layer] += x.double().square().sum(1)
            self.low[side][layer] = self.low[side][layer].minimum(x.amin(1))
            self.high[side][layer] = self.high[side][layer].maximum(x.amax(1))
            for start in self.stretches.get(self.window, ()):
                self.samples[side][layer].append(x[:, start : start + STRETCH])
        dim = k.shape[-1]
        scale = dim**-0.5 if scale is None else scale
        grouped = q.unflatten(0, (len(k), -1))
        self.sums["query_moment"][layer] += (grouped.mT @ grouped).mean(1)
        projection = self.projections[layer].unflatten(0, (len(k), -1))
        for head in range(len(k)):
            for rows, w in zip(grouped[head], projection[head], strict=True):
                self._costs(layer, head, rows, k[head], v[head], w, scale)

    def _costs(self, layer, head, q, k, v, w, scale) -> None:
        """Add what errors in keys and values cost one query head: q, k, v [tokens,
        dim], w [dim, hidden]."""
        gram = w @ w.mT
        size = ((v @ gram) * v).sum(1)  # |W v|² of each token
        for start in range(0, len(q), _TILE):
            rows = q[start : start + _TILE]
            end = start + len(rows)
            later = torch.arange(end) > torch.arange(start, end).unsqueeze(1)
            scores = (rows @ k[:end].mT * scale).masked_fill(later, -torch.inf)
            p = scores.softmax(-1)
            out, square = p @ v[:end], p.square()
            turned, total = out @ gram, square.sum(1)
            # Σ p² |W (v - out)|², multiplied out.
            cost = square @ size[:end] + total * (turned * out).sum(1)
            cost -= 2 * ((square @ v[:end]) * turned).sum(1)
            weighted = rows * (cost.clamp_min(0) * scale**2).unsqueeze(1)
            self.sums["key_cost"][layer, head] += weighted.mT @ rows
            self.sums["value_cost"][layer, head] += total.sum() * gram

    def calibration(self, **words) -> Calibration:
        """The means, and the rest."""
        count = self.tokens[0]
        means = {name: (x / count).float() for name, x in self.sums.items()}
        grams = [w @ w.mT for w in self.projections]
        kv_heads = self.shape.num_kv_heads
        gram = torch.stack([g.unflatten(0, (kv_heads, -1)).sum(1) for g in grams])
        samples = {
            f"{side}s": torch.stack([torch.cat(parts, 1) for parts in layers]).half()
            for side, layers in self.samples.items()
        }
        for name, sample in samples.items():
            if not torch.isfinite(sample).all():
                raise ValueOutOfRange(f"{name} exceed 65504, the largest float16")
        return Calibration(
            **means,
            **{f"{side}_low": x for side, x in self.low.items()},
            **{f"{side}_high": x for side, x in self.high.items()},
            output_gram=gram,
            **samples,
            **words,
        )


def _output_projections(model) -> list[torch.Tensor]:
    """For each layer the projection behind attention, float32 [heads, dim, hidden].

    Raises:
        UnsupportedModel: there is no module of a known name and a fitting size.
        NonFiniteValue: a weight is NaN or infinity.
    """
    shape, found = KVShape.of(model.config), {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        for name in _PROJECTIONS:
            projection = getattr(module, name, None)
            weight = getattr(projection, "weight", None)
            if not isinstance(layer, int) or not isinstance(weight, torch.Tensor):
                continue
            weight = weight.detach().float().cpu()
            # GPT-2's kind of layer holds its weight as [in, out], all others [out, in].
            weight = weight if type(projection).__name__ == "Conv1D" else weight.mT
            if weight.dim() != 2 or len(weight) % (shape.head_dim * shape.num_kv_heads):
                continue
            if not torch.isfinite(weight).all():
                raise NonFiniteValue(f"NaN or infinity in {name} of layer {layer}")
            found.setdefault(layer, weight.unflatten(0, (-1, shape.head_dim)))
    missing = [i for i in range(shape.num_layers) if i not in found]
    if missing:
        raise UnsupportedModel(
            f"{model.config.model_type}: no output projection found for layers "
            f"{missing}; known names are {', '.join(_PROJECTIONS)}"
        )
    return [found[i] for i in range(shape.num_layers)]
