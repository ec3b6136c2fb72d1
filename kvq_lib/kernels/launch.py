"""The host side that kernels share: what can run where, tile sizes, arguments."""

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..errors import InvalidArgument, UnsupportedBackend
from ..quantize import Quantized, Spec

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
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 2

    def run(self) -> None:
        """Queue the kernel on the current stream. Does not wait for it."""
        self.kernel[self.grid](
            **self.arguments, num_warps=self.warps, num_stages=self.stages
        )


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


# -- arguments -------------------------------------------------------------------------


def parts_of(cold: Quantized | None) -> int:
    """Slices of channels that one byte of codes holds: 1, 2 or 4."""
    return 1 if cold is None else cold.spec.fmt.per_byte


def padded(width: int) -> int:
    """The tile width for `width` channels: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(width))


def pool_arguments(pool: torch.Tensor) -> tuple[tuple, tuple[int, int]]:
    """A hot pool as a kernel takes it, and its strides inside a page."""
    return (pool, pool.stride(0), pool.stride(1)), (pool.stride(2), pool.stride(3))


def cold_arguments(cold: Quantized | None) -> tuple[tuple, tuple | None]:
    """Cold keys or values as a kernel takes them, and their constant SIDE; see
    `tiles`."""
    if cold is None:
        return (None, None, None), None
    spec = cold.spec
    codes = stored_codes(cold)

    def place(x):
        return None if x is None else (x, x.stride(0), x.stride(1))

    def step(x):
        return 0 if x is None else x.stride(2 if spec.granularity == "token" else 3)

    offset = spec.offset if spec.fmt.kind == "int" else 0
    # What `small_numbers` divides by.
    unit = 256.0 if spec.format == "fp8" else 1.0
    if spec.fmt.per_byte > 1 and not offset:
        unit = 512.0
    bound = 2.0 if spec.format == "fp8" else 2.0**spec.fmt.bits
    side = (
        spec.format,
        spec.granularity or "none",
        offset,
        spec.symmetric,
        bound,
        codes.stride(2),
        codes.stride(3),
        step(cold.scale),
        step(cold.zero),
        spec.fmt.per_byte,
        unit,
    )
    return (place(codes), place(cold.scale), place(cold.zero)), side


def stored_codes(cold: Quantized) -> torch.Tensor:
    """The codes in their own dtype: bytes, or float16 for fp16."""
    if cold.spec.format != "fp16":
        return cold.codes
    try:
        return cold.codes.view(torch.float16)
    except RuntimeError as error:
        raise InvalidArgument(f"pool of float16 bytes: {error}") from None


def code_bits(cold: tuple[Quantized, Quantized] | None) -> int:
    """The most bits of a code among keys and values; 16 where nothing is cold.

    FP8 counts as 16: its codes become float16 in registers, by bits of their own.
    """
    if not cold:
        return 16
    formats = [side.spec.fmt for side in cold]
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


def refuse_channel_values(spec: Spec | None) -> None:
    """Values are summed over tokens; a scale per channel would not come out of the sum.

    Raises:
        UnsupportedBackend: values with a scale per channel.
    """
    if spec is not None and spec.granularity == "channel":
        raise UnsupportedBackend(
            "the Triton kernels read values with scales per token or page, not per "
            'channel; backend="torch" does'
        )


def attention_arguments(q, hot, keys, values, tiling) -> dict[str, Any]:
    """What `decode` and `extend` take alike."""
    dim, kv_heads = q.shape[2], hot[0].shape[0]
    hot_k, inner_k = pool_arguments(hot[0])
    hot_v, inner_v = pool_arguments(hot[1])
    cold_k, key_side = cold_arguments(keys)
    cold_v, value_side = cold_arguments(values)
    cold_dot, hot_dot = dot_dtypes(q, hot[0])
    k_parts, v_parts = parts_of(keys), parts_of(values)
    while dim // k_parts > tiling.slice and dim % (2 * k_parts) == 0:
        k_parts *= 2
    return {
        "hot_k": hot_k,
        "hot_v": hot_v,
        "cold_k": cold_k,
        "cold_v": cold_v,
        "NONFINITE": NONFINITE,
        "OVERFLOW": OVERFLOW,
        "KEYS": key_side,
        "VALUES": value_side,
        "HOT_K": inner_k,
        "HOT_V": inner_v,
        "CHANNEL": q.stride(2),
        "K_PARTS": k_parts,
        "V_PARTS": v_parts,
        "K_PAD": padded(dim // k_parts),
        "V_PAD": padded(dim // v_parts),
        "DIM": dim,
        "DIM_PAD": padded(dim),
        "GROUP": q.shape[1] // kv_heads,
        "ROWS": tiling.rows,
        "PAGE": hot[0].shape[2],
        "COLD_DOT": cold_dot,
        "HOT_DOT": hot_dot,
    }


def dot_dtypes(q: torch.Tensor, hot: torch.Tensor) -> tuple:
    """Triton dtypes of the products with cold and with hot pages.

    Codes are exact in float16, and `tiles` keeps q in its range, for bfloat16 models
    too. Hot pages are multiplied in their own dtype, unless q has more bits.
    """
    if q.dtype == torch.float32:
        return tl.float32, tl.float32
    if hot.dtype == torch.float16 or hot.dtype == q.dtype:
        return tl.float16, DTYPES[hot.dtype]
    return tl.float16, tl.float32


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
        by_channel: keys have a scale per channel: scaled codes take registers, too.
    """
    warps = 8 if padded(dim) > 128 else 4
    if target < 80 or dtype == torch.float32:
        rows = max(16, triton.next_power_of_2(group))
        slice_ = 16 if by_channel else 32
        return Tiling(rows, cold=16, hot=16, warps=warps, stages=1, slice=slice_)
    if by_channel or padded(dim) > 128:
        return Tiling(max(32, triton.next_power_of_2(group)), cold=32, hot=32)
    return Tiling(max(64, triton.next_power_of_2(group)), cold=32, hot=32)


def by_channel(cold: tuple[Quantized, Quantized] | None) -> bool:
    """Whether cold keys have a scale per channel."""
    return cold is not None and cold[0].spec.granularity == "channel"


#: Tiles that `tune` found to be the fastest, by `tiling_key`.
FASTEST: dict[tuple, Tiling] = {}


def tiling_key(kernel: str, target: int, q, hot, cold) -> tuple:
    """All that decides which tiles are best, as far as tiles know it."""
    kv_heads, _, page_size, dim = hot[0].shape
    specs = cold and tuple(side.spec for side in cold)
    group = q.shape[1] // kv_heads
    return kernel, target, group, dim, q.dtype, hot[0].dtype, specs, page_size


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
