"""The partial results of `decode`'s splits, put together by log-sum-exp."""

import torch
import triton
import triton.language as tl

from .common import rounded
from .launch import Launch, padded


@triton.jit
def merge_kernel(
    partial,
    out,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """Program (sequence, query head).

    partial: (sums, maxima, totals) as `decode` leaves them; a split that read nothing
    has maximum -inf and counts for nothing. out: (pointer, strides).
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, DIM_PAD)
    cell = (sequence * tl.num_programs(1) + head) * SPLITS + split
    m = tl.load(partial[1] + cell, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top > float("-inf"), top, 0.0))
    total = tl.load(partial[2] + cell, mask=split < SPLITS, other=0.0)
    sums = tl.load(
        partial[0] + (cell * DIM)[:, None] + d[None, :],
        mask=(m > float("-inf"))[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    value = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    place = out[0] + sequence * out[1] + head * out[2] + d * out[3]
    tl.store(place, rounded(value, out[0].dtype.element_ty), mask=d < DIM)


def merge(partial: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    """Merge partial results of attention.

    Args:
        partial: float32, contiguous: sums of values [sequences, heads, splits, dim],
            maxima of log2 scores and totals of probabilities, both
            [sequences, heads, splits].
        out: [sequences, heads, dim], any strides; written.

    Bytes (`budget.merge`): reads sequences·heads·splits·(dim + 2)·4, writes out.
    """
    merge_launch(partial, out).run()


def merge_launch(partial, out) -> Launch:
    """The launch of `merge`."""
    sequences, heads, splits, dim = partial[0].shape
    return Launch(
        merge_kernel,
        (sequences, heads),
        {
            "partial": partial,
            "out": (out, *out.stride()),
            "DIM": dim,
            "DIM_PAD": padded(dim),
            "SPLITS": splits,
            "SPLITS_PAD": triton.next_power_of_2(splits),
        },
        warps=8 if splits * padded(dim) > 8192 else 4,
    )
