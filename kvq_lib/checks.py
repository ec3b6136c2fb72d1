"""Arguments that many functions check alike."""

import operator

import torch

from .errors import InvalidArgument, UnsupportedBackend, UnsupportedModel


def whole(name: str, value, at_least: int) -> int:
    """`value` as a plain int; numpy's integers are taken, True and 2.0 are not.

    Raises:
        InvalidArgument: not a whole number, below `at_least`, or beyond 2^60.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    # No machine counts so far; and beyond 2^63 Python's ranges lose their length.
    if number is None or not at_least <= number <= 2**60:
        raise InvalidArgument(
            f"{name} is a whole number, at least {at_least}; got {value!r}"
        )
    return number


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
    except (AssertionError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedBackend(f"device {device!r}: {reason}") from None
    return torch.device("cpu") if found.type == "cpu" else found


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
