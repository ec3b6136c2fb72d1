"""The planner: bytes by hand for many kinds of models, and agreement with the cache."""

from pathlib import Path

import pytest
from helpers import advance, recipe, stream
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.layers import load_config
from kvq_lib.pages import Pages
from kvq_lib.sizes import most_hot, pages_touched

GIB = 2**30
CONFIGS = Path(__file__).parent / "configs"


def planned(name, context=4096, schemes="native", **options):
    """A plan for a config of `tests/configs` on 80 GiB, its weights not counted."""
    options = {"weights": 0, "utilization": 1.0, **options}
    return kvq.plan(CONFIGS / f"{name}.json", "80GiB", context, schemes, **options)


def row(*args, **options):
    return planned(*args, **options).schemes[0]


# -- bytes by hand -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        # 2 tensors * layers * kv heads * channels * 2 bytes * 4096 tokens.
        ("llama-2-7b", 2 * 32 * 32 * 128 * 2 * 4096),
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2 * 4096),
        ("qwen2.5-7b", 2 * 28 * 4 * 128 * 2 * 4096),
        ("falcon-7b", 2 * 32 * 1 * 64 * 2 * 4096),  # one kv head for 71 heads
        ("gemma-2-9b", 2 * 42 * 8 * 256 * 2 * 4096),  # 256, not 3584 / 16 = 224
        ("mistral-7b-v0.1", 2 * 32 * 8 * 128 * 2 * 4096),
        # One latent of 512 + 64 channels, whatever the heads.
        ("deepseek-v2-lite", 27 * (512 + 64) * 2 * 4096),
        # 4 of 32 layers attend.
        ("jamba-like", 2 * 4 * 8 * 128 * 2 * 4096),
        # The last 10 of 30 layers share; 4 of the first 20 are full, 16 have a window
        # of 512 tokens, which touches at most 33 pages of 16.
        ("gemma-3n-like", 2 * 2 * 256 * 2 * (4 * 4096 + 16 * 33 * 16)),
        # 12 layers are full, 12 have a window of 128 tokens: at most 9 pages of 16.
        ("gpt-oss-20b", 2 * 8 * 64 * 2 * (12 * 4096 + 12 * 9 * 16)),
    ],
)
def test_bytes_of_a_sequence_of_4096_tokens_in_16_bits(name, nbytes):
    found = row(name)
    assert (found.sequence_bytes, found.step_bytes) == (nbytes, 0)
    assert found.max_batch == (80 * GIB - found.chunk_bytes) // nbytes


@pytest.mark.parametrize(
    ("name", "gib"), [("llama-2-7b", 32), ("llama-3.1-8b", 8), ("qwen2.5-7b", 3.5)]
)
def test_the_known_examples_of_16_sequences(name, gib):
    assert 16 * row(name).sequence_bytes == gib * GIB


@pytest.mark.parametrize(
    ("name", "context", "layers", "windowed", "window_pages"),
    [
        # heads * channels: the same in every layer of each of these.
        ("gemma-2-9b", 8192, 21, 21, 257),  # 4096 tokens from within a page: 257
        ("gemma-2-9b", 4096, 21, 21, 256),  # the window is not full: every page
        ("gemma-2-9b", 4112, 21, 21, 257),
        ("mistral-7b-v0.1", 32768, 0, 32, 257),
        ("gpt-oss-20b", 131072, 12, 12, 9),
        ("gpt-oss-20b", 100, 12, 12, 7),  # ceil(100 / 16)
    ],
)
def test_a_layer_with_a_window_keeps_the_pages_that_it_touches(
    name, context, layers, windowed, window_pages
):
    width = {"gemma-2-9b": 8 * 256, "mistral-7b-v0.1": 8 * 128, "gpt-oss-20b": 8 * 64}
    page = 2 * width[name] * 16 * 2
    pages = layers * -(-context // 16) + windowed * window_pages
    found = row(name, context)
    assert found.sequence_bytes == pages * page
    full = context <= {"gemma-2-9b": 4096, "mistral-7b-v0.1": 4096}.get(name, 128)
    assert found.bytes_per_token == (layers + windowed) * page / 16
    growing = layers + windowed if full else layers
    assert found.bytes_per_token_at_context == growing * page / 16


def test_a_window_of_sealed_pages_by_hand():
    # Mistral at 8192 tokens under int4: 4 bits and 4 bytes a token and side. A head
    # keeps 256 cold pages (the window's tokens) and the hot page that fills.
    cold = 2 * 16 * (128 // 2 + 4)
    hot = 2 * 16 * 128 * 2
    found = row("mistral-7b-v0.1", 8192, "int4")
    assert found.sequence_bytes == 32 * 8 * (256 * cold + hot)
    assert found.step_bytes == 0
    # A chunk of 512: 4095 + 512 tokens are 288 pages; it touches 33 of them, hot.
    assert found.chunk_bytes == 32 * 8 * ((288 - 256) * cold + (33 - 1) * hot)


def test_chunked_layers_keep_at_most_a_chunk_of_attention():
    import transformers

    config = transformers.Llama4TextConfig()  # 36 of 48 layers: 8192 tokens
    page = 2 * 8 * 128 * 16 * 2
    found = kvq.plan(config, 2**50, 65536, "native", weights=0)
    assert found.schemes[0].sequence_bytes == page * (12 * 4096 + 36 * 513)


@pytest.mark.parametrize(
    ("scheme", "page"),
    [
        ("native", 576 * 16 * 2),
        ("int8", 16 * (576 + 2)),
        ("int4", 16 * (288 + 4)),
        ("fp8", 16 * 576 + 2),
        ("nvfp4", 16 * (288 + 36) + 2),
    ],
)
def test_a_latent_is_one_tensor(scheme, page):
    found = row("deepseek-v2-lite", 4096, scheme)
    assert found.sequence_bytes == 27 * 256 * page
    hot = 27 * 576 * 16 * 2
    assert found.step_bytes == (0 if scheme == "native" else hot)


@pytest.mark.parametrize("scheme", ["int4-kivi", "k8v4", "mixed", "int2-feedback"])
def test_schemes_that_tell_keys_from_values_do_not_go_with_a_latent(scheme):
    with pytest.raises(kvq.UnsupportedScheme, match=f"{scheme} .*latent"):
        planned("deepseek-v2-lite", 4096, scheme)
    skipped = dict(planned("deepseek-v2-lite", 4096, None).skipped)
    assert "latent" in skipped[scheme] and "int8" not in skipped


def test_mixed_is_sized_by_its_budget_until_it_is_allocated():
    # Keys of 6 bits, values of 4 bits and 4 bytes a token.
    found = planned("llama-3.1-8b", 4096, "mixed")
    page = 16 * 128 * 6 // 8 + 16 * (64 + 4)
    assert found.schemes[0].sequence_bytes == 32 * 8 * 256 * page
    assert any("mixed" in note and "budget" in note for note in found.notes)
    shape = kvq.KVShape(2, 2, 32)
    fitted = recipe("mixed", shape)
    config = {**LLAMA, "num_hidden_layers": 2, "head_dim": 32}
    found = kvq.plan(config, 2**40, 160, fitted, weights=0).schemes[0]
    assert found.sequence_bytes == kvq.kv_bytes(shape, fitted, 160)
    with pytest.raises(kvq.UnsupportedScheme, match="2 layers, not for 3"):
        kvq.plan({**config, "num_hidden_layers": 3}, 2**40, 160, fitted, weights=0)


# -- agreement with the cache --------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "dtype": "float16",
}
SIZED = [name for name in kvq.SCHEMES if name != "mixed"]


@settings(max_examples=150)
@given(
    name=st.sampled_from(SIZED),
    context=st.integers(1, 500),
    page=st.sampled_from([1, 3, 16, 64]),
    windows=st.tuples(st.integers(0, 70), st.integers(0, 70)),
)
def test_a_plain_model_takes_what_kv_bytes_says(name, context, page, windows):
    scheme = kvq.scheme(name, *windows)
    found = kvq.plan(LLAMA, GIB, context, scheme, page_size=page, weights=0)
    shape = kvq.KVShape(3, 2, 48)
    wanted = kvq.kv_bytes(shape, scheme, context, page_size=page)
    assert found.schemes[0].sequence_bytes == wanted


@pytest.mark.parametrize(
    "name", ["llama-2-7b", "llama-3.1-8b", "qwen2.5-7b", "falcon-7b"]
)
def test_models_that_the_cache_runs_take_what_kv_bytes_says(name):
    shape = kvq.KVShape.of(load_config(CONFIGS / f"{name}.json"))
    for found in planned(name, 4000, None).schemes:
        if found.scheme != "mixed":
            assert found.sequence_bytes == kvq.kv_bytes(shape, found.scheme, 4000)


@pytest.mark.parametrize("scheme", ["native", "int8", "int4-kivi", "int2-feedback"])
def test_a_cache_of_the_planned_bytes_holds_the_planned_batch(scheme):
    shape, page, context, chunk, batch = kvq.KVShape(2, 2, 16), 4, 30, 9, 3
    changes = {} if scheme == "native" else {"recent": 5, "sinks": 3}
    scheme = recipe(scheme, shape, page, **changes)
    config = {**LLAMA, "num_hidden_layers": 2, "head_dim": 16}
    options = {"page_size": page, "chunk": chunk, "weights": 0, "utilization": 1.0}
    found = kvq.plan(config, GIB, context, scheme, **options).schemes[0]
    each = found.sequence_bytes + found.step_bytes
    room = batch * each + found.chunk_bytes
    found = kvq.plan(config, room, context, scheme, **options).schemes[0]
    assert (found.max_batch, found.cache_bytes, found.left_bytes) == (batch, room, 0)

    law = scheme.law(page)
    hot = batch * most_hot(law, 8, 1) + most_hot(law, 8, chunk) - most_hot(law, 8, 1)
    cold = batch * len(law.sealed(context))
    cache = kvq.PagedKVCache(shape, scheme, page, max(cold, hot), hot)
    if scheme.seals:
        cache = kvq.PagedKVCache(shape, scheme, page, cold, hot)
    assert cache.nbytes == room
    s = stream(shape, context, groups=1)
    seqs = [cache.add() for _ in range(batch)]
    for seq in seqs:  # prefill one after the other, then decode together
        for start in range(0, 25, chunk):
            advance(cache, (seq, s, min(chunk, 25 - start)))
    for _ in range(5):
        advance(cache, *((seq, s, 1) for seq in seqs))
    assert [cache.length(seq) for seq in seqs] == [context] * batch


@given(
    page=st.integers(1, 9),
    context=st.integers(1, 120),
    chunk=st.integers(1, 60),
    recent=st.integers(0, 30),
    sinks=st.integers(0, 30),
)
def test_no_sequence_needs_more_hot_pages_and_some_sequence_needs_them_all(
    page, context, chunk, recent, sinks
):
    law = kvq.scheme("int4", recent, sinks).law(page)
    pages = -(-context // page)
    most, cold = most_hot(law, pages, chunk), len(law.sealed(context))
    worst = (pages - 1) * page + 1  # a step's last token opens the last page
    start = max(0, worst - chunk)
    steps = [*[1] * start, worst - start, *[1] * (context - worst)]

    def run(hot):
        tables = Pages(law, hot, cold)
        seq = tables.add()
        for length in steps:
            tables.commit(tables.begin([seq], [length]))

    run(most)
    with pytest.raises(kvq.OutOfPages):
        run(most - 1)
    for length in range(1, chunk + 1):  # steps of one size, wherever they fall
        tables = Pages(law, most, cold)
        seq = tables.add()
        for begun in range(0, context, length):
            step = tables.begin([seq], [min(length, context - begun)])
            tables.commit(step)


@given(tokens=st.integers(1, 200), page=st.integers(1, 20))
def test_neighbouring_tokens_touch_so_many_pages(tokens, page):
    counts = [len({i // page for i in range(s, s + tokens)}) for s in range(page)]
    assert pages_touched(tokens, page) == max(counts)


# -- tensor parallelism --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpus", "heads"),
    [
        ("llama-3.1-8b", 1, 8),
        ("llama-3.1-8b", 2, 4),
        ("llama-3.1-8b", 3, 3),
        ("llama-3.1-8b", 8, 1),
        ("llama-3.1-8b", 16, 1),  # replicated
        ("qwen2.5-7b", 8, 1),
        ("falcon-7b", 2, 1),
    ],
)
def test_each_gpu_has_its_share_of_the_kv_heads(name, gpus, heads):
    one, each = row(name), row(name, tensor_parallel=gpus)
    all_heads = {"llama-3.1-8b": 8, "qwen2.5-7b": 4, "falcon-7b": 1}[name]
    assert each.sequence_bytes * all_heads == one.sequence_bytes * heads


def test_a_latent_is_on_every_gpu_and_weights_are_divided():
    one = planned("deepseek-v2-lite", weights=10**9 + 1)
    four = planned("deepseek-v2-lite", weights=10**9 + 1, tensor_parallel=4)
    assert one.schemes[0].sequence_bytes == four.schemes[0].sequence_bytes
    assert (one.weight_bytes, four.weight_bytes) == (10**9 + 1, 250_000_001)
    assert any("latent" in note and "replicated" in note for note in four.notes)


# -- monotonic -----------------------------------------------------------------------

NAMES = sorted(p.stem for p in CONFIGS.glob("*.json") if p.stem != "t5-base")


@settings(max_examples=60)
@given(data=st.data())
def test_more_memory_never_fewer_longer_context_never_more(data):
    name = data.draw(st.sampled_from(NAMES))
    scheme = data.draw(st.sampled_from(["native", "int8", "int4", "nvfp4", "fp8"]))
    windows = data.draw(st.tuples(st.integers(0, 300), st.integers(0, 300)))
    page = data.draw(st.sampled_from([1, 5, 16, 256]))
    chunk = data.draw(st.integers(1, 3000))
    context, more = sorted(data.draw(st.integers(1, 20000)) for _ in range(2))
    memory, larger = sorted(data.draw(st.integers(1, 10**12)) for _ in range(2))

    def batch(memory, context, scheme=scheme):
        scheme = kvq.scheme(scheme, *windows)
        options = {"page_size": page, "chunk": chunk, "weights": 10**9}
        found = kvq.plan(parsed(name), memory, context, scheme, **options).schemes[0]
        assert found.step_bytes >= 0 and found.chunk_bytes >= 0
        return found.max_batch

    assert batch(memory, context) <= batch(larger, context)
    assert batch(memory, more) <= batch(memory, context)


def parsed(name, loaded={}):  # noqa: B006
    if name not in loaded:
        loaded[name] = load_config(CONFIGS / f"{name}.json")
    return loaded[name]


@settings(max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    pair=st.sampled_from(
        [("fp16", "int8"), ("int8", "int4"), ("int4", "int4-rotated"), ("fp8", "nvfp4")]
    ),
    context=st.integers(1, 20000),
    gigabytes=st.integers(1, 1000),
)
def test_fewer_bits_never_fewer_sequences(name, pair, context, gigabytes):
    more, fewer = kvq.plan(
        parsed(name), gigabytes * 10**9, context, pair, weights=10**9
    ).schemes
    assume(fewer.bits_per_element <= more.bits_per_element)
    assert fewer.max_batch >= more.max_batch
