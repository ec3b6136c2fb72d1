"""PagedKVCache: arguments that are refused, and steps that do not fit."""

import pytest
import torch
from helpers import advance, assert_unchanged, frozen, stream

import kvq_lib as kvq

SHAPE = kvq.KVShape(num_layers=2, num_kv_heads=2, head_dim=8)
PAGE = 8


def new_cache(scheme="int8", pages=16, dtype=torch.float32, **options):
    return kvq.PagedKVCache(
        SHAPE, scheme, PAGE, num_pages=pages, dtype=dtype, **options
    )


def filled(cache, lengths=(21, 8), seed=0):
    """Some sequences, their streams, and room to go on."""
    parts = [
        (cache.add(), stream(SHAPE, 60, seed=seed + i, dtype=torch.float32), n)
        for i, n in enumerate(lengths)
    ]
    advance(cache, *parts, named=True)
    return parts


# -- arguments that are refused --------------------------------------------------------


def tensors(tokens=3, heads=4, kv_heads=2, dim=8, dtype=torch.float32):
    return [
        torch.zeros(tokens, h, dim, dtype=dtype) for h in (heads, kv_heads, kv_heads)
    ]


def changed(index, tensor):
    given = tensors()
    given[index] = tensor
    return given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (tensors(tokens=2), "k must be"),
        (tensors(tokens=4), "k must be"),
        (tensors(dim=16), "k must be"),
        (tensors(kv_heads=1), "k must be"),
        (tensors(heads=3), "q must be"),
        (tensors(heads=0), "q must be"),
        (changed(0, torch.zeros(2, 4, 8)), "q must be"),
        (changed(0, torch.zeros(3, 32)), "q must be"),
        (changed(1, torch.zeros(3, 2, 8, 1)), "k must be"),
        (changed(2, torch.zeros(3, 1, 8)), "v must be"),
        (tensors(dtype=torch.int32), "float"),
        (tensors(dtype=torch.float8_e4m3fn), "float"),
        (changed(1, torch.zeros(3, 2, 8, dtype=torch.float64)), "dtype"),
        (changed(2, torch.zeros(3, 2, 8, dtype=torch.float16)), "dtype"),
        (changed(1, torch.zeros(3, 2, 8, device="meta")), "meta"),
        (changed(0, torch.zeros(3, 4, 8, device="meta")), "meta"),
    ],
)
def test_a_wrong_shape_dtype_or_device_is_told_and_changes_nothing(given, said):
    cache = new_cache()
    parts = filled(cache)
    batch = cache.begin([parts[1][0]], [3])
    before = frozen(cache)
    with pytest.raises(kvq.InvalidArgument, match=said):
        cache.attend(0, batch, *given)
    assert_unchanged(cache, before)
    cache.attend(0, batch, *tensors())


def test_unequal_channels_of_keys_and_values_are_not_supported():
    cache = new_cache()
    batch = cache.begin([cache.add()], [3])
    q, k, _ = tensors()
    with pytest.raises(kvq.UnsupportedModel, match=r"8 .*4"):
        cache.attend(0, batch, q, k, torch.zeros(3, 2, 4))


@pytest.mark.parametrize("layer", [-1, 2, None, "0", 0.5])
def test_there_are_layers_from_zero_on(layer):
    cache = new_cache()
    batch = cache.begin([cache.add()], [3])
    with pytest.raises(kvq.InvalidArgument, match="layer"):
        cache.attend(layer, batch, *tensors())


def test_the_calls_of_a_step_come_in_order():
    cache = new_cache()
    seq = cache.add()
    batch = cache.begin([seq], [3])
    cache.attend(1, batch, *tensors())
    with pytest.raises(kvq.StepError, match="layer 1"):
        cache.attend(1, batch, *tensors())
    with pytest.raises(kvq.StepError, match="1 of 2 layers"):
        cache.commit(batch)
    assert cache.length(seq) == 0
    cache.attend(0, batch, *tensors())
    cache.commit(batch)
    assert cache.length(seq) == 3
    for call in (cache.commit, cache.abort, lambda b: cache.attend(0, b, *tensors())):
        with pytest.raises(kvq.StepError):
            call(batch)
    batch = cache.begin([seq], [3])
    cache.abort(batch)
    for call in (cache.commit, cache.abort, lambda b: cache.attend(0, b, *tensors())):
        with pytest.raises(kvq.StepError):
            call(batch)
    assert cache.length(seq) == 3


def test_a_step_of_another_cache_is_refused():
    one, two = new_cache(), new_cache()
    filled(two)
    before = frozen(two)
    batch = one.begin([one.add()], [3])
    with pytest.raises(kvq.StepError):
        two.attend(0, batch, *tensors())
    one.attend(0, batch, *tensors())
    one.attend(1, batch, *tensors())
    for call in (two.commit, two.abort):
        with pytest.raises(kvq.StepError):
            call(batch)
    assert_unchanged(two, before)
    one.commit(batch)


def test_handles_that_are_unknown_freed_or_foreign_are_refused():
    cache, other = new_cache(), new_cache()
    freed, foreign, mine = cache.add(), other.add(), cache.add()
    cache.free(freed)
    before = frozen(cache)
    for bad in (freed, foreign, 10**9, "x", None):
        for call in (
            cache.length,
            cache.free,
            cache.fork,
            lambda h: cache.begin([mine, h], [1, 1]),
        ):
            with pytest.raises(kvq.UnknownSequence, match="no sequence of this cache"):
                call(bad)
    assert_unchanged(cache, before)


def test_a_sequence_in_a_step_is_busy():
    cache = new_cache()
    (seq, _, _), (other, _, _) = filled(cache)
    batch = cache.begin([seq], [3])
    before = frozen(cache)
    for call in (cache.free, cache.fork, lambda h: cache.begin([other, h], [1, 1])):
        with pytest.raises(kvq.SequenceBusy):
            call(seq)
    assert_unchanged(cache, before)
    cache.abort(batch)
    cache.free(seq)


@pytest.mark.parametrize(
    ("lengths", "token_ids"),
    [
        ([1], None),
        ([1, 0], None),
        ([1, -3], None),
        ([1, 1.5], None),
        ([1, 2], [[5], [6]]),
        ([1, 2], [[5]]),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(lengths, token_ids):
    cache = new_cache()
    seqs = [part[0] for part in filled(cache)]
    before = frozen(cache)
    with pytest.raises(kvq.InvalidArgument):
        cache.begin(seqs, lengths, token_ids=token_ids)
    with pytest.raises(kvq.InvalidArgument, match="twice"):
        cache.begin([seqs[0], seqs[0]], [1, 1])
    assert_unchanged(cache, before)


@pytest.mark.parametrize("bad", [2**63, -(2**63) - 1, 1.7, "a", None])
def test_a_token_id_is_a_whole_number_of_64_bits(bad):
    # 1.7 must not be found as 1; and what cannot be hashed must not wait for commit,
    # which cannot fail.
    cache = new_cache()
    (seq, _, _), _ = filled(cache)
    before = frozen(cache)
    with pytest.raises(kvq.InvalidArgument):
        cache.begin([seq], [PAGE], token_ids=[[1] * (PAGE - 1) + [bad]])
    with pytest.raises(kvq.InvalidArgument):
        cache.add([bad] * (PAGE + 1))
    assert_unchanged(cache, before)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"backend": "cuda"}, kvq.UnsupportedBackend),
        ({"scheme": "int7"}, kvq.UnsupportedScheme),
        ({"page_size": 0}, kvq.InvalidArgument),
        ({"page_size": 16.0}, kvq.InvalidArgument),
        ({"num_pages": 0}, kvq.InvalidArgument),
        ({"num_hot_pages": -1}, kvq.InvalidArgument),
        ({"dtype": torch.int8}, kvq.InvalidArgument),
        ({"dtype": torch.float8_e4m3fn}, kvq.InvalidArgument),
        ({"shape": kvq.KVShape(1, 1, 7), "scheme": "int4"}, kvq.InvalidArgument),
        ({"shape": kvq.KVShape(1, 1, 6), "scheme": "int2-kivi"}, kvq.InvalidArgument),
    ],
)
def test_a_cache_that_cannot_be_is_refused(options, error):
    with pytest.raises(error):
        kvq.PagedKVCache(**{"shape": SHAPE, "scheme": "int8", **options})


def test_auto_says_which_backend_it_chose():
    assert new_cache(backend="auto").backend == "torch"
    assert new_cache(backend="torch").backend == "torch"


def test_a_device_may_be_named_with_its_index():
    cache = new_cache(device="cpu:0")
    batch = cache.begin([cache.add()], [3])
    cache.attend(0, batch, *tensors())


# -- too few pages ---------------------------------------------------------------------


@pytest.mark.parametrize("hot", [5, 16])
def test_too_few_pages_leave_no_trace(hot):
    # 5 hot pages run out of hot ones; 16 run out of cold ones first.
    cache = new_cache("int4", pages=6, num_hot_pages=hot)
    parts = filled(cache, lengths=(20, 9))
    before = frozen(cache)
    seqs = [p[0] for p in parts]
    with pytest.raises(kvq.OutOfPages, match="hot" if hot == 5 else "cold"):
        cache.begin(seqs, [5, 24])
    assert_unchanged(cache, before)
    # What fits goes on.
    advance(cache, (seqs[0], parts[0][1], 1), (seqs[1], parts[1][1], 1))


def test_a_fork_without_room_for_the_partial_page_leaves_no_trace():
    cache = new_cache("int8", pages=8, num_hot_pages=3)
    parts = filled(cache, lengths=(4, 3, 2))
    before = frozen(cache)
    with pytest.raises(kvq.OutOfPages, match="1 hot"):
        cache.fork(parts[0][0])
    assert_unchanged(cache, before)
    cache.free(parts[2][0])
    assert cache.length(cache.fork(parts[0][0])) == 4
