"""Attention heads of a real model: what they read, and what a quantized cache changes.

A pattern is what one query head makes of one text: row i holds the share of its
attention that the query at position i gives to every token. Patterns are computed here
in float64 from the keys as a cache stores them, hot and cold as the law says.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..attention import cache_for, forward, on_cache
from ..checks import whole
from ..errors import InvalidArgument
from ..quantize import quantize_as
from ..schemes import Scheme
from ..schemes import scheme as find_scheme
from ..storage import Quantized


@dataclass(frozen=True, eq=False)
class Head:
    """Queries of one query head, and the keys and values that it reads.

    Attributes:
        layer, head: which query head it is.
        tokens: the token ids of the text.
        queries, keys, values: float16 [tokens, dim], as a hot page stores them: queries
            and keys carry their positions.
    """

    layer: int
    head: int
    tokens: tuple[int, ...]
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class _Listener:
    """A cache that remembers what some layers attend, and otherwise is the cache."""

    def __init__(self, cache, layers: set[int]):
        self._cache, self._layers = cache, layers
        self.heard: dict[int, list[torch.Tensor]] = {}

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def attend(self, layer, batch, q, k, v, scale=None):
        if layer in self._layers:
            self.heard[layer] = [x.detach().cpu().half() for x in (q, k, v)]
        return self._cache.attend(layer, batch, q, k, v, scale)


def read_heads(
    model, tokens: Iterable[int], wanted: Iterable[tuple[int, int]]
) -> list[Head]:
    """Let a model read a text through an unquantized cache, and listen to some heads.

    Args:
        model: a decoder model of transformers.
        tokens: token ids.
        wanted: pairs of layer and query head.

    Raises:
        InvalidArgument: a layer or a head that the model does not have.
        UnsupportedModel: the model's attention does what the cache does not.
    """
    row, wanted = list(tokens), list(wanted)
    native = find_scheme("native")
    cache = cache_for(model, native, 16, [len(row)], len(row))
    listener = _Listener(cache, {layer for layer, _ in wanted})
    with on_cache(model):
        forward(model, listener, [cache.add()], [row], last_only=True)
    found = []
    for layer, head in wanted:
        if layer not in listener.heard:
            raise InvalidArgument(f"the model has no layer {layer!r}")
        q, k, v = listener.heard[layer]  # [tokens, heads, dim]
        if not 0 <= head < q.shape[1]:
            raise InvalidArgument(f"heads are 0 to {q.shape[1] - 1}, got {head!r}")
        shared = head * k.shape[1] // q.shape[1]
        found.append(
            Head(layer, head, tuple(row), q[:, head], k[:, shared], v[:, shared])
        )
    return found


def pages_of(head: Head, page_size: int) -> torch.Tensor:
    """The full pages of a head's keys, float16 [pages, page_size, dim]."""
    page_size = whole("page_size", page_size, at_least=1)
    full = len(head.keys) // page_size
    return head.keys[: full * page_size].unflatten(0, (full, page_size))


def sealed(head: Head, scheme: "str | Scheme", page_size: int = 16) -> Quantized:
    """The full pages of a head's keys as a scheme seals them, [pages, page_size, dim].

    Raises:
        InvalidArgument: no full page, or a scheme that seals nothing.
        UnsupportedScheme: an unknown scheme, or one that needs calibration.
    """
    recipe = find_scheme(scheme)
    recipe.require_fit()
    if not recipe.seals or len(head.keys) < page_size:
        raise InvalidArgument(f"{recipe.name} seals none of {len(head.keys)} tokens")
    return quantize_as(pages_of(head, page_size), recipe.sides(head.layer)[0])


def pattern(
    head: Head, scheme: "str | Scheme" = "native", recent=None, page_size: int = 16
) -> torch.Tensor:
    """Attention probabilities of a head, float64 [tokens, tokens]; each row adds to 1.

    Args:
        scheme: how the keys are stored.
        recent: tokens of the 16-bit window; None keeps the scheme's own.

    Raises:
        InvalidArgument, UnsupportedScheme: as `sealed`.
    """
    recipe = find_scheme(scheme, recent=recent)
    hot = cold = head.keys.double()
    if recipe.seals:
        stored = sealed(head, recipe, page_size).dequantize().double().flatten(0, 1)
        cold = torch.cat([stored, hot[len(stored) :]])
    law, position = recipe.law(page_size), torch.arange(len(hot))
    page = position // page_size
    hot_pages = torch.zeros(page[-1] + 1, page[-1] + 1, dtype=torch.bool)
    for i, row in enumerate(hot_pages):
        for pages in law.hot(i):
            row[pages.start : pages.stop] = True
    query = head.queries.double()
    reads_hot = hot_pages[page][:, page]
    scores = torch.where(reads_hot, query @ hot.T, query @ cold.T)
    later = position > position.unsqueeze(1)
    scores = scores * hot.shape[1] ** -0.5
    return scores.masked_fill(later, float("-inf")).softmax(-1)


def moved(before: torch.Tensor, after: torch.Tensor) -> float:
    """The share of attention that lies on other tokens than before: the mean over
    queries of half the sum of absolute differences (total variation distance).

    Args:
        before, after: patterns [tokens, tokens].
    """
    return (before - after).abs().sum(-1).mean().item() / 2
