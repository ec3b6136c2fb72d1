"""The Triton backend as the cache calls it."""

import pytest
import torch
from kernel_bounds import excess, oracle
from kernel_cases import DEVICE, FITTED, FREE, fitted

import kvq_lib as kvq
from kvq_lib.kernels import backend, launch, reference
from kvq_lib.turns import Found

SHAPE = kvq.KVShape(num_layers=2, num_kv_heads=2, head_dim=64)


def step(cache, seqs, lengths, seed):
    """One step of random tokens through every layer: the outputs, and what `oracle`
    says of each where the cache has PyTorch's tables."""
    random = torch.Generator().manual_seed(seed)
    batch = cache.begin(seqs, lengths)
    outs, truth = [], []
    for layer in range(SHAPE.num_layers):
        q, k, v = (
            torch.randn(sum(lengths), heads, 64, generator=random).half().to(DEVICE)
            for heads in (6, 2, 2)
        )
        outs.append(cache.attend(layer, batch, q, k, v))
        if cache.backend == reference.NAME:
            hot, cold = cache._hot[layer], cache._cold[layer]
            turns = cache._turns[layer]
            truth.append(oracle(q, hot, cold, batch.tables, 64**-0.5, turns))
    cache.commit(batch)
    return outs, truth


@pytest.mark.parametrize("name", [*FREE, *FITTED])
def test_a_cache_on_triton_does_what_it_does_on_torch(name):
    caches = [
        kvq.PagedKVCache(
            SHAPE,
            fitted(name, 2, 64, recent=16, sinks=5),
            num_pages=20,
            device=DEVICE,
            backend=chosen,
        )
        for chosen in ("triton", "torch")
    ]
    assert [cache.backend for cache in caches] == ["triton", "torch"]
    seqs = [[cache.add(), cache.add()] for cache in caches]
    for seed, lengths in enumerate(([40, 15], [1, 1], [1, 20])):
        (ours, _), (_, truth) = (
            step(cache, handles, lengths, seed)
            for cache, handles in zip(caches, seqs, strict=True)
        )
        for out, (expected, allowed) in zip(ours, truth, strict=True):
            assert excess(out, expected, allowed) <= 1
    pools = [cache._hot_tensors + cache._cold_tensors for cache in caches]
    for ours, theirs in zip(*pools, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(*(cache.clipped for cache in caches))
    assert caches[0].clipped.any() == (name in FITTED)


@pytest.mark.parametrize(
    ("bad", "error"), [(float("nan"), kvq.NonFiniteValue), (1e6, kvq.ValueOutOfRange)]
)
def test_commit_raises_what_the_kernels_flagged(bad, error):
    cache = kvq.PagedKVCache(SHAPE, num_pages=4, device=DEVICE, backend="triton")
    seq = cache.add()
    batch = cache.begin([seq], [3])
    for layer in range(2):
        q, k, v = (torch.zeros(3, 2, 64, device=DEVICE) for _ in range(3))
        if layer == 1:
            v[2, 1, 9] = bad
        cache.attend(layer, batch, q, k, v)
    with pytest.raises(error, match="layer 1, kv head 1"):
        cache.commit(batch)
    assert cache.length(seq) == 0 and cache.stats().hot == 0


@pytest.mark.parametrize("side", ["q", "k", "v"])
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (float("nan"), kvq.NonFiniteValue),
        (-float("inf"), kvq.NonFiniteValue),
        (6e4, kvq.ValueOutOfRange),  # float16 holds it, but not the sum of some
    ],
)
def test_what_turns_into_too_much_is_told(bad, error, side):
    cache = kvq.PagedKVCache(
        SHAPE, "int4-rotated", num_pages=4, device=DEVICE, backend="triton"
    )
    batch = cache.begin([cache.add()], [3])
    for layer in range(2):
        x = {n: torch.zeros(3, 2, 64, device=DEVICE).half() for n in "qkv"}
        if layer == 1:
            # The row is finite, or all of it is not: inf - inf must not hide it.
            x[side][2, 1] = bad
        cache.attend(layer, batch, **x)
    with pytest.raises(error, match="layer 1, kv head 1"):
        cache.commit(batch)


@pytest.mark.parametrize("tokens", [1, 20])
def test_turned_outputs_at_the_end_of_the_range_saturate(tokens):
    # Rounded in their own coordinates, values come back above the largest float16.
    center = torch.full((2, 64), 65504.0)
    aids = ("center", "rotate")
    sides = kvq.Spec("int4", "token", False), kvq.Spec("int2", "page", False, aids)
    fit = ((Found(), Found(center=center)),) * 2
    recipe = kvq.Scheme("odd", *sides, fit=fit)
    cache = kvq.PagedKVCache(
        SHAPE, recipe, num_pages=8, device=DEVICE, backend="triton"
    )
    seq, v = cache.add(), torch.full((20, 2, 64), 65504.0, device=DEVICE).half()
    v[::2] = 65440.0
    for count in {20, tokens}:
        batch = cache.begin([seq], [count])
        q = torch.zeros(count, 2, 64, dtype=torch.float16, device=DEVICE)
        outs = [cache.attend(layer, batch, q, q, v[:count]) for layer in range(2)]
        cache.commit(batch)
        assert all(out.isfinite().all() and (out > 65300).all() for out in outs)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("tokens", "before"), [(1, 0), (3, 0), (1, 200)])
@pytest.mark.parametrize("scheme", ["native", "int8"])
def test_scores_that_overflow_are_told(scheme, tokens, before, sign):
    # `decode` with and without splits, and `extend`.
    cache = kvq.PagedKVCache(
        SHAPE,
        scheme,
        num_pages=16,
        dtype=torch.float32,
        device=DEVICE,
        backend="triton",
    )
    seq = cache.add()
    for count, size in ((before, 1.0), (tokens, 3e38)):
        if not count:
            continue
        batch = cache.begin([seq], [count])
        q = torch.full((count, 2, 64), sign * size, device=DEVICE)
        k = torch.full((count, 2, 64), 6e4, device=DEVICE)
        for layer in range(2):
            cache.attend(layer, batch, q, k, k)
        if size == 1.0:
            cache.commit(batch)
    with pytest.raises(kvq.NonFiniteValue, match="layer 0, kv head 0"):
        cache.commit(batch)
    assert cache.length(seq) == before


@pytest.mark.parametrize("tokens", [1, 48])
@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4", "native"])
def test_values_at_the_end_of_the_range_do_not_become_infinite(scheme, tokens):
    cache = kvq.PagedKVCache(
        SHAPE, scheme, num_pages=8, device=DEVICE, backend="triton"
    )
    seq = cache.add()
    for count in {48, tokens}:
        batch = cache.begin([seq], [count])
        q = torch.zeros(count, 2, 64, dtype=torch.float16, device=DEVICE)
        v = torch.full_like(q, 65504.0)
        outs = [cache.attend(layer, batch, q, q, v) for layer in range(2)]
        cache.commit(batch)
        assert all((out == 65504.0).all() for out in outs)


@pytest.mark.parametrize("group", [17, 71])
@pytest.mark.parametrize("name", ["native", "int4-kivi"])
def test_any_number_of_query_heads_shares_a_kv_head(name, group):
    # Falcon-7B has 71.
    shape = kvq.KVShape(1, 1, 64)
    random = torch.Generator().manual_seed(0)
    outs = []
    q = torch.randn(20, group, 64, generator=random).half().to(DEVICE)
    k, v = (torch.randn(20, 1, 64, generator=random).half().to(DEVICE) for _ in "kv")
    for chosen in ("triton", "torch"):
        cache = kvq.PagedKVCache(
            shape, name, num_pages=4, device=DEVICE, backend=chosen
        )
        batch = cache.begin([cache.add()], [20])
        outs.append(cache.attend(0, batch, q, k, v).double())
        cache.commit(batch)
    assert (outs[0] - outs[1]).norm() < 2e-3 * outs[1].norm()


def test_pages_that_cannot_be_sealed_are_refused():
    def step_on(scheme):
        cache = kvq.PagedKVCache(
            SHAPE, scheme, page_size=24, num_pages=2, device=DEVICE, backend="triton"
        )
        step(cache, [cache.add()], [30], seed=0)

    with pytest.raises(kvq.UnsupportedBackend, match="got 24"):
        step_on("int8")
    step_on("native")


def test_a_key_beyond_its_page_is_called_that():
    cache = kvq.PagedKVCache(SHAPE, num_pages=4, device=DEVICE, backend="triton")
    batch = cache.begin([cache.add()], [1])
    q = torch.ones(1, 2, 64, device=DEVICE)
    for layer in range(2):
        cache.attend(layer, batch, q, q * 1e5, q)
    with pytest.raises(kvq.ValueOutOfRange, match="layer 0, kv head 0"):
        cache.commit(batch)


def test_a_wide_hot_page_takes_nothing_that_no_cold_page_could_hold():
    cache = kvq.PagedKVCache(
        SHAPE, num_pages=4, dtype=torch.float32, device=DEVICE, backend="triton"
    )
    batch = cache.begin([cache.add()], [3])
    q, k, v = (torch.zeros(3, 2, 64, device=DEVICE) for _ in range(3))
    k[1, 0, 5] = 1e5
    for layer in range(2):
        cache.attend(layer, batch, q, k, v)
    with pytest.raises(kvq.ValueOutOfRange, match="layer 0, kv head 0"):
        cache.commit(batch)


def test_flags_that_are_clear_raise_nothing():
    assert backend.check(backend.new_flags(3, 2, DEVICE)) is None


def test_values_by_channel_are_refused():
    keys = kvq.Spec("int4", "token", False)
    recipe = kvq.Scheme("odd", keys, kvq.Spec("int4", "channel", False))
    with pytest.raises(kvq.UnsupportedBackend, match="per channel"):
        kvq.PagedKVCache(SHAPE, recipe, device=DEVICE, backend="triton")
    assert kvq.PagedKVCache(SHAPE, recipe, num_pages=2).backend == reference.NAME


def test_float64_is_refused():
    with pytest.raises(kvq.UnsupportedBackend, match="float64"):
        kvq.PagedKVCache(SHAPE, dtype=torch.float64, device=DEVICE, backend="triton")


def test_bfloat16_is_refused_in_the_interpreter():
    if launch.interpreted():
        with pytest.raises(kvq.UnsupportedBackend, match="bfloat16"):
            kvq.PagedKVCache(SHAPE, dtype=torch.bfloat16, backend="triton")
    else:
        cache = kvq.PagedKVCache(SHAPE, dtype=torch.bfloat16, device=DEVICE)
        assert cache.backend == "triton"
