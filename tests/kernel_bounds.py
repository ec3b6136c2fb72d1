"""How exact a kernel must be: attention in float64, and what rounding may add to it."""

import torch

from kvq_lib.kernels import reference
from kvq_lib.turns import Turns, turn

#: Unit roundoff: the largest relative error of rounding to nearest.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11}

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
# - Runs of channels, R of them: each has a scale and a zero point, which round numbers
#   that add up to M at most, and R - 1 sums round what is below M: R + 1 more of M.
# - Turned queries: each channel is rounded to the operands' dtype, independently, as
#   above; and in float32 a turn's TURN_STEPS steps, each of which keeps the norm of its
#   row or is undone by the other side, are off by TURN_STEPS·u32·|q| |k|.
#   Together: S is off by at most δ.
# - Keys in FP4: a number of a block times its scale is exact. Static scales are a
#   page's.
# - Probabilities times scales, to the operands' dtype: u·Σ p |c| s. In float16 what is
#   below 2^-14 of the largest loses at most 2^-25 of the largest.
# - Sums, in float32: exp2 (2 units in the last place on a GPU), scale, product, partial
#   sums, three factors at the end: SUM_STEPS·u32·Σ p (|c| s + |z|).
# - The output, to its dtype: its own u. Turned back, TURN_STEPS in float32 before.
#
# Errors of scores change probabilities by p·(e^δ - 1), and the output by that times
# (v - out), since probabilities add up to one.

# Seen in the interpreter, in some 300 cases of each dtype: at most 0.54 of the allowed
# error in float16 and 0.35 in float32. Where scores are large or values cancel, that is
# up to 5e-3 and 1.1e-5 of the output's own norm.

SCORE_STEPS, SUM_STEPS, SIGMAS, TURN_STEPS = 4, 8, 4, 12


def oracle(
    q, hot, cold, tiles, scale, turns: Turns | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, and how far from it a kernel may be.

    Args:
        q: [tokens, heads, dim]; dots are taken in its dtype, or half precision.
        hot, cold: pools.
        tiles: from `reference.plan`.
        scale: factor of the scores.
        turns: into the coordinates of the pools, and out of them.

    Returns:
        Float64 [tokens, heads, dim]; the allowed norm over channels of a query's and
        head's error, [tokens, heads].
    """
    kv_heads = hot[0].shape[0]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    allowed = torch.empty(q.shape[:2], dtype=torch.float64, device=q.device)
    half = q.dtype != torch.float32
    u, u32 = UNIT[q.dtype], UNIT[torch.float32]
    runs = cold[0].parts if cold else ()
    by_channel = any(run.spec.granularity == "channel" for run in runs)
    of_size = 2 if len(runs) < 2 else len(runs) + 3
    wide = turn(q.double(), turns.queries) if turns else q.double()
    for tile in tiles:
        rows = wide[tile.rows].unflatten(1, (kv_heads, -1))
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
        delta = u32 * (delta + of_size * size)
        if turns:
            delta += SIGMAS * u * (rows**2 @ ((k + k_zero) ** 2).mT).sqrt()
            lengths = rows.norm(dim=-1, keepdim=True), (k + k_zero).norm(dim=-1)
            delta += TURN_STEPS * u32 * lengths[0] * lengths[1].unsqueeze(1)
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
        if turns:
            error += TURN_STEPS * u32 * value.norm(dim=-1)

        def by_query(x, lead=(kv_heads, group, queries)):
            return x.unflatten(1, lead[1:]).movedim(2, 0).flatten(1, 2)

        out[tile.rows], allowed[tile.rows] = by_query(value), by_query(error)
    if turns:
        out = turn(out, turns.outputs)
    return out, allowed + (UNIT[q.dtype] + u32) * out.norm(dim=-1)


def stored(hot, cold, tile) -> tuple[torch.Tensor, ...]:
    """What a tile reads, hot tokens first: c·s and z, float64 [kv_heads, tokens, dim],
    and s of each token, [kv_heads, tokens], 1 where it has none of its own. Keys may be
    runs, and their s is not asked for."""
    scaled = reference.select(hot, tile.hot).flatten(1, 2)[:, : tile.hot_tokens]
    scaled = scaled.double()
    zeros, steps = torch.zeros_like(scaled), torch.ones_like(scaled[..., 0])
    if tile.cold is None:
        return scaled, zeros, steps
    pages = cold.map(lambda t: reference.select(t, tile.cold))
    x = pages.dequantize(torch.float64)
    z = torch.cat([zero_points(run) for run in pages.parts], dim=-1)
    s, (first, *_) = torch.ones_like(x[..., 0]), pages.parts
    if first.spec.granularity in ("token", "page", "static"):
        s = first.scale.expand(first.shape)[..., 0].double()
    if first.outer is not None:
        s = first.outer.expand(first.shape)[..., 0].double()
    more = [(x - z).flatten(1, 2), z.flatten(1, 2), s.flatten(1, 2)]
    return tuple(
        torch.cat(pair, 1) for pair in zip((scaled, zeros, steps), more, strict=True)
    )


def zero_points(run) -> torch.Tensor:
    """The zero point of each number of a run, float64."""
    if run.zero is None:
        return torch.zeros(run.shape, dtype=torch.float64, device=run.codes.device)
    return run.zero.expand(run.shape).double()


def excess(out: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> float:
    """The largest error of a query and head, in units of what is allowed.

    NaN anywhere gives infinity.
    """
    error = (out.double() - expected).norm(dim=-1) / allowed
    return error.nan_to_num(nan=float("inf")).max().item()
