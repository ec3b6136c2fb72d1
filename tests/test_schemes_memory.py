"""Named recipes, the bits that they take, and the memory formulas."""

import dataclasses
import math
import sys

import pytest
import torch
from helpers import SCHEMES, WINDOWS, advance, cold_pools, hot_pools, recipe, stream
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq_lib as kvq

GIB = 2**30
#: Whose bits are written down; those of mixed widths depend on the allocation.
TABLE = [name for name in kvq.SCHEMES if name != "mixed"]


def bits_by_the_book(name, page, dim):
    """The table: bits for each number, keys and values averaged."""
    return {
        "native": 16,
        "fp16": 16,
        "fp8": 8 + 16 / (page * dim),
        "int8": 8 + 16 / dim,
        "int4": 4 + 32 / dim,
        "int4-kivi": (4 + 32 / page + 4 + 32 / dim) / 2,
        "int2-kivi": (2 + 32 / page + 2 + 32 / dim) / 2,
        "k8v4": 6 + 24 / dim,
        "nvfp4": 4.5 + 16 / (page * dim),
        "int4-rotated": 4 + 32 / dim,
        "int8-static": 8,
        "fp8-static": 8,
        "int4-feedback": (4 + 32 / page + 4 + 32 / dim) / 2,
        "int2-feedback": (2 + 32 / page + 2 + 32 / dim) / 2,
    }[name]


# -- bits ----------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", TABLE)
def test_bits_per_element_of_live_tensors_match_the_table(name, dim, page_size):
    shape = kvq.KVShape(num_layers=2, num_kv_heads=3, head_dim=dim)
    scheme = recipe(name, shape, page_size)
    cache = kvq.PagedKVCache(shape, scheme, page_size=page_size, num_pages=4)
    assert cache.bits_per_element == pytest.approx(
        bits_by_the_book(name, page_size, dim), rel=1e-12
    )
    if name != "native":
        given_by_formula = scheme.bits_per_element(page_size, dim)
        assert given_by_formula == pytest.approx(cache.bits_per_element, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_native_takes_the_bits_of_its_dtype(dtype):
    shape = kvq.KVShape(1, 2, 8)
    cache = kvq.PagedKVCache(shape, "native", num_pages=2, dtype=dtype)
    assert cache.bits_per_element == 8 * dtype.itemsize
    assert cold_pools(cache) == []


@pytest.mark.parametrize("name", [name for name in TABLE if name != "native"])
def test_storage_is_packed_bytes_with_half_precision_scales(name):
    # Nothing is quantized by name only: what the pools hold is what is billed.
    shape = kvq.KVShape(2, 3, 64)
    scheme = recipe(name, shape)
    cache = kvq.PagedKVCache(shape, scheme, num_pages=4, num_hot_pages=2)
    assert {pool.dtype for pool in cold_pools(cache)} <= {torch.uint8, torch.float16}
    cold = sum(p.untyped_storage().nbytes() for p in cold_pools(cache))
    hot = sum(p.untyped_storage().nbytes() for p in hot_pools(cache))
    elements = 2 * 2 * 3 * 64 * 16
    assert cold == 4 * elements * bits_by_the_book(name, 16, 64) / 8
    assert hot == 2 * elements * 2
    assert cache.nbytes == hot + cold


# -- schemes -------------------------------------------------------------------------


def test_the_named_schemes_are_those_of_the_table():
    recipes = {
        "native": (None, None),
        "fp16": (("fp16", None, True), ("fp16", None, True)),
        "fp8": (("fp8", "page", True), ("fp8", "page", True)),
        "int8": (("int8", "token", True), ("int8", "token", True)),
        "int4": (("int4", "token", False), ("int4", "token", False)),
        "int4-kivi": (("int4", "channel", False), ("int4", "token", False)),
        "int2-kivi": (("int2", "channel", False), ("int2", "token", False)),
        "k8v4": (("int8", "token", True), ("int4", "token", False)),
        "nvfp4": (("fp4", "block", True), ("fp4", "block", True)),
        "int8-static": (("int8", "static", True), ("int8", "static", True)),
        "fp8-static": (("fp8", "static", True), ("fp8", "static", True)),
    }
    for name, sides in recipes.items():
        found = kvq.scheme(name)
        for spec, wanted in zip((found.keys, found.values), sides, strict=True):
            assert spec == (wanted and kvq.Spec(*wanted))
        assert (found.name, found.recent, found.sinks) == (name, 0, 0)
        assert kvq.SCHEMES[name] == found


def test_the_table_of_schemes_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        kvq.SCHEMES["mine"] = kvq.scheme("int8")


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_recent_and_sinks_round_up_to_whole_pages(tokens, pages):
    law = kvq.scheme("int4", recent=tokens, sinks=0).law(16)
    assert (law.window, law.sinks) == (pages, 0)
    law = kvq.scheme("int4", recent=0, sinks=tokens).law(16)
    assert (law.window, law.sinks) == (0, pages)


def test_asking_for_a_window_changes_nothing_else():
    base = kvq.scheme("int4-kivi")
    changed = kvq.scheme("int4-kivi", recent=32, sinks=16)
    assert dataclasses.replace(changed, recent=0, sinks=0) == base
    assert kvq.scheme(changed) == changed
    assert kvq.scheme(changed, recent=0) == dataclasses.replace(changed, recent=0)
    assert kvq.SCHEMES["int4-kivi"].recent == 0


def test_native_is_all_sinks_and_seals_nothing():
    law = kvq.scheme("native").law(16)
    assert law.sinks == sys.maxsize
    assert not kvq.scheme("native").seals
    for length in (0, 1, 16, 1000):
        assert len(law.sealed(length)) == 0
        sinks, window = law.kept_hot(length)
        assert sinks == range(math.ceil(length / 16)) and len(window) == 0


@given(
    page=st.integers(1, 20),
    length=st.integers(0, 200),
    recent=st.integers(0, 70),
    sinks=st.integers(0, 70),
)
def test_each_earlier_page_is_read_once_hot_or_cold(page, length, recent, sinks):
    law = kvq.scheme("int4", recent=recent, sinks=sinks).law(page)
    own = length // page
    hot = [p for part in law.hot(own) for p in part]
    window, first = math.ceil(recent / page), math.ceil(sinks / page)
    wanted = {p for p in range(own + 1) if own - p <= window or p < first}
    assert len(hot) == len(set(hot)) and set(hot) == wanted
    assert set(law.cold(own)) == set(range(own)) - wanted


def test_a_scheme_of_ones_own_is_stored_as_it_says():
    mine = kvq.Scheme(
        "mine",
        keys=kvq.Spec("int4", "page", symmetric=True),
        values=kvq.Spec("int2", "token", symmetric=False),
        recent=16,
    )
    shape = kvq.KVShape(1, 2, 64)
    cache = kvq.PagedKVCache(shape, mine, page_size=16, num_pages=4)
    bits = (4 + 16 / 1024 + 2 + 32 / 64) / 2
    assert cache.bits_per_element == pytest.approx(bits, rel=1e-12)
    assert cache.scheme == mine


@pytest.mark.parametrize(
    "make",
    [
        lambda: kvq.scheme("int5"),
        lambda: kvq.scheme("INT8"),
        lambda: kvq.scheme(None),
        lambda: kvq.scheme(8),
        lambda: kvq.PagedKVCache(kvq.KVShape(1, 1, 8), "int3"),
        lambda: kvq.kv_bytes(kvq.KVShape(1, 1, 8), "int3", 16),
        lambda: kvq.Scheme("half", keys=kvq.Spec("int8", "token"), values=None),
        lambda: kvq.Scheme("half", keys=None, values=kvq.Spec("int8", "token")),
        lambda: kvq.Spec("int8", "row"),
        lambda: kvq.Spec("fp16", "token"),
        lambda: kvq.Spec("fp8", "page", symmetric=False),
    ],
)
def test_what_is_no_scheme_is_refused(make):
    with pytest.raises(kvq.UnsupportedScheme):
        make()


def test_an_unknown_scheme_is_told_the_known_ones():
    with pytest.raises(kvq.UnsupportedScheme, match=r"int5.*int4-kivi.*k8v4"):
        kvq.scheme("int5")


@pytest.mark.parametrize("field", ["recent", "sinks"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "16"])
def test_a_window_is_a_whole_number_of_tokens(field, value):
    with pytest.raises(kvq.InvalidArgument, match=field):
        kvq.scheme("int8", **{field: value})


# -- bytes ---------------------------------------------------------------------------


def test_the_textbook_example_is_one_gib():
    shape = kvq.KVShape(num_layers=32, num_kv_heads=8, head_dim=128)
    for name in ("native", "fp16"):
        assert kvq.kv_bytes(shape, name, seq_len=1024, batch=8) == GIB
    assert kvq.kv_bytes(shape, "native", 1024, 8, dtype=torch.float32) == 2 * GIB


@pytest.mark.parametrize(("tokens", "pages"), [(1024, 64), (1025, 65), (1, 1), (16, 1)])
def test_sixteen_tokens_make_a_page(tokens, pages):
    shape = kvq.KVShape(1, 1, 8)
    page = 2 * 16 * 8 * 2
    assert kvq.kv_bytes(shape, "native", tokens, page_size=16) == pages * page
    cache = kvq.PagedKVCache(shape, "native", page_size=16, num_pages=70)
    seq = cache.add()
    advance(cache, (seq, stream(shape, tokens), tokens))
    assert cache.stats().hot == pages


def held_bytes(cache):
    """Bytes of the pages in use, from the tensors and the counts."""

    stats = cache.stats()
    hot = sum(p.nbytes // p.shape[2] for p in hot_pools(cache))
    cold = sum(p.nbytes // p.shape[1] for p in cold_pools(cache))
    return stats.hot * hot + stats.cold * cold


@pytest.mark.parametrize(("recent", "sinks"), WINDOWS)
@pytest.mark.parametrize("name", SCHEMES)
def test_kv_bytes_is_what_a_cache_holds_at_every_length(name, recent, sinks):
    shape = kvq.KVShape(num_layers=2, num_kv_heads=3, head_dim=32)
    scheme = recipe(name, shape, 8, recent=recent, sinks=sinks)
    s = stream(shape, 90, groups=1)
    for dtype in (torch.float16, torch.float64):
        cache = kvq.PagedKVCache(shape, scheme, 8, num_pages=40, dtype=dtype)
        seq = cache.add()
        for length in range(1, 91):
            advance(cache, (seq, s, 1))
            wanted = kvq.kv_bytes(shape, scheme, length, page_size=8, dtype=dtype)
            assert held_bytes(cache) == wanted, length


@settings(max_examples=60)
@given(data=st.data())
def test_kv_bytes_counts_a_batch_however_it_was_fed(data):
    name = data.draw(st.sampled_from(SCHEMES))
    page = data.draw(st.sampled_from([1, 4, 16]))
    recent, sinks = (data.draw(st.integers(0, 40)) for _ in range(2))
    length, batch = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 3))
    chunk = data.draw(st.integers(1, 70))
    shape = kvq.KVShape(1, 2, 32)
    scheme = recipe(name, shape, page, recent=recent, sinks=sinks)
    cache = kvq.PagedKVCache(shape, scheme, page, num_pages=220)
    seqs = [cache.add() for _ in range(batch)]
    s = stream(shape, length, groups=1)
    for start in range(0, length, chunk):
        n = min(chunk, length - start)
        advance(cache, *((seq, s, n) for seq in seqs))
    assert held_bytes(cache) == kvq.kv_bytes(shape, scheme, length, batch, page)


def test_no_token_and_no_sequence_take_no_bytes():
    shape = kvq.KVShape(2, 2, 8)
    assert kvq.kv_bytes(shape, "int4", 0) == 0
    assert kvq.kv_bytes(shape, "int4", 100, batch=0) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"seq_len": -1},
        {"seq_len": 1.0},
        {"seq_len": 1, "batch": -1},
        {"seq_len": 1, "page_size": 0},
        {"seq_len": True},
    ],
)
def test_a_count_that_is_not_whole_is_refused(arguments):
    with pytest.raises(kvq.InvalidArgument):
        kvq.kv_bytes(kvq.KVShape(1, 1, 8), "int8", **arguments)


@pytest.mark.parametrize(
    ("available", "model", "activations", "each", "fit"),
    [
        (80, 16, 4, 10, 6),
        (80, 16, 4, 12, 5),
        (80, 80, 0, 1, 0),
        (80, 100, 0, 1, 0),
        (80, 79, 1, 1, 0),
        (80, 79, 0, 1, 1),
        (0, 0, 0, 1, 0),
        (24 * GIB, 15 * GIB, GIB, GIB, 8),
        (24 * GIB, 15 * GIB, GIB, GIB + 1, 7),
        (1.5, 0.25, 0.25, 0.5, 2),
    ],
)
def test_as_many_sequences_fit_as_there_is_room_for(
    available, model, activations, each, fit
):
    found = kvq.max_batch(available, model, activations, each)
    assert found == fit and isinstance(found, int)


@pytest.mark.parametrize(
    "amounts",
    [(-1, 0, 0, 1), (1, -1, 0, 1), (1, 0, -1, 1), (1, 0, 0, 0), (1, 0, 0, -1)],
)
def test_amounts_of_memory_that_make_no_sense_are_refused(amounts):
    with pytest.raises(kvq.InvalidArgument):
        kvq.max_batch(*amounts)


# -- shapes of models ----------------------------------------------------------------


def config(kind, **options):
    import transformers

    return getattr(transformers, kind)(**options)


@pytest.mark.parametrize(
    ("kind", "options", "shape"),
    [
        (
            "LlamaConfig",
            {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
            (32, 32, 128),
        ),
        (
            "LlamaConfig",
            {
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "hidden_size": 576,
            },
            (30, 3, 64),
        ),
        (
            "Qwen3Config",
            {
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "hidden_size": 1024,
                "head_dim": 128,
            },
            (28, 8, 128),
        ),
        ("GPT2Config", {"n_layer": 12, "n_head": 12, "n_embd": 768}, (12, 12, 64)),
    ],
    ids=["all heads", "grouped", "head dim of its own", "other names"],
)
def test_the_shape_of_a_model_comes_from_its_config(kind, options, shape):
    assert dataclasses.astuple(kvq.KVShape.of(config(kind, **options))) == shape


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("T5Config", "encoder-decoder"),
        ("DeepseekV3Config", "latent"),
        ("Qwen3NextConfig", "linear_attention"),
        ("MambaConfig", "mamba"),
    ],
)
def test_a_model_without_plain_keys_and_values_is_refused(kind, reason):
    with pytest.raises(kvq.UnsupportedModel, match=reason):
        kvq.KVShape.of(config(kind))


def test_a_model_with_one_kv_head_under_another_name_is_not_taken_for_71():
    # Falcon-7B: "multi_query" makes one head of keys and values, "num_kv_heads" is 71.
    try:
        shape = kvq.KVShape.of(config("FalconConfig"))
    except kvq.UnsupportedModel:
        return
    assert shape.num_kv_heads == 1


def test_layers_that_differ_in_shape_are_refused_with_a_clear_error():
    # Head dim and kv heads of this one differ between sliding and full layers.
    with pytest.raises(kvq.UnsupportedModel, match="gemma4"):
        kvq.KVShape.of(config("Gemma4TextConfig"))


@pytest.mark.parametrize("bad", [(0, 1, 8), (1, -1, 8), (1, 1, 1.5), (1, True, 8)])
def test_a_shape_has_whole_positive_numbers(bad):
    with pytest.raises(kvq.InvalidArgument):
        kvq.KVShape(*bad)
