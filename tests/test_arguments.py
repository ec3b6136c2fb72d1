"""Arguments of the wrong type, size or kind: a clear error of the library's own, before
anything is computed, and never a silent wrong answer."""

import math

import numpy
import pytest
import torch
from helpers import real_model, tiny_model

import kvq_lib as kvq

SHAPE = kvq.KVShape(2, 2, 8)
IDS = [list(range(1, 41))]
NAN, INF = math.nan, math.inf
#: Python refuses to print an integer of so many digits.
ENDLESS = 10**5000
NOT_WHOLE = [1.5, "16", None, True, [16], 2**61, NAN]
GREEDY = {"scheme": "int8", "page_size": 8, "max_new_tokens": 2}


class Tokenizer:
    eos_token_id = None

    def decode(self, tokens, skip_special_tokens):
        return ""


def generate(prompts, **options):
    return kvq.generate(tiny_model(), Tokenizer(), prompts, **{**GREEDY, **options})


def perplexity(ids=IDS, **options):
    ids = ids if isinstance(ids, torch.Tensor) else torch.tensor(ids)
    return kvq.perplexity(tiny_model(), ids, **{"page_size": 8, **options})


def cache(**options):
    given = {"shape": SHAPE, "page_size": 4, "num_pages": 8, **options}
    return kvq.PagedKVCache(**given)


# -- recipes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: kvq.Scheme("x", "int8", "int4"), kvq.UnsupportedScheme),
        (lambda: kvq.Scheme("x", None, "int4"), kvq.UnsupportedScheme),
        (lambda: kvq.Scheme(3, None, None), kvq.UnsupportedScheme),
        (lambda: kvq.scheme(None), kvq.UnsupportedScheme),
        (lambda: kvq.scheme(["int8"]), kvq.UnsupportedScheme),
        (lambda: kvq.Spec(["int8"], "token"), kvq.UnsupportedScheme),
        (lambda: kvq.Spec("int8", ["token"]), kvq.UnsupportedScheme),
        (lambda: kvq.Spec("int8", "token", "no"), kvq.InvalidArgument),
        (lambda: kvq.Spec("int8", "token", 1), kvq.InvalidArgument),
        (lambda: kvq.quantize(torch.ones(2, 4), None), kvq.UnsupportedScheme),
        (lambda: kvq.quantize(torch.ones(2, 4), "int8", ["page"]), kvq.KVQError),
    ],
)
def test_a_recipe_is_made_of_what_exists(make, error):
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("bad", [*NOT_WHOLE, -1])
@pytest.mark.parametrize("field", ["recent", "sinks"])
def test_windows_and_sinks_are_whole_numbers(field, bad):
    if bad is None:  # keeps the scheme's own
        return
    with pytest.raises(kvq.InvalidArgument, match=field):
        kvq.scheme("int8", **{field: bad})


def test_numbers_of_numpy_and_torch_count_as_whole():
    for three in (numpy.int64(3), numpy.uint8(3), torch.tensor(3)):
        scheme = kvq.scheme("int8", recent=three)
        assert scheme == kvq.scheme("int8", recent=3) and type(scheme.recent) is int
        assert kvq.KVShape(three, three, three) == kvq.KVShape(3, 3, 3)
        store = cache(num_pages=three)
        batch = store.begin([store.add()], [three], token_ids=[[three] * 3])
        assert batch.lengths == [3] and type(batch.lengths[0]) is int
    assert generate([numpy.array([1, 2])]) == generate([torch.tensor([1, 2])])


@pytest.mark.parametrize("bad", [*NOT_WHOLE, 0])
def test_a_page_is_a_whole_number_of_tokens_everywhere(bad):
    for call in (
        lambda: generate(IDS, page_size=bad),
        lambda: perplexity(page_size=bad),
        lambda: kvq.logits(tiny_model(), IDS[0], page_size=bad),
        lambda: cache(page_size=bad),
        lambda: kvq.kv_bytes(SHAPE, "int8", 40, page_size=bad),
        lambda: kvq.scheme("int8").bits_per_element(bad, 64),
        lambda: kvq.scheme("int8").bits_per_element(16, bad),
        lambda: kvq.scheme("native").law(bad),
    ):
        with pytest.raises(kvq.InvalidArgument):
            call()


# -- sizes -----------------------------------------------------------------------------


def test_sizes_of_absurd_caches_are_still_exact():
    tokens = 2**60
    page = 2 * 2 * 2 * 8 * 16 * 2  # sides, layers, heads, dim, tokens, bytes
    assert kvq.kv_bytes(SHAPE, "native", tokens) == tokens // 16 * page
    scheme = kvq.scheme("int8", recent=2**60, sinks=2**60)
    assert kvq.kv_bytes(SHAPE, scheme, 32) == 2 * page


@pytest.mark.parametrize(
    "call",
    [
        lambda: kvq.KVShape(ENDLESS, 1, 1),
        lambda: kvq.KVShape(torch.tensor(True), 1, 1),
        lambda: kvq.KVShape(torch.ones(1, dtype=torch.int64, device="meta"), 1, 1),
        lambda: kvq.max_batch(10**400, 0, 0, 1),
        lambda: kvq.max_batch(True, 0, 0, 1),
        lambda: cache(page_size=2**60),
        lambda: cache(num_pages=2**50),
        lambda: cache(shape=kvq.KVShape(2**60, 1, 1)),
        lambda: cache().add([True] * 5),
        lambda: cache().add(b"abcdef"),
        lambda: cache().add(5),
        lambda: kvq.kv_bytes(SHAPE, "int8", 16, dtype="float16"),
        lambda: kvq.kv_bytes(SHAPE, "int8", 16, dtype=torch.int8),
        lambda: kvq.kv_bytes((2, 2, 8), "int8", 16),
        lambda: kvq.max_batch(NAN, 0, 0, 1),
        lambda: kvq.max_batch(1, 0, 0, INF),
        lambda: kvq.max_batch("80", 0, 0, 1),
        lambda: kvq.max_batch(1, None, 0, 1),
        lambda: kvq.max_batch(1, 0, 0, 0),
        lambda: cache(shape=(2, 2, 8)),
        lambda: cache(dtype="float16"),
        lambda: cache(dtype=None),
    ],
)
def test_sizes_are_refused_that_are_none(call):
    with pytest.raises(kvq.InvalidArgument):
        call()


def test_batches_are_counted_in_the_decimals_that_one_reads():
    assert kvq.max_batch(80, 14, 2, 0.64) == 100
    assert kvq.max_batch(0.3, 0.1, 0.1, 0.1) == 1
    assert kvq.max_batch(1, 2, 0, 0.1) == 0
    assert kvq.max_batch(1e308, 0, 0, 5e-324) > 10**600


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", 1.5, "meta", "hpu", 10**30])
def test_a_device_that_is_not_there_is_told(device):
    for call in (lambda: cache(device=device), lambda: kvq.load_model(device=device)):
        with pytest.raises(kvq.UnsupportedBackend, match="device"):
            call()


# -- a step ----------------------------------------------------------------------------


def step_of(store, tokens=3, **changed):
    """A layer of a step with some of its arguments changed; the step is then undone."""
    seq = store.add()
    batch = store.begin([seq], [tokens])
    given = {name: torch.ones(tokens, 2, 8) for name in "qkv"}
    given = {"layer": 0, "batch": batch, **given, **changed}
    try:
        return store.attend(**given)
    finally:
        store.abort(batch)
        store.free(seq)


@pytest.mark.parametrize(
    "changed",
    [
        {"layer": True},
        {"layer": 0.0},
        {"layer": "0"},
        {"q": None},
        {"k": [[1.0]]},
        {"v": numpy.ones((3, 2, 8))},
        {"scale": NAN},
        {"scale": INF},
        {"scale": "1"},
        {"scale": torch.ones(2)},
        {"scale": 10**400},
        {"scale": True},
        {"layer": ENDLESS},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_layer_of_a_step_takes_tensors_and_numbers(changed):
    with pytest.raises(kvq.InvalidArgument, match=next(iter(changed))):
        step_of(cache(), **changed)


@pytest.mark.parametrize(
    "arguments", [(None, [1]), ([1], None), (3, 3), ([1], [1], 5), ([1], [1], [None])]
)
def test_a_step_takes_lists(arguments):
    store = cache()
    seq = store.add()
    given = [
        [seq] if part == [1] and i == 0 else part for i, part in enumerate(arguments)
    ]
    with pytest.raises(kvq.InvalidArgument):
        store.begin(*given)


@pytest.mark.parametrize("batch", [None, 5, "x"])
def test_a_step_comes_from_begin(batch):
    store = cache()
    x = torch.ones(3, 2, 8)
    for call in (
        lambda: store.attend(0, batch, x, x, x),
        lambda: store.commit(batch),
        lambda: store.abort(batch),
    ):
        with pytest.raises(kvq.InvalidArgument, match="begin"):
            call()


@pytest.mark.parametrize("scheme", ["fp16", "int8", "int4"])
def test_the_largest_bfloat16_that_fits_a_half_is_the_last_one_taken(scheme):
    # 65504 itself is 65536 in bfloat16.
    store = cache(scheme=scheme, dtype=torch.bfloat16)
    for value, fits in ((65280.0, True), (65504.0, False), (65536.0, False)):
        x = torch.full((8, 2, 8), value, dtype=torch.bfloat16)
        if fits:
            assert torch.isfinite(step_of(store, 8, q=x * 0, k=x, v=x)).all()
        else:
            with pytest.raises(kvq.ValueOutOfRange, match="k exceeds 65504, layer 0"):
                step_of(store, 8, q=x * 0, k=x, v=x)


def test_autocast_does_not_reach_attention():
    draw = torch.Generator().manual_seed(1)
    given = {name: torch.randn(9, 2, 8, generator=draw) for name in "qkv"}
    wanted = step_of(cache(), 9, **given)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step_of(cache(), 9, **given), wanted)


@pytest.mark.parametrize("side", "kv")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scheme", ["int4", "fp8", "fp16", "int2-kivi"])
def test_what_no_page_could_hold_is_refused_when_it_comes(scheme, dtype, side):
    # The page is not full yet: sealed later, it would fail for an innocent token.
    wide = torch.full((3, 2, 8), 1e5, dtype=dtype)
    fine = torch.full((3, 2, 8), 1.0, dtype=dtype)
    given = {"q": fine, "k": fine, "v": fine, side: wide}
    with pytest.raises(kvq.ValueOutOfRange, match=f"{side} exceeds 65504, layer 0"):
        step_of(cache(scheme=scheme, dtype=dtype), **given)
    # A cache that seals nothing has the range of its own dtype.
    assert torch.isfinite(step_of(cache(scheme="native", dtype=dtype), **given)).all()


@pytest.mark.parametrize("scheme", ["int8", "int4", "int2-kivi", "fp8", "k8v4"])
def test_pages_at_the_end_of_the_range_can_be_sealed(scheme):
    draw = torch.Generator().manual_seed(0)
    sign = torch.randint(0, 2, (9, 2, 8), generator=draw) * 2.0 - 1
    store = cache(scheme=scheme, dtype=torch.float32)
    out = step_of(store, 9, q=0 * sign, k=sign * 65504, v=sign * 65504)
    assert torch.isfinite(out).all()


def test_scores_that_overflow_are_told():
    big = torch.full((3, 2, 8), 3e38)
    for scheme in ("native", "int8"):
        with pytest.raises(kvq.NonFiniteValue, match="overflow, layer 0, head 0"):
            step_of(cache(scheme=scheme), q=big, k=torch.full((3, 2, 8), 6e4))


def test_a_cache_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        store = cache(scheme="int4")
    wanted = step_of(cache(scheme="int4"), 9)
    assert torch.equal(step_of(store, 9), wanted)
    twin = store.fork(store.add())
    store.free(twin)


# -- dequantization --------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.int32, torch.float8_e4m3fn, "float32", None])
def test_codes_are_dequantized_to_floats(bad):
    with pytest.raises(kvq.InvalidArgument, match="dtype"):
        kvq.quantize(torch.ones(2, 8), "int4").dequantize(bad)


@pytest.mark.parametrize("fmt", ["int2", "int4", "int8", "fp8", "fp16"])
def test_half_precision_results_are_rounded_once_and_never_infinite(fmt):
    x = torch.linspace(-65504, 65504, 64).view(4, 16)
    for block in (x, x / 65504, x * 1e-5):
        made = kvq.quantize(block, fmt)
        for dtype in (torch.float16, torch.bfloat16):
            limit = torch.finfo(dtype).max
            wanted = made.dequantize(torch.float32).clamp(-limit, limit).to(dtype)
            assert torch.equal(made.dequantize(dtype), wanted)
            assert torch.isfinite(wanted).all()


def test_any_layout_that_is_dense_is_quantized_and_nothing_is_traced():
    x = torch.randn(2, 8, 16, requires_grad=True)
    for fmt in ("fp16", "int4", "fp8"):
        for view in (x.transpose(-1, -2), x[..., ::2], x[:1].expand(3, 8, 16)):
            made, plain = kvq.quantize(view, fmt), kvq.quantize(view.contiguous(), fmt)
            for one, other in zip(made.tensors, plain.tensors, strict=True):
                assert torch.equal(one, other) and not one.requires_grad
    for bad in (torch.empty(2, 8, device="meta"), torch.eye(8).to_sparse()):
        with pytest.raises(kvq.InvalidArgument, match="dense"):
            kvq.quantize(bad)


# -- texts and tokens ------------------------------------------------------------------

PROMPTS = [
    None,
    5,
    [1, 2, 3],
    b"bytes",
    [b"bytes"],
    [None],
    [[1.5, 2.0]],
    [torch.tensor([1.0, 2.0])],
    [torch.tensor([True, False])],
    [[True]],
    [torch.tensor([[1, 2]])],
    [["a"]],
    [[97]],
    [[-1]],
    [[2**70]],
    [[ENDLESS]],
    [torch.ones(2, dtype=torch.int64, device="meta")],
    iter([]),
]


@pytest.mark.parametrize("prompts", PROMPTS)
def test_prompts_are_texts_or_tokens_that_the_model_knows(prompts):
    with pytest.raises(kvq.InvalidArgument):
        generate(prompts)


@pytest.mark.parametrize(
    "options",
    [
        *({"max_new_tokens": bad} for bad in (*NOT_WHOLE, 0, -1)),
        *({"temperature": bad} for bad in (NAN, INF, -1.0, "0", None, 1j, 10**400)),
        *({"seed": bad} for bad in (None, -1, 0.5, 2**64)),
    ],
    ids=str,
)
def test_numbers_of_a_generation_are_in_their_range(options):
    with pytest.raises(kvq.InvalidArgument, match=next(iter(options))):
        generate([[1, 2]], **options)


def test_a_tiny_temperature_is_greedy():
    greedy = generate([[1, 2, 3]], max_new_tokens=9)
    for temperature in (1e-9, 1e-300, 5e-324):
        assert (
            generate([[1, 2, 3]], max_new_tokens=9, temperature=temperature) == greedy
        )


@pytest.mark.parametrize(
    "ids",
    [
        torch.ones(1, 40),
        torch.ones(1, 40, dtype=torch.bool),
        torch.ones(40, dtype=torch.int64),
        torch.ones(1, 1, dtype=torch.int64),
        torch.ones(0, 40, dtype=torch.int64),
        torch.full((1, 40), 97),
        torch.full((1, 40), -100),
    ],
    ids=lambda ids: f"{list(ids.shape)} {ids.dtype}",
)
def test_windows_are_matrices_of_tokens_that_the_model_knows(ids):
    with pytest.raises(kvq.InvalidArgument):
        perplexity(ids)


@pytest.mark.parametrize("window", [[], None, 5, [1.5], [97], "text", [[1, 2]]])
def test_a_window_is_a_row_of_tokens_that_the_model_knows(window):
    with pytest.raises(kvq.InvalidArgument):
        kvq.logits(tiny_model(), window)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_more_tokens_than_the_model_is_made_for_are_refused(kind):
    model = tiny_model(kind, num_key_value_heads=4, max_position_embeddings=32)
    row = list(range(33))
    kvq.logits(model, row[:32], page_size=8)
    kvq.generate(model, Tokenizer(), [row[:30]], **GREEDY)
    for call in (
        lambda: kvq.logits(model, row, page_size=8),
        lambda: kvq.perplexity(model, torch.tensor([row]), page_size=8),
        lambda: kvq.generate(model, Tokenizer(), [row[:31]], **GREEDY),
    ):
        with pytest.raises(kvq.InvalidArgument, match=r"33 tokens.* 32 positions"):
            call()


@pytest.mark.parametrize("model", [None, torch.nn.Linear(2, 2), "base"], ids=str)
def test_a_model_has_a_head_that_predicts_tokens(model):
    model = tiny_model().model if model == "base" else model
    for call in (
        lambda: kvq.logits(model, IDS[0]),
        lambda: kvq.perplexity(model, torch.tensor(IDS)),
        lambda: kvq.generate(model, Tokenizer(), IDS),
    ):
        with pytest.raises(kvq.UnsupportedModel, match="no language model"):
            call()
    with pytest.raises(kvq.InvalidArgument, match="no tokenizer"):
        kvq.generate(tiny_model(), None, IDS)


@pytest.mark.parametrize(
    "options",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": [4, 2]},
        {"hidden_size": None},
        {"hidden_size": 9},
        {"layer_types": [None]},
        {"layer_types": 5},
        {"layer_types": ["linear_attention"]},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused(options):
    from types import SimpleNamespace

    plain = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    assert kvq.KVShape.of(SimpleNamespace(**plain)) == kvq.KVShape(2, 4, 8)
    with pytest.raises(kvq.UnsupportedModel):
        kvq.KVShape.of(SimpleNamespace(**{**plain, **options}))


# -- models ----------------------------------------------------------------------------


def test_the_packaged_model_is_found_whatever_the_case_of_its_name():
    model, _ = kvq.load_model("SmolLM2-135M")
    assert model.config.num_hidden_layers == real_model()[0].config.num_hidden_layers


@pytest.mark.parametrize("name", [None, 5, "", b"smollm2-135m"])
def test_a_models_name_is_a_text_or_a_folder(name):
    with pytest.raises(kvq.InvalidArgument, match="name"):
        kvq.load_model(name)


def test_a_folder_without_a_model_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (tmp_path, str(tmp_path / "none"), "./none"):
        with pytest.raises(kvq.InvalidArgument, match="cannot load"):
            kvq.load_model(name)


@pytest.mark.parametrize("dtype", ["float16", torch.int8, 16])
def test_a_model_computes_in_a_float_dtype(dtype):
    with pytest.raises(kvq.InvalidArgument, match="dtype"):
        kvq.load_model(dtype=dtype)
