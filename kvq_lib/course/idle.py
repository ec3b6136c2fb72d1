"""A model that computes nothing, for looking at the engine's scheduler alone.

Which requests run, and on which pages, is decided by integers: by lengths, page tables
and bytes. So a model that returns zeros at once shows the same schedule as a real one
of the same shape, thousands of times faster.
"""

import torch

WORDS = 97  # of its vocabulary


def idle_model(kv_heads: int = 1, head_dim: int = 128, layers: int = 1):
    """A model of a given shape in float16; every new token is token 0, and none ends
    an answer."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2**20,
        dtype=torch.float16,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.generation_config.eos_token_id = -1

    def forward(input_ids, position_ids, kvq_step, logits_to_keep=None, **others):
        _, batch = kvq_step
        batch.attended.update(range(layers))
        logits = torch.zeros(1, len(logits_to_keep), WORDS)
        return type("Output", (), {"logits": logits})

    model.forward = forward
    return model.eval()


class NoText:
    """A tokenizer for requests that are given as token ids, and whose text nobody
    reads."""

    eos_token_id = None

    def decode(self, tokens, skip_special_tokens):
        """An empty text."""
        return ""


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Random token ids: no two prompts share a first page."""
    draw = torch.Generator().manual_seed(1)
    return torch.randint(1, WORDS, (count, tokens), generator=draw).tolist()
