"""Random caches for the tests of the Triton kernels, and an oracle for what they read.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before
triton is imported: import this module first.
"""

import os
from dataclasses import dataclass

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import kvq_lib as kvq  # noqa: E402
from kvq_lib.kernels import backend, launch, reference  # noqa: E402
from kvq_lib.quantize import Quantized, empty, quantize_as  # noqa: E402

assert DEVICE == "cuda" or launch.interpreted(), (
    "triton was imported before TRITON_INTERPRET was set"
)

DTYPES = (torch.float32, torch.float16)

#: Largest relative error of a query's output against float64. In float32 scores reach
#: 50 here, and a sum of such a size is good to a few 1e-6. In float16 three roundings
#: of up to 4.9e-4 add up (scaled codes, probabilities, the output), and where values
#: cancel the output is smaller than what was rounded: 1.5e-3 has been seen.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}

#: Each kernel's randomized test runs this often for each dtype.
CASES = 160


def cases(count: int = CASES):
    """Settings of a randomized test. A failure is not made smaller: in the interpreter
    that takes minutes, and the seed is printed."""
    return settings(
        max_examples=count,
        # The same cases everywhere: a rare one must not fail somebody else's change.
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@dataclass(frozen=True)
class Case:
    """A cache and the queries of a step, with everything written and sealed.

    Attributes:
        law, scheme: what is hot and what is cold.
        ends, lengths: tokens of each sequence, the step included; queries of the step.
        hot, cold: pools.
        hot_ids, cold_ids: page tables; None where there is no such copy.
        q: [tokens, heads, dim].
    """

    law: kvq.schemes.Law
    scheme: kvq.Scheme
    ends: list[int]
    lengths: list[int]
    hot: tuple[torch.Tensor, torch.Tensor]
    cold: tuple[Quantized, Quantized] | None
    hot_ids: list[list[int | None]]
    cold_ids: list[list[int | None]]
    q: torch.Tensor

    @property
    def starts(self) -> list[int]:
        return [end - n for end, n in zip(self.ends, self.lengths, strict=True)]

    @property
    def tables(self) -> backend.Tables:
        return backend.plan(
            self.law, self.hot_ids, self.cold_ids, self.starts, self.lengths, DEVICE
        )

    def reference(self) -> torch.Tensor:
        """What `reference` gives in float64."""
        out = torch.empty(self.q.shape, dtype=torch.float64, device=DEVICE)
        for tile in reference.plan(
            self.law, self.hot_ids, self.cold_ids, self.starts, self.lengths, DEVICE
        ):
            q = self.q[tile.rows].double()
            out[tile.rows] = reference.read(q, self.hot, self.cold, tile, 0.125)
        return out

    def full_attention(self) -> torch.Tensor:
        """Full attention on the dequantized cache, one query at a time, in float64."""
        heads, kv_heads = self.q.shape[1], self.hot[0].shape[0]
        size, rows = self.law.page_size, []
        for s, (start, length) in enumerate(
            zip(self.starts, self.lengths, strict=True)
        ):
            for position in range(start, start + length):
                own = position // size
                sides = []
                for side in range(2):
                    read = []
                    for j in range(own + 1):
                        is_hot = j < self.law.sinks or j >= own - self.law.window
                        if is_hot:
                            page = self.hot[side][:, self.hot_ids[s][j]].double()
                        else:
                            id_ = self.cold_ids[s][j]
                            pool = self.cold[side].map(lambda t, i=id_: t[:, i])
                            page = pool.dequantize(torch.float64)
                        read.append(page)
                    sides.append(torch.cat(read, dim=1)[:, : position + 1])
                k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in sides)
                q = self.q[len(rows)].double().unsqueeze(1)
                weights = (q @ k.transpose(1, 2) * 0.125).softmax(-1)
                rows.append((weights @ v).squeeze(1))
        return torch.stack(rows)


def new_flags(kv_heads: int) -> torch.Tensor:
    return torch.zeros(kv_heads, dtype=torch.int32, device=DEVICE)


def strided(draw, shape, dtype, fill) -> torch.Tensor:
    """A tensor full of `fill`, contiguous or with gaps in any of its dims."""
    if draw(st.booleans()):
        return torch.full(shape, fill, dtype=dtype, device=DEVICE)
    gaps = [draw(st.integers(0, 2)) for _ in shape]
    step = draw(st.sampled_from([1, 1, 2]))
    sizes = [n + gap for n, gap in zip(shape, gaps, strict=True)]
    sizes[-1] = shape[-1] * step + 2 * gaps[-1]
    whole = torch.full(sizes, fill, dtype=dtype, device=DEVICE)
    for dim, (n, gap) in enumerate(zip(shape, gaps, strict=True)):
        if dim < len(shape) - 1:
            whole = whole.narrow(dim, gap, n)
    return whole[..., : shape[-1] * step : step]


def poisoned(draw, spec, lead, page_size, dim) -> Quantized:
    """A pool of cold pages whose every byte is 255: NaN in codes and scales."""
    plain = empty(spec, lead, page_size, dim)

    def poison(t):
        # float16 codes are read as float16, so their bytes must lie in pairs.
        if spec.format == "fp16":
            x = torch.full(
                (*t.shape[:-1], t.shape[-1] + 2 * draw(st.integers(0, 1))),
                255,
                dtype=t.dtype,
                device=DEVICE,
            )
            return x[..., : t.shape[-1]]
        return strided(draw, t.shape, t.dtype, 255 if t.dtype == torch.uint8 else NAN)

    return plain.map(poison)


NAN = float("nan")
SCHEMES = [*kvq.SCHEMES, "page-int4", "channel-int8", "channel-fp8"]

#: Recipes beyond the named ones, so that every way of reading is covered.
MORE = {
    "page-int4": ("int4", "page", False),
    "channel-int8": ("int8", "channel", True),
    "channel-fp8": ("fp8", "channel", True),
}


def scheme_called(name: str, recent: int, sinks: int) -> kvq.Scheme:
    if name in MORE:
        keys = kvq.Spec(*MORE[name])
        values = kvq.Spec("int2", "page", False)
        return kvq.Scheme(name, keys, values, recent, sinks)
    return kvq.scheme(name, recent, sinks)


@st.composite
def caches(draw, dtype, chunks: bool, longest: int = 200, most: int = 3):
    """A `Case`: one query a sequence, or chunks of them where `chunks`.

    Ragged lengths, permuted page tables, pages shared by a prefix, pools with gaps,
    sinks and windows; pages that nothing was written to are full of NaN.
    """
    size = draw(st.sampled_from([16, 32, 64]))
    recent = draw(st.sampled_from([0, 0, 9, 40, 100]))
    scheme = scheme_called(
        draw(st.sampled_from(SCHEMES)), recent, draw(st.sampled_from([0, 0, 3, 40]))
    )
    law = scheme.law(size)
    dim = draw(st.sampled_from([64, 64, 80, 96, 128, 256]))
    kv_heads = draw(st.integers(1, 2))
    group = draw(st.integers(1, 5) if chunks else st.integers(1, 16))
    ends = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    lengths = [draw(st.integers(1, end)) if chunks else 1 for end in ends]
    hot_dtype = dtype
    if dtype == torch.float32 and draw(st.booleans()):
        hot_dtype = torch.float16

    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=random).to(DEVICE)

    counts = [-(-end // size) for end in ends]
    pages = sum(counts) + 2
    hot = tuple(
        strided(draw, (kv_heads, pages, size, dim), hot_dtype, NAN) for _ in range(2)
    )
    cold = None
    if scheme.seals:
        cold = tuple(
            poisoned(draw, spec, (kv_heads, pages), size, dim)
            for spec in (scheme.keys, scheme.values)
        )
    free_hot, free_cold = (
        torch.randperm(pages, generator=random).tolist() for _ in range(2)
    )
    hot_ids, cold_ids = [], []
    for s, (end, count) in enumerate(zip(ends, counts, strict=True)):
        shared = 0
        if s and draw(st.booleans()):  # the first pages are those of the first sequence
            shared = min(end // size, ends[0] // size)
        hot_ids.append(hot_ids[0][:shared] if shared else [])
        cold_ids.append(cold_ids[0][:shared] if shared else [])
        for j in range(shared, count):
            hot_ids[s].append(free_hot.pop())
            full = (j + 1) * size <= end
            sealed = scheme.seals and full and j >= law.sinks
            cold_ids[s].append(free_cold.pop() if sealed else None)
            tokens = min(size, end - j * size)
            for side, pool in enumerate(hot):
                x = normal(kv_heads, tokens, dim) + 3 * normal(kv_heads, 1, dim)
                pool[:, hot_ids[s][j], :tokens] = x.to(hot_dtype)
                if sealed:
                    page = torch.tensor([hot_ids[s][j]], device=DEVICE)
                    put_cold(pool, page, cold[side], cold_ids[s][j])
    q = normal(sum(lengths), kv_heads * group, dim).to(dtype)
    case = Case(law, scheme, ends, lengths, hot, cold, hot_ids, cold_ids, q)
    forget_unread(case)
    return case


def put_cold(pool, page, cold: Quantized, target: int) -> None:
    sealed = quantize_as(pool.index_select(1, page), cold.spec)
    for store, new in zip(cold.tensors, sealed.tensors, strict=True):
        store[:, target] = new[:, 0]


def forget_unread(case: Case) -> None:
    """Fill hot pages that no query of the step reads with NaN: they may be free."""
    read = set()
    for ids, start, end in zip(case.hot_ids, case.starts, case.ends, strict=True):
        for page in range(start // case.law.page_size, -(-end // case.law.page_size)):
            read |= {ids[j] for part in case.law.hot(page) for j in part}
    for ids in case.hot_ids:
        for j, id_ in enumerate(ids):
            if id_ not in read:
                for pool in case.hot:
                    pool[:, id_] = NAN
                ids[j] = None


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a query and head, relative to the norm of what it should be.

    NaN anywhere gives infinity.
    """
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return error.nan_to_num(nan=float("inf")).max().item()
