"""Other coordinates: attention gives the same in all of them."""

import dataclasses

import pytest
import torch
from helpers import advance, dense_hadamard, random_calibration, same_bits, stream

import kvq_lib as kvq
from kvq_lib.specs import WIDTHS
from kvq_lib.turns import Found, Turn, hadamard, hadamard_block, turn, turns_of

DIMS = [8, 16, 24, 40, 64, 80, 96, 112, 128, 192, 256]
FP16 = kvq.Spec("fp16")


def normal(*shape, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)


def turned(*aids, dim, found=None):
    """The turns of a layer whose keys have these aids."""
    keys = kvq.Spec("int8", "token", aids=aids)
    return turns_of(keys, FP16, dim, torch.device("cpu"), (found or Found(), Found()))


# -- the Hadamard matrix ---------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 7, 12, *DIMS])
def test_the_transform_is_the_matrix_of_its_definition(dim):
    block = hadamard_block(dim)
    assert dim % block == 0 and (dim // block) % 2 == 1
    assert block & (block - 1) == 0
    wanted = dense_hadamard(dim)
    found = hadamard(torch.eye(dim, dtype=torch.float64), block)
    assert (found - wanted).abs().max() < 1e-14
    x = normal(5, 3, dim)
    assert (hadamard(x, block) - x @ wanted).abs().max() < 1e-13
    # Its own inverse, and it leaves lengths as they are.
    assert (hadamard(hadamard(x, block), block) - x).abs().max() < 1e-13
    assert (wanted @ wanted - torch.eye(dim, dtype=torch.float64)).abs().max() < 1e-13


@pytest.mark.parametrize("dim", DIMS)
def test_an_outlier_is_spread_over_its_block(dim):
    x = torch.zeros(1, dim, dtype=torch.float64)
    x[0, 3] = 100.0
    block = hadamard_block(dim)
    out = hadamard(x, block)[0]
    assert (out[:block].abs() - 100 / block**0.5).abs().max() < 1e-12
    assert (out[block:] == 0).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_are_the_same_in_turned_coordinates(dim, dtype):
    q, k = (normal(20, 2, dim, seed=s, dtype=dtype) for s in (1, 2))
    ways = turned("rotate", dim=dim)
    wanted = torch.einsum("qhd,khd->hqk", q.double(), k.double())
    q2, k2 = turn(q, ways.queries), turn(k, ways.keys)
    assert q2.dtype == k2.dtype == dtype
    assert (k2 - k).abs().max() > 0.1
    found = torch.einsum("qhd,khd->hqk", q2.double(), k2.double())
    limit = 20 * torch.finfo(dtype).eps * (q.norm(dim=-1).max() * k.norm(dim=-1).max())
    assert (found - wanted).abs().max() < limit
    assert torch.equal(turn(q.float(), ways.queries), turn(q.float(), ways.keys))


@pytest.mark.parametrize("dim", DIMS)
def test_scores_of_float16_pages_differ_by_the_rounding_of_float16(dim):
    q, k = (normal(20, 2, dim, seed=s, dtype=torch.float16) for s in (1, 2))
    ways = turned("rotate", dim=dim)
    stored = turn(k, ways.keys).half()  # as hot pages hold it
    wanted = torch.einsum("qhd,khd->hqk", q.double(), k.double())
    found = turn(q, ways.queries).double()
    found = torch.einsum("qhd,khd->hqk", found, stored.double())
    # Each product is off by at most half a unit in the last place of its key.
    sizes = turn(q, ways.queries).double().abs(), stored.double().abs()
    limit = 1.01 * torch.einsum("qhd,khd->hqk", *sizes) * 2.0**-11 + 1e-4
    assert ((found - wanted).abs() <= limit).all()
    assert (found - wanted).abs().max() > 1e-6


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_the_other_rows(dim, dtype):
    x = normal(33, 4, dim, dtype=dtype)
    draw = torch.Generator().manual_seed(1)
    way = Turn(
        before=normal(2, dim, seed=3).float(),
        gain=normal(2, dim, seed=4).float(),
        block=hadamard_block(dim),
        order=torch.stack([torch.randperm(dim, generator=draw) for _ in range(2)]),
        after=normal(2, dim, seed=5).float(),
    )
    together = turn(x, way)
    assert together.dtype == torch.float32
    for rows in (slice(0, 1), slice(7, 8), slice(5, 22), slice(32, 33)):
        assert same_bits(turn(x[rows], way), together[rows])
    # And heads that share a kv head are turned alike.
    twins = x[:, [0, 0, 2, 2]]
    assert same_bits(turn(twins, way)[:, 0], turn(twins, way)[:, 1])


def test_the_parts_of_a_turn_come_in_their_order():
    x = normal(3, 4, 8)
    before, gain, after = (normal(2, 8, seed=s).float() for s in (1, 2, 3))
    order = torch.stack([torch.randperm(8), torch.randperm(8)])
    found = turn(x, Turn(before, gain, 8, order, after))
    for head in range(4):
        h = head // 2
        wanted = ((x[:, head] - before[h]) * gain[h]) @ dense_hadamard(8)
        wanted = wanted[:, order[h]] + after[h]
        assert (found[:, head] - wanted).abs().max() < 1e-13


def test_nothing_to_turn_is_told():
    assert turns_of(None, None, 8, torch.device("cpu")) is None
    assert turned(dim=8) is None
    assert turned("clip", "feedback", dim=8) is None
    assert turned("rotate", dim=7) is None  # blocks of one channel
    assert turned("rotate", dim=8) is not None
    assert Turn().still and not Turn(block=2).still


# -- through a cache -------------------------------------------------------------------

COORDINATES = [
    ("center",),
    ("smooth",),
    ("rotate",),
    ("center", "smooth", "rotate"),
]


@pytest.mark.parametrize("aids", COORDINATES, ids="+".join)
@pytest.mark.parametrize("dim", [16, 40, 80])
@pytest.mark.parametrize("mixed", [False, True], ids=["spec", "mixed"])
def test_a_cache_whose_pages_all_stay_hot_gives_plain_attention(aids, dim, mixed):
    if mixed and dim % 16:
        dim = 48  # with an order of channels on top
    shape = kvq.KVShape(2, 2, dim)
    keys = kvq.Spec("int4", "token", False, aids)
    if mixed:
        keys = kvq.Mixed(16.0, aids=aids)
    values = tuple(aid for aid in aids if aid != "smooth")
    values = kvq.Spec("int4", "token", False, values)
    scheme = kvq.Scheme("turned", keys, values, recent=10_000)
    scheme = kvq.fit(scheme, random_calibration(shape), 4)
    s = stream(shape, 30)
    outs, pools = [], []
    for recipe in (scheme, "native"):
        cache = kvq.PagedKVCache(shape, recipe, 4, num_pages=16, dtype=torch.float64)
        (out,) = advance(cache, (cache.add(), s, 30))
        outs.append(out)
        pools.append(cache._hot_tensors)
    assert (outs[0] - outs[1]).abs().max() < 1e-12 * 1000
    assert not torch.allclose(pools[0][0], pools[1][0])  # other coordinates inside
    if values.aids:
        assert not torch.allclose(pools[0][1], pools[1][1])


def test_outputs_are_turned_back_with_what_values_lost():
    shape = kvq.KVShape(1, 2, 16)
    values = kvq.Spec("int8", "token", aids=("center", "rotate"))
    scheme = kvq.Scheme("v", FP16, values, recent=1000)
    scheme = kvq.fit(scheme, random_calibration(shape))
    center = scheme.fit[0][1].center.double()
    cache = kvq.PagedKVCache(shape, scheme, 4, num_pages=8, dtype=torch.float64)
    s = stream(shape, 5)
    # Values that all are the center leave nothing in the pool, and come out whole.
    v = center.expand(1, 5, 2, 16).contiguous()
    (out,) = advance(cache, (cache.add(), dataclasses.replace(s, v=v), 5))
    assert cache._hot_tensors[1].abs().max() < 1e-12
    assert (out[0].unflatten(1, (2, 2)) - center[None, :, None]).abs().max() < 1e-12


def test_keys_and_queries_take_opposite_factors():
    shape = kvq.KVShape(1, 2, 16)
    factor = torch.full((2, 16), 4.0)
    found = Found(factor=factor)
    ways = turned("smooth", dim=shape.head_dim, found=found)
    x = normal(3, 2, 16)
    assert torch.equal(turn(x, ways.keys), x / 4)
    assert torch.equal(turn(x, ways.queries), x * 4)


def test_a_turn_of_sixteen_bit_numbers_is_computed_in_float32():
    x = normal(4, 2, 64, dtype=torch.bfloat16)
    ways = turned("rotate", dim=64)
    wanted = x.double() @ dense_hadamard(64)
    assert (turn(x, ways.keys).double() - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_side_that_is_not_turned_stays_as_it_is(which):
    sides = {"keys": WIDTHS[1], "values": WIDTHS[1]}
    sides[which] = kvq.Spec("int8", "token", aids=("rotate",))
    ways = turns_of(*sides.values(), 16, torch.device("cpu"))
    x = normal(3, 2, 16)
    same = {"keys": ("values", "outputs"), "values": ("keys", "queries")}[which]
    for name in ("keys", "queries", "values", "outputs"):
        assert torch.equal(turn(x, getattr(ways, name)), x) == (name in same)
