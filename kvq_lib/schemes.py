"""Named recipes: how keys and values are stored, and what stays in 16 bits."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from .checks import whole
from .errors import UnsupportedScheme
from .quantize import Spec


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

    Raises:
        UnsupportedScheme: keys or values that are no Spec; keys without values, or the
            reverse.
        InvalidArgument: a negative or fractional `recent` or `sinks`.
    """

    name: str
    keys: Spec | None
    values: Spec | None
    recent: int = 0
    sinks: int = 0

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise UnsupportedScheme(f"a scheme's name is a text, got {self.name!r}")
        for side in (self.keys, self.values):
            if not isinstance(side, Spec | None):
                raise UnsupportedScheme(
                    "keys and values are stored by a kvq.Spec, such as "
                    f'kvq.Spec("int8", "token"); got {side!r}'
                )
        if (self.keys is None) != (self.values is None):
            raise UnsupportedScheme(
                "keys and values are both stored by a Spec, or both kept as they are; "
                'Spec("fp16") stores one side in 16 bits'
            )
        for field in ("recent", "sinks"):
            tokens = whole(field, getattr(self, field), at_least=0)
            object.__setattr__(self, field, tokens)  # the class is frozen

    @property
    def seals(self) -> bool:
        """Whether full pages are quantized; False for "native"."""
        return self.keys is not None

    def law(self, page_size: int) -> Law:
        """The law of hot and cold pages; a scheme that seals nothing is all sinks.

        Raises:
            InvalidArgument: a page size that is not a whole number ≥ 1.
        """
        page_size = whole("page_size", page_size, at_least=1)
        if not self.seals:
            return Law(page_size, sinks=sys.maxsize, window=0)
        return Law(page_size, -(-self.sinks // page_size), -(-self.recent // page_size))

    def page_nbytes(self, page_size: int, head_dim: int) -> int:
        """Bytes of one cold page of one kv head: keys and values. 0 for native."""
        page_size = whole("page_size", page_size, at_least=1)
        head_dim = whole("head_dim", head_dim, at_least=1)
        if not self.seals:
            return 0
        return self.keys.nbytes(page_size, head_dim) + self.values.nbytes(
            page_size, head_dim
        )

    def bits_per_element(self, page_size: int, head_dim: int) -> float | None:
        """Bits per cold number, scales and zero points included. None for native."""
        nbytes = self.page_nbytes(page_size, head_dim)
        return 8 * nbytes / (2 * page_size * head_dim) if self.seals else None


def _int(bits: int, granularity: str) -> Spec:
    """The library's integer recipes: 8 bits are symmetric, fewer are not."""
    return Spec(f"int{bits}", granularity, symmetric=bits == 8)


_FP16, _FP8 = Spec("fp16"), Spec("fp8", "page")

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
