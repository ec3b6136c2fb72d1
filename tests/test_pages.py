"""Page tables: no page lost, none held twice by mistake, counts exact."""

import sys

import pytest
from helpers import snapshot
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import kvq_lib as kvq
from kvq_lib.pages import Pages
from kvq_lib.schemes import Law

EXAMPLES, STEPS = 650, 80
MISUSE = ("StepError", "UnknownSequence", "SequenceBusy")


class Machine(RuleBasedStateMachine):
    """Drives `Pages` on tiny pools beside a model of what memory must hold.

    The model writes a label for every token where a cache would write its numbers, and
    demands after each operation that every sequence can read its own labels back from
    the copies that the law tells it to read. It counts pages from tables alone.
    """

    operations = 0
    seen: dict[str, int] = {}  # noqa: RUF012

    @initialize(
        size=st.integers(1, 3),
        law=st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (1, 1), (2, 2), None]),
        num_hot=st.integers(3, 12),
        num_cold=st.integers(3, 12),
    )
    def build(self, size, law, num_hot, num_cold):
        self.size = size
        self.sinks, self.window = law if law else (sys.maxsize, 0)
        if law is None:
            num_cold = 0
        self.pages = Pages(Law(size, self.sinks, self.window), num_hot, num_cold)
        self.hot = [[None] * size for _ in range(num_hot)]
        self.cold = [None] * num_cold
        self.labels = {}  # handle -> label of each token
        self.tokens = {}  # handle -> its tokens; None once one is not known
        self.steps = []  # (step, handles, new labels, new tokens, snapshot before)
        self.freed = []
        self.content = {}  # Page -> all tokens up to its end, for pages with known ones
        self.fresh = 0

    # -- the model -------------------------------------------------------------------

    def note(self, what):
        # A refused handle is cheap to try: it is no operation.
        Machine.operations += what not in MISUSE
        Machine.seen[what] = Machine.seen.get(what, 0) + 1

    def busy(self):
        return {h for _, handles, *_ in self.steps for h in handles}

    def idle(self):
        return sorted(self.labels.keys() - self.busy())

    def count(self, tokens):
        return (tokens + self.size - 1) // self.size

    def read_hot(self, length):
        """Pages that the query at position `length` reads hot, of those that exist."""
        own = length // self.size
        return [
            p
            for p in range(self.count(length))
            if p == own or own - p <= self.window or p < self.sinks
        ]

    def read_cold(self, length):
        full = length // self.size
        return [p for p in range(full) if p not in self.read_hot(length)]

    def sealed(self, length):
        return [p for p in range(length // self.size) if p >= self.sinks]

    def holders(self):
        """For each page, the sequences that hold it and that read its hot copy."""
        refs, hot_refs = {}, {}
        for handle, labels in self.labels.items():
            table = self.pages.sequences[handle].pages
            for page in table:
                refs[page] = refs.get(page, 0) + 1
            for p in self.read_hot(len(labels)):
                hot_refs[table[p]] = hot_refs.get(table[p], 0) + 1
        for step, handles, *_ in self.steps:
            for handle, table in zip(handles, step.tables, strict=True):
                for page in table[len(self.pages.sequences[handle].pages) :]:
                    refs[page] = hot_refs[page] = 1
        return refs, hot_refs

    def room(self):
        """Hot and cold pages that no sequence and no step needs."""
        _, hot_refs = self.holders()
        being_sealed = sum(len(s) for step, *_ in self.steps for s in step.sealing)
        sealed = {
            self.pages.sequences[h].pages[p]
            for h, labels in self.labels.items()
            for p in self.sealed(len(labels))
        }
        return (
            len(self.hot) - len(hot_refs),
            len(self.cold) - len(sealed) - being_sealed,
        )

    def fails_without_trace(self, error, call):
        before = snapshot(self.pages)
        with pytest.raises(error):
            call()
        assert snapshot(self.pages) == before
        self.note(error.__name__)

    # -- operations ------------------------------------------------------------------

    # One rule that draws the operation by weight: with a rule for each, hypothesis
    # leaves some of them out of most runs, and few steps would ever be committed.
    @rule(
        what=st.sampled_from(
            ["begin and commit"] * 6
            + ["begin", "begin", "commit", "abort", "abort", "fork", "add", "misuse"]
            + ["free", "add with tokens"] * 2
        ),
        data=st.data(),
    )
    def operate(self, what, data):
        if what == "begin and commit":
            opened = len(self.steps)
            self.begin(data)
            if len(self.steps) > opened:
                self.commit(data, which=-1)
        elif len(self.labels) < 5 or not what.startswith("add"):
            getattr(self, what.replace(" ", "_"))(data)

    def add(self, data):
        handle = self.pages.add()
        self.labels[handle], self.tokens[handle] = [], []
        self.note("add")

    def add_with_tokens(self, data):
        tokens = data.draw(st.lists(st.integers(0, 1), max_size=9))
        known = [self.content[page] for page in self.pages.index.values()]
        if known and data.draw(st.integers(0, 3)):  # most random prefixes would miss
            tokens = [*data.draw(st.sampled_from(known)), *tokens]
        longest = self.longest_prefix(tokens)
        handle = self.pages.add(tokens)
        length = self.pages.length(handle)
        assert length == longest * self.size
        assert not tokens or length < len(tokens), "nothing is left to compute"
        self.tokens[handle] = tokens[:length]
        self.labels[handle] = [("known", *tokens[: i + 1]) for i in range(length)]
        self.note("add, hit" if length else "add, miss")

    def longest_prefix(self, tokens):
        """Pages of the longest prefix whose every copy that the law asks for exists."""
        found = {self.content[page]: page for page in self.pages.index.values()}
        for m in range((len(tokens) - 1) // self.size, 0, -1):
            chain = [found.get(tuple(tokens[: (i + 1) * self.size])) for i in range(m)]
            if all(
                page is not None and (page.cold is not None or i < self.sinks)
                for i, page in enumerate(chain)
            ) and all(chain[p].hot is not None for p in self.read_hot(m * self.size)):
                return m
        return 0

    def begin(self, data):
        idle = self.idle()
        if not idle:
            return
        handles = data.draw(
            st.lists(st.sampled_from(idle), min_size=1, max_size=3, unique=True)
        )
        lengths = [
            data.draw(st.integers(1, 2 * self.size), label="new") for _ in handles
        ]
        tokens = None
        if data.draw(st.integers(0, 5), label="named"):
            tokens = [
                data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
                for n in lengths
            ]
        starts = [len(self.labels[h]) for h in handles]
        ends = [a + n for a, n in zip(starts, lengths, strict=True)]
        need_hot = sum(map(self.count, ends)) - sum(map(self.count, starts))
        need_cold = sum(
            len(self.sealed(b)) - len(self.sealed(a))
            for a, b in zip(starts, ends, strict=True)
        )
        room = self.room()
        if need_hot > room[0] or need_cold > room[1]:
            self.fails_without_trace(
                kvq.OutOfPages, lambda: self.pages.begin(handles, lengths, tokens)
            )
            return
        before = snapshot(self.pages)
        step = self.pages.begin(handles, lengths, tokens)
        if need_hot <= len(before[0]) and need_cold <= len(before[1]):
            assert snapshot(self.pages)[2] == before[2], "gave up a prefix needlessly"
        else:
            self.note("evictions")
        self.write(step, handles, starts, lengths, tokens, before)
        self.note("begin")

    def write(self, step, handles, starts, lengths, tokens, before):
        """What the layers of a model would do: append, then seal."""
        labels = []
        for row, (handle, start, n) in enumerate(
            zip(handles, starts, lengths, strict=True)
        ):
            table, new = step.tables[row], []
            history = self.tokens[handle]
            if tokens is not None and history is not None:
                all_tokens = [*history, *tokens[row]]
                new = [("known", *all_tokens[: i + 1]) for i in range(start, start + n)]
            else:
                new = [("unique", self.fresh + i) for i in range(n)]
                self.fresh += n
            for i, label in enumerate(new, start):
                page = table[i // self.size]
                self.hot[page.hot][i % self.size] = label
            sealing = [p for p in self.sealed(start + n) if p not in self.sealed(start)]
            assert list(step.sealing[row]) == sealing
            for p in sealing:
                self.cold[table[p].cold] = list(self.hot[table[p].hot])
            labels.append(new)
        self.steps.append((step, handles, labels, tokens, before))

    def commit(self, data, which=None):
        if not self.steps:
            return
        if which is None:
            which = data.draw(st.integers(0, len(self.steps) - 1))
        step, handles, labels, tokens, _ = self.steps.pop(which)
        self.pages.commit(step)
        for row, handle in enumerate(handles):
            self.labels[handle] += labels[row]
            if tokens is None or self.tokens[handle] is None:
                self.tokens[handle] = None
            else:
                self.tokens[handle] = [*self.tokens[handle], *tokens[row]]
        self.fails_without_trace(kvq.StepError, lambda: self.pages.commit(step))
        self.note("commit")

    def abort(self, data):
        if not self.steps:
            return
        which = data.draw(st.integers(0, len(self.steps) - 1))
        step, handles, _, _, before = self.steps.pop(which)
        self.pages.abort(step)
        now = snapshot(self.pages)
        for handle in handles:
            assert now[5][handle] == before[5][handle]
            for page in now[5][handle][0]:  # its pages: copies as before
                assert now[6][page][1] == before[6][page][1]
        self.fails_without_trace(kvq.StepError, lambda: self.pages.abort(step))
        self.note("abort")

    def fork(self, data):
        idle = self.idle()
        if not idle:
            return
        handle = data.draw(st.sampled_from(idle))
        partial = len(self.labels[handle]) % self.size > 0
        if partial and self.room()[0] < 1:
            self.fails_without_trace(kvq.OutOfPages, lambda: self.pages.fork(handle))
            return
        twin, copy = self.pages.fork(handle)
        assert (copy is not None) == partial
        if copy is not None:
            source, target = copy
            assert source == self.pages.sequences[handle].pages[-1].hot != target
            self.hot[target] = list(self.hot[source])
        self.labels[twin] = list(self.labels[handle])
        self.tokens[twin] = self.tokens[handle]
        self.note("fork")

    def free(self, data):
        idle = self.idle()
        if not idle:
            return
        handle = data.draw(st.sampled_from(idle))
        self.pages.free(handle)
        del self.labels[handle], self.tokens[handle]
        self.freed.append(handle)
        self.note("free")

    def misuse(self, data):
        bad, error = None, None
        if self.freed:
            bad, error = self.freed[-1], kvq.UnknownSequence
            self.fails_without_trace(error, lambda: self.pages.length(bad))
        if self.busy() and (bad is None or data.draw(st.booleans())):
            bad, error = min(self.busy()), kvq.SequenceBusy
        if bad is None:
            bad, error = "no handle", kvq.UnknownSequence
        others = self.idle()[:1]
        for call in (
            lambda: self.pages.fork(bad),
            lambda: self.pages.free(bad),
            lambda: self.pages.begin([*others, bad], [1] * (len(others) + 1)),
        ):
            self.fails_without_trace(error, call)

    # -- what holds after every one of them ------------------------------------------

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for handle, labels in self.labels.items():
            seq = self.pages.sequences[handle]
            assert self.pages.length(handle) == len(labels)
            assert len(seq.pages) == self.count(len(labels))
            for p in self.read_hot(len(labels)):
                wanted = labels[p * self.size : (p + 1) * self.size]
                assert self.hot[seq.pages[p].hot][: len(wanted)] == wanted
            for p in self.read_cold(len(labels)):
                wanted = labels[p * self.size : (p + 1) * self.size]
                assert self.cold[seq.pages[p].cold] == wanted
            if self.tokens[handle] is not None:
                for p in range(len(labels) // self.size):
                    prefix = tuple(self.tokens[handle][: (p + 1) * self.size])
                    assert self.content.setdefault(seq.pages[p], prefix) == prefix

    @invariant()
    def every_query_of_an_open_step_reads_its_own_tokens(self):
        for step, handles, new, *_ in self.steps:
            for row, handle in enumerate(handles):
                labels, table = self.labels[handle] + new[row], step.tables[row]
                for position in range(len(self.labels[handle]), len(labels)):
                    seen = labels[: position + 1]
                    own = position // self.size
                    for p in range(own + 1):
                        wanted = seen[p * self.size : (p + 1) * self.size]
                        if p in self.read_hot(position) or p == own:
                            assert self.hot[table[p].hot][: len(wanted)] == wanted
                        else:
                            assert self.cold[table[p].cold] == wanted

    @invariant()
    def counts_are_exact(self):
        refs, hot_refs = self.holders()
        for page in refs:
            assert page.refs == refs[page]
            assert page.hot_refs == hot_refs.get(page, 0)
        for page in self.pages.index.values():
            assert page.refs == refs.get(page, 0)
            assert page.hot_refs == hot_refs.get(page, 0)

    @invariant()
    def every_id_is_in_exactly_one_place(self):
        pages, (refs, hot_refs) = self.pages, self.holders()
        known = {*refs, *pages.index.values(), *pages.idle_hot, *pages.idle_cold}
        for name, pool in (("hot", pages.hot), ("cold", pages.cold)):
            held = [getattr(p, name) for p in known if getattr(p, name) is not None]
            assert sorted([*pool.free, *held]) == list(range(pool.count))
        # Idle: findable copies that nobody needs, and those alone.
        assert set(pages.idle_hot) == {
            p for p in known if p.hot is not None and p not in hot_refs
        }
        assert set(pages.idle_cold) == {
            p for p in known if p.cold is not None and p not in refs
        }
        assert all(p.key is not None for p in [*pages.idle_hot, *pages.idle_cold])
        hot_room, cold_room = self.room()
        assert hot_room == len(pages.hot.free) + len(pages.idle_hot)
        assert cold_room == len(pages.cold.free) + len(pages.idle_cold)

    @invariant()
    def the_index_finds_known_pages_alone(self):
        pages, (refs, _) = self.pages, self.holders()
        for key, page in pages.index.items():
            assert page.key == key
            assert page in self.content, "a page with unknown tokens can be found"
            assert page.hot is not None or page.cold is not None
        named = [p for p in {*refs, *pages.idle_hot, *pages.idle_cold} if p.key]
        assert all(pages.index[p.key] is p for p in named)
        contents = [self.content[p] for p in pages.index.values()]
        assert len(set(contents)) == len(contents), "two pages for one prefix"

    @invariant()
    def live_pages_are_counted_once(self):
        live = {}
        for handle, labels in self.labels.items():
            for p, page in enumerate(self.pages.sequences[handle].pages):
                live[page] = min(self.size, len(labels) - p * self.size)
        assert self.pages.live() == live


def test_random_operations_lose_no_page_and_share_none_by_mistake():
    Machine.operations, Machine.seen = 0, {}
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Machine.operations >= 20_000, Machine.seen
    # The pools are small enough that what is rare elsewhere is frequent here.
    for what in ("OutOfPages", "evictions", "add, hit", "fork", "abort", "commit"):
        assert Machine.seen[what] >= 50, Machine.seen
