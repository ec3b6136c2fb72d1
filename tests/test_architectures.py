"""Models other than the packaged one: what works equals their own attention, and what
attention asks for beyond the cache is refused, never ignored."""

import pytest
import torch
from helpers import model_step, real_model, tiny_model

import kvq_lib as kvq

IDS = torch.randint(97, (40,), generator=torch.Generator().manual_seed(5))


#: For kinds of models that know no grouped queries.
EVERY_HEAD = {"num_key_value_heads": 4}


def own_logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


def mixture(**options):
    return {"num_experts_per_tok": 2, "num_local_experts": 4, **options}


BART = {
    **EVERY_HEAD,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "is_encoder_decoder": False,
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 4, "attention_bias": True}),
        ("Llama", {"num_key_value_heads": 1, "head_dim": 24}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Phi3", {}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 64}),
        ("Mistral", {"sliding_window": 40}),
        ("Gemma", {"head_dim": 8}),
        ("Gemma3Text", {"head_dim": 8, "sliding_window": 64}),
        ("Granite", {"attention_multiplier": 0.3}),
        ("Olmo2", {}),
        ("Cohere2", {"sliding_window": 64}),
        ("GPT2", {**EVERY_HEAD, "scale_attn_by_inverse_layer_idx": True}),
        ("GPTNeoX", EVERY_HEAD),
        ("OPT", {**EVERY_HEAD, "word_embed_proj_dim": 32, "ffn_dim": 48}),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [None, 7])
def test_native_equals_the_models_own_attention(kind, options, chunk):
    model = tiny_model(kind, **options)
    assert model.config._attn_implementation == "sdpa"
    wanted = own_logits(model)
    found = kvq.logits(model, IDS, "native", page_size=8, chunk=chunk)
    assert found.dtype == torch.float64
    assert (found - wanted).abs().max() < 1e-9 * wanted.abs().max()
    # And the attention of these weights matters: quantizing it shows.
    coarse = kvq.logits(model, IDS, "int2-kivi", page_size=8, chunk=chunk)
    assert (coarse - wanted).abs().max() > 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Gemma2", {"head_dim": 8}, "softcap"),
        (
            "GptOss",
            mixture(head_dim=8, sliding_window=64, dtype=torch.float32),
            "s_aux",
        ),
        ("Mistral", {"sliding_window": 8}, "window of 8"),
        ("Mistral", {"sliding_window": 39}, "window of 39 over a context of 40"),
        ("Gemma3Text", {"head_dim": 8, "sliding_window": 16}, "window of 16"),
        ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "bloom"),
        ("DiffLlama", {}, "DiffLlama"),
        ("Falcon", {"num_kv_heads": 4, "multi_query": False}, "Falcon"),
        # Positions from the padding token's id on; one cache for several layers; keys
        # for each expert, which the config counts otherwise.
        ("Roberta", {"is_decoder": True}, "roberta does not count"),
        ("XLMRoberta", {"is_decoder": True}, "roberta does not count"),
        ("Gemma3nText", {"num_kv_shared_layers": 1, "head_dim": 8}, "shares a cache"),
        ("JetMoe", {"kv_channels": 8}, "JetMoe"),
        # Positions counted anew in each chunk.
        ("Bart", BART, "bart counts positions by itself"),
        ("Pegasus", BART, "pegasus counts positions by itself"),
        # A window that reaches the layers by their mask alone.
        ("Phimoe", mixture(head_dim=8, sliding_window=8, dtype=torch.float32), "of 8"),
        ("Llama", {"is_causal": False}, "not causal"),
    ],
    ids=str,
)
def test_attention_that_the_cache_does_not_implement_is_refused(kind, options, reason):
    model = tiny_model(kind, **options)
    before = model.config._attn_implementation
    for call in (
        lambda: kvq.logits(model, IDS, "native", page_size=8),
        lambda: kvq.perplexity(model, IDS[None], "int8", page_size=8),
        lambda: kvq.generate(model, Decoder(), [IDS.tolist()], max_new_tokens=1),
    ):
        with pytest.raises(kvq.UnsupportedModel, match=reason):
            call()
        assert model.config._attn_implementation == before
    own_logits(model)


def test_a_sliding_window_is_refused_when_the_context_outgrows_it():
    model = tiny_model("Mistral", sliding_window=32)
    kvq.logits(model, IDS[:32], "native", page_size=8)
    for chunk in (1, 7, None):
        with pytest.raises(kvq.UnsupportedModel, match="window of 32"):
            kvq.logits(model, IDS[:33], "native", page_size=8, chunk=chunk)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (
            "Llama",
            {
                "max_position_embeddings": 16,
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "rope_theta": 10000.0,
                },
            },
        ),
        (
            "Phi3",
            {
                "original_max_position_embeddings": 16,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                },
            },
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_rotary_phases_that_change_with_the_context_are_refused_or_do_not_matter(
    kind, options
):
    # These models rotate keys by a frequency that depends on the longest position of
    # the same forward pass: keys cached earlier keep another phase.
    model = tiny_model(kind, **options)
    try:
        whole = kvq.logits(model, IDS, "native", page_size=8)
        parts = kvq.logits(model, IDS, "native", page_size=8, chunk=7)
    except kvq.UnsupportedModel:
        return
    assert (parts - whole).abs().max() < 1e-9 * whole.abs().max()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_models_own_attention_is_restored(implementation):
    model = tiny_model()
    model.set_attn_implementation(implementation)
    wanted = own_logits(model)
    kvq.perplexity(model, IDS[None], "int4", page_size=8)
    kvq.logits(model, IDS, "int4", page_size=8)
    kvq.generate(model, Decoder(), [IDS.tolist()], max_new_tokens=2)
    with pytest.raises(kvq.InvalidArgument):  # a token that the model does not have
        kvq.logits(model, [5000], "int4", page_size=8)
    assert model.config._attn_implementation == implementation
    assert torch.equal(own_logits(model), wanted)
    out = model.generate(IDS[None], max_new_tokens=3, do_sample=False)
    assert out.shape[1] > 40


class Decoder:
    """As much of a tokenizer as generation from token ids needs."""

    eos_token_id = None

    def decode(self, tokens, skip_special_tokens):
        return ""


def test_a_step_that_fails_leaves_the_cache_as_it_was():
    model = tiny_model()
    cache = kvq.PagedKVCache(
        kvq.KVShape.of(model.config), "int4", 8, num_pages=9, dtype=torch.float64
    )
    seq = cache.add()
    model_step(model, cache, [seq], [[1] * 11])
    before = cache.stats()
    with pytest.raises(IndexError):
        model_step(model, cache, [seq], [[1, 5000]])
    assert cache.stats() == before and cache.length(seq) == 11
    rows = model_step(model, cache, [seq], [[1] * 9])
    wanted = kvq.logits(model, [1] * 20, "int4", page_size=8)[11:]
    assert (rows - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_a_model_that_gives_all_rows_is_asked_for_the_last():
    model, forward = tiny_model(), type(tiny_model()).forward
    wanted = kvq.generate(model, Decoder(), [IDS.tolist()], max_new_tokens=3)

    def all_rows(input_ids=None, position_ids=None, logits_to_keep=0, **options):
        options |= {"input_ids": input_ids, "position_ids": position_ids}
        return forward(model, **options)

    model.forward = all_rows
    assert kvq.generate(model, Decoder(), [IDS.tolist()], max_new_tokens=3) == wanted


def test_training_mode_is_left_and_then_restored():
    model = tiny_model(attention_dropout=0.5)
    wanted = kvq.perplexity(model, IDS[None], "int8", page_size=8)
    model.train()
    assert kvq.perplexity(model, IDS[None], "int8", page_size=8) == wanted
    assert all(module.training for module in model.modules())
    model.eval()
    model.model.layers[0].train()  # as where one layer is tuned
    before = [module.training for module in model.modules()]
    assert kvq.perplexity(model, IDS[None], "int8", page_size=8) == wanted
    assert [module.training for module in model.modules()] == before


def test_logits_that_overflow_are_told():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    for call in (
        lambda: kvq.perplexity(model, IDS[None], "int8", page_size=8),
        lambda: kvq.generate(model, Decoder(), [IDS.tolist()], max_new_tokens=2),
        lambda: kvq.generate(model, Decoder(), [IDS.tolist()], temperature=1.0),
    ):
        with pytest.raises(kvq.NonFiniteValue, match="logits"):
            call()
    with torch.no_grad():
        model.lm_head.weight[3] = 1e6
    assert kvq.perplexity(model, IDS[None], "int8", page_size=8) == torch.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_models_in_other_dtypes_keep_their_own(dtype):
    model = tiny_model(dtype=dtype)
    found = kvq.logits(model, IDS, "native", page_size=8)
    assert found.dtype == dtype
    wanted = own_logits(model).float()
    # A few roundings of a 16-bit number, in each of two layers.
    limit = 30 * torch.finfo(dtype).eps * wanted.abs().max()
    assert (found.float() - wanted).abs().max() < limit
    assert torch.isfinite(kvq.logits(model, IDS, "int8", page_size=8)).all()


def test_a_model_is_loaded_from_a_local_folder(tmp_path):
    _, tokenizer = real_model()
    model = tiny_model(vocab_size=len(tokenizer), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for folder in (str(tmp_path), tmp_path):
        loaded, its_tokenizer = kvq.load_model(folder)
        assert not loaded.training and loaded.dtype == torch.float32
        assert torch.equal(own_logits(loaded), own_logits(model))
        assert its_tokenizer("hello").input_ids == tokenizer("hello").input_ids
    half, _ = kvq.load_model(str(tmp_path), dtype=torch.float64)
    assert half.dtype == torch.float64
    (out,) = kvq.generate(loaded, its_tokenizer, ["hello"], max_new_tokens=3)
    assert 1 <= len(out.tokens) <= 3


def test_the_packaged_model_needs_no_network(monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model, tokenizer = kvq.load_model("smollm2-135m")
    shape = kvq.KVShape.of(model.config)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (30, 3, 64)
    assert model.config._attn_implementation == "sdpa"
    assert tokenizer.decode(tokenizer("a b").input_ids) == "a b"
