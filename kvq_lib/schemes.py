"""Named recipes: how keys and values are stored, and what stays in 16 bits."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from .checks import whole
from .errors import InvalidArgument, UnsupportedScheme
from .specs import Mixed, Side, Spec
from .turns import Found


@dataclass(frozen=True)
class Law:
    """Which pages a query reads in 16 bits (hot) and which quantized (cold).

    It depends on the position of the query alone: never on how many tokens come in
    one step, on the other sequences, or on what was recomputed. Pages are counted
    from the start of the sequence; the query at position i stands on page i // P.

    Attributes:
        page_size: tokens in a page, P.
        sinks: the first pages, read hot by every query and never sealed.
        window: pages before the query's own that it reads hot.
    """

    page_size: int
    sinks: int
    window: int

    def hot(self, query_page: int) -> tuple[range, range]:
        """Pages that a query on page `query_page` reads hot: sinks, then window."""
        return (
            range(min(self.sinks, query_page + 1)),
            range(max(self.sinks, query_page - self.window), query_page + 1),
        )

    def cold(self, query_page: int) -> range:
        """Pages that a query on page `query_page` reads cold."""
        return range(self.sinks, max(self.sinks, query_page - self.window))

    def kept_hot(self, length: int) -> tuple[range, range]:
        """Existing pages that the query after `length` tokens, or a later one, reads
        hot: sinks, then window."""
        pages = -(-length // self.page_size)
        sinks, window = self.hot(length // self.page_size)
        return (
            range(sinks.start, min(sinks.stop, pages)),
            range(window.start, min(window.stop, pages)),
        )

    def sealed(self, length: int) -> range:
        """Pages of a sequence of `length` tokens that have a cold form."""
        return range(self.sinks, max(self.sinks, length // self.page_size))


@dataclass(frozen=True)
class Scheme:
    """How a cache stores keys and values.

    Attributes:
        name: for tables and messages.
        keys: storage of sealed keys; None together with `values` for a cache that
            seals nothing ("native").
        values: storage of sealed values.
        recent: how many of the latest tokens a query reads in 16 bits. Rounds up to
            whole pages; the page of the query itself is always in 16 bits.
        sinks: how many of the first tokens every query reads in 16 bits. Rounds up to
            whole pages.
        layers: keys and values of each layer, where layers differ; () where they do
            not. `keys` and `values` then count for nothing.
        fit: what calibration found for the keys and the values of each layer; set by
            `kvq.fit`.

    Raises:
        UnsupportedScheme: keys or values that are no Spec; keys without values, or the
            reverse; what goes for keys alone asked of values; layers that are no
            pairs; what was found for other keys or values.
        InvalidArgument: a negative or fractional `recent` or `sinks`.
    """

    name: str
    keys: Side | None
    values: Spec | None
    recent: int = 0
    sinks: int = 0
    layers: tuple[tuple[Side, Spec], ...] = ()
    fit: tuple[tuple[Found, Found], ...] | None = field(default=None, repr=False)

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise UnsupportedScheme(f"a scheme's name is a text, got {self.name!r}")
        if (self.keys is None) != (self.values is None):
            raise UnsupportedScheme(
                "keys and values are both stored by a Spec, or both kept as they are; "
                'Spec("fp16") stores one side in 16 bits'
            )
        if not isinstance(self.layers, tuple | list):
            raise UnsupportedScheme(
                "layers are pairs of keys and values, one for each layer, or (); "
                f"got {self.layers!r}"
            )
        layers = tuple(tuple(p) if isinstance(p, list) else p for p in self.layers)
        object.__setattr__(self, "layers", layers)  # the class is frozen
        pairs = (*layers, (self.keys, self.values))
        for pair in pairs if self.seals or layers else ():
            _require_sides(pair)
        if self.fit is not None:
            self._require_found()
        for name in ("recent", "sinks"):
            tokens = whole(name, getattr(self, name), at_least=0)
            object.__setattr__(self, name, tokens)

    def _require_found(self) -> None:
        """Refuse what was not found for these keys and values, layer by layer."""
        fit = self.fit
        if (
            not isinstance(fit, tuple)
            or not fit
            or not self.seals
            or (self.layers and len(fit) != len(self.layers))
            or not all(
                isinstance(both, tuple)
                and len(both) == 2
                and all(isinstance(found, Found) for found in both)
                and all(map(Found.serves, both, self.sides(i)))
                for i, both in enumerate(fit)
            )
        ):
            raise UnsupportedScheme(
                f"{self.name}: fit belongs to other keys and values; kvq.fit sets it, "
                "and fit=None takes it away"
            )

    @property
    def seals(self) -> bool:
        """Whether full pages are quantized; False for "native"."""
        return self.keys is not None

    @property
    def calibrated(self) -> bool:
        """Whether it needs what calibration finds; see `kvq.fit`."""
        pairs = self.layers or ((self.keys, self.values),)
        return self.seals and any(side.calibrated for pair in pairs for side in pair)

    def sides(self, layer: int) -> tuple[Side | None, Spec | None]:
        """Storage of the keys and of the values of a layer.

        Raises:
            InvalidArgument: no layer of a scheme that tells layers apart.
        """
        layer = whole("layer", layer, at_least=0)
        if self.layers and layer >= len(self.layers):
            raise InvalidArgument(
                f"layer is 0 to {len(self.layers) - 1} for {self.name}, got {layer}"
            )
        return self.layers[layer] if self.layers else (self.keys, self.values)

    def require_fit(self) -> None:
        """Refuse to store anything before calibration, where it is needed.

        Raises:
            UnsupportedScheme: the scheme needs calibration and has none.
        """
        if self.calibrated and self.fit is None:
            raise UnsupportedScheme(
                f"{self.name} is made for one model: "
                f"kvq.fit({self.name!r}, kvq.calibrate(model, input_ids))"
            )

    def require_layers(self, num_layers: int) -> None:
        """Refuse a model of another number of layers.

        Raises:
            UnsupportedScheme: the scheme tells layers apart, and has more or fewer.
        """
        for per_layer in (self.layers, self.fit or ()):
            if per_layer and len(per_layer) != num_layers:
                raise UnsupportedScheme(
                    f"{self.name} is made for {len(per_layer)} layers, "
                    f"not for {num_layers}"
                )

    def require_shape(self, num_layers: int, kv_heads: int, head_dim: int) -> None:
        """Refuse another model than the one that the scheme is made for.

        Raises:
            UnsupportedScheme: other layers, kv heads or channels.
        """
        self.require_layers(num_layers)
        for i, both in enumerate(self.fit or ()):
            for found, side in zip(both, self.sides(i), strict=True):
                found.require_shape(side, kv_heads, head_dim)

    def law(self, page_size: int) -> Law:
        """The law of hot and cold pages; a scheme that seals nothing is all sinks.

        Raises:
            InvalidArgument: a page size that is not a whole number ≥ 1.
        """
        page_size = whole("page_size", page_size, at_least=1)
        if not self.seals:
            return Law(page_size, sinks=sys.maxsize, window=0)
        return Law(page_size, -(-self.sinks // page_size), -(-self.recent // page_size))

    def page_nbytes(self, page_size: int, head_dim: int, layer: int = 0) -> int:
        """Bytes of one cold page of one kv head: keys and values. 0 for native.

        Raises:
            UnsupportedScheme: mixed widths that are not allocated yet.
        """
        page_size = whole("page_size", page_size, at_least=1)
        head_dim = whole("head_dim", head_dim, at_least=1)
        if not self.seals:
            return 0
        return sum(side.nbytes(page_size, head_dim) for side in self.sides(layer))

    def bits_per_element(self, page_size: int, head_dim: int) -> float | None:
        """Bits per cold number, scales and zero points included; the mean over layers.

        None for native.
        """
        layers = range(len(self.layers) or 1)
        nbytes = [self.page_nbytes(page_size, head_dim, i) for i in layers]
        elements = 2 * page_size * head_dim * len(layers)
        return 8 * sum(nbytes) / elements if self.seals else None


def _require_sides(pair) -> None:
    """Refuse a pair that is no storage of keys and values."""
    keys, values = pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None)
    for side, kinds in ((keys, Side), (values, Spec)):
        if not isinstance(side, kinds):
            raise UnsupportedScheme(
                "keys and values are stored by a kvq.Spec, such as "
                'kvq.Spec("int8", "token"), and keys also by a kvq.Mixed; '
                f"got {side!r}"
            )
    if "smooth" in values.aids:
        raise UnsupportedScheme('"smooth" goes for keys: queries take the factors')


def _int(bits: int, granularity: str, *aids: str) -> Spec:
    """The library's integer recipes: 8 bits are symmetric, fewer are not."""
    return Spec(f"int{bits}", granularity, symmetric=bits == 8, aids=aids)


_FP16, _FP8, _FP4 = Spec("fp16"), Spec("fp8", "page"), Spec("fp4", "block")

#: Every named scheme, by name.
SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        s.name: s
        for s in (
            Scheme("native", None, None),
            Scheme("fp16", _FP16, _FP16),
            Scheme("fp8", _FP8, _FP8),
            Scheme("int8", _int(8, "token"), _int(8, "token")),
            Scheme("int4", _int(4, "token"), _int(4, "token")),
            Scheme("int4-kivi", _int(4, "channel"), _int(4, "token")),
            Scheme("int2-kivi", _int(2, "channel"), _int(2, "token")),
            Scheme("k8v4", _int(8, "token"), _int(4, "token")),
            Scheme("nvfp4", _FP4, _FP4),
            Scheme("int4-rotated", *[_int(4, "token", "rotate")] * 2),
            # From here on a scheme is made for one model, by `kvq.fit`.
            Scheme("fp8-static", *[Spec("fp8", "static")] * 2),
            Scheme("int8-static", *[Spec("int8", "static")] * 2),
            Scheme("mixed", Mixed(bits=6.0), _int(4, "token")),
            # 4.5 bits on pages of 64 tokens at D = 64. It wins since channels get
            # scales that pages of 64 make cheap, since turning leaves no channel whose
            # range stretches its ruler, since rounding errors are pushed where no query
            # looks, and since the first tokens, which most queries look at, stay as
            # they are.
            Scheme(
                "int4-feedback",
                _int(4, "channel", "rotate", "feedback"),
                _int(4, "token", "rotate", "feedback"),
                sinks=64,
            ),
            # 3.25 bits on pages of 16 tokens at D = 64. With four levels a code, the
            # window and the first page carry most of the attention; turning leaves no
            # outlier to stretch a ruler, and clipping shortens that of values.
            Scheme(
                "int2-feedback",
                _int(2, "channel", "rotate", "feedback"),
                _int(2, "token", "rotate", "clip", "feedback"),
                recent=128,
                sinks=16,
            ),
        )
    }
)


def scheme(
    name: "str | Scheme", recent: int | None = None, sinks: int | None = None
) -> Scheme:
    """A named scheme, or a given one, with its 16-bit window and sinks changed.

    Args:
        name: a key of `SCHEMES`, or a Scheme.
        recent: tokens of the 16-bit window; None keeps the scheme's own.
        sinks: first tokens kept in 16 bits; None keeps the scheme's own.

    Raises:
        UnsupportedScheme: an unknown name.
        InvalidArgument: a negative `recent` or `sinks`.
    """
    if isinstance(name, Scheme):
        found = name
    elif isinstance(name, str) and name in SCHEMES:
        found = SCHEMES[name]
    else:
        raise UnsupportedScheme(
            f"unknown scheme {name!r}; known: {', '.join(SCHEMES)}, or a kvq.Scheme"
        )
    changes = {"recent": recent, "sinks": sinks}
    return replace(found, **{k: v for k, v in changes.items() if v is not None})
