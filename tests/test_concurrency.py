"""Many long sequences on one budget: how many the engine's scheduler runs at a time."""

import pytest
import torch
from helpers import tiny_model

import kvq_lib as kvq
from kvq_lib.course.idle import NoText, idle_model, prompts

CONTEXT, ANSWER = 4096, 256
NAMES = ("native", "fp16", "int8", "int4")


def served(model, scheme, sequences, chunk):
    """The most sequences that run at a time, once nobody else gets in.

    Args:
        sequences: so many fit the budget in 16 bits.
    """
    shape = kvq.KVShape.of(model.config)
    tokens = sequences * (CONTEXT + 128)
    engine = kvq.Engine(
        model,
        NoText(),
        scheme,
        memory_bytes=tokens * shape.elements_per_token * 2,
        context=CONTEXT + 128,
        chunk=chunk,
        clock=kvq.VirtualClock(),
    )
    assert engine.cache.dtype == torch.float16
    asked = prompts(4 * sequences, CONTEXT)
    for prompt in asked:
        engine.submit(kvq.Request(prompt, ANSWER))
    last = None
    while last is None or last.tokens > last.running:  # as long as prompts are read
        for event in engine.step():
            assert event.result is None, "an answer ended before all had begun"
        last = engine.metrics.usage[-1]
    # Tokens were left, and nobody got in: for want of pages.
    assert last.waiting > 0 and last.running < engine.chunk
    assert engine.metrics.prefix_tokens == 0
    assert engine.metrics.computed_tokens >= last.running * CONTEXT
    return engine.metrics.peak_running


def assert_ratios(counted, sequences):
    baseline = max(counted["native"], counted["fp16"])
    assert baseline == sequences
    assert counted["int8"] >= 1.85 * baseline
    assert counted["int4"] >= 3.3 * baseline


def test_a_model_that_computes_serves_more_long_sequences_in_8_and_4_bits():
    model = tiny_model(
        dtype=torch.float16,
        head_dim=128,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    model.generation_config.eos_token_id = -1  # no answer ends by itself
    assert_ratios({name: served(model, name, 16, 2048) for name in NAMES}, 16)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_scheduler_alone_says_the_same_for_more_sequences(head_dim):
    model = idle_model(2, head_dim, 2)
    assert_ratios({name: served(model, name, 40, 4096) for name in NAMES}, 40)
