"""Choosing tiles by timing them on the device at hand.

`decode_tiling` and `extend_tiling` choose by rule, from registers and spills counted at
compile time. `tune` times tiles around that choice, and `decode` and `extend` then use
the fastest. It is an explicit call: nothing is timed inside a launch, and never while a
CUDA graph is captured.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..errors import InvalidArgument
from . import decode, extend
from .launch import FASTEST, Tiling, by_channel, capability, code_bits, tiling_key
from .launch import decode_tiling as decode_rule
from .launch import extend_tiling as extend_rule


def candidates(default: Tiling, kernel: str) -> list[Tiling]:
    """Tiles around the default one, which comes first.

    Args:
        default: what the rule chose.
        kernel: "decode", where the tile of cold tokens and the warps are what can
            change; or "extend", where the rows can, too.
    """
    rows = [default.rows]
    if kernel == "extend" and default.rows == 64:
        rows += [32]
    depths = [
        (default.warps, default.stages),
        (default.warps, default.stages + 1),
        (12 - default.warps, default.stages),  # 8 for 4, and 4 for 8
    ]
    return [
        replace(default, rows=r, cold=cold, warps=warps, stages=stages)
        for r in rows
        for cold in (default.cold, default.cold // 2, default.cold * 2)
        for warps, stages in depths
        if cold >= 16
    ]


def split_counts(kernel: str) -> tuple[int | None, ...]:
    """Splits that each tile is timed with: the rule's, which is None, and others."""
    return (None, 1, 8) if kernel == "decode" else (None,)


def tune(
    q: torch.Tensor,
    hot: tuple,
    cold: tuple | None,
    tables: tuple,
    flags: torch.Tensor,
    scale: float,
    law: tuple[int, int] | None = None,
    timer: Callable[[Callable[[], None]], float] | None = None,
) -> tuple[Tiling, int | None]:
    """Time tiles on the tensors of one step, and remember the fastest.

    Args:
        q, hot, cold, tables, flags, scale: as `decode` takes them; with `law`, as
            `extend` does. Nothing but `flags` is written.
        law: sinks and window, in pages, to tune `extend`; None to tune `decode`.
        timer: gives the milliseconds of a function of no arguments; default:
            `triton.testing.do_bench`.

    Returns:
        The fastest tiling and its splits (None: as many as `split_count` says). Only
        the tiling is remembered, for the same device, group, dim, dtypes, formats and
        page size: how many splits are best depends on the batch.

    Raises:
        InvalidArgument: a CUDA graph is being captured.
        UnsupportedBackend: as `decode` and `extend`.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InvalidArgument("tiles cannot be timed while a CUDA graph is captured")
    kernel = "decode" if law is None else "extend"
    group, dim = q.shape[1] // hot[0].shape[0], q.shape[2]
    shape = capability(q.device), group, dim, q.dtype
    bits = code_bits(cold)
    default = (
        decode_rule(*shape, bits)
        if law is None
        else extend_rule(*shape, by_channel(cold))
    )
    out, times = torch.empty_like(q), {}
    for tiling in candidates(default, kernel):
        for splits in split_counts(kernel):
            if law is None:
                more = (tables, flags, scale, tiling, splits)
                launches = decode.prepare(q, out, hot, cold, *more)
            else:
                more = (tables, law, flags, scale, tiling)
                launches = extend.prepare(q, out, hot, cold, *more)
            time = time_of(launches, timer or do_bench)
            if time is not None:
                times[tiling, splits] = time
    fastest = min(times, key=times.get)
    FASTEST[tiling_key(kernel, shape[0], q, hot, cold)] = fastest[0]
    return fastest


def time_of(launches, timer) -> float | None:
    """What the timer says of a kernel's launches; None where the chip lacks the
    registers or the shared memory for them."""
    from triton.runtime.errors import OutOfResources

    try:
        return timer(lambda: [launch.run() for launch in launches])
    except OutOfResources:
        return None


def do_bench(function) -> float:
    import triton

    return triton.testing.do_bench(function)


def clear() -> None:
    """Forget what was timed: the rules decide again."""
    FASTEST.clear()
