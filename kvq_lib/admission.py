"""Whom the pages suffice for: what a budget in bytes buys, and what sequences need.

Counts of pages come in pairs: hot, cold.
"""

from .attention import cache_for
from .cache import PagedKVCache
from .errors import InvalidArgument, OutOfPages
from .schemes import Law, Scheme


class Room:
    """The pages of a cache: how many are free, and how many sequences still need.

    Args:
        cache: the cache.
        chunk: hot pages that are meant for the chunk being read, not for sequences.
    """

    def __init__(self, cache: PagedKVCache, chunk: int):
        self.cache = cache
        self.chunk = chunk
        self.law = cache.scheme.law(cache.page_size)

    @property
    def total(self) -> tuple[int, int]:
        """Pages of the pools."""
        return self.cache._pages.hot.count, self.cache._pages.cold.count

    @property
    def used(self) -> tuple[int, int]:
        """Pages that sequences need."""
        return tuple(a - b for a, b in zip(self.total, self.free, strict=True))

    @property
    def free(self) -> tuple[int, int]:
        """Pages that hold nothing, or are kept only in case a prefix comes again.

        `cache.stats()` says it, too, but walks all page tables: too slow for each step.
        """
        tables = self.cache._pages
        return (
            len(tables.hot.free) + len(tables.idle_hot),
            len(tables.cold.free) + len(tables.idle_cold),
        )

    def taken(self, start: int, end: int) -> tuple[int, int]:
        """Pages that a step takes which brings a sequence from `start` to `end`."""
        size, sealed = self.cache.page_size, self.law.sealed
        hot = -(-end // size) - -(-start // size)
        return hot, sealed(end).stop - sealed(start).stop

    def outstanding(self, seq: int, tokens: int) -> tuple[int, int]:
        """Pages that a sequence still needs on its way to so many tokens."""
        length = self.cache.length(seq)
        held = sum(map(len, self.law.kept_hot(length)))
        return self._most_hot(tokens) - held, self.taken(length, tokens)[1]

    def require(self, tokens: int) -> None:
        """Refuse a sequence of so many tokens that would not fit even alone.

        Raises:
            OutOfPages: says what it needs and what there is.
        """
        hot, cold = self._most_hot(tokens), len(self.law.sealed(tokens))
        if hot > self.total[0] or cold > self.total[1]:
            raise OutOfPages(
                f"{tokens} tokens need {hot} hot and {cold} cold pages; memory_bytes "
                f"buys {self.total[0]} and {self.total[1]}, divided for requests of "
                "`context` tokens"
            )

    def _most_hot(self, tokens: int) -> int:
        """The most hot pages that a sequence of so many tokens holds at a time, if it
        is read page by page."""
        kept = self.law.sinks + self.law.window + 1
        return min(-(-tokens // self.cache.page_size), kept)


class Plan:
    """One step: new tokens of each sequence, and the pages that they will take.

    Attributes:
        tokens: for each sequence of the step, how many.
        hot, cold: pages.
    """

    def __init__(self, room: Room):
        self.room = room
        self.tokens: dict[int, int] = {}
        self.hot = self.cold = 0

    def affordable(self, seq: int, want: int) -> int:
        """As many of the `want` next tokens of a sequence as pages are left for."""
        start, size = self.room.cache.length(seq), self.room.cache.page_size
        hot, cold = self.room.free
        end = size * (-(-start // size) + hot - self.hot)
        if self.room.cache.scheme.seals:
            # One token less than would fill, and seal, one page too many.
            sealed = self.room.law.sealed(start).stop + cold - self.cold
            end = min(end, size * (sealed + 1) - 1)
        return max(0, min(want, end - start))

    def put(self, seq: int, count: int) -> None:
        """Plan a sequence's next `count` tokens."""
        if count > 0:
            start = self.room.cache.length(seq)
            hot, cold = self.room.taken(start, start + count)
            self.tokens[seq] = count
            self.hot += hot
            self.cold += cold

    def hot_room_beside(
        self, running: list[tuple[int, int]], seq: int, tokens: int
    ) -> int:
        """Hot pages that are left once a new sequence has read its tokens beside
        others; negative where hot or cold pages do not suffice. Alone it always fits.

        Args:
            running: the others, and to how many tokens each will go.
            seq, tokens: the new one, likewise.
        """
        hot, cold = self.room.outstanding(seq, tokens)
        free_hot, free_cold = self.room.free
        if not running:
            return max(0, free_hot - hot)
        others = [self.room.outstanding(*other) for other in running]
        cold += sum(c for _, c in others)
        # What is planned is among it, but for a chunk that takes more than its share.
        hot += max(self.hot, self.room.chunk + sum(h for h, _ in others))
        return free_hot - hot if cold <= free_cold else -1


def cache_within(
    memory_bytes: int, model, scheme: Scheme, page_size: int, chunk: int, context: int
) -> tuple[PagedKVCache, int]:
    """The cache that a budget buys, and how many of its hot pages are for a chunk.

    Args:
        memory_bytes: the most bytes of its pools.
        chunk: the most tokens of a step.
        context: tokens of a typical sequence, for which the pools are balanced.

    Raises:
        InvalidArgument: the budget does not buy one page of each kind.
        UnsupportedScheme, UnsupportedModel: as in `cache_for`.
    """
    # The smallest cache there is: it checks model and scheme, and picks the dtype.
    probe = cache_for(model, scheme, page_size, [1], chunk=1)
    shape = probe.shape
    hot = shape.elements_per_token * page_size * probe.dtype.itemsize
    cold = shape.num_kv_heads * sum(
        scheme.page_nbytes(page_size, shape.head_dim, layer)
        for layer in range(shape.num_layers)
    )
    num_hot, num_cold, spare = divide(
        memory_bytes, (hot, cold), scheme.law(page_size), chunk, context
    )
    if num_hot < 1 or (scheme.seals and num_cold < 1):
        raise InvalidArgument(
            f"memory_bytes={memory_bytes} buys too few pages: a hot one of "
            f"{page_size} tokens takes {hot} bytes, a cold one {cold}"
        )
    cache = PagedKVCache(
        shape,
        scheme,
        page_size,
        num_pages=max(1, num_cold),  # unused where nothing is sealed
        num_hot_pages=num_hot,
        device=probe.device,
        dtype=probe.dtype,
    )
    return cache, spare


def divide(
    memory_bytes: int,
    page_nbytes: tuple[int, int],
    law: Law,
    chunk: int,
    context: int,
) -> tuple[int, int, int]:
    """Divide a budget between hot and cold pages.

    One sequence of `context` tokens comes first. Of what is left, up to a quarter buys
    hot pages for a chunk; the rest buys more such sequences. The planner counts by the
    same rule.

    Args:
        memory_bytes: the budget.
        page_nbytes: of one page; a cold one takes 0 where nothing is sealed.
        law: the scheme's.
        chunk: the most tokens of a step.
        context: tokens of a typical sequence.

    Returns:
        Hot pages, cold pages, and those of the hot ones that are for a chunk. Less
        than one cold page, if the budget is too small.
    """
    hot, cold = page_nbytes
    if not cold:
        return memory_bytes // hot, 0, 0
    pages = -(-context // law.page_size)
    kept = most_hot(law, pages, 1)
    sequence = kept * hot + max(1, len(law.sealed(context))) * cold
    left = max(0, memory_bytes - sequence)
    reserve = chunk_reserve(left, hot * (most_hot(law, pages, chunk) - kept))
    more = kept * (left - reserve) // sequence
    num_hot = kept + (spare := reserve // hot) + more
    return num_hot, (memory_bytes - num_hot * hot) // cold, spare


def chunk_reserve(left: int, wanted: int) -> int:
    """Bytes set aside for a chunk: what it wants, but at most a quarter of the bytes
    that are left beside one sequence. With less, a prompt is read in more steps."""
    return min(wanted, left // 4)


def pages_touched(tokens: int, page_size: int) -> int:
    """The most pages that so many neighbouring tokens can lie on."""
    return -(-(tokens - 1) // page_size) + 1


def most_hot(law: Law, pages: int, chunk: int) -> int:
    """The most hot pages that a sequence of `pages` pages ever holds.

    A step of `chunk` tokens writes hot pages and keeps those that its first query, or a
    later one, reads. It is worst when its last token opens a page.
    """
    first = max(0, pages - pages_touched(chunk, law.page_size))
    oldest = max(law.sinks, first - law.window)
    return min(law.sinks, pages) + max(0, pages - oldest)
