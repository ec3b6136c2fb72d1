"""PagedKVCache: pools of tensors driven by page tables.

New keys and values land in hot pages. The step that fills a page seals it: quantizes
it, once, into a cold page. What a query reads is fixed by the law (`schemes.Law`) from
its position alone. Pages that lie side by side are read in place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from . import kernels
from .checks import float_dtype, real, reason, step_tensors, usable_device, whole
from .errors import InvalidArgument, NonFiniteValue, StepError, ValueOutOfRange
from .memory import KVShape
from .pages import Pages, Step
from .schemes import Scheme
from .schemes import scheme as find_scheme
from .specs import Spec
from .storage import empty
from .turns import Found, turns_of


@dataclass(eq=False)
class Batch:
    """A step in progress: made by `begin`, ended by `commit` or `abort`.

    Attributes:
        lengths: new tokens of each sequence; the step's tokens are laid one sequence
            after the other.
        positions: int64 [tokens], the position of each token in its sequence.
        pages, slots: int64 [tokens], the hot page and the place of each token.
        sealing: two int64 [pages]: the hot pages that fill, and their cold ones.
        tables: what the queries read, in the backend's own form.
        flags: what the backend noticed and `commit` will look at.
        attended: the layers that have been written and read.
    """

    step: Step
    lengths: list[int]
    positions: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor
    sealing: tuple[torch.Tensor, torch.Tensor]
    tables: Any
    flags: Any
    attended: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class CacheStats:
    """What the pools hold.

    Attributes:
        sequences, tokens: live ones; a shared token counts once.
        hot, cold: pages that a sequence needs or a step has reserved.
        shared: pages in the tables of two sequences or more.
        cached_hot, cached_cold: pages kept only in case a prefix comes again.
        free_hot, free_cold: pages that hold nothing.
        waste: bytes of the empty slots in partial pages.
    """

    sequences: int
    tokens: int
    hot: int
    cold: int
    shared: int
    cached_hot: int
    cached_cold: int
    free_hot: int
    free_cold: int
    waste: int


class PagedKVCache:
    """A paged cache of keys and values, quantized page by page.

    Args:
        shape: layers, kv heads and head dim of the model.
        scheme: a name of `SCHEMES`, or a Scheme.
        page_size: tokens in a page.
        num_pages: cold pages (hot pages, for a scheme that seals nothing).
        num_hot_pages: hot pages; default: as many as `num_pages`. A step needs one for
            every page that it writes, and sequences keep those of their last partial
            page, window and sinks.
        device: where the pools live.
        dtype: of hot pages.
        backend: "torch", "triton" or "auto", Triton on a CUDA device and PyTorch
            elsewhere; the attribute of that name says what was chosen.

    Raises:
        UnsupportedScheme: an unknown scheme.
        UnsupportedBackend: the backend, or the device, cannot run here.
        InvalidArgument: a size that is not a whole number ≥ 1, a head dim that the
            format cannot pack, a dtype that hot pages cannot have, or pools that do not
            fit the device's memory.
    """

    def __init__(
        self,
        shape: KVShape,
        scheme: "str | Scheme" = "int8",
        page_size: int = 16,
        num_pages: int = 1024,
        num_hot_pages: int | None = None,
        device=None,
        dtype: torch.dtype = torch.float16,
        backend: str = "auto",
    ):
        if not isinstance(shape, KVShape):
            raise InvalidArgument(f"shape is a kvq.KVShape, got {shape!r}")
        num_hot_pages = num_pages if num_hot_pages is None else num_hot_pages
        num_pages = whole("num_pages", num_pages, at_least=1)
        num_hot_pages = whole("num_hot_pages", num_hot_pages, at_least=1)
        self.shape = shape
        self.scheme = find_scheme(scheme)
        self.page_size = page_size = whole("page_size", page_size, at_least=1)
        self.device = usable_device("cpu" if device is None else device)
        self.dtype = float_dtype("dtype", dtype)
        self.scheme.require_fit()
        self.scheme.require_shape(*astuple(shape))
        self._kernels = kernels.choose(backend, self.device, dtype, self._specs())
        self.backend = self._kernels.NAME
        cold_pages = num_pages if self.scheme.seals else 0
        try:
            # A cache made in inference mode must serve outside of it, too.
            with torch.inference_mode(False):
                self._allocate(num_hot_pages, cold_pages)
        except (RuntimeError, MemoryError) as error:
            raise InvalidArgument(
                f"{num_hot_pages} hot and {cold_pages} cold pages of {page_size} "
                f"tokens do not fit {self.device}: {reason(error)}"
            ) from None
        self._pages = Pages(self.scheme.law(page_size), num_hot_pages, cold_pages)

    def _specs(self) -> list[tuple[Spec, ...]]:
        """How keys, and how values, are stored: every spec that occurs."""
        if not self.scheme.seals:
            return []
        pairs = self.scheme.layers or (self.scheme.sides(0),)
        dim = self.shape.head_dim
        return [
            tuple({spec for pair in pairs for spec, _ in pair[side].runs(dim)})
            for side in range(2)
        ]

    def _allocate(self, hot_pages: int, cold_pages: int) -> None:
        """Make the pools: hot pages of all layers together, cold ones layer by layer,
        for layers may differ. One view of each per layer: indexing is not free on the
        path of a token."""
        layers, kv_heads = self.shape.num_layers, self.shape.num_kv_heads
        page = (self.page_size, self.shape.head_dim)
        options = {"dtype": self.dtype, "device": self.device}
        self._hot_tensors = [
            torch.zeros(layers, kv_heads, hot_pages, *page, **options) for _ in range(2)
        ]
        self._hot = [
            tuple(pool[i] for pool in self._hot_tensors) for i in range(layers)
        ]
        sides = [self.scheme.sides(i) for i in range(layers)]
        found = self.scheme.fit or ((Found(), Found()),) * layers
        self._cold = [None] * layers
        if self.scheme.seals:
            lead = (kv_heads, cold_pages)
            self._cold = [
                tuple(
                    empty(side, lead, *page, self.device, what.aids)
                    for side, what in zip(pair, both, strict=True)
                )
                for pair, both in zip(sides, found, strict=True)
            ]
        self._turns = [
            turns_of(*pair, self.shape.head_dim, self.device, both)
            for pair, both in zip(sides, found, strict=True)
        ]

    # -- sequences -------------------------------------------------------------------

    def add(self, token_ids: Iterable[int] | None = None) -> int:
        """A new sequence. Given its tokens, it starts with the longest cached prefix.

        `length(seq)` says how many tokens are already there; at least one is left.
        """
        return self._pages.add(token_ids)

    def fork(self, seq: int) -> int:
        """A twin of a sequence: full pages are shared, the partial one is copied.

        Raises:
            UnknownSequence, SequenceBusy, OutOfPages.
        """
        twin, copy = self._pages.fork(seq)
        if copy is not None:
            source, target = copy
            for pool in self._hot_tensors:
                pool[:, :, target] = pool[:, :, source]
        return twin

    def free(self, seq: int) -> None:
        """Forget a sequence.

        Raises:
            UnknownSequence, SequenceBusy.
        """
        self._pages.free(seq)

    def length(self, seq: int) -> int:
        """Tokens of a sequence that are committed.

        Raises:
            UnknownSequence.
        """
        return self._pages.length(seq)

    # -- steps -----------------------------------------------------------------------

    def begin(
        self,
        seqs: Sequence[int],
        lengths: Sequence[int],
        token_ids: Sequence[Iterable[int]] | None = None,
    ) -> Batch:
        """Start a step: reserve the pages of all its tokens, or raise and reserve none.

        Args:
            seqs: the sequences that get new tokens.
            lengths: new tokens of each.
            token_ids: the new tokens of each. Without them the pages that fill cannot
                be found by other sequences.

        Raises:
            OutOfPages: too few pages are free; nothing is reserved. Pages kept for
                prefixes are given up first.
            UnknownSequence, SequenceBusy, InvalidArgument: see the message.
        """
        step = self._pages.begin(seqs, lengths, token_ids)
        size = self.page_size
        positions, pages, hot, cold = [], [], [], []
        for start, count, table, sealing in zip(
            step.starts, step.lengths, step.tables, step.sealing, strict=True
        ):
            positions += range(start, start + count)
            pages += [table[i // size].hot for i in range(start, start + count)]
            hot += [table[j].hot for j in sealing]
            cold += [table[j].cold for j in sealing]
        positions = self._ints(positions)
        return Batch(
            step=step,
            lengths=step.lengths,
            positions=positions,
            pages=self._ints(pages),
            slots=positions % size,
            sealing=(self._ints(hot), self._ints(cold)),
            tables=self._kernels.plan(
                self._pages.law,
                [[page.hot for page in table] for table in step.tables],
                [[page.cold for page in table] for table in step.tables],
                step.starts,
                step.lengths,
                self.device,
            ),
            flags=self._kernels.new_flags(
                self.shape.num_layers, self.shape.num_kv_heads, self.device
            ),
        )

    @torch.no_grad()
    def attend(
        self,
        layer: int,
        batch: Batch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Write one layer's new keys and values, and attend to all that the law allows.

        Args:
            layer: 0 to num_layers - 1; once each, in any order.
            batch: from `begin`.
            q: [tokens, heads, dim]; heads is a multiple of kv_heads.
            k: [tokens, kv_heads, dim], with its rotary phase if the model has one.
            v: [tokens, kv_heads, dim].
            scale: factor of the scores, finite; default dim^-0.5.

        Returns:
            [tokens, heads, dim], in q's dtype.

        Raises:
            NonFiniteValue, ValueOutOfRange: names the layer and the head. A cache that
                seals takes no key and no value that is beyond 65504, the largest
                float16, once it is rounded to a hot page's dtype: no cold page could
                hold it later. The batch stays open; nothing visible has changed.
            InvalidArgument: a wrong shape, dtype, device or scale.
            StepError: the batch is over, or has this layer already.
        """
        self._check_step(batch)
        layer = self._checked_layer(layer, batch)
        kv_heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        step_tensors(q, k, v, len(batch.positions), kv_heads, dim, self.device)
        scale = dim**-0.5 if scale is None else real("scale", scale)
        try:
            out = self._kernels.attend(
                q,
                k,
                v,
                self._hot[layer],
                self._cold[layer],
                self._turns[layer],
                batch.pages,
                batch.slots,
                batch.sealing,
                batch.tables,
                None if batch.flags is None else batch.flags[layer],
                scale,
            )
        except (NonFiniteValue, ValueOutOfRange) as error:
            what, head = error.args
            message = f"{what}, layer {layer}, head {head}; nothing was stored"
            raise type(error)(message) from None
        batch.attended.add(layer)
        return out

    def commit(self, batch: Batch) -> None:
        """End a step: its tokens now belong to their sequences. Cannot run out.

        Raises:
            StepError: a layer is missing, or the batch is over.
            NonFiniteValue, ValueOutOfRange: a backend that runs ahead of the program
                tells only now; the step is aborted.
        """
        self._check_step(batch)
        missing = self.shape.num_layers - len(batch.attended)
        if missing:
            raise StepError(
                f"{missing} of {self.shape.num_layers} layers have not been attended; "
                "attend them, or abort"
            )
        try:
            self._kernels.check(batch.flags)
        except (NonFiniteValue, ValueOutOfRange):
            self.abort(batch)
            raise
        self._pages.commit(batch.step)

    def abort(self, batch: Batch) -> None:
        """Undo a step: lengths, tables and cold pages are as before `begin`.

        Pages that `begin` took from the prefix index stay taken.

        Raises:
            StepError: the batch is over.
        """
        self._check_step(batch)
        self._pages.abort(batch.step)

    # -- sizes -----------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the pools, used or not."""
        return sum(map(_nbytes, (*self._hot_tensors, *self._cold_tensors)))

    @property
    def bits_per_element(self) -> float:
        """Bits stored for each cold number, from the tensors; hot for native."""
        pages = self._pages.cold.count or self._pages.hot.count
        elements = self.shape.elements_per_token * self.page_size * pages
        tensors = self._cold_tensors or self._hot_tensors
        return 8 * sum(map(_nbytes, tensors)) / elements

    @property
    def effective_bits(self) -> float:
        """All live bytes, page tables included, in bits for each live number.

        A shared page counts once; pages kept only for prefixes do not count. NaN for a
        cache without tokens.
        """
        live = self._pages.live()
        tokens = sum(live.values())
        if tokens == 0:
            return float("nan")
        hot = sum(page.hot_refs > 0 for page in live)
        cold = sum(page.cold is not None for page in live)
        entries = sum(len(seq.pages) for seq in self._pages.sequences.values())
        nbytes = (
            hot * sum(map(_nbytes, self._hot_tensors)) // self._pages.hot.count
            + cold
            * sum(map(_nbytes, self._cold_tensors))
            // max(1, self._pages.cold.count)
            + entries * 8  # a hot and a cold page id, int32 each
        )
        return 8 * nbytes / (tokens * self.shape.elements_per_token)

    @property
    def clipped(self) -> torch.Tensor:
        """How many numbers were beyond the largest code when they were sealed, since
        the cache was made, aborted steps included: int64 [layers, 2, kv_heads], keys
        and values. Zero wherever scales follow the data. What feedback adds to a number
        is not looked at: the counter watches the text, not the rounding.
        """
        counts = torch.zeros(
            self.shape.num_layers, 2, self.shape.num_kv_heads, dtype=torch.int64
        )
        for layer, pair in enumerate(self._cold):
            for side, pool in enumerate(pair or ()):
                for part in pool.parts:
                    if part.clipped is not None:
                        counts[layer, side] += part.clipped.cpu()
        return counts

    def stats(self) -> CacheStats:
        """Pages in use, shared, kept and free; see `CacheStats`."""
        p = self._pages
        live = p.live()
        empty_slots = len(live) * self.page_size - sum(live.values())
        token_nbytes = self.shape.elements_per_token * self.dtype.itemsize
        return CacheStats(
            sequences=len(p.sequences),
            tokens=sum(live.values()),
            hot=p.hot.count - len(p.hot.free) - len(p.idle_hot),
            cold=p.cold.count - len(p.cold.free) - len(p.idle_cold),
            shared=sum(page.refs > 1 for page in live),
            cached_hot=len(p.idle_hot),
            cached_cold=len(p.idle_cold),
            free_hot=len(p.hot.free),
            free_cold=len(p.cold.free),
            waste=empty_slots * token_nbytes,
        )

    # -- inside ----------------------------------------------------------------------

    def _ints(self, values) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    @property
    def _cold_tensors(self) -> list[torch.Tensor]:
        """The tensors of the cold pools, [kv_heads, pages, …], layer by layer."""
        layers = (pool for pair in self._cold for pool in pair or ())
        return [t for pool in layers for t in pool.tensors]

    def _check_step(self, batch: Batch) -> None:
        if not isinstance(batch, Batch):
            raise InvalidArgument(f"batch comes from begin, got {type(batch).__name__}")
        if batch.step.owner is not self._pages or not batch.step.open:
            raise StepError("this step is committed or aborted, or of another cache")

    def _checked_layer(self, layer: int, batch: Batch) -> int:
        layer = whole("layer", layer, at_least=0)
        if layer >= self.shape.num_layers:
            raise InvalidArgument(
                f"layer is 0 to {self.shape.num_layers - 1}, got {layer!r}"
            )
        if layer in batch.attended:
            raise StepError(f"layer {layer} has already been attended in this step")
        return layer


def _nbytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()
