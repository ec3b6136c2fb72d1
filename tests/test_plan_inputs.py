"""What the planner reads: layers, weights, amounts of memory, configs."""

import dataclasses
import json

import pytest
import torch
from test_plan import GIB, LLAMA, planned

import kvq_lib as kvq
from kvq_lib.gpus import amount, gpu_memory
from kvq_lib.kernels.budget import BANDWIDTH
from kvq_lib.layers import HYBRID, LATENT, PLAIN, load_config, read_layers

# -- every model type, against the model itself ---------------------------------------

#: What the default config of some types lacks.
NEEDED = {
    "bamba": {"attn_layer_indices": [3, 7]},
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 1408,
    },
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "hidden_size": 16,
        "intermediate_size": 16,
        "vocab_size": 97,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0] * 10,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "laurel_rank": 4,
    },
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # names of arguments change
@pytest.mark.parametrize("name", sorted(PLAIN | LATENT | HYBRID))
def test_layers_are_those_of_the_models_own_cache(name):
    import transformers

    layers = {} if name in HYBRID else {"num_hidden_layers": 8}
    config = transformers.AutoConfig.for_model(
        name, **{**layers, **NEEDED.get(name, {})}
    )
    # No numbers: shapes alone.  One model looks at a number and is small enough.
    device = "cpu" if name == "gemma3n_text" else "meta"
    with torch.device(device), torch.no_grad():
        options = {"attn_implementation": "eager", "dtype": torch.bfloat16}
        make = transformers.AutoModelForCausalLM.from_config
        model = make(config, **options).eval()
        cache = transformers.DynamicCache(config=config)
        ids = torch.zeros(1, 5, dtype=torch.long)
        model(input_ids=ids, use_cache=True, past_key_values=cache)
    found = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None:
            window = getattr(layer, "sliding_window", None)
            numbers = (keys.numel() + values.numel()) // 5
            found.append((keys.shape[1], numbers, window))
    planned = read_layers(config).cached
    assert found == [
        (one.kv_heads, one.kv_heads * one.head_dim * one.tensors, one.window)
        for one in planned
    ]
    assert found


# -- weights -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Embedding and head; each layer's q and o, k and v, mlp, two norms; last norm.
        (
            "llama-2-7b",
            2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096,
        ),
        (
            "llama-3.1-8b",
            2 * 128256 * 4096
            + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
            + 4096,
        ),
        # Tied embeddings count once; four norms a layer.
        (
            "gemma-2-9b",
            256000 * 3584
            + 42 * (2 * 3584 * 4096 + 2 * 3584 * 2048 + 3 * 3584 * 14336 + 4 * 3584)
            + 3584,
        ),
    ],
)
def test_parameters_are_counted_from_the_config(name, parameters):
    found = planned(name, weights=None)
    assert (found.parameters, found.weight_bits) == (parameters, 16)
    assert found.weight_bytes == 2 * parameters


def test_experts_count_in_full():
    # DeepSeek-V2-Lite is known to have 15.7 billion parameters, 2.4 of them active.
    assert planned("deepseek-v2-lite", weights=None).parameters == 15_706_484_224


@pytest.mark.parametrize(
    ("dtype", "bits"), [("float32", 32), ("int4", 4), (4.5, 4.5), ("float8", 8)]
)
def test_weights_of_other_widths(dtype, bits):
    found = planned("llama-2-7b", weights=None, weight_dtype=dtype)
    assert found.weight_bytes == -(-6_738_415_616 * bits // 8)
    assert found.weight_bits == bits


def test_quantized_weights_are_not_guessed():
    with pytest.raises(kvq.UnsupportedModel, match=r"gpt_oss.*quantized"):
        planned("gpt-oss-20b", weights=None)
    assert planned("gpt-oss-20b", weights=None, weight_dtype=4.25).parameters > 2e10


def test_given_weights_are_taken_as_they_are():
    found = planned("llama-2-7b", weights="13 GB")
    assert (found.weight_bytes, found.parameters) == (13 * 10**9, None)
    with pytest.raises(kvq.InvalidArgument, match="not both"):
        planned("llama-2-7b", weights="13 GB", weight_dtype=4)


def test_where_the_memory_goes_adds_up():
    found = planned(
        "llama-3.1-8b", schemes=None, weights=None, reserve="2GiB", utilization=0.9
    )
    assert found.usable_bytes == 72 * GIB
    for one in found.schemes:
        each = one.sequence_bytes + one.step_bytes
        free = 72 * GIB - 2 * 8_030_261_248 - 2 * GIB
        assert one.max_batch == (free - one.chunk_bytes) // each
        assert one.cache_bytes == one.max_batch * each + one.chunk_bytes
        assert one.left_bytes == free - one.cache_bytes


def test_weights_that_do_not_fit_leave_nothing():
    found = planned("llama-2-7b", weights="81GiB").schemes[0]
    assert (found.max_batch, found.cache_bytes, found.left_bytes) == (0, 0, -GIB)


# -- amounts, and dtypes ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        (".5KB", 500),
        ("1 TiB", 2**40),
        ("0.1GB", 10**8),
        ("25769803776", 25769803776),
        ("7B", 7),
        (7, 7),
    ],
)
def test_amounts_of_memory(text, nbytes):
    assert amount("x", text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GB", "24G", "24Gb", "24 gigs", "-1GB", "1e9", "nan", "inf", "1,5GB"),
        *("9" * 400, "99999999999TiB", -1, 1.5, True, None),
    ],
)
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(kvq.InvalidArgument, match="x is"):
        amount("x", text)


def test_gpus_by_name_in_any_case():
    assert gpu_memory("h200") == 141 * 10**9
    assert gpu_memory("L4") == gpu_memory("24GB") < gpu_memory("24GiB")
    assert set(BANDWIDTH) <= set(kvq.MEMORY_GB)
    for bad in ("H300", "", "0GiB", 0):
        with pytest.raises(kvq.InvalidArgument):
            gpu_memory(bad)


def test_the_dtype_of_hot_pages():
    wide = {**LLAMA, "dtype": "float32"}

    def both(config, **options):
        names = ["native", "int8"]
        rows = kvq.plan(config, GIB, 8, names, weights=0, **options).schemes
        page = 3 * 2 * 2 * 48 * 16
        return [one.sequence_bytes / page for one in rows]

    assert both(LLAMA) == [2, 2]
    assert both(wide) == [4, 2]  # as PagedKVCache does for a model in float32
    assert both(wide, dtype=torch.float32) == [4, 4]
    assert both(LLAMA, dtype=torch.float32) == [4, 4]
    silent = {k: v for k, v in LLAMA.items() if k != "dtype"}
    assert both(silent) == [2, 2]
    notes = " ".join(kvq.plan(silent, GIB, 8, "native").notes)
    assert "hot pages are taken for float16" in notes and "16 bits per weight" in notes


# -- configs -------------------------------------------------------------------------


def test_a_model_is_a_file_a_folder_a_dict_or_a_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    plans = [
        kvq.plan(model, GIB, 100, "int8")
        for model in (
            tmp_path,
            str(tmp_path),
            tmp_path / "config.json",
            LLAMA,
            load_config(LLAMA),
        )
    ]
    assert all(found == plans[0] for found in plans)
    nested = {"model_type": "llava", "text_config": LLAMA, "dtype": "float16"}
    found = kvq.plan(nested, GIB, 100, "int8", weights=0)
    assert found.model == "llama" and found.schemes[0].sequence_bytes == (
        plans[0].schemes[0].sequence_bytes
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5"}, "t5 is an encoder-decoder"),
        ({"model_type": "bart"}, "bart is an encoder-decoder"),
        ({"model_type": "whisper"}, "whisper is an encoder-decoder"),
        ({"model_type": "mamba"}, "mamba has no layer with a cache"),
        ({"model_type": "bamba"}, "bamba has no layer with a cache"),
        ({"model_type": "deepseek_v32"}, "deepseek_v32 has layers of kind indexed"),
        ({"model_type": "gemma4_text"}, "gemma4_text"),
        ({"model_type": "jetmoe"}, "what jetmoe caches is not known"),
        ({"model_type": "mimo_v2_flash"}, "what mimo_v2_flash caches"),
        ({"model_type": "no_such_model"}, "knows no model type 'no_such_model'"),
        ({**LLAMA, "num_hidden_layers": 10**12}, "1000000000000 layers"),
        ({**LLAMA, "num_attention_heads": 0}, "a llama config that is wrong"),
        ({**LLAMA, "num_key_value_heads": 0}, "kv heads is a whole number, at least 1"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_what_is_not_known_is_refused_by_name(config, reason):
    with pytest.raises(kvq.KVQError, match=reason):
        kvq.plan(config, GIB, 100, weights=0)


@pytest.mark.parametrize(
    "options",
    [
        {"context": 0},
        {"context": -1},
        {"context": 1.5},
        {"context": 2**61},
        {"page_size": 0},
        {"tensor_parallel": 0},
        {"chunk": 0},
        {"utilization": 0},
        {"utilization": 1.01},
        {"utilization": float("nan")},
        {"weight_dtype": float("nan")},
        {"weight_dtype": 0},
        {"weight_dtype": "int3"},
        {"weights": "-1GB"},
        {"reserve": "1G"},
        {"dtype": torch.int8},
        {"gpu": "H300"},
        {"schemes": "int5"},
        {"schemes": []},
        {"schemes": 5},
        {"model": 5},
        {"model": {}},
        {"model": ""},
    ],
)
def test_what_makes_no_sense_is_refused(options):
    arguments = {"model": LLAMA, "gpu": GIB, "context": 100, **options}
    with pytest.raises(kvq.KVQError):
        kvq.plan(**arguments)


def test_huge_numbers_do_no_harm():
    found = kvq.plan(LLAMA, 2**60, 2**60, None, page_size=2**40, chunk=2**60)
    assert len(found.schemes) == len(kvq.SCHEMES)
    assert {one.max_batch for one in found.schemes if one.scheme == "native"} == {0}


def test_a_plan_becomes_plain_data():
    found = planned("deepseek-v2-lite", schemes=None)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert content["schemes"][0] == dataclasses.asdict(found.schemes[0])
    assert set(content["skipped"]) == {name for name, _ in found.skipped}


def test_states_sharing_and_long_contexts_are_noted():
    assert any("28 layers keep a state" in n for n in planned("jamba-like").notes)
    assert any("last 10 layers" in n for n in planned("gemma-3n-like").notes)
    long = " ".join(planned("llama-2-7b", 4097).notes)
    assert "beyond the 4096 tokens" in long
    assert "beyond" not in " ".join(planned("llama-2-7b", 4096, reserve=1).notes)
