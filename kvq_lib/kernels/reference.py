"""The kernels' meaning in PyTorch: slow enough to read, fast enough to use on a CPU.

Pools are [kv_heads, pages, page_size, dim]: the keys, or the values, of one layer. A
sequence whose pages lie side by side is then read as a view, without a copy.
"""

from dataclasses import dataclass

import torch

from ..errors import NonFiniteValue, ValueOutOfRange
from ..quantize import quantize_as
from ..schemes import Law
from ..storage import Quantized, Runs
from ..turns import Turns, turn

#: What `PagedKVCache.backend` calls it.
NAME = "torch"

#: Queries whose scores are held at once. A longer chunk is read in tiles: of what grows
#: with the square of its length, one byte for each query and key is left, the mask.
TILE = 256


@dataclass(frozen=True)
class Tile:
    """Queries of one sequence, and the pages that they read.

    Attributes:
        rows: their rows in the flattened step.
        hot: hot pages to read, as an index into a pool.
        hot_tokens: tokens to read from them; the last page may be partial.
        cold: cold pages to read, all of them full; None for none.
        hidden: bool [queries, hot_tokens + cold tokens], True where the law forbids a
            query to look; None when all is visible.
    """

    rows: slice
    hot: "slice | torch.Tensor"
    hot_tokens: int
    cold: "slice | torch.Tensor | None"
    hidden: torch.Tensor | None


def plan(
    law: Law,
    hot: list[list[int | None]],
    cold: list[list[int | None]],
    starts: list[int],
    lengths: list[int],
    device: torch.device,
) -> list[Tile]:
    """What the queries of a step read, in tiles.

    Args:
        law: which pages are read hot and which cold.
        hot, cold: page tables of each sequence; None where there is no such copy.
        starts: position of each sequence's first query.
        lengths: queries of each sequence.
        device: where the index tensors live.
    """
    size, row, tiles = law.page_size, 0, []
    for hot_ids, cold_ids, begin, count in zip(hot, cold, starts, lengths, strict=True):
        for start in range(begin, begin + count, TILE):
            queries = range(start, min(start + TILE, begin + count))
            first, last = start // size, queries[-1] // size
            # From the window of the first query to the page of the last one.
            window = range(law.hot(first)[1].start, law.hot(last)[1].stop)
            hot_read, cold_read = [*law.hot(last)[0], *window], [*law.cold(last)]
            hot_tokens = (len(hot_read) - 1) * size + queries[-1] % size + 1
            hidden = None
            if len(queries) > 1:
                hidden = _hidden(law, queries, hot_read, hot_tokens, cold_read, device)
            tiles.append(
                Tile(
                    rows=slice(row, row + len(queries)),
                    hot=_index([hot_ids[j] for j in hot_read], device),
                    hot_tokens=hot_tokens,
                    cold=_index([cold_ids[j] for j in cold_read], device),
                    hidden=hidden,
                )
            )
            row += len(queries)
    return tiles


def _hidden(law, queries, hot, hot_tokens, cold, device) -> torch.Tensor:
    """Where the law forbids a query to look: bool [queries, hot + cold tokens]."""
    size = law.page_size
    query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    nearest = query // size - law.window  # the first page of each query's window
    slots = torch.arange(size, device=device)
    key = (_ints(hot, device).unsqueeze(1) * size + slots).flatten()[:hot_tokens]
    page = key // size
    hidden_hot = (key > query) | ((page >= law.sinks) & (page < nearest))
    hidden_cold = _ints(cold, device).repeat_interleave(size) >= nearest
    return torch.cat([hidden_hot, hidden_cold], dim=1)


def _index(ids: list[int], device) -> "slice | torch.Tensor | None":
    """An index of page ids; a slice where they lie side by side; None for no pages."""
    if not ids:
        return None
    if ids == list(range(ids[0], ids[0] + len(ids))):
        return slice(ids[0], ids[0] + len(ids))
    return _ints(ids, device)


def _ints(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def select(pool: torch.Tensor, pages: "slice | torch.Tensor") -> torch.Tensor:
    """Pages of a pool, [kv_heads, pages, …]; a view where they lie side by side."""
    return pool[:, pages] if isinstance(pages, slice) else pool.index_select(1, pages)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hot: tuple[torch.Tensor, torch.Tensor],
    cold: "tuple[Quantized | Runs, Quantized] | None",
    turns: Turns | None,
    pages: torch.Tensor,
    slots: torch.Tensor,
    sealing: tuple[torch.Tensor, torch.Tensor],
    tables: list[Tile],
    flags: None,
    scale: float,
) -> torch.Tensor:
    """One layer of a step: write the new keys and values, seal, and read.

    Args:
        q: [tokens, heads, dim]; head h reads kv head h // (heads / kv_heads).
        k, v: [tokens, kv_heads, dim].
        hot: key and value pools.
        cold: key and value pools; None for a cache that seals nothing.
        turns: into the coordinates of the pools, and out of them; None where they are
            the model's own.
        pages, slots: int64 [tokens], the hot page of each token, and its place there.
        sealing: hot and cold page ids, int64 [pages] each, of the pages that fill.
        tables: from `plan`.
        flags: from `new_flags`.
        scale: factor of the scores.

    Returns:
        [tokens, heads, dim] in the dtype of q.

    Raises:
        NonFiniteValue, ValueOutOfRange: their arguments are what was wrong, and the
            head. No committed page has changed.
    """
    finite = torch.finfo(q.dtype).max
    if not _within(q, finite):
        raise _blame(NonFiniteValue, torch.isfinite(q), "NaN or infinity in q")
    ways = (turns.keys, turns.values) if turns else (None, None)
    # What float16 cannot hold could not be sealed, and then a later token, which only
    # fills the page, would be blamed.
    dtype = hot[0].dtype if cold is None else torch.float16
    limit = min(torch.finfo(t).max for t in (dtype, hot[0].dtype))
    for name, x, pool, way in zip("kv", (k, v), hot, ways, strict=True):
        stored = (turn(x, way) if way else x).to(pool.dtype)
        if not _within(stored, limit):
            # In bfloat16 itself the limit of 65504 would round up to 65536.
            sound, fits = torch.isfinite(x), stored.double().abs() <= limit
            if not sound.all():
                raise _blame(NonFiniteValue, sound, f"NaN or infinity in {name}")
            raise _blame(ValueOutOfRange, fits, f"{name} exceeds {limit:.6g}")
        append(pool, pages, slots, stored)
    if len(sealing[0]):
        for pool, store in zip(hot, cold, strict=True):
            seal(pool, sealing[0], store, sealing[1])
    rows = turn(q, turns.queries) if turns else q
    out = rows.new_empty(rows.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    # `read` says in which precision it computes; autocast would have it otherwise.
    with torch.autocast(q.device.type, enabled=False):
        for tile in tables:
            out[tile.rows] = read(rows[tile.rows], hot, cold, tile, scale)
    if turns:
        out = turn(out, turns.outputs)
    if not _within(out, torch.finfo(out.dtype).max):
        raise _blame(NonFiniteValue, torch.isfinite(out), "scores or output overflow")
    if out.dtype == q.dtype:
        return out
    # A mean of values can pass float16's largest by what quantizing added.
    return out.clamp(-finite, finite).to(q.dtype)


def append(
    pool: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, x: torch.Tensor
) -> None:
    """Write new keys or values, [tokens, kv_heads, dim], into hot pages."""
    pool[:, pages, slots] = x.transpose(0, 1)


def seal(
    hot: torch.Tensor,
    hot_pages: torch.Tensor,
    cold: "Quantized | Runs",
    cold_pages: torch.Tensor,
) -> None:
    """Quantize full hot pages into cold ones; both index lists are int64 [pages]."""
    aids = [part.aid for part in cold.parts]
    sealed = quantize_as(hot.index_select(1, hot_pages), cold.spec, aids)
    for store, new in zip(cold.tensors, sealed.tensors, strict=True):
        store.index_copy_(1, cold_pages, new)
    for store, new in zip(cold.parts, sealed.parts, strict=True):
        if store.clipped is not None:
            store.clipped.add_(new.clipped)


def read(
    q: torch.Tensor,
    hot: tuple[torch.Tensor, torch.Tensor],
    cold: "tuple[Quantized | Runs, Quantized] | None",
    tile: Tile,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of one tile's queries over its hot and cold pages.

    Args:
        q: [queries, heads, dim]; the rest as in `attend`.

    Returns:
        [queries, heads, dim], float32, or float64 for float64 queries.
    """
    queries, heads, dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    kv_heads = hot[0].shape[0]
    # Query heads that share a kv head become rows of one matrix.
    rows = q.to(dtype).view(queries, kv_heads, -1, dim).permute(1, 2, 0, 3)
    rows = rows.reshape(kv_heads, -1, dim) * scale

    keys = [_hot_tokens(hot[0], tile, dtype)]
    values = [_hot_tokens(hot[1], tile, dtype)]
    if tile.cold is not None:
        for side, pool in ((keys, cold[0]), (values, cold[1])):
            pages = pool.map(lambda t: select(t, tile.cold))
            side.append(pages.dequantize(dtype).flatten(1, 2))

    scores = torch.cat([rows @ k.transpose(1, 2) for k in keys], dim=-1)
    if tile.hidden is not None:
        grouped = scores.view(kv_heads, -1, *tile.hidden.shape)
        grouped.masked_fill_(tile.hidden, float("-inf"))
    weights = scores.softmax(dim=-1).split([k.shape[1] for k in keys], dim=-1)
    out = sum(w @ v for w, v in zip(weights, values, strict=True))
    out = out.view(kv_heads, -1, queries, dim).permute(2, 0, 1, 3)
    return out.reshape(queries, heads, dim)


def new_flags(layers: int, kv_heads: int, device: torch.device) -> None:
    """Nothing: this backend raises at once. Others flag on the device."""


def check(flags: None) -> None:
    """Nothing to check at a commit; see `new_flags`."""


def _within(x: torch.Tensor, limit: float) -> bool:
    """Whether no magnitude in x exceeds `limit`; NaN does. Cheaper than `isfinite`."""
    return x.abs().max().item() <= limit


def _blame(error, good: torch.Tensor, what: str) -> Exception:
    """The error (what, head) for the first head where good [tokens, heads, dim] is
    not true throughout."""
    return error(what, (~good).any(dim=2).any(dim=0).nonzero()[0].item())


def _hot_tokens(pool: torch.Tensor, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
    """Tokens of the tile's hot pages, [kv_heads, hot_tokens, dim]."""
    return select(pool, tile.hot).flatten(1, 2)[:, : tile.hot_tokens].to(dtype)
