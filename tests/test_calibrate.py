"""Calibration: what it keeps of a model's keys, values and queries."""

import dataclasses
import hashlib
import importlib
import itertools
import json

import pytest
import torch
from helpers import tiny_model
from hypothesis import given
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.calibrate import _stretches

IDS = torch.randint(97, (2, 192), generator=torch.Generator().manual_seed(4))

#: Kinds of models: grouped queries, one head of keys and values, other projections.
KINDS = {
    "grouped": ("Llama", {}),
    "one head": ("Llama", {"num_key_value_heads": 1, "attention_bias": True}),
    "[in, out]": ("GPT2", {"num_key_value_heads": 4}),
    "[out, in]": ("GPTBigCode", {"multi_query": True, "n_positions": 256}),
    "dense": ("GPTNeoX", {"num_key_value_heads": 4}),
    "scaled": ("Granite", {"attention_multiplier": 0.3}),
}
PROJECTIONS = {"GPT2": "c_proj", "GPTBigCode": "c_proj", "GPTNeoX": "dense"}


def heard(model, kind, ids, monkeypatch):
    """Queries, keys, values and factors of the model's own attention, by its own code:
    for each window and layer (q [heads, tokens, dim], k, v, factor, projection)."""
    name = type(model).__module__
    module, calls = importlib.import_module(name), []
    own = module.eager_attention_forward

    def listening(layer, query, key, value, *args, **options):
        factor = options.get("scaling")
        if factor is None:
            factor = layer.scaling if hasattr(layer, "scaling") else None
        projection = getattr(layer, PROJECTIONS.get(kind, "o_proj"))
        calls.append((query[0], key[0], value[0], factor, projection))
        return own(layer, query, key, value, *args, **options)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(module, "eager_attention_forward", listening)
        model.set_attn_implementation("eager")
        for window in ids:
            model(input_ids=window[None], use_cache=False)
        model.set_attn_implementation("sdpa")
    layers = len(calls) // len(ids)
    return [calls[i * layers : (i + 1) * layers] for i in range(len(ids))]


@pytest.fixture(scope="module", params=KINDS)
def found(request):
    kind, options = KINDS[request.param]
    model = tiny_model(kind, **options)
    patch = pytest.MonkeyPatch()
    calls = heard(model, kind, IDS, patch)
    patch.undo()
    return kvq.calibrate(model, IDS), calls


def assert_close(found, wanted, rel=1e-4):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= rel * wanted.abs().max()


def test_means_extremes_and_squares_are_those_of_all_tokens(found):
    calibration, calls = found
    assert calibration.tokens == IDS.numel()
    for layer in range(2):
        for at, side in ((1, "key"), (2, "value")):
            x = torch.cat([window[layer][at] for window in calls], dim=1).double()
            for name, wanted in (
                ("mean", x.mean(1)),
                ("low", x.amin(1)),
                ("high", x.amax(1)),
                ("square", x.square().mean(1)),
            ):
                kept = getattr(calibration, f"{side}_{name}")
                assert kept.dtype == torch.float32
                assert_close(kept[layer], wanted)


def test_the_moment_of_queries_is_their_mean_over_tokens_and_heads_of_a_group(found):
    calibration, calls = found
    for layer in range(2):
        q = torch.cat([window[layer][0] for window in calls], dim=1).double()
        kv_heads = calibration.shape.num_kv_heads
        per_head = torch.einsum("htd,hte->hde", q, q) / q.shape[1]
        wanted = per_head.unflatten(0, (kv_heads, -1)).mean(1)
        assert_close(calibration.query_moment[layer], wanted)


def test_samples_are_the_tokens_of_their_stretches(found):
    calibration, calls = found
    for layer in range(2):
        for at, kept in ((1, calibration.keys), (2, calibration.values)):
            # 64 to 127 and 128 to 191 of each window; never the first 64.
            wanted = torch.cat([w[layer][at][:, 64:192] for w in calls], dim=1)
            assert kept.dtype == torch.float16
            assert_close(kept[layer].double(), wanted.double(), rel=1e-3)


def projections(calls, layer, kv_heads):
    """The layer's own projection behind attention, as a function for each query head:
    [heads, dim, hidden]."""
    q, *_, projection = calls[0][layer]
    heads, _, dim = q.shape
    identity = torch.eye(heads * dim, dtype=q.dtype)
    with torch.no_grad():
        nothing = projection(torch.zeros(1, heads * dim, dtype=q.dtype))
        w = projection(identity) - nothing
    return w.view(kv_heads, heads // kv_heads, dim, -1).double()


def test_grams_are_those_of_the_output_projection(found):
    calibration, calls = found
    for layer in range(2):
        w = projections(calls, layer, calibration.shape.num_kv_heads)
        wanted = torch.einsum("hgdo,hgeo->hde", w, w)
        assert_close(calibration.output_gram[layer], wanted)


@pytest.mark.parametrize("name", ["grouped", "[out, in]", "scaled"])
def test_costs_are_the_squared_derivatives_of_the_layers_output(name, monkeypatch):
    """The output of a query is a function of all its keys and values. A small random
    error in each of them changes it by the sum of squared derivatives."""
    kind, options = KINDS[name]
    model, layer, ids = tiny_model(kind, **options), 1, IDS[:1, :128]
    calibration = kvq.calibrate(model, ids)
    calls = heard(model, kind, ids, monkeypatch)
    kv_heads, dim = calibration.shape.num_kv_heads, calibration.shape.head_dim
    w = projections(calls, layer, kv_heads)
    q, k, v, factor, _ = calls[0][layer]
    factor = dim**-0.5 if factor is None else factor
    q = q.unflatten(0, (kv_heads, -1))
    for side, kept in enumerate((calibration.key_cost, calibration.value_cost)):
        for head in range(kv_heads):
            wanted = sum(
                squared_derivatives(side, rows, k[head], v[head], projection, factor)
                for rows, projection in zip(q[head], w[head], strict=True)
            )
            assert_close(kept[layer, head], wanted / ids.numel())


def squared_derivatives(side, q, k, v, w, factor):
    """Σ over queries, tokens and outputs of (∂ output / ∂ x)(∂ output / ∂ x)ᵀ, with x
    the keys (0) or the values (1); by automatic differentiation, query by query."""
    hidden = torch.ones(len(q), len(k)).triu(1).bool()

    def outputs(x):
        keys, values = (x, v) if side == 0 else (k, x)
        scores = (q @ keys.T * factor).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ values @ w

    # Forward mode: one direction for each token and channel, all at once.
    x = (k, v)[side]
    total = torch.zeros(k.shape[1], k.shape[1], dtype=torch.float64)
    for start in range(0, len(x), 32):
        count = min(32, len(x) - start)
        ways = torch.zeros(count, k.shape[1], *x.shape, dtype=torch.float64)
        for t in range(count):
            ways[t, :, start + t] = torch.eye(k.shape[1], dtype=torch.float64)

        def along(way):
            return torch.func.jvp(outputs, (x,), (way,))[1]

        slopes = torch.func.vmap(along)(ways.flatten(0, 1))
        slopes = slopes.view(count, k.shape[1], -1)
        total += torch.einsum("tdo,teo->de", slopes, slopes)
    return total


# -- where samples are taken -----------------------------------------------------------


@given(windows=st.integers(1, 40), tokens=st.integers(128, 3000))
def test_stretches_are_spread_over_the_text_and_leave_out_the_first_tokens(
    windows, tokens
):
    found = _stretches(windows, tokens)
    places = [(w, start) for w, starts in found.items() for start in starts]
    per_window = (tokens - 64) // 64
    assert len(places) == min(8, windows * per_window) == len(set(places))
    assert places == sorted(places)
    for window, start in places:
        assert 0 <= window < windows
        assert start % 64 == 0 and 64 <= start <= tokens - 64
    # As evenly as there is room: no two are closer than others by more than one place.
    order = [w * per_window + start // 64 - 1 for w, start in places]
    gaps = [b - a for a, b in itertools.pairwise(order)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    total = windows * per_window
    assert order[0] <= total / 16 and order[-1] >= total * 15 / 16 - 1


def test_a_long_text_leaves_512_tokens():
    model = tiny_model(max_position_embeddings=1024)
    ids = torch.randint(97, (1, 1000), generator=torch.Generator().manual_seed(1))
    calibration = kvq.calibrate(model, ids)
    assert calibration.keys.shape == calibration.values.shape == (2, 2, 512, 8)


# -- words -----------------------------------------------------------------------------


def test_the_record_says_which_model_and_which_text():
    model = tiny_model()
    calibration = kvq.calibrate(model, IDS)
    digest = hashlib.sha256(json.dumps(IDS.tolist()).encode()).hexdigest()
    assert (calibration.text, calibration.tokens) == (digest, 384)
    assert calibration.model == "llama"
    assert calibration.shape == kvq.KVShape(2, 2, 8)
    assert kvq.calibrate(model, IDS, "mine").model == "mine"
    model.config.name_or_path = "someone/something"
    again = kvq.calibrate(model, IDS.int())
    assert (again.model, again.text) == ("something", digest)
    assert kvq.calibrate(model, IDS.flip(0)).text != digest


def test_the_model_is_left_as_it_was():
    model = tiny_model().train()
    before = [p.clone() for p in model.parameters()]
    kvq.calibrate(model, IDS)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert all(map(torch.equal, before, model.parameters()))
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sixteen_bit_models_are_described_like_others(dtype):
    model = tiny_model().to(dtype)
    found = kvq.calibrate(model, IDS)
    wanted = kvq.calibrate(model.double(), IDS)  # the same weights
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == getattr(wanted, field.name).dtype
    limit = 60 * torch.finfo(dtype).eps
    assert_close(found.key_mean, wanted.key_mean, rel=limit)
    assert_close(found.query_moment, wanted.query_moment, rel=limit)


# -- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        IDS[0],
        IDS.tolist(),
        None,
        IDS[:, :127],
        IDS[:0],
        IDS.float(),
        IDS + 97,
        IDS - 97,
        IDS.bool(),
        IDS.to("meta"),
        torch.zeros(1, 257, dtype=torch.int64),
    ],
    ids=[
        "one dim",
        "a list",
        "nothing",
        "too short",
        "no window",
        "floats",
        "unknown tokens",
        "negative tokens",
        "truths",
        "without numbers",
        "beyond the model's context",
    ],
)
def test_what_is_no_text_is_refused(ids):
    with pytest.raises(kvq.InvalidArgument):
        kvq.calibrate(tiny_model(), ids)


@pytest.mark.parametrize("name", [5, b"x", ["x"]])
def test_a_name_is_a_text(name):
    with pytest.raises(kvq.InvalidArgument, match="name"):
        kvq.calibrate(tiny_model(), IDS, name)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Gemma2", {"head_dim": 8}, "softcap"),
        ("Mistral", {"sliding_window": 100}, "window of 100"),
        ("Llama", {"is_causal": False}, "not causal"),
        ("BioGpt", {}, "kv_heads"),
    ],
    ids=str,
)
def test_a_model_that_the_cache_cannot_serve_is_refused(kind, options, reason):
    with pytest.raises(kvq.UnsupportedModel, match=reason):
        kvq.calibrate(tiny_model(kind, **options), IDS)


def test_what_is_no_model_is_refused():
    with pytest.raises(kvq.UnsupportedModel, match="Linear"):
        kvq.calibrate(torch.nn.Linear(2, 2), IDS)
    with pytest.raises(kvq.UnsupportedBackend, match="meta"):
        kvq.calibrate(tiny_model().to("meta"), IDS)


def test_a_projection_that_is_not_found_is_told():
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    attention.o_proj = torch.nn.Sequential(attention.o_proj)
    with pytest.raises(kvq.UnsupportedModel, match=r"layers \[1\].*o_proj"):
        kvq.calibrate(model, IDS)


def test_numbers_that_overflow_are_told():
    model = tiny_model(dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] = torch.inf
    with pytest.raises(kvq.NonFiniteValue, match="layer 1"):
        kvq.calibrate(model, IDS)
    model = tiny_model(dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e6)
    with pytest.raises(kvq.ValueOutOfRange, match=r"values.*65504"):
        kvq.calibrate(model, IDS)
