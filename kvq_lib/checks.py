"""Arguments that many functions check alike."""

import contextlib
import math
import operator
from collections.abc import Iterable
from numbers import Real

import torch

from .errors import InvalidArgument, UnsupportedBackend, UnsupportedModel


def whole(name: str, value, at_least: int) -> int:
    """`value` as a plain int; numpy's integers are taken, True and 2.0 are not.

    Raises:
        InvalidArgument: not a whole number, below `at_least`, or beyond 2^60.
    """
    number = _index(value)
    # No machine counts so far; and beyond 2^63 Python's ranges lose their length.
    if number is None or not at_least <= number <= 2**60:
        large = number is not None and number > 2**60
        bound = "at most 2^60" if large else f"at least {at_least}"
        raise InvalidArgument(f"{name} is a whole number, {bound}; got {_shown(value)}")
    return number


def real(name: str, value, at_least: float | None = None) -> float:
    """`value` as a finite float.

    Raises:
        InvalidArgument: no real number, NaN, infinite, or below `at_least`.
    """
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        # Python's integers and fractions can be larger than any float.
        with contextlib.suppress(OverflowError):
            number = float(value)
    low = -math.inf if at_least is None else at_least
    if not math.isfinite(number) or number < low:
        bound = "" if at_least is None else f", at least {at_least}"
        raise InvalidArgument(f"{name} is a finite number{bound}; got {_shown(value)}")
    return number


def token_ids(tokens: Iterable[int]) -> list[int]:
    """A row of token ids, a list or a 1-d tensor, as plain integers of 64 bits.

    Raises:
        InvalidArgument: anything else.
    """
    if not isinstance(tokens, str | bytes):
        # What cannot be read becomes a row of None, which is no row of integers.
        with contextlib.suppress(TypeError, RuntimeError):
            tokens = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
            row = [_index(token) for token in tokens]
            if all(token is not None and -(2**63) <= token < 2**63 for token in row):
                return row
    raise InvalidArgument(
        f"a row of tokens is a list of whole numbers of 64 bits; got {_shown(tokens)}"
    )


def _index(value) -> int | None:
    """A whole number as an int; None for anything else."""
    if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # the latter: a tensor without storage
        return None


def _shown(value) -> str:
    """A value in an error's message: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def float_dtype(name: str, dtype) -> torch.dtype:
    """A dtype of floats of 16 bits or more.

    Raises:
        InvalidArgument: anything else.
    """
    if (
        not isinstance(dtype, torch.dtype)
        or not dtype.is_floating_point
        or dtype.itemsize < 2
    ):
        raise InvalidArgument(
            f"{name} is a torch dtype of floats of 16 bits or more, got {dtype!r}"
        )
    return dtype


def usable_device(device) -> torch.device:
    """The device as tensors report it: "cuda" is some "cuda:0", "cpu:0" is "cpu".

    Raises:
        UnsupportedBackend: PyTorch has no such device here.
    """
    try:
        found = torch.empty(0, device=device).device
    except (
        AssertionError,
        ImportError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise UnsupportedBackend(f"device {_shown(device)}: {reason(error)}") from None
    if found.type == "meta":
        raise UnsupportedBackend("device 'meta' holds no numbers")
    return torch.device("cpu") if found.type == "cpu" else found


def reason(error: Exception) -> str:
    """The first line of another library's error, with its kind; where that line only
    announces the next one, that one too."""
    first, *more = f"{type(error).__name__}: {error}".splitlines()
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def step_tensors(q, k, v, tokens: int, kv_heads: int, dim: int, device) -> None:
    """Queries, keys and values of a step: q [tokens, heads, dim], heads a multiple of
    kv_heads; k and v [tokens, kv_heads, dim]; one dtype of floats, on `device`.

    Raises:
        InvalidArgument: they are not.
        UnsupportedModel: keys and values differ in their channels.
    """
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
        if not isinstance(x, torch.Tensor):
            raise InvalidArgument(f"{name} must be a tensor, got {type(x).__name__}")
    if k.dim() == v.dim() == 3 and k.shape[2] != v.shape[2]:
        raise UnsupportedModel(
            f"keys of {k.shape[2]} and values of {v.shape[2]} channels; the cache "
            "wants equal ones"
        )
    for name, x in named[1:]:
        if tuple(x.shape) != (tokens, kv_heads, dim):
            raise InvalidArgument(
                f"{name} must be [tokens, kv_heads, dim] = {[tokens, kv_heads, dim]}, "
                f"got {list(x.shape)}"
            )
    heads = q.shape[1] if q.dim() == 3 else 0
    if tuple(q.shape) != (tokens, heads, dim) or heads == 0 or heads % kv_heads:
        raise InvalidArgument(
            f"q must be [tokens, heads, dim] = [{tokens}, a multiple of {kv_heads}, "
            f"{dim}], got {list(q.shape)}"
        )
    float_dtype("the dtype of q", q.dtype)
    for name, x in named:
        if x.dtype != q.dtype:
            raise InvalidArgument(
                f"q, k and v share one dtype; got {q.dtype}, {k.dtype}, {v.dtype}"
            )
        if x.device != device:
            raise InvalidArgument(f"{name} is on {x.device}, the cache on {device}")
