"""Predictions of a full server: by hand, and what limits them."""

import pytest

import kvq_lib as kvq
from kvq_lib.course.roofline import TFLOPS, Model, gain, predict
from kvq_lib.kernels.budget import BANDWIDTH

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def model():
    return Model.of(LLAMA)


def test_a_model_is_counted_by_hand(model):
    layer = 512 * (512 + 256 + 256 + 512) + 3 * 512 * 1024 + 2 * 512
    assert model.parameters == 4 * layer + 2 * 1000 * 512 + 512
    assert model.width == 4 * 4 * 128


def test_a_prediction_by_hand(model):
    found = predict(model, "L4", "fp16", 1000, 200, offered=3)
    weights, token = 2 * model.parameters, 2 * 4 * 2 * 128 * 2
    moving = (weights + 3 * 1100 * token) / (BANDWIDTH["L4"] * 1e9)
    computing = 3 * (2 * model.parameters + 4 * model.width * 1100) / 121e12
    assert found.batch == 3
    assert found.step_seconds == pytest.approx(max(moving, computing))
    assert found.decode_bound == "memory" and moving > computing
    reading = 1000 * (2 * model.parameters + 2 * model.width * 1000) / 121e12
    prefill = max(reading, weights / (BANDWIDTH["L4"] * 1e9))
    assert found.prefill_seconds == pytest.approx(prefill)
    request = prefill + 200 * found.step_seconds / 3
    assert found.tokens_per_second == pytest.approx(200 / request)
    assert found.prefill_share == pytest.approx(prefill / request)


def test_the_batch_is_the_planners(model):
    found = predict(model, "T4", "int8", 3000, 1000)
    (row,) = kvq.plan(
        LLAMA, "T4", 4000, "int8", weights=2 * model.parameters, reserve="1GiB"
    ).schemes
    assert found.batch == row.max_batch > 100


def test_a_gain_is_at_most_that_of_the_batch_and_prefill_eats_it(model):
    long, short = (gain(model, "L4", "int4", 4096, a) for a in (4096, 16))
    batches = [predict(model, "L4", s, 4096, 4096).batch for s in ("int4", "fp16")]
    assert 1 < short < long <= 1.01 * batches[0] / batches[1]


def test_without_more_requests_only_the_bytes_count(model):
    alone = gain(model, "L4", "int4", 16, 16, offered=1)
    assert 1 < alone < 1.01


def test_what_makes_no_sense_is_refused(model):
    with pytest.raises(kvq.InvalidArgument, match="no peak is known for 'L5', only T4"):
        predict(model, "L5", "int8", 10, 10)
    with pytest.raises(kvq.InvalidArgument, match="prompt"):
        predict(model, "L4", "int8", 0, 10)
    with pytest.raises(kvq.InvalidArgument, match="fits T4"):
        predict(model, "T4", "fp16", 10**7, 10)
    assert set(TFLOPS) == set(BANDWIDTH)
