"""Random caches for the tests of the Triton kernels, and an oracle for what they read.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before
triton is imported: import this module first.
"""

import os
from dataclasses import dataclass, field

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

#: Factor of the scores in all tests.
SCALE = 0.125

DTYPES = (torch.float32, torch.float16)

#: Unit roundoff: the largest relative error of rounding to nearest.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11}

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
    cold: tuple[Quantized, Quantized] | None = field(repr=False)
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
    scheme = scheme_called(name or draw(st.sampled_from(SCHEMES)), recent, sinks)
    law = scheme.law(size)
    dim = draw(st.sampled_from([64, 64, 80, 96, 128, 256]))
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
    loud = draw(st.sampled_from([1, 1, 1, 8, 1 / 64]))
    q = (loud * normal(sum(lengths), kv_heads * group, dim)).to(dtype)
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


# -- how exact a kernel must be --------------------------------------------------------
#
# Let a token's stored key be c·s + z (hot: c = k, s = 1, z = 0), its score
# S = scale·Σ q (c s + z), its probability p, and u = 2^-11 (float16) or 2^-24
# (float32) the unit roundoff of the operands of products, u32 = 2^-24 that of all else.
# A kernel rounds here:
#
# - Scores, in float32. Each step after the products (scale, zero point, units, maximum)
#   rounds a number no larger than |S| or |max S|: SCORE_STEPS roundings. The products'
#   partial sums wander; their errors add up to less than one rounding of the sum of
#   absolute values, M = scale·Σ|q|(|c| s + |z|). Dividing q by a power of two costs
#   it, in float16, 2^-24 of its largest element at most; that is another one.
# - Scaled keys, in float16, where a scale belongs to a channel: each product q·s or c·s
#   is off by at most u of itself. Over the channels these errors have mean zero and
#   are independent, so by Hoeffding's inequality their sum passes
#   SIGMAS·u·scale·√Σ(q c s)² about once in 10^10 scores (a rounding error's variance is
#   at most u²/3); Σ|q c s| would allow ten times too much.
#   Together: S is off by at most δ.
# - Probabilities times scales, to the operands' dtype: u·Σ p |c| s. In float16 what is
#   below 2^-14 of the largest loses at most 2^-25 of the largest.
# - Sums, in float32: exp2 (2 units in the last place on a GPU), scale, product, partial
#   sums, three factors at the end: SUM_STEPS·u32·Σ p (|c| s + |z|).
# - The output, to its dtype: its own u.
#
# Errors of scores change probabilities by p·(e^δ - 1), and the output by that times
# (v - out), since probabilities add up to one.

# Seen in the interpreter, in some 300 cases of each dtype: at most 0.54 of the allowed
# error in float16 and 0.35 in float32. Where scores are large or values cancel, that is
# up to 5e-3 and 1.1e-5 of the output's own norm.

SCORE_STEPS, SUM_STEPS, SIGMAS = 4, 8, 4


def oracle(q, hot, cold, tiles, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, and how far from it a kernel may be.

    Args:
        q: [tokens, heads, dim]; dots are taken in its dtype, or half precision.
        hot, cold: pools.
        tiles: from `reference.plan`.
        scale: factor of the scores.

    Returns:
        Float64 [tokens, heads, dim]; the allowed norm over channels of a query's and
        head's error, [tokens, heads].
    """
    kv_heads = hot[0].shape[0]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    allowed = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    half = q.dtype != torch.float32
    u, u32 = UNIT[q.dtype], UNIT[torch.float32]
    by_channel = cold is not None and cold[0].spec.granularity == "channel"
    for tile in tiles:
        rows = q[tile.rows].double().unflatten(1, (kv_heads, -1))
        queries, group = rows.shape[0], rows.shape[2]
        rows = rows.permute(1, 2, 0, 3).flatten(1, 2) * scale
        k, k_zero, _ = stored(hot[0], cold and cold[0], tile)
        v, v_zero, steps = stored(hot[1], cold and cold[1], tile)
        scores = rows @ (k + k_zero).mT
        if tile.hidden is not None:
            scores.masked_fill_(tile.hidden.repeat(group, 1), float("-inf"))
        p, top = scores.softmax(-1), scores.amax(-1, keepdim=True)
        value = p @ (v + v_zero)

        size = rows.abs() @ (k.abs() + k_zero.abs()).mT
        delta = (scores.abs() + top.abs()).nan_to_num(posinf=0.0) * SCORE_STEPS
        delta = u32 * (delta + 2 * size)
        if half and by_channel:
            delta[..., tile.hot_tokens :] += (
                SIGMAS * u * (rows**2 @ (k**2).mT).sqrt()[..., tile.hot_tokens :]
            )
        apart = (v + v_zero).norm(dim=-1).unsqueeze(1) ** 2
        apart = apart - 2 * value @ (v + v_zero).mT + (value**2).sum(-1, keepdim=True)
        error = (p * delta.expm1() * apart.clamp(min=0).sqrt()).sum(-1)

        weighted = p @ v.abs()
        error += u * weighted.norm(dim=-1)
        if half:
            lost = 2.0**-25 * p.amax(-1, keepdim=True) * (p > 0)
            lost = lost * (steps.amax(-1, keepdim=True) / steps).unsqueeze(1)
            error += (lost @ v.abs()).norm(dim=-1)
        error += SUM_STEPS * u32 * (weighted + p @ v_zero.abs()).norm(dim=-1)
        error += UNIT[q.dtype] * value.norm(dim=-1)

        def by_query(x, lead=(kv_heads, group, queries)):
            return x.unflatten(1, lead[1:]).movedim(2, 0).flatten(1, 2)

        out[tile.rows], allowed[tile.rows] = by_query(value), by_query(error)
    return out, allowed


def stored(hot, cold, tile) -> tuple[torch.Tensor, ...]:
    """What a tile reads, hot tokens first: c·s and z, float64 [kv_heads, tokens, dim],
    and s of each token, [kv_heads, tokens], 1 where it has none of its own."""
    scaled = reference.select(hot, tile.hot).flatten(1, 2)[:, : tile.hot_tokens]
    scaled = scaled.double()
    zeros, steps = torch.zeros_like(scaled), torch.ones_like(scaled[..., 0])
    if tile.cold is None:
        return scaled, zeros, steps
    pages = cold.map(lambda t: reference.select(t, tile.cold))
    x = pages.dequantize(torch.float64)
    z = torch.zeros_like(x) if pages.zero is None else pages.zero.expand_as(x).double()
    s = torch.ones_like(x[..., 0])
    if cold.spec.granularity in ("token", "page"):
        s = pages.scale.expand_as(x)[..., 0].double()
    more = [(x - z).flatten(1, 2), z.flatten(1, 2), s.flatten(1, 2)]
    return tuple(
        torch.cat(pair, 1) for pair in zip((scaled, zeros, steps), more, strict=True)
    )


def excess(out: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> float:
    """The largest error of a query and head, in units of what is allowed.

    NaN anywhere gives infinity.
    """
    error = (out.double() - expected).norm(dim=-1) / allowed
    return error.nan_to_num(nan=float("inf")).max().item()
