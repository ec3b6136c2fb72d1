"""The host side that kernels share: launches, what can run where, tile sizes."""

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from ..errors import UnsupportedBackend
from ..specs import Spec
from ..storage import Quantized, Runs

#: Bits of a flag: a value was NaN or infinite; a finite one did not fit its storage;
#: scores overflowed.
NONFINITE, TOO_LARGE, OVERFLOW = 1, 2, 4

#: Triton's names of the dtypes that kernels take.
DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and its arguments: run on a device, or compiled without one.

    Attributes:
        kernel: a function under `triton.jit`.
        grid: programs along up to three axes.
        arguments: by name; tensors, ints, floats, constants, and tuples of them.
        warps, stages: of a program; depth of its pipeline of loads.
        fuse: whether a product and a sum may become one instruction, which rounds once
            instead of twice. False where each bit must be PyTorch's.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 2
    fuse: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """What Triton's compiler is told beyond the arguments."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": self.fuse,
        }

    def run(self) -> None:
        """Queue the kernel on the current stream. Does not wait for it."""
        self.kernel[self.grid](**self.arguments, **self.options)


def interpreted() -> bool:
    """Whether Triton was imported with TRITON_INTERPRET=1: kernels run on the CPU."""
    return not isinstance(tl.sum, triton.runtime.JITFunction)


def require(device: torch.device, *dtypes: torch.dtype) -> None:
    """Refuse what cannot run.

    Raises:
        UnsupportedBackend: a dtype, or a device, that the kernels do not run on.
    """
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UnsupportedBackend(
                f"Triton kernels take float16, bfloat16 and float32, got {dtype}"
            )
    if device.type == "meta":
        return
    if os.environ.get("TRITON_INTERPRET") == "1" and not interpreted():
        raise UnsupportedBackend(
            "TRITON_INTERPRET was set after triton was imported: set it before"
        )
    if interpreted():
        if torch.bfloat16 in dtypes:
            raise UnsupportedBackend(
                "bfloat16 is wrong in Triton's interpreter: use float16 or float32"
            )
    elif device.type != "cuda":
        raise UnsupportedBackend(
            f"Triton kernels need a CUDA device, got {device}; with TRITON_INTERPRET=1 "
            "in the environment they run on the CPU, slowly"
        )
    elif torch.bfloat16 in dtypes and capability(device) < 80:
        raise UnsupportedBackend("this GPU has no bfloat16: use float16 or float32")


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability times ten, such as 90; 80 in the interpreter."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; those of an A100 in the interpreter."""
    if device.type != "cuda":
        return 108
    return torch.cuda.get_device_properties(device).multi_processor_count


# -- what is asked of storage ----------------------------------------------------------


def padded(width: int) -> int:
    """The tile width for `width` channels: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(width))


def code_bits(cold: "tuple[Quantized | Runs, Quantized] | None") -> int:
    """The most bits of a code among keys and values; 16 where nothing is cold.

    FP4 and FP8 count as 16: their codes become float16 in registers, by bits of their
    own.
    """
    if not cold:
        return 16
    formats = [part.spec.fmt for side in cold for part in side.parts]
    return max(16 if fmt.kind == "float" else fmt.bits for fmt in formats)


def require_page(page_size: int) -> None:
    """Refuse pages that cannot be sealed.

    Raises:
        UnsupportedBackend: a page size that is no power of two.
    """
    if page_size & (page_size - 1):
        raise UnsupportedBackend(
            f"the Triton kernels seal pages of 1, 2, 4, 8, … tokens, got {page_size}; "
            'backend="torch" takes any'
        )


def refuse_channel_values(*specs: Spec | None) -> None:
    """Values are summed over tokens; a scale per channel would not come out of the sum.

    Raises:
        UnsupportedBackend: values with a scale per channel.
    """
    if any(spec is not None and spec.granularity == "channel" for spec in specs):
        raise UnsupportedBackend(
            "the Triton kernels read values with scales per token or page, not per "
            'channel; backend="torch" does'
        )


# -- tiles -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiling:
    """Shape of the work of one program.

    Attributes:
        rows: of queries.
        slice: channels that a product of queries and keys takes at once.
        cold, hot: tokens of a tile of cold, of hot pages.
        warps, stages: see `Launch`.
    """

    rows: int
    cold: int
    hot: int
    warps: int = 4
    stages: int = 2
    slice: int = 256


def decode_tiling(
    target: int, group: int, dim: int, dtype: torch.dtype, cold_bits: int
) -> Tiling:
    """Tiles of `decode`, as large as fits in registers.

    From sm_80 on the rows are padded to 16, the height of a matrix instruction. sm_75
    gets no matrix instructions from Triton, and neither does float32: their products
    are plain multiply-adds that hold both operands in registers over all channels. So
    rows are not padded beyond a power of two, tiles have 16 tokens, and the products
    with keys go over slices of the channels.

    Args:
        target: compute capability times ten.
        group: query heads of one kv head.
        dim: head dim.
        dtype: of the queries.
        cold_bits: largest bits of a code among keys and values; 16 for native.
    """
    rows, wide = triton.next_power_of_2(group), padded(dim) > 128
    if target < 80 or dtype == torch.float32:
        warps = 8 if wide and rows > 4 else 4
        return Tiling(rows, cold=16, hot=16, warps=warps, stages=1, slice=64)
    rows, cold = max(16, rows), 64 if cold_bits > 8 or wide else 128
    return Tiling(rows, cold, hot=32 if wide else 64, warps=8 if wide else 4)


def extend_tiling(
    target: int, group: int, dim: int, dtype: torch.dtype, by_channel: bool = False
) -> Tiling:
    """Tiles of `extend`; see `decode_tiling`.

    Args:
        by_channel: keys have a scale per channel or block: scaled codes take registers,
            too.
    """
    warps = 8 if padded(dim) > 128 else 4
    if target < 80 or dtype == torch.float32:
        rows = max(16, triton.next_power_of_2(group))
        slice_ = 16 if by_channel else 32
        return Tiling(rows, cold=16, hot=16, warps=warps, stages=1, slice=slice_)
    if by_channel or padded(dim) > 128:
        return Tiling(max(32, triton.next_power_of_2(group)), cold=32, hot=32)
    return Tiling(max(64, triton.next_power_of_2(group)), cold=32, hot=32)


def by_channel(cold: "tuple[Quantized | Runs, Quantized] | None") -> bool:
    """Whether cold keys have a scale per channel, or per block of them."""
    return cold is not None and any(
        run.spec.granularity in ("channel", "block") for run in cold[0].parts
    )


#: Tiles that `tune` found to be the fastest, by `tiling_key`.
FASTEST: dict[tuple, Tiling] = {}


def tiling_key(kernel: str, target: int, q, hot, cold) -> tuple:
    """All that decides which tiles are best, as far as tiles know it.

    Of cold pages that is how they are read: what was done about the error is not.
    """
    kv_heads, _, page_size, dim = hot[0].shape
    sides = cold and tuple(
        tuple((replace(run.spec, aids=()), run.shape[-1]) for run in side.parts)
        for side in cold
    )
    group = q.shape[1] // kv_heads
    return kernel, target, group, dim, q.dtype, hot[0].dtype, sides, page_size


def split_count(programs: int, tokens: int, tile: int, device: torch.device) -> int:
    """Splits of `decode`: a power of two, so that few kernels are compiled.

    Enough for four programs on each multiprocessor, as long as each split has two tiles
    to read.

    Args:
        programs: sequences times kv heads.
        tokens: the most that a sequence reads.
        tile: tokens of a tile.
        device: where it runs.
    """
    wanted = -(-4 * processors(device) // programs)
    useful = max(1, tokens // (2 * tile))
    return min(128, 1 << (min(wanted, useful).bit_length() - 1))
