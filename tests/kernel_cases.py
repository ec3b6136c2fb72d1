"""Random caches for the tests of the Triton kernels, and an oracle for what they read.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before
triton is imported: import this module first.
"""

import os
from dataclasses import dataclass, field, replace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kernel_bounds import oracle  # noqa: E402

import kvq_lib as kvq  # noqa: E402
from kvq_lib.kernels import backend, launch, reference  # noqa: E402
from kvq_lib.quantize import quantize_as  # noqa: E402
from kvq_lib.storage import Aid, Quantized, Runs, empty  # noqa: E402
from kvq_lib.turns import Found  # noqa: E402

assert DEVICE == "cuda" or launch.interpreted(), (
    "triton was imported before TRITON_INTERPRET was set"
)

#: Factor of the scores in all tests.
SCALE = 0.125

DTYPES = (torch.float32, torch.float16)

#: Each kernel's randomized test runs this often for each dtype.
CASES = 150


def cases(count: int = CASES):
    """Settings of a randomized test: new cases in every run.

    A failure is not made smaller: in the interpreter that takes minutes. What is
    printed repeats it.
    """
    return settings(
        max_examples=count,
        derandomize=False,
        print_blob=True,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
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
    hot: tuple[torch.Tensor, torch.Tensor] = field(repr=False)
    cold: "tuple[Quantized | Runs, Quantized] | None" = field(repr=False)
    hot_ids: list[list[int | None]]
    cold_ids: list[list[int | None]]
    q: torch.Tensor = field(repr=False)

    @property
    def starts(self) -> list[int]:
        return [end - n for end, n in zip(self.ends, self.lengths, strict=True)]

    @property
    def tables(self) -> backend.Tables:
        return backend.plan(
            self.law, self.hot_ids, self.cold_ids, self.starts, self.lengths, DEVICE
        )

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention in float64, and the error allowed to a kernel; see `oracle`."""
        tiles = reference.plan(
            self.law, self.hot_ids, self.cold_ids, self.starts, self.lengths, DEVICE
        )
        return oracle(self.q, self.hot, self.cold, tiles, SCALE)

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
                weights = (q @ k.transpose(1, 2) * SCALE).softmax(-1)
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


def poisoned(draw, side, lead, page_size, dim, aids=()) -> "Quantized | Runs":
    """A pool of cold pages whose every byte is 255: NaN in codes and scales."""

    def poison(run, t):
        # float16 codes are read as float16, so their bytes must lie in pairs.
        if run.spec.format == "fp16":
            x = torch.full(
                (*t.shape[:-1], t.shape[-1] + 2 * draw(st.integers(0, 1))),
                255,
                dtype=t.dtype,
                device=DEVICE,
            )
            return x[..., : t.shape[-1]]
        return strided(draw, t.shape, t.dtype, 255 if t.dtype == torch.uint8 else NAN)

    plain, runs = empty(side, lead, page_size, dim, DEVICE, aids), []
    for run in plain.parts:
        bad = run.map(lambda t, run=run: poison(run, t))
        # A static scale is not the pages': it is there before they are.
        static = run.spec.granularity == "static"
        runs.append(replace(bad, scale=run.scale) if static else bad)
    return Runs(tuple(runs), side) if isinstance(plain, Runs) else runs[0]


NAN = float("nan")

#: Named recipes that need no calibration.
FREE = [name for name, recipe in kvq.SCHEMES.items() if not recipe.calibrated]

#: Recipes beyond those, so that every way of reading is covered: keys.
MORE = {
    "page-int4": kvq.Spec("int4", "page", False),
    "channel-int8": kvq.Spec("int8", "channel", True),
    "channel-fp8": kvq.Spec("fp8", "channel", True),
    "static-int8": kvq.Spec("int8", "static"),
    "static-fp8": kvq.Spec("fp8", "static"),
    "aided-int4": kvq.Spec("int4", "token", False, ("clip", "feedback")),
    "mixed": kvq.Mixed(),
}

#: Their values.
VALUES = {
    "static-int8": kvq.Spec("fp8", "static"),
    "static-fp8": kvq.Spec("int8", "static"),
    "mixed": kvq.Spec("int4", "token", False),
}

SCHEMES = [*FREE, *MORE, "mixed"]  # this one twice: it has many forms


def drawn_scheme(draw, name: str, dim: int, recent: int, sinks: int) -> kvq.Scheme:
    """The scheme of a name; mixed widths are drawn."""
    if name not in MORE:
        return kvq.scheme(name, recent, sinks)
    keys, values = MORE[name], VALUES.get(name, kvq.Spec("int2", "page", False))
    if name == "mixed":
        blocks = [draw(st.integers(0, 2)), draw(st.integers(0, dim // 16 - 2))]
        wide = [16 * n for n in blocks]
        aids = draw(st.sampled_from([(), ("clip",), ("feedback",)]))
        keys = kvq.Mixed(channels=(*wide, dim - sum(wide)), aids=aids)
    return kvq.Scheme(name, keys, values, recent, sinks)


def made_up(side, kv_heads: int, dim: int, random) -> list[Aid]:
    """What calibration might find for each run of a side, without a model."""
    found = []
    for spec, width in side.runs(dim):
        scale = clip = feedback = None
        if spec.granularity == "static":
            reach = 2 + 8 * torch.rand(kv_heads, 1, 1, 1, generator=random)
            scale = (reach / spec.largest_code).half()
        if "clip" in spec.aids:
            clip = 0.5 + 0.5 * torch.rand(kv_heads, 1, 1, 1, generator=random)
        if "feedback" in spec.aids:
            shares = torch.randn(kv_heads, width, width, generator=random)
            feedback = (shares / width**0.5).triu(1)
        found.append(Aid(scale, clip, feedback))
    return found


@st.composite
def caches(
    draw, dtype, chunks: bool, longest: int = 200, most: int = 3, name=None, size=None
):
    """A `Case`: one query a sequence, or chunks of them where `chunks`. `name`: of a
    scheme, then without window and sinks. `size`: tokens of a page.

    Ragged lengths, permuted page tables, pages shared by a prefix, pools with gaps,
    sinks and windows; pages that nothing was written to are full of NaN.
    """
    size = size or draw(st.sampled_from([16, 32, 64]))
    recent = 0 if name else draw(st.sampled_from([0, 0, 9, 40, 100]))
    sinks = 0 if name else draw(st.sampled_from([0, 0, 3, 40]))
    dim = draw(st.sampled_from([64, 64, 80, 96, 128, 256]))
    name = name or draw(st.sampled_from(SCHEMES))
    scheme = drawn_scheme(draw, name, dim, recent, sinks)
    law = scheme.law(size)
    kv_heads = draw(st.integers(1, 2))
    group = draw(st.integers(1, 5) if chunks else st.integers(1, 16))
    # Every length, but the short ones more often: a long chunk takes seconds.
    longest = draw(st.sampled_from([min(100, longest), longest]))
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
            poisoned(
                draw, side, (kv_heads, pages), size, dim,
                made_up(side, kv_heads, dim, random),
            )
            for side in (scheme.keys, scheme.values)
        )  # fmt: skip
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
    loud = draw(st.sampled_from([1, 1, 1, 8, 1 / 64]))
    q = (loud * normal(sum(lengths), kv_heads * group, dim)).to(dtype)
    case = Case(law, scheme, ends, lengths, hot, cold, hot_ids, cold_ids, q)
    forget_unread(case)
    return case


def put_cold(pool, page, cold: "Quantized | Runs", target: int) -> None:
    aids = [run.aid for run in cold.parts]
    sealed = quantize_as(pool.index_select(1, page), cold.spec, aids)
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


# -- schemes as `kvq.fit` makes them ---------------------------------------------------

INT4 = kvq.Spec("int4", "token", False)

#: Keys and values of two layers.
FITTED = {
    "fp8-static": ((kvq.Spec("fp8", "static"),) * 2,) * 2,
    "int8-static": ((kvq.Spec("int8", "static"),) * 2,) * 2,
    "mixed": (
        (kvq.Mixed(channels=(16, 16, 32)), INT4),
        (kvq.Mixed(channels=(0, 48, 16), aids=("center", "rotate", "clip")), INT4),
    ),
    "aided": (
        (
            kvq.Spec(
                "int4", "channel", False,
                ("center", "smooth", "rotate", "clip", "feedback"),
            ),
            kvq.Spec("int4", "token", False, ("center", "rotate", "feedback")),
        ),
        (kvq.Spec("fp4", "block", aids=("smooth",)), kvq.Spec("fp4", "block")),
    ),
}  # fmt: skip


def fitted(name: str, kv_heads: int, dim: int, **window) -> kvq.Scheme:
    """A scheme of `FITTED`, of two layers, with numbers in place of a calibration; or a
    named one that needs none."""
    if name not in FITTED:
        return kvq.scheme(name, **window)
    random, layers = torch.Generator().manual_seed(3), FITTED[name]

    def found(side) -> Found:
        def each():
            return torch.randn(kv_heads, dim, generator=random)

        order = torch.stack([torch.randperm(dim, generator=random) for _ in range(2)])
        return Found(
            center=each() if "center" in side.aids else None,
            factor=(0.5 * each()).exp() if "smooth" in side.aids else None,
            order=order if isinstance(side, kvq.Mixed) else None,
            aids=tuple(made_up(side, kv_heads, dim, random)),
        )

    fit = tuple(tuple(found(side) for side in pair) for pair in layers)
    return kvq.Scheme(name, *layers[0], layers=layers, fit=fit, **window)
