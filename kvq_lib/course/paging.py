"""Page tables of a real cache, to look at: which pages, whose, hot or cold.

Like `kvq_lib.swap`, this looks inside the cache: there is no public way to a page's
ids, and none is needed but for pictures.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ..cache import PagedKVCache
from .figures import bar, look

CELL = 0.9, 0.8  # width and height of a drawn page
ROW, STAGGER = 1.5, 0.9  # from row to row, upwards and to the right


@dataclass(frozen=True)
class Entry:
    """A row of a page table.

    Attributes:
        hot: id of the copy in 16 bits, if a later token may read it; else None.
        cold: id of the quantized copy, or None.
        tokens: on the page.
        sequences: whose tables hold it.
    """

    hot: int | None
    cold: int | None
    tokens: int
    sequences: int


def page_table(cache: PagedKVCache, seq: int) -> list[Entry]:
    """The page table of a sequence, from its first page to its last.

    Raises:
        UnknownSequence.
    """
    length, size = cache.length(seq), cache.page_size
    law = cache.scheme.law(size)
    kept = set(itertools.chain(*law.kept_hot(length)))
    return [
        Entry(
            hot=page.hot if i in kept else None,
            cold=page.cold,
            tokens=min(size, length - i * size),
            sequences=page.refs,
        )
        for i, page in enumerate(cache._pages.sequences[seq].pages)
    ]


def owners(
    cache: PagedKVCache, sequences: Mapping[str, int], kind: str
) -> list[list[int]]:
    """Who needs each page of a pool.

    Args:
        sequences: names and handles.
        kind: "hot" or "cold", the pool.

    Returns:
        For each page of the pool, the places in `sequences` of those that need it.
    """
    found = [[] for _ in range(getattr(cache._pages, kind).count)]
    for who, seq in enumerate(sequences.values()):
        for entry in page_table(cache, seq):
            id_ = getattr(entry, kind)
            if id_ is not None:
                found[id_].append(who)
    return found


def draw_tables(ax, cache: PagedKVCache, sequences: Mapping[str, int]) -> None:
    """Draw logical pages, the pools of physical ones, and a line for each copy.

    The hot pool stands above the sequences if there is a cold one, which stands below.
    A page of a pool has a stripe for each sequence that needs it; a white one holds
    nothing that any of them needs. The last page of a sequence is as full as it is.

    Args:
        ax: matplotlib axes.
        cache: the cache.
        sequences: names and handles.
    """
    bottom = "cold" if cache._pages.cold.count else "hot"
    rows = [*(["hot"] if bottom == "cold" else []), *range(len(sequences)), bottom]
    level = {row: ROW * (len(rows) - 1 - i) for i, row in enumerate(rows)}
    pools = {kind: owners(cache, sequences, kind) for kind in {"hot", bottom}}
    for who, seq in enumerate(sequences.values()):
        for i, entry in enumerate(page_table(cache, seq)):
            x = i + STAGGER * who  # or lines would hide behind the rows below
            _cell(ax, x, level[who], str(i), [who], entry.tokens / cache.page_size)
            for kind in pools:
                id_ = getattr(entry, kind)
                if id_ is not None:
                    ends = sorted([(level[who], x), (level[kind], id_)])
                    _line(ax, who, *ends)
    for kind, pages in pools.items():
        for id_, whose in enumerate(pages):
            _cell(ax, id_, level[kind], str(id_), whose)
    names = [*sequences]
    labels = [f"{row} pool" if row in pools else names[row] for row in rows]
    if len(pools) == 1:
        labels[-1] = "pool"
    ax.set_yticks([y + CELL[1] / 2 for y in level.values()], labels)
    ax.set_ylim(-0.1, ROW * (len(rows) - 1) + CELL[1] + 0.1)
    ax.set_xlim(-0.1, max(ax.dataLim.x1, max(map(len, pools.values()))) + 0.1)
    ax.set_xticks([])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def _line(ax, who: int, low: tuple, high: tuple) -> None:
    """From the top of the lower cell to the bottom of the upper one, each (y, x)."""
    middle = CELL[0] / 2
    ax.plot(
        [low[1] + middle, high[1] + middle],
        [low[0] + CELL[1], high[0]],
        color=look(who).color,
        linestyle=look(who).linestyle,
        linewidth=0.9,
        zorder=0,
    )


def _cell(ax, x, y, text: str, whose: list[int], full: float = 1.0) -> None:
    """A page: an outline, a stripe for each owner, its number."""
    wide, high = CELL
    place = {"bottom": y, "align": "edge"}
    ax.bar(x, high, wide, color="white", zorder=0.5, **place)
    for i, who in enumerate(whose):
        share = full * wide / len(whose)
        ax.bar(x + i * share, high, share, zorder=1, **place, **bar(who))
    ax.bar(x, high, wide, fill=False, edgecolor="black", linewidth=0.8, **place)
    ax.text(
        x + wide / 2,
        y + high / 2,
        text,
        ha="center",
        va="center",
        fontsize=9,
        bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"},
    )
