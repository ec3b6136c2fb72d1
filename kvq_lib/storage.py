"""What quantized keys or values are made of: packed codes, scales and zero points."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .checks import float_dtype
from .errors import InvalidArgument, UnsupportedScheme
from .formats import decode_fp4, decode_fp8, unpack
from .specs import BLOCK, Mixed, Side, Spec


@dataclass(frozen=True, eq=False)
class Aid:
    """What calibration found for one layer's keys, or values; None where it is unused.

    Attributes:
        scale: float16 [kv_heads, 1, 1, 1], the static scales.
        clip: float32 [kv_heads, 1, 1, 1], the part of each group's range that is kept.
        feedback: float32 [kv_heads, dim, dim], strictly upper triangular: row d says
            what an error of 1 in channel d takes away from the channels after it.
    """

    scale: torch.Tensor | None = None
    clip: torch.Tensor | None = None
    feedback: torch.Tensor | None = None

    def to(self, device) -> "Aid":
        """The same on a device."""
        tensors = (self.scale, self.clip, self.feedback)
        return Aid(*(t if t is None else t.to(device) for t in tensors))


@dataclass(frozen=True, eq=False)
class Quantized:
    """Quantized blocks: what `quantize` returns, and what a pool of cold pages is.

    Attributes:
        codes: packed codes, uint8 [..., tokens, bytes].
        scale: float16, broadcasts against [..., tokens, dim]; None for fp16. For fp4
            instead e4m3, uint8 [..., tokens, dim / 16], in units of `outer`.
        zero: float16, as scale, in units of x; None when symmetric.
        spec: the recipe that made it.
        outer: for fp4 the scale of the page, float16 [..., 1, 1]; else None.
        aid: what calibration adds.
        clipped: int64 [kv_heads], how many numbers were beyond the largest code when
            they came, before feedback moved them; None where no number can be.
        shape: shape of the numbers it stands for.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    spec: Spec
    outer: torch.Tensor | None = None
    aid: Aid = Aid()
    clipped: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        dim = self.codes.shape[-1] * 8 // self.spec.fmt.bits
        return (*self.codes.shape[:-1], dim)

    @property
    def parts(self) -> "tuple[Quantized, ...]":
        """The runs of channels that it is stored in; see `Runs`."""
        return (self,)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold it: codes, then scale, zero, outer where they exist.

        A static scale is no part of it: one serves all pages.
        """
        scale = None if self.spec.granularity == "static" else self.scale
        return [t for t in (self.codes, scale, self.zero, self.outer) if t is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points, counted from the tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def bits_per_element(self) -> float:
        """Bits stored for each number, scales and zero points included."""
        count = self.codes.numel() * 8 // self.spec.fmt.bits
        return 8 * self.nbytes / count

    def unpack(self) -> torch.Tensor:
        """What the codes mean, [..., tokens, dim], before scale and zero.

        Integers (int16) for integer formats, signed when symmetric; float32 for fp4,
        fp8 and fp16. `unpack() * scale + zero` is `dequantize()`, but for fp4, whose
        scales are codes, too.
        """
        if self.spec.format == "fp16":
            return self.codes.view(torch.float16).float()
        if self.spec.format == "fp8":
            return decode_fp8(self.codes)
        if self.spec.format == "fp4":
            return decode_fp4(unpack(self.codes, 4))
        return unpack(self.codes, self.spec.fmt.bits, torch.int16) - self.spec.offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """x̂ = codes · scale + zero, [..., tokens, dim].

        Computed in float32, or in float64 for that dtype. Rounding x̂ to float32 adds
        up to 2^-24 of its magnitude to the half step of the codes; a smaller dtype adds
        its own rounding, and float16 saturates at 65504.

        Raises:
            InvalidArgument: `dtype` is not one of floats of 16 bits or more.
        """
        float_dtype("dtype", dtype)
        if dtype.itemsize < 4:
            x, limit = self.dequantize(torch.float32), torch.finfo(dtype).max
            return x.clamp_(-limit, limit).to(dtype)
        if self.spec.fmt.kind == "float":
            x = self.unpack().to(dtype)
        else:
            # In place and without integers between: this is the path of every token.
            x = unpack(self.codes, self.spec.fmt.bits, dtype)
            if self.spec.offset:
                x -= self.spec.offset
        if self.scale is not None:
            x *= step_of(self.scale, self.outer, dtype)
        if self.zero is not None:
            x += self.zero.to(dtype)
        return x

    def map(self, fn) -> "Quantized":
        """The same with `fn` applied to each tensor (indexing, moving, cloning)."""
        names = ("codes", "scale", "zero", "outer")
        held = {name: getattr(self, name) for name in names}
        return replace(
            self, **{name: fn(t) for name, t in held.items() if t is not None}
        )


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of channels, each stored in its own way, side by side; see `Mixed`.

    Attributes:
        parts: the runs, from the first channel to the last.
        spec: the recipe that made them.
    """

    parts: tuple[Quantized, ...]
    spec: Mixed

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers it stands for."""
        return (*self.parts[0].shape[:-1], sum(p.shape[-1] for p in self.parts))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold it, run by run."""
        return [t for part in self.parts for t in part.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points, counted from the tensors."""
        return sum(part.nbytes for part in self.parts)

    @property
    def bits_per_element(self) -> float:
        """Bits stored for each number, scales and zero points included."""
        return 8 * self.nbytes / torch.Size(self.shape).numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """x̂, [..., tokens, dim]; see `Quantized.dequantize`."""
        return torch.cat([part.dequantize(dtype) for part in self.parts], dim=-1)

    def map(self, fn) -> "Runs":
        """The same with `fn` applied to each tensor."""
        return Runs(tuple(part.map(fn) for part in self.parts), self.spec)


def empty(
    side: Side,
    lead: tuple[int, ...],
    tokens: int,
    dim: int,
    device=None,
    aids: Sequence[Aid] = (),
) -> Quantized | Runs:
    """Zero-filled storage for blocks [*lead, tokens, dim].

    Args:
        aids: what calibration found, one for each run of `side`; then lead is
            (kv_heads, pages).

    Raises:
        UnsupportedScheme: `side` needs an aid that is not given.
    """
    runs = side.runs(dim)
    parts = [
        _empty(spec, lead, tokens, width, device, aid)
        for (spec, width), aid in zip(runs, checked_aids(side, dim, aids), strict=True)
    ]
    return Runs(tuple(parts), side) if isinstance(side, Mixed) else parts[0]


def _empty(spec: Spec, lead, tokens: int, dim: int, device, aid: Aid) -> Quantized:
    codes = torch.zeros(
        *lead, tokens, spec.fmt.packed_width(dim), dtype=torch.uint8, device=device
    )
    aid = aid.to(codes.device)
    clipped = None
    if clips(spec):
        clipped = torch.zeros(lead[0], dtype=torch.int64, device=device)
    shape = spec.scale_shape(tokens, dim)
    if shape is None:
        return Quantized(codes, None, None, spec)
    if spec.granularity == "static":
        scale = aid.scale.expand(*lead, 1, 1)
        return Quantized(codes, scale, None, spec, aid=aid, clipped=clipped)
    if spec.granularity == "block":
        scale = torch.zeros(*lead, *shape, dtype=torch.uint8, device=device)
        outer = torch.zeros(*lead, 1, 1, dtype=torch.float16, device=device)
        return Quantized(codes, scale, None, spec, outer, aid)
    scale = torch.zeros(*lead, *shape, dtype=torch.float16, device=device)
    zero = None if spec.symmetric else torch.zeros_like(scale)
    return Quantized(codes, scale, zero, spec, aid=aid, clipped=clipped)


def clips(spec: Spec) -> bool:
    """Whether a number can be beyond the largest code."""
    return spec.granularity == "static" or "clip" in spec.aids


def wanted_aids(spec: Spec) -> list[str]:
    """What the codes of a run need from calibration: attributes of `Aid`."""
    wanted = ["scale"] * (spec.granularity == "static")
    return wanted + [name for name in ("clip", "feedback") if name in spec.aids]


def checked_aids(side: Side, dim: int, aids: Sequence[Aid]) -> Sequence[Aid]:
    """One aid for each run, with all that the run asks for.

    Raises:
        UnsupportedScheme: a run asks for what its aid does not hold.
        InvalidArgument: more aids than runs, or fewer.
    """
    runs = side.runs(dim)
    aids = aids or (Aid(),) * len(runs)
    if len(aids) != len(runs):
        raise InvalidArgument(f"{len(aids)} aids for {len(runs)} runs of channels")
    for (spec, _), aid in zip(runs, aids, strict=True):
        missing = [name for name in wanted_aids(spec) if getattr(aid, name) is None]
        if missing:
            raise UnsupportedScheme(
                f"{spec} needs calibration for its {', '.join(missing)}: see kvq.fit"
            )
    return aids


def step_of(scale: torch.Tensor, outer: torch.Tensor | None, dtype) -> torch.Tensor:
    """What a code of 1 stands for; broadcasts against [..., tokens, dim]."""
    if outer is None:
        return scale.to(dtype)
    blocks = decode_fp8(scale).to(dtype) * outer.to(dtype)
    return blocks.repeat_interleave(BLOCK, dim=-1)
