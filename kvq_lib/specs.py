"""How one side of the cache, keys or values, is stored: recipes, no tensor."""

from collections.abc import Iterable
from dataclasses import dataclass

from .checks import real, whole
from .errors import InvalidArgument, UnsupportedScheme
from .formats import Format, format_of

#: A group is one page, one token or one channel of a [tokens, dim] block. The value is
#: the dims over which its minimum and maximum are taken. A "static" scale serves all
#: pages of a kv head and comes from calibration. A "block" is 16 channels of a token:
#: its scale is itself a code, in units of one scale per page.
GROUP_DIMS = {
    "page": (-2, -1),
    "token": (-1,),
    "channel": (-2,),
    "static": (-2, -1),
    "block": (-1,),
}

#: Channels that share a scale under "block".
BLOCK = 16

#: What can be done about the error, in the order in which it is done. The first three
#: choose other coordinates, in which keys and queries, or values and outputs, are the
#: same to attention; the last two choose other codes.
AIDS = {
    "center": "take each channel's calibrated mean away",
    "smooth": "divide key channels by calibrated factors, multiply the query's by them",
    "rotate": "turn by a Hadamard matrix, which spreads outliers over the channels; in "
    "blocks of the largest power of two that divides the head dim, so not at all if it "
    "is odd",
    "clip": "narrow each group's range by a calibrated factor",
    "feedback": "push each channel's rounding error into the channels still to come",
}

#: Aids that no calibration is needed for.
FREE_AIDS = ("rotate",)


def _in_order(aids: Iterable[str]) -> tuple[str, ...]:
    """The aids in the order of `AIDS`, each once."""
    given = (aids,) if isinstance(aids, str) else aids
    if not isinstance(given, Iterable):
        raise UnsupportedScheme(
            f"aids are names, such as ('rotate',), or () for none; got {aids!r}"
        )
    given = tuple(given)
    for aid in given:
        if not isinstance(aid, str) or aid not in AIDS:
            raise UnsupportedScheme(f"unknown aid {aid!r}; known: {', '.join(AIDS)}")
    return tuple(aid for aid in AIDS if aid in given)


@dataclass(frozen=True)
class Spec:
    """How one side of the cache, keys or values, is stored.

    Attributes:
        format: "int2", "int4", "int8", "fp4", "fp8" or "fp16".
        granularity: which numbers share a scale: "page", "token", "channel", "static"
            (all pages of a kv head; symmetric formats only) or "block" (16 channels of
            a token; for fp4, and fp4 has no other). None for fp16, which has no scale.
        symmetric: True for no zero point. Floats are always symmetric.
        aids: names from `AIDS`, in any order.

    Raises:
        UnsupportedScheme: for a combination that does not exist.
        InvalidArgument: `symmetric` is neither True nor False.
    """

    format: str
    granularity: str | None = None
    symmetric: bool = True
    aids: tuple[str, ...] = ()

    def __post_init__(self):
        fmt = format_of(self.format)
        if not isinstance(self.symmetric, bool):
            raise InvalidArgument(f"symmetric is a bool, got {self.symmetric!r}")
        object.__setattr__(self, "aids", _in_order(self.aids))  # the class is frozen
        if self.format == "fp16":
            if self.granularity is not None or not self.symmetric:
                raise UnsupportedScheme(
                    "fp16 stores numbers as they are: no granularity, no zero point; "
                    f"got granularity={self.granularity!r}, symmetric={self.symmetric}"
                )
        elif self.granularity not in tuple(GROUP_DIMS):  # it need not be hashable
            raise UnsupportedScheme(
                f"granularity is one of {', '.join(GROUP_DIMS)}; "
                f"got {self.granularity!r} for {self.format}"
            )
        if fmt.kind == "float" and not self.symmetric:
            raise UnsupportedScheme(f"{self.format} is symmetric: it has no zero point")
        if (self.format == "fp4") != (self.granularity == "block"):
            raise UnsupportedScheme(
                'fp4 takes granularity "block", and nothing else does; '
                f"got {self.granularity!r} for {self.format}"
            )
        if self.granularity == "static" and not self.symmetric:
            raise UnsupportedScheme("a static scale has no zero point: be symmetric")
        clips = fmt.kind == "int" and self.granularity != "static"
        if "clip" in self.aids and not clips:
            raise UnsupportedScheme(
                '"clip" narrows the range of integer codes whose scale follows the '
                f"data; got {self.format} with granularity {self.granularity!r}"
            )
        if "feedback" in self.aids and self.format == "fp16":
            raise UnsupportedScheme('"feedback" wants codes of 8 bits or fewer')

    @property
    def fmt(self) -> Format:
        """The number format."""
        return format_of(self.format)

    @property
    def offset(self) -> int:
        """What to subtract from a stored integer code to get its signed value."""
        integer = self.fmt.kind == "int"
        return 1 << (self.fmt.bits - 1) if self.symmetric and integer else 0

    @property
    def largest_code(self) -> float:
        """Magnitude of the largest code: 127 for symmetric int8, 15 for int4, …"""
        if self.fmt.kind == "float":
            return self.fmt.largest
        bits = self.fmt.bits
        return (1 << (bits - 1)) - 1 if self.symmetric else (1 << bits) - 1

    @property
    def calibrated(self) -> bool:
        """Whether it needs what calibration finds; see `kvq.fit`."""
        return self.granularity == "static" or not set(self.aids) <= set(FREE_AIDS)

    def runs(self, dim: int) -> tuple[tuple["Spec", int], ...]:
        """The channels from first to last: how they are stored, and how many."""
        return ((self, dim),)

    def scale_shape(self, tokens: int, dim: int) -> tuple[int, int] | None:
        """Shape of the scales of one [tokens, dim] block; None without scales.

        Raises:
            InvalidArgument: a dim that does not fill the blocks of fp4.
        """
        if self.granularity is None:
            return None
        if self.granularity == "block":
            if dim % BLOCK:
                raise InvalidArgument(
                    f"fp4 has a scale for every {BLOCK} channels; dim is {dim}"
                )
            return (tokens, dim // BLOCK)
        group = GROUP_DIMS[self.granularity]
        return (1 if -2 in group else tokens, 1 if -1 in group else dim)

    def nbytes(self, tokens: int, dim: int) -> int:
        """Bytes that one [tokens, dim] block takes: codes, scales and zero points.

        Static scales do not count: there is one for all pages.

        Raises:
            InvalidArgument: a size that is not a whole number ≥ 1, or a dim that the
                format cannot pack.
        """
        tokens = whole("tokens", tokens, at_least=1)
        dim = whole("dim", dim, at_least=1)
        codes = tokens * self.fmt.packed_width(dim)
        shape = self.scale_shape(tokens, dim)
        if shape is None or self.granularity == "static":
            return codes
        groups = shape[0] * shape[1]
        if self.granularity == "block":
            return codes + groups + 2  # a byte for each block, a float16 for the page
        return codes + groups * (2 if self.symmetric else 4)


#: The widths of a `Mixed` side, from the widest; scales belong to tokens.
WIDTHS = (
    Spec("fp16"),
    Spec("int8", "token"),
    Spec("int4", "token", symmetric=False),
)


@dataclass(frozen=True)
class Mixed:
    """Channels of 16, 8 and 4 bits side by side: the lesson's b_i.

    Channels are stored in order of need, those of one width together, each token with
    one scale per width. Which channels come first is found by calibration, for each kv
    head; how many have which width, for each layer.

    Attributes:
        bits: the budget, bits per element over all layers, scales included.
        channels: of 16, 8 and 4 bits, each a multiple of 16; () until `kvq.fit` has
            allocated them.
        aids: as in `Spec`; they go for the runs of 8 and 4 bits.

    Raises:
        UnsupportedScheme: a width that is no multiple of 16, or an unknown aid.
        InvalidArgument: a budget that is no positive number, or channels that are no
            whole numbers.
    """

    bits: float = 6.0
    channels: tuple[int, ...] = ()
    aids: tuple[str, ...] = ()

    calibrated = True

    def __post_init__(self):
        object.__setattr__(self, "aids", _in_order(self.aids))  # the class is frozen
        object.__setattr__(self, "bits", real("bits", self.bits, at_least=0))
        if not self.bits:
            raise InvalidArgument("bits is a budget above 0; got 0")
        if not isinstance(self.channels, Iterable) or isinstance(self.channels, str):
            raise InvalidArgument(
                f"channels are numbers of 16, 8 and 4 bits, or (); "
                f"got {self.channels!r}"
            )
        counts = tuple(whole("channels", n, at_least=0) for n in self.channels)
        if counts and (len(counts) != len(WIDTHS) or any(n % BLOCK for n in counts)):
            raise UnsupportedScheme(
                f"channels of 16, 8 and 4 bits, each a multiple of {BLOCK}; "
                f"got {self.channels!r}"
            )
        object.__setattr__(self, "channels", counts)

    def runs(self, dim: int) -> tuple[tuple[Spec, int], ...]:
        """The channels from first to last: how they are stored, and how many.

        Raises:
            UnsupportedScheme: nothing is allocated yet, or for another head dim.
        """
        if not self.channels or sum(self.channels) != dim:
            raise UnsupportedScheme(
                f"mixed widths are allocated for one model, by kvq.fit; "
                f"these are {self.channels} for {dim} channels"
            )
        codes = tuple(aid for aid in self.aids if aid in ("clip", "feedback"))
        return tuple(
            (spec if spec.format == "fp16" else _with_aids(spec, codes), n)
            for spec, n in zip(WIDTHS, self.channels, strict=True)
            if n
        )

    def nbytes(self, tokens: int, dim: int) -> int:
        """Bytes that one [tokens, dim] block takes; see `Spec.nbytes`."""
        return sum(spec.nbytes(tokens, n) for spec, n in self.runs(dim))


#: How one side is stored.
Side = Spec | Mixed


def _with_aids(spec: Spec, aids: tuple[str, ...]) -> Spec:
    return Spec(spec.format, spec.granularity, spec.symmetric, aids)
