"""Other coordinates for keys and values, in which attention gives the same.

Scores and outputs do not change when

- every key loses the same vector: q · c is then one number for all keys of a query,
  and softmax does not see it;
- every value loses the same vector, and the output gets it back: probabilities add up
  to one;
- a key channel is divided by a factor, and the query's is multiplied by it;
- keys and queries are turned by the same orthogonal matrix: (q H) · (k H) = q · k;
- channels change places, in keys and queries alike.

What does change is how well the numbers quantize. All of this happens on the way into
the cache, so hot and cold pages are in the same coordinates.
"""

from dataclasses import dataclass

import torch

from .errors import UnsupportedScheme
from .specs import Mixed, Side
from .storage import Aid, wanted_aids


@dataclass(frozen=True, eq=False)
class Turn:
    """x ↦ ((x - before) · gain) H, with its channels in another order, + after.

    Attributes:
        before, gain, after: float32 [kv_heads, dim]; None for 0, 1, 0.
        block: H is a block-diagonal Hadamard matrix of blocks of this size, divided by
            its root; 1 for none.
        order: int64 [kv_heads, dim]: place i gets channel order[i]; None as they are.
    """

    before: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    block: int = 1
    order: torch.Tensor | None = None
    after: torch.Tensor | None = None

    @property
    def still(self) -> bool:
        """Whether it changes nothing."""
        tensors = (self.before, self.gain, self.order, self.after)
        return self.block == 1 and all(t is None for t in tensors)


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of one layer: on the way in, and on the way out."""

    keys: Turn
    queries: Turn
    values: Turn
    outputs: Turn


@dataclass(frozen=True, eq=False)
class Found:
    """What calibration found for one layer's keys, or values; None where it is unused.

    Attributes:
        center: float32 [kv_heads, dim], what every key, or value, loses.
        factor: float32 [kv_heads, dim], what keys are divided by: powers of two, so
            that nothing is rounded.
        order: int64 [kv_heads, dim], the channels in the order they are stored in.
        aids: for each run of channels, what its codes need; () for nothing.
        dim: the channels that all of it was found for; None for any number.
    """

    center: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    order: torch.Tensor | None = None
    aids: tuple[Aid, ...] = ()
    dim: int | None = None

    def serves(self, side: Side) -> bool:
        """Whether it is what calibration finds for a side: no less, and no more."""
        mixed = isinstance(side, Mixed)
        if mixed and not side.channels:
            return False
        wanted = {
            "center": "center" in side.aids,
            "factor": "smooth" in side.aids,
            "order": mixed,
        }
        runs = side.runs(sum(side.channels) if mixed else 1)
        held = [
            [name for name in _AID_NAMES if getattr(aid, name, None) is not None]
            for aid in self.aids or (Aid(),) * len(runs)
        ]
        return held == [wanted_aids(spec) for spec, _ in runs] and all(
            (getattr(self, name) is not None) == here for name, here in wanted.items()
        )

    def require_shape(self, side: Side, kv_heads: int, dim: int) -> None:
        """Refuse another model's shape.

        Raises:
            UnsupportedScheme: it was found for other heads or channels.
        """
        if self.dim not in (None, dim):
            raise UnsupportedScheme(
                f"calibration was of another model: of {self.dim} channels, not {dim}"
            )
        named = {n: (getattr(self, n), (dim,)) for n in ("center", "factor", "order")}
        for aid, (_, width) in zip(self.aids, side.runs(dim), strict=False):
            shapes = ((1, 1, 1), (1, 1, 1), (width, width))
            for name, shape in zip(_AID_NAMES, shapes, strict=True):
                named[f"{name} of {width} channels"] = getattr(aid, name), shape
        for name, (t, shape) in named.items():
            if t is not None and t.shape != (kv_heads, *shape):
                raise UnsupportedScheme(
                    f"calibration was of another model: its {name} has shape "
                    f"{list(t.shape)}, not {[kv_heads, *shape]}"
                )


_AID_NAMES = ("scale", "clip", "feedback")


def hadamard_block(dim: int) -> int:
    """The largest power of two that divides dim: 64 → 64, 80 → 16, 96 → 32."""
    return dim & -dim


def turns_of(
    keys: Side | None,
    values: Side | None,
    dim: int,
    device: torch.device,
    found: tuple[Found, Found] = (Found(), Found()),
) -> Turns | None:
    """The turns that a layer's storage asks for; None for none."""
    if keys is None or values is None:
        return None
    k, v = found

    def at(t):
        return None if t is None else t.to(device)

    def block(side):
        return hadamard_block(dim) if "rotate" in side.aids else 1

    order = at(k.order) if isinstance(keys, Mixed) else None
    factor = at(k.factor)
    turns = Turns(
        keys=Turn(
            before=at(k.center),
            gain=None if factor is None else 1 / factor,
            block=block(keys),
            order=order,
        ),
        queries=Turn(gain=factor, block=block(keys), order=order),
        values=Turn(before=at(v.center), block=block(values)),
        outputs=Turn(block=block(values), after=at(v.center)),
    )
    still = turns.keys.still and turns.values.still
    return None if still else turns


def turn(x: torch.Tensor, how: Turn) -> torch.Tensor:
    """Turn x [tokens, heads, dim]; heads is a multiple of kv_heads.

    Returns:
        As x, float32, or float64 for float64. Each row is computed element by element,
        so that it does not depend on the other rows, not even in its last bit.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = x.to(dtype)
    group = x.shape[1]

    def each_head(t):
        return t.repeat_interleave(group // len(t), dim=0)

    if how.before is not None:
        y = y - each_head(how.before)
    if how.gain is not None:
        y = y * each_head(how.gain)
    if how.block > 1:
        y = hadamard(y, how.block)
    if how.order is not None:
        y = y.gather(-1, each_head(how.order).expand(y.shape))
    if how.after is not None:
        y = y + each_head(how.after)
    return y


def hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """x H for H block-diagonal, x [..., dim]: the fast Walsh-Hadamard transform.

    H is symmetric and its own inverse.
    """
    shape, half = x.shape, 1
    while half < block:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).reshape(shape)
        half *= 2
    return x * block**-0.5
