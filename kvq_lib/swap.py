"""Swapping: a sequence's pages leave for host memory and come back bit by bit.

Leaving, a sequence takes along the bytes of its cold pages, codes and scales, and of
those hot pages that the law still reads. Coming back, it goes through the cache's own
life cycle: `begin` reserves its pages, chunk by chunk, their bytes are copied where a
model would have written keys and values, and `commit` enters them into the tables and
the prefix index. Nothing is quantized again.

This module looks inside the cache, for there is no public way to a page's bytes: it
reads the ids in `cache._pages.sequences[seq].pages`, and reads and writes the pools
`cache._hot_tensors` and `cache._cold_tensors`. A step reserves a hot page for every
page that it restores, though the law needs few of them. The others hold nothing of
use, so they are given back at once, by `cache._pages`: the prefix index must not find
them.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .cache import PagedKVCache
from .checks import token_ids as checked_tokens
from .checks import whole
from .errors import InvalidArgument
from .pages import Page


@dataclass(frozen=True, eq=False)
class Swapped:
    """What a sequence needs to come back to the cache that it left.

    Attributes:
        length: its tokens.
        hot_pages, cold_pages: indices of the saved pages, counted from its start.
        hot: keys and values, each [layers, kv_heads, hot pages, page_size, dim], on
            the host.
        cold: codes and scales of all layers, each [kv_heads, cold pages, …], on the
            host.
    """

    length: int
    hot_pages: list[int]
    cold_pages: range
    hot: list[torch.Tensor]
    cold: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return sum(t.numel() * t.element_size() for t in (*self.hot, *self.cold))


def swap_out(cache: PagedKVCache, seq: int) -> Swapped:
    """Copy a sequence's pages to host memory and free it.

    Shared pages are copied, too: their other holders may be gone by the time it
    returns.

    Raises:
        UnknownSequence, SequenceBusy: nothing has changed.
    """
    length = cache.length(seq)
    law = cache.scheme.law(cache.page_size)
    pages = cache._pages.sequences[seq].pages
    kept, sealed = list(itertools.chain(*law.kept_hot(length))), law.sealed(length)
    hot = _ids(cache, [pages[j].hot for j in kept])
    cold = _ids(cache, [pages[j].cold for j in sealed])
    saved = Swapped(
        length,
        kept,
        sealed,
        [pool[:, :, hot].cpu() for pool in cache._hot_tensors],
        [pool[:, cold].cpu() for pool in cache._cold_tensors],
    )
    cache.free(seq)
    return saved


def swap_in(
    cache: PagedKVCache,
    seq: int,
    saved: Swapped,
    token_ids: Iterable[int],
    pages: int = 32,
) -> None:
    """Restore what `swap_out` saved into a sequence fresh from `cache.add(token_ids)`.

    Pages that `add` found by their tokens are used as they are: those of the sequence
    itself, or, where these are gone, those that another has computed meanwhile.

    Args:
        seq: the sequence; it may have found more tokens than were saved.
        saved: from `swap_out` of this cache.
        token_ids: the tokens of the sequence, `saved.length` at least.
        pages: the most pages of one step, each of which needs a hot page for a while.

    Raises:
        OutOfPages: too few pages are free; the sequence is freed, `saved` still good.
        InvalidArgument: too few tokens, or a sequence that ends amid a page; nothing
            has changed.
        UnknownSequence, SequenceBusy: nothing has changed.
    """
    tokens = checked_tokens(token_ids)
    start, size = cache.length(seq), cache.page_size
    step = size * whole("pages", pages, at_least=1)
    if len(tokens) < saved.length:
        raise InvalidArgument(f"{len(tokens)} tokens given, {saved.length} were saved")
    if start < saved.length and start % size:
        raise InvalidArgument(
            f"the sequence has {start} tokens already, no whole pages of {size}"
        )
    found = start // size
    try:
        while start < saved.length:
            end = min(start + step, saved.length)
            restored = _restore(cache, seq, saved, tokens[start:end])[found:]
            _forget_hot(cache, restored)
            start = end
    except Exception:
        restored = cache._pages.sequences[seq].pages[found:]
        cache.free(seq)
        _forget_hot(cache, restored)
        raise


@torch.no_grad()
def _restore(cache, seq: int, saved: Swapped, tokens: list[int]) -> list[Page]:
    """One step of `swap_in`: reserve, copy, commit. Returns the sequence's pages."""
    first = cache.length(seq) // cache.page_size
    batch = cache.begin([seq], [len(tokens)], token_ids=[tokens])
    table = batch.step.tables[0]
    try:
        at = [i for i, j in enumerate(saved.hot_pages) if first <= j < len(table)]
        ids = _ids(cache, [table[saved.hot_pages[i]].hot for i in at])
        for pool, bytes_ in zip(cache._hot_tensors, saved.hot, strict=True):
            pool[:, :, ids] = bytes_[:, :, at].to(pool.device)
        at = [i for i, j in enumerate(saved.cold_pages) if first <= j < len(table)]
        ids = _ids(cache, [table[saved.cold_pages[i]].cold for i in at])
        for pool, bytes_ in zip(cache._cold_tensors, saved.cold, strict=True):
            pool[:, ids] = bytes_[:, at].to(pool.device)
        batch.attended.update(range(cache.shape.num_layers))
        cache.commit(batch)
    finally:
        if batch.step.open:
            cache.abort(batch)
    return table


def _forget_hot(cache, restored: list[Page]) -> None:
    """Give back the hot copies that the law reads no more: they were not saved.

    Those of sinks were, and are all that there is of a sink.
    """
    tables = cache._pages
    for page in restored:
        if page in tables.idle_hot and page.cold is not None:
            del tables.idle_hot[page]
            tables._give_hot(page)


def _ids(cache, ids: list[int]) -> torch.Tensor:
    """Page ids as an index, int64 [pages]."""
    return torch.tensor(ids, dtype=torch.int64, device=cache.device)
