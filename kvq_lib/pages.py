"""Page tables, reference counts and the prefix index: integers only, no tensor.

A logical page is P consecutive tokens of a sequence. It has up to two physical copies:
a hot one (16 bits) and a cold one (quantized). Sequences share pages; each page counts
the sequences that hold it, and those that still need its hot copy. A copy that nobody
needs stays findable by the hash of its tokens until the room is wanted: least recently
used first.
"""

import hashlib
import heapq
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .checks import token_ids as checked_tokens
from .checks import whole
from .errors import (
    InvalidArgument,
    OutOfPages,
    SequenceBusy,
    StepError,
    UnknownSequence,
)
from .schemes import Law

_handles = itertools.count(1)  # one counter for all caches: no handle fits two


@dataclass(eq=False)
class Page:
    """One logical page.

    Attributes:
        hot: id of its hot copy, or None.
        cold: id of its cold copy, or None.
        refs: sequences whose table holds it.
        hot_refs: sequences that may still read its hot copy.
        key: hash of its tokens and all before them, once it is full and indexed.
    """

    hot: int | None = None
    cold: int | None = None
    refs: int = 1
    hot_refs: int = 1
    key: bytes | None = None


@dataclass(eq=False)
class _Sequence:
    pages: list[Page] = field(default_factory=list)
    length: int = 0
    key: bytes | None = b""  # of the last full page; None once a token is not known
    tail: list[int] = field(default_factory=list)  # tokens of the partial last page
    step: "Step | None" = None


@dataclass(eq=False)
class Step:
    """What `Pages.begin` reserved: one entry per sequence in every list.

    Attributes:
        owner: the Pages that made it.
        handles: the sequences.
        starts: their lengths before the step.
        lengths: their new tokens.
        tables: their pages, new ones included.
        sealing: for each, the indices of the pages that this step fills and seals.
    """

    owner: "Pages"
    handles: list[int]
    starts: list[int]
    lengths: list[int]
    tables: list[list[Page]]
    sealing: list[range]
    tokens: list[list[int] | None]
    open: bool = True


class _Ids:
    """Free ids of one pool, lowest first: neighbours in a sequence lie together."""

    def __init__(self, count: int):
        self.count = count
        self.free = list(range(count))

    def take(self) -> int:
        return heapq.heappop(self.free)

    def give(self, id_: int) -> None:
        heapq.heappush(self.free, id_)


class Pages:
    """All page tables of one cache.

    Args:
        law: which pages are read hot and which cold.
        num_hot: hot pages in the pool.
        num_cold: cold pages in the pool; unused when nothing is sealed.
    """

    def __init__(self, law: Law, num_hot: int, num_cold: int):
        self.law = law
        self.hot = _Ids(num_hot)
        self.cold = _Ids(num_cold)
        self.index: dict[bytes, Page] = {}
        # Copies that no sequence needs, oldest first: the next to be given up.
        self.idle_hot: OrderedDict[Page, None] = OrderedDict()
        self.idle_cold: OrderedDict[Page, None] = OrderedDict()
        self.sequences: dict[int, _Sequence] = {}

    # -- sequences -------------------------------------------------------------------

    def add(self, token_ids: Iterable[int] | None = None) -> int:
        """A new sequence, starting with the longest cached prefix of `token_ids`.

        At least one token is left to compute: the model needs a query.
        """
        seq = _Sequence()
        if token_ids is not None:
            seq.pages, seq.key = self._match(checked_tokens(token_ids))
            seq.length = len(seq.pages) * self.law.page_size
            self._claim(seq)
        handle = next(_handles)
        self.sequences[handle] = seq
        return handle

    def fork(self, handle: int) -> tuple[int, tuple[int, int] | None]:
        """A twin that shares all full pages.

        Returns:
            The twin, and (source, target) hot page ids of the partial last page, which
            the caller copies; None where there is none.

        Raises:
            OutOfPages: there is no hot page for the copy of the partial page.
        """
        seq = self._idle(handle)
        full = seq.length // self.law.page_size
        copy, tail = None, []
        if full < len(seq.pages):
            self._require(hot=1, cold=0)
            tail = [Page(hot=self._take_hot())]
            copy = (seq.pages[full].hot, tail[0].hot)
        twin = _Sequence(seq.pages[:full], seq.length, seq.key, list(seq.tail))
        self._claim(twin)
        twin.pages += tail
        new = next(_handles)
        self.sequences[new] = twin
        return new, copy

    def free(self, handle: int) -> None:
        """Forget a sequence. Its full pages stay findable until room is needed."""
        seq = self._idle(handle)
        del self.sequences[handle]
        hot = set(itertools.chain(*self.law.kept_hot(seq.length)))
        # The end first: a prefix is worth more than what follows it, so it goes last.
        for i in reversed(range(len(seq.pages))):
            page = seq.pages[i]
            page.refs -= 1
            if i in hot:
                self._drop_hot(page)
            if page.refs == 0 and page.cold is not None:
                if page.key is None:
                    self._give_cold(page)
                else:
                    self.idle_cold[page] = None

    def length(self, handle: int) -> int:
        """Committed tokens of a sequence."""
        return self._find(handle).length

    def live(self) -> dict[Page, int]:
        """Every page in a committed table, once, with the tokens on it."""
        size = self.law.page_size
        return {
            page: min(size, seq.length - i * size)
            for seq in self.sequences.values()
            for i, page in enumerate(seq.pages)
        }

    # -- steps -----------------------------------------------------------------------

    def begin(
        self,
        handles: Sequence[int],
        lengths: Sequence[int],
        token_ids: Sequence[Iterable[int]] | None = None,
    ) -> Step:
        """Reserve the pages that `lengths` new tokens need; all of them, or nothing.

        Raises:
            OutOfPages: the pools are too small right now.
            InvalidArgument, UnknownSequence, SequenceBusy: see the message.
        """
        handles, lengths, tokens = self._checked(handles, lengths, token_ids)
        seqs = [self._idle(h) for h in handles]
        if len(set(seqs)) != len(seqs):
            raise InvalidArgument("a sequence stands twice in one step")
        size, law = self.law.page_size, self.law
        ends = [s.length + n for s, n in zip(seqs, lengths, strict=True)]
        added = [
            -(-end // size) - len(s.pages) for s, end in zip(seqs, ends, strict=True)
        ]
        sealing = [
            range(law.sealed(s.length).stop, law.sealed(end).stop)
            for s, end in zip(seqs, ends, strict=True)
        ]
        self._require(hot=sum(added), cold=sum(map(len, sealing)))

        tables = []
        for seq, count, seal in zip(seqs, added, sealing, strict=True):
            new = [Page(hot=self._take_hot()) for _ in range(count)]
            table = seq.pages + new
            for i in seal:
                table[i].cold = self._take_cold()
            tables.append(table)
        step = Step(
            self,
            handles,
            [s.length for s in seqs],
            lengths,
            tables,
            sealing,
            tokens,
        )
        for seq in seqs:
            seq.step = step
        return step

    def commit(self, step: Step) -> None:
        """Make a step's tokens part of their sequences. Cannot run out of pages."""
        for i, seq in enumerate(self._close(step)):
            size = self.law.page_size
            old, new = seq.length // size, (seq.length + step.lengths[i]) // size
            seq.pages = step.tables[i]
            seq.length += step.lengths[i]
            self._index(seq, step.tokens[i], range(old, new))
            for j in range(self.law.cold(old).stop, self.law.cold(new).stop):
                self._drop_hot(seq.pages[j])

    def abort(self, step: Step) -> None:
        """Give back all that `begin` reserved; lengths and tables are as before."""
        for i, seq in enumerate(self._close(step)):
            for j in step.sealing[i]:
                self._give_cold(step.tables[i][j])
            for page in step.tables[i][len(seq.pages) :]:
                self._give_hot(page)

    # -- the prefix index ------------------------------------------------------------

    def _match(self, tokens: list[int]) -> tuple[list[Page], bytes]:
        """The longest usable prefix: its pages, and the key of the last one."""
        size, law = self.law.page_size, self.law
        pages, keys = [], [b""]
        for i in range((len(tokens) - 1) // size):
            key = _chain(keys[-1], tokens[i * size : (i + 1) * size])
            page = self.index.get(key)
            if page is None or (page.cold is None and i >= law.sinks):
                break
            pages.append(page)
            keys.append(key)
        # The query after m pages reads the window before it hot. Where such a copy is
        # gone, a shorter prefix may still have all of its own.
        while any(
            pages[j].hot is None
            for j in itertools.chain(*law.kept_hot(len(pages) * size))
        ):
            pages.pop()
        return pages, keys[len(pages)]

    def _index(self, seq: _Sequence, tokens: list[int] | None, full: range) -> None:
        """Enter the pages that became full under the hash of all tokens so far."""
        if tokens is None or seq.key is None:
            seq.key, seq.tail = None, []
            return
        size = self.law.page_size
        known = seq.tail + tokens
        for n, j in enumerate(full):
            seq.key = _chain(seq.key, known[n * size : (n + 1) * size])
            if seq.key not in self.index:  # else another sequence was first: keep its
                self.index[seq.key] = seq.pages[j]
                seq.pages[j].key = seq.key
        seq.tail = known[len(full) * size :]

    # -- counting --------------------------------------------------------------------

    def _claim(self, seq: _Sequence) -> None:
        """Count a sequence in on all its pages."""
        for page in seq.pages:
            page.refs += 1
            self.idle_cold.pop(page, None)
        for j in itertools.chain(
            *self.law.kept_hot(len(seq.pages) * self.law.page_size)
        ):
            seq.pages[j].hot_refs += 1
            self.idle_hot.pop(seq.pages[j], None)

    def _drop_hot(self, page: Page) -> None:
        page.hot_refs -= 1
        if page.hot_refs == 0:
            if page.key is None:
                self._give_hot(page)
            else:
                self.idle_hot[page] = None

    def _require(self, hot: int, cold: int) -> None:
        for name, want, ids, idle in (
            ("hot", hot, self.hot, self.idle_hot),
            ("cold", cold, self.cold, self.idle_cold),
        ):
            room = len(ids.free) + len(idle)
            if want > room:
                raise OutOfPages(
                    f"{want} {name} pages needed, {room} of {ids.count} available; "
                    "free a sequence, send fewer tokens, or make the pool larger"
                )

    def _take_hot(self) -> int:
        if not self.hot.free:
            page, _ = self.idle_hot.popitem(last=False)
            self._give_hot(page)
            if page.cold is None:  # nothing is left of it
                self._forget(page)
        return self.hot.take()

    def _take_cold(self) -> int:
        if not self.cold.free:
            page, _ = self.idle_cold.popitem(last=False)
            self._give_cold(page)
            self._forget(page)
            if page.hot is not None:
                del self.idle_hot[page]
                self._give_hot(page)
        return self.cold.take()

    def _give_hot(self, page: Page) -> None:
        self.hot.give(page.hot)
        page.hot = None

    def _give_cold(self, page: Page) -> None:
        self.cold.give(page.cold)
        page.cold = None

    def _forget(self, page: Page) -> None:
        del self.index[page.key]
        page.key = None

    # -- checks ----------------------------------------------------------------------

    def _find(self, handle: int) -> _Sequence:
        try:
            return self.sequences[handle]
        except (KeyError, TypeError):
            raise UnknownSequence(
                f"{handle!r} is no sequence of this cache: it was freed, or belongs "
                "to another cache"
            ) from None

    def _idle(self, handle: int) -> _Sequence:
        seq = self._find(handle)
        if seq.step is not None:
            raise SequenceBusy(
                f"sequence {handle} is in a step that is neither committed nor aborted"
            )
        return seq

    def _checked(self, handles, lengths, token_ids) -> tuple[list, list, list]:
        """The arguments of `begin` as lists of plain integers."""
        try:
            handles, lengths = list(handles), list(lengths)
            token_ids = None if token_ids is None else list(token_ids)
        except TypeError as error:
            message = f"sequences, lengths and token_ids are lists: {error}"
            raise InvalidArgument(message) from None
        if len(handles) == 0 or len(handles) != len(lengths):
            raise InvalidArgument(
                f"a step needs sequences and one length for each; got {len(handles)} "
                f"sequences and {len(lengths)} lengths"
            )
        lengths = [whole("each length", n, at_least=1) for n in lengths]
        if token_ids is None:
            return handles, lengths, [None] * len(handles)
        tokens = [checked_tokens(ids) for ids in token_ids]
        if [len(t) for t in tokens] != lengths:
            raise InvalidArgument(
                f"token_ids has rows of {[len(t) for t in tokens]} tokens, "
                f"lengths says {lengths}"
            )
        return handles, lengths, tokens

    def _close(self, step: Step) -> list[_Sequence]:
        if step.owner is not self or not step.open:
            raise StepError("this step is committed or aborted, or of another cache")
        step.open = False
        seqs = [self.sequences[h] for h in step.handles]
        for seq in seqs:
            seq.step = None
        return seqs


def _chain(parent: bytes, tokens: list[int]) -> bytes:
    """Hash of a page's tokens and of all pages before it."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes()).digest()
