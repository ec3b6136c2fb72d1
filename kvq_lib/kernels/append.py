"""New keys and values into hot pages."""

import torch
import triton
import triton.language as tl

from .common import is_finite, raise_flag
from .launch import NONFINITE, TOO_LARGE, Launch, padded, require


@triton.jit
def append_kernel(
    k,
    v,
    hot_k,
    hot_v,
    pages,
    slots,
    flags,
    tokens,
    NONFINITE: tl.constexpr,
    TOO_LARGE: tl.constexpr,
    LIMIT: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (token tile, kv head). Tensors come as (pointer, strides).

    k, v: [tokens, kv_heads, dim]; hot_k, hot_v: [kv_heads, pages, page_size, dim].
    """
    head = tl.program_id(1)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, DIM_PAD)
    page = tl.load(pages + token, mask=token < tokens, other=0).to(tl.int64)
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int64)
    real = (token < tokens)[:, None] & (d < DIM)[None, :]
    move(k, hot_k, head, token, page, slot, d, real, flags, NONFINITE, TOO_LARGE, LIMIT)
    move(v, hot_v, head, token, page, slot, d, real, flags, NONFINITE, TOO_LARGE, LIMIT)


@triton.jit
def move(
    x,
    pool,
    head,
    token,
    page,
    slot,
    d,
    real,
    flags,
    NONFINITE: tl.constexpr,
    TOO_LARGE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Move one tile of x, cast, to its pages; flag what the cast makes infinite, and
    what is beyond LIMIT after it."""
    source = x[0] + token.to(tl.int64)[:, None] * x[1] + head * x[2] + d[None, :] * x[3]
    new = tl.load(source, mask=real, other=0.0)
    stored = new.to(pool[0].dtype.element_ty)
    row = page * pool[2] + slot * pool[3] + head.to(tl.int64) * pool[1]
    tl.store(pool[0] + row[:, None] + d[None, :] * pool[4], stored, mask=real)
    raise_flag(flags, head, is_finite(new) == 0, NONFINITE)
    fits = is_finite(stored)
    if LIMIT is not None:
        fits = fits & (tl.abs(stored.to(tl.float32)) <= LIMIT)
    raise_flag(flags, head, is_finite(new) & (fits == 0), TOO_LARGE)


def append(
    hot: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    flags: torch.Tensor,
    limit: float | None = None,
) -> None:
    """Write new keys and values into hot pages.

    Args:
        hot: key and value pools [kv_heads, pages, page_size, dim], any strides.
        pages, slots: int32 or int64 [tokens], the page and the place of each token.
        k, v: [tokens, kv_heads, dim], any strides; float16, bfloat16 or float32.
        flags: int32 [kv_heads]; gets the bit NONFINITE where k or v holds NaN or
            infinity, TOO_LARGE where a value overflows the pool's dtype or, stored,
            exceeds `limit` in magnitude.
        limit: the largest magnitude that a cold page can hold; None where nothing is
            sealed.

    Raises:
        UnsupportedBackend: a dtype or device that Triton does not run on.

    Bytes (`budget.append`): reads 2·T·H·D·e + 16·T·H (page and slot, once a head),
    writes 2·T·H·D·h, for T tokens, H kv heads, dim D, e bytes an element of k and v, h
    of a hot page.
    """
    for launch in prepare(hot, pages, slots, k, v, flags, limit):
        launch.run()


def prepare(hot, pages, slots, k, v, flags, limit=None) -> list[Launch]:
    """The launches of `append`."""
    tokens, kv_heads, dim = k.shape
    require(k.device, k.dtype, *(pool.dtype for pool in hot))
    tile = 16
    return [
        Launch(
            append_kernel,
            (-(-tokens // tile), kv_heads),
            {
                "k": (k, *k.stride()),
                "v": (v, *v.stride()),
                "hot_k": (hot[0], *hot[0].stride()),
                "hot_v": (hot[1], *hot[1].stride()),
                "pages": pages,
                "slots": slots,
                "flags": flags,
                "tokens": tokens,
                "NONFINITE": NONFINITE,
                "TOO_LARGE": TOO_LARGE,
                "LIMIT": limit,
                "DIM": dim,
                "DIM_PAD": padded(dim),
                "TILE": tile,
            },
        )
    ]
