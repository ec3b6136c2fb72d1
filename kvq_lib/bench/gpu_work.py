"""The work that `bench.gpu` times: kernels on random pages, and what to hold beside.

A model reads the cache of one layer after the other, each once a step. So a case has as
many copies of its pages as outgrow the GPU's own cache, all are read in turn, and a
CUDA graph keeps the launches close together. What is timed was checked before, on
poisoned outputs, against float64. Bytes are those of `kernels.budget`.
"""

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvq_lib.kernels import append, backend, budget, decode, extend, reference, seal
from kvq_lib.quantize import quantize_as
from kvq_lib.schemes import Scheme
from kvq_lib.schemes import scheme as find_scheme
from kvq_lib.storage import empty

OUTGROW = 8  # times the GPU's cache: bytes that a case reads before it reads any again
DISTINCT = 64  # pages of random numbers; the pools repeat them in random order
TOLERANCE = 3e-3  # relative error against float64, as in the tests; SDPA is held to it
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Plan:
    """What is measured: all combinations, the most telling ones first.

    Attributes:
        lengths: tokens of each sequence, the one that asks included.
        schemes: "native" first; it is what the others are compared with.
        chunk: new tokens of `extend`, after a context of the shortest length.
        sealed: tokens whose pages are sealed at once.
        copied: bytes of the copy that shows the memory's bandwidth.
    """

    lengths: tuple[int, ...] = (32768, 8192, 4096)
    batches: tuple[int, ...] = (32, 8, 1)
    page_sizes: tuple[int, ...] = (64, 16)
    schemes: tuple[str, ...] = (
        "native", "fp16", "fp8", "int8", "int4", "int4-kivi", "int2-kivi", "k8v4",
    )  # fmt: skip
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    chunk: int = 1024
    sealed: int = 65536
    copied: int = 2**31

    def cases(self) -> Iterator["Case"]:
        """Cases of `decode`, by falling length, batch and page size."""
        for length in self.lengths:
            for batch in self.batches:
                for page_size in self.page_sizes:
                    for name in self.schemes:
                        yield Case(length, batch, page_size, name)


#: What a reader's GPU measures in less than a minute.
SMALL = Plan((8192,), (8,), (16,), chunk=0, sealed=0, copied=2**28)


@dataclass(frozen=True)
class Case:
    """One setting of `decode`."""

    length: int
    batch: int
    page_size: int
    scheme: str

    def moved(self, plan: Plan, splits: int = 1) -> int:
        """Bytes that `decode` reads and writes, with what `merge` does for splits."""
        shape = (plan.heads, plan.kv_heads, plan.dim)
        lengths = [self.length] * self.batch
        moved = budget.decode(
            lengths, *shape, self.scheme, self.page_size, splits=splits
        )
        if splits > 1:
            moved += budget.merge(self.batch, plan.heads, plan.dim, splits)
        return sum(moved)


@dataclass(frozen=True)
class Machine:
    """Where it runs, and how work is timed.

    Attributes:
        seconds: does some work several times; the time of each.
        cache: bytes of the GPU's last-level cache.
        memory: bytes that a case may take.
    """

    device: torch.device
    seconds: Callable[[Callable[[], None]], list[float]]
    cache: int
    memory: int

    def time(self, work: Callable[[], None], times: int) -> dict[str, float]:
        """Median time of one of the `times` equal things that `work` does, in µs, and
        how far the middle half of the repeats lies apart, as a share of it."""
        found = self.seconds(work)
        low, median, high = statistics.quantiles(found, n=4)
        return {"microseconds": median / times * 1e6, "spread": (high - low) / median}


def here() -> Machine:
    """This machine's first GPU."""
    gpu = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info(0)
    cache = gpu.L2_cache_size
    return Machine(torch.device("cuda", 0), graph_seconds, cache, int(0.6 * free))


def graph_seconds(work: Callable[[], None], repeats: int = 15) -> list[float]:
    """Seconds by CUDA events around replays of a graph, after warming up."""
    work()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (repeats + 3))]
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    pairs = list(zip(events[::2], events[1::2], strict=True))[3:]
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def tiling(case: Case):
    """The tiling that a case of `decode` is timed with; None is the library's choice.

    This is the place where a search over tilings would hand in what it found.
    """
    return None


# -- pages of random numbers -----------------------------------------------------------


class Pages:
    """Pools of random pages of one layer, and page tables that lie scattered in them.

    Attributes:
        hot, cold: pools, as the kernels take them.
        ids: [sequences][pages], hot and cold ids; None where there is no such copy.
    """

    def __init__(self, plan, name, page_size, length, sequences, device, all_hot=False):
        self.law = find_scheme(name).law(page_size)
        self.device = device
        count = -(-length // page_size)
        cold = self.law.cold(count - 1)
        hot = range(count) if all_hot else range(len(cold), count)
        sides = _sides(plan, find_scheme(name), page_size, device)
        self.hot = tuple(
            x.half()[:, _some(sequences * len(hot), device)] for x, _ in sides
        )
        self.cold = None
        if find_scheme(name).seals:
            pick = _some(sequences * len(cold), device)
            self.cold = tuple(z.map(lambda t: t[:, pick]) for _, z in sides)
        self.ids = [_tables(sequences, count, pages) for pages in (hot, cold)]

    def plan(self, start: int, length: int, of: slice, planner=backend.plan):
        """Tables of a step of `length` tokens from `start` on, of some sequences."""
        hot, cold = (ids[of] for ids in self.ids)
        each = [start] * len(hot), [length] * len(hot)
        return planner(self.law, hot, cold, *each, self.device)


def _sides(plan, recipe: Scheme, page_size: int, device) -> list[tuple]:
    """Keys and values of some pages, float32, and quantized; keys have a bias per
    channel, as those of models do."""
    sides = []
    for spec, bias in ((recipe.keys, 2.0), (recipe.values, 0.0)):
        shape = (plan.kv_heads, DISTINCT, page_size, plan.dim)
        x = torch.randn(shape, device=device)
        x += bias * torch.randn(plan.kv_heads, 1, 1, plan.dim, device=device)
        sides.append((x, None if spec is None else quantize_as(x, spec)))
    return sides


def _some(count: int, device) -> torch.Tensor:
    return torch.randint(DISTINCT, (count,), device=device)


def _tables(sequences: int, count: int, pages: range) -> list[list[int | None]]:
    """Page tables of sequences, scattered; `pages` are those that have a copy."""
    free = iter(torch.randperm(sequences * len(pages)).tolist())
    return [
        [next(free) if j in pages else None for j in range(count)]
        for _ in range(sequences)
    ]


def _query(plan: Plan, tokens: int, device) -> torch.Tensor:
    return torch.randn(tokens, plan.heads, plan.dim, device=device).half()


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error of a query and head, relative to its norm; NaN gives infinity."""
    error = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return error.nan_to_num(nan=float("inf")).max().item()


# -- what is measured ------------------------------------------------------------------


def decode_row(plan: Plan, case: Case, machine: Machine) -> dict:
    """Check and time one case of `decode`: a row of the table.

    Raises:
        MemoryError: it does not fit; says what it needs.
        ArithmeticError: the kernel's output is wrong.
    """
    copies = max(1, -(-OUTGROW * machine.cache // case.moved(plan)))
    if copies * case.moved(plan) > machine.memory:
        need = copies * case.moved(plan) / 2**30
        raise MemoryError(f"{need:.1f} GiB of pages do not fit")
    device, scale = machine.device, plan.dim**-0.5
    at, batch = case.length - 1, case.batch
    size, name = case.page_size, case.scheme
    pages = Pages(plan, name, size, case.length, copies * batch, device)
    q = _query(plan, batch, device)
    out = torch.full_like(q, float("nan"))
    flags = torch.zeros(plan.kv_heads, dtype=torch.int32, device=device)
    launches = []
    for i in range(copies):
        tables = pages.plan(at, 1, slice(i * batch, (i + 1) * batch)).decode
        data = (q, out, pages.hot, pages.cold, tables, flags, scale)
        launches.append(decode.prepare(*data, tiling=tiling(case)))

    for launch in launches[0]:
        launch.run()
    errors = []
    for i in sorted({0, batch - 1}):
        (read,) = pages.plan(at, 1, slice(i, i + 1), reference.plan)
        exact = reference.read(
            q[i : i + 1].double(), pages.hot, pages.cold, read, scale
        )
        errors.append(relative_error(out[i : i + 1], exact))
    if max(errors) > TOLERANCE:
        raise ArithmeticError(f"{case}: relative error {max(errors):.1e}")
    out.fill_(float("nan"))
    timed = machine.time(lambda: [x.run() for one in launches for x in one], copies)
    if not out.isfinite().all() or flags.any():
        raise ArithmeticError(f"{case}: an output was not written, or a flag is set")
    splits = launches[0][0].grid[2]
    row = asdict(case) | {"splits": splits, "copies": copies, "error": max(errors)}
    return row | with_rate(case.moved(plan, splits), timed)


def with_rate(moved: int, timed: dict[str, float]) -> dict[str, float]:
    """Bytes, time and GB/s."""
    rate = moved / timed["microseconds"] / 1e3
    return {"bytes": moved, **timed, "gb_per_s": rate}


def sdpa_rows(plan: Plan, length: int, batch: int, machine: Machine) -> Iterator[dict]:
    """PyTorch's attention on contiguous keys and values, by every backend.

    Grouped: each query head is a head of its own, `enable_gqa` tells PyTorch. Folded:
    the query heads of a kv head are rows, as if they were tokens; the same numbers.
    """
    device, dim, kv_heads = machine.device, plan.dim, plan.kv_heads
    each = 2 * batch * kv_heads * length * dim * 2
    copies = max(1, -(-OUTGROW * machine.cache // each))
    if copies * each > machine.memory:
        raise MemoryError(
            f"{copies * each / 2**30:.1f} GiB of keys and values do not fit"
        )
    shape = (copies, batch, kv_heads, length, dim)
    k, v = (torch.randn(shape, device=device, dtype=torch.float16) for _ in range(2))
    q = _query(plan, batch, device)
    rows = q[0].double().view(kv_heads, -1, dim) * dim**-0.5
    weights = (rows @ k[0, 0].double().transpose(1, 2)).softmax(-1)
    exact = (weights @ v[0, 0].double()).view(plan.heads, dim)
    moved = each + 2 * batch * plan.heads * dim * 2
    for name, choice in BACKENDS.items():
        for form in ("grouped", "folded"):
            heads = (plan.heads, 1) if form == "grouped" else (kv_heads, -1)
            queries, gqa = q.view(batch, *heads, dim), form == "grouped"

            def one(i, queries=queries, gqa=gqa):
                call = F.scaled_dot_product_attention
                return call(queries, k[i], v[i], enable_gqa=gqa)

            row = {"length": length, "batch": batch, "backend": name, "form": form}
            try:
                with warnings.catch_warnings(), sdpa_kernel(choice):
                    warnings.simplefilter("ignore")  # PyTorch's reasons to refuse
                    error = relative_error(one(0)[0].reshape(-1, dim), exact)
                    work = lambda one=one: [one(i) for i in range(copies)]  # noqa: E731
                    timed = machine.time(work, copies)
            except RuntimeError as problem:  # no such kernel, or out of memory
                yield row | {"unavailable": str(problem).splitlines()[0][:120]}
                continue
            if error > TOLERANCE:
                yield row | {"unavailable": f"relative error {error:.1e}"}
            else:
                yield row | {"error": error} | with_rate(moved, timed)


def copy_row(plan: Plan, machine: Machine) -> dict:
    """A device-to-device copy of random bytes, read and written: the ceiling."""
    source = torch.randint(
        256, (plan.copied,), dtype=torch.uint8, device=machine.device
    )
    target = torch.empty_like(source)
    timed = machine.time(lambda: target.copy_(source), 1)
    return with_rate(2 * plan.copied, timed)


def other_rows(plan: Plan, name: str, page_size: int, machine: Machine) -> Iterator:
    """`append`, `seal` and `extend` of one scheme; not checked here, the tests do."""
    device, kv_heads, dim = machine.device, plan.kv_heads, plan.dim
    flags = torch.zeros(kv_heads, dtype=torch.int32, device=device)
    base = {"scheme": name, "page_size": page_size}

    def timed(kernel, tokens, moved, launches):
        found = machine.time(lambda: [x.run() for x in launches], 1)
        row = {"kernel": kernel, "tokens": tokens, "launches": len(launches)}
        return base | row | with_rate(sum(moved), found)

    pages = plan.sealed // page_size
    if pages and find_scheme(name).seals:
        sides = _sides(plan, find_scheme(name), page_size, device)
        ids = torch.randperm(pages, device=device)
        for side, (x, z) in zip(("keys", "values"), sides, strict=True):
            hot = x.half()[:, _some(pages, device)]
            cold = empty(z.spec, (kv_heads, pages), page_size, dim, device)
            moved = budget.seal(pages, kv_heads, page_size, dim, z.spec)
            launches = seal.prepare(hot, ids, cold, ids, flags)
            yield timed(f"seal {side}", pages * page_size, moved, launches)
    if plan.chunk:
        start, chunk = min(plan.lengths), plan.chunk
        store = Pages(plan, name, page_size, start + chunk, 1, device, all_hot=True)
        tables = store.plan(start, chunk, slice(1)).extend
        q = _query(plan, chunk, device)
        reach = (store.law.sinks, store.law.window)
        data = (store.hot, store.cold, tables, reach, flags, dim**-0.5)
        launches = extend.prepare(q, torch.empty_like(q), *data)
        tile = launches[0].arguments["ROWS"] // (plan.heads // kv_heads)
        shape = (plan.heads, kv_heads, dim)
        moved = budget.extend(start, chunk, *shape, name, page_size, tile)
        yield timed("extend", chunk, moved, launches)
        if name == "native":
            k = torch.randn(chunk, kv_heads, dim, device=device).half()
            place = torch.arange(chunk, device=device)
            where = (place // page_size, place % page_size)
            launches = append.prepare(store.hot, *where, k, k, flags)
            yield timed("append", chunk, budget.append(chunk, kv_heads, dim), launches)
