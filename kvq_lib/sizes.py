"""Bytes that a sequence of a model takes under a scheme, before any model is loaded."""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch

from .admission import most_hot, pages_touched
from .errors import UnsupportedScheme
from .layers import CacheLayer, ModelLayers
from .schemes import Law, Scheme
from .specs import Mixed, Side


@dataclass(frozen=True)
class Size:
    """Bytes of one sequence under one scheme, on one GPU."""

    bits: float
    token: Fraction
    growth: Fraction
    committed: int
    decoding: int
    prefilling: int


@dataclass(frozen=True)
class Sizes:
    """What decides the size of a sequence, apart from the scheme."""

    layers: ModelLayers
    context: int
    page_size: int
    chunk: int
    gpus: int
    dtype: torch.dtype | None

    def of(self, recipe: Scheme, given: bool) -> Size:
        """Bytes under a scheme; `given`, whether the user chose the dtype."""
        recipe.require_layers(len(self.layers.layers))
        dtype = self.dtype or torch.float16
        if not given and recipe.seals and dtype.itemsize > 2:
            dtype = torch.float16
        law = recipe.law(self.page_size)
        sums, elements = [Fraction(0)] * 5, 0
        for i, layer in enumerate(self.layers.layers):
            if layer:
                heads = -(-layer.kv_heads // self.gpus)
                width = layer.tensors * layer.head_dim
                hot = width * self.page_size * dtype.itemsize
                cold = _cold_page(recipe, self.page_size, layer, i)
                elements += heads * width
                found = self._layer(law, layer, hot, cold)
                sums = [s + heads * x for s, x in zip(sums, found, strict=True)]
        token, growth, *rest = sums
        bits = float(8 * token / elements)
        return Size(bits, token, growth, *map(int, rest))

    def _layer(self, law: Law, layer: CacheLayer, hot: int, cold: int):
        """For one head of one layer: bytes of a token, of one more token, and of a
        sequence committed, while it decodes, while it is prefilled."""
        token = Fraction(cold or hot, self.page_size)
        window = layer.window
        if window is None or self.context <= window:
            kept, sealed = law.kept_hot(self.context), len(law.sealed(self.context))
            committed = sum(map(len, kept)) * hot + sealed * cold
            growth = token
        else:
            committed = self._pool(law, window, 1, hot, cold)
            growth = Fraction(0)
        # A page that fills needs a cold one beside it, however short the context.
        decoding = self._pool(law, window, 1, hot, cold)
        prefilling = self._pool(law, window, self.chunk, hot, cold)
        return token, growth, committed, decoding, prefilling

    def _pool(
        self, law: Law, window: int | None, chunk: int, hot: int, cold: int
    ) -> int:
        """Bytes of the most hot and the most cold pages that one head of a sequence
        holds at a time, up to the context, in steps of at most `chunk` tokens."""
        pages = -(-self.context // law.page_size)
        sealed = max(1, len(law.sealed(self.context)))
        if window is not None and self.context > window:
            # A step's first query reads window - 1 earlier tokens; they and the step
            # may begin and end inside a page.
            span = window - 1 + chunk
            pages = min(pages, pages_touched(span, law.page_size))
            sealed = min(sealed, -(-span // law.page_size))
        return most_hot(law, pages, chunk) * hot + sealed * cold


def _cold_page(recipe: Scheme, page_size: int, layer: CacheLayer, index: int) -> int:
    """Bytes of one cold page of one head; of the latent, where there is one."""
    if not recipe.seals:
        return 0
    keys, values = recipe.sides(index)
    if not layer.latent:
        return sum(_side(side, page_size, layer.head_dim) for side in (keys, values))
    if keys != values:
        raise UnsupportedScheme(
            f"{recipe.name} stores keys and values differently; a latent is one tensor"
        )
    return _side(keys, page_size, layer.head_dim)


def _side(side: Side, page_size: int, dim: int) -> int:
    """Bytes of one page of keys or values; a budget counts where calibration has not
    allocated the widths yet."""
    if isinstance(side, Mixed) and not side.channels:
        return math.ceil(Fraction(repr(side.bits)) * page_size * dim / 8)
    return side.nbytes(page_size, dim)
