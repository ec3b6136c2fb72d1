"""Attention patterns of heads are those that the cache computes."""

import pytest
import torch
from helpers import real_model, real_text

import kvq_lib as kvq
from kvq_lib.course.heads import moved, pattern, read_heads, sealed
from kvq_lib.errors import InvalidArgument, UnsupportedScheme

TOKENS = 64
WANTED = [(0, 0), (16, 6), (29, 8)]


@pytest.fixture(scope="module")
def heads():
    return read_heads(real_model()[0], real_text()[:TOKENS], WANTED)


def of_the_cache(head, name, recent):
    """The pattern as `PagedKVCache` computes it: where the values are one-hot, the
    outputs are the probabilities."""
    keys = kvq.SCHEMES[name].keys
    values = kvq.Spec("fp16")
    scheme = kvq.Scheme("keys alone", keys, values, recent=recent)
    shape = kvq.KVShape(1, 1, TOKENS)
    cache = kvq.PagedKVCache(
        shape, scheme, num_pages=8, dtype=torch.float16, backend="torch"
    )
    seq = cache.add()
    batch = cache.begin([seq], [TOKENS])
    q, k = (x.float().unsqueeze(1) for x in (head.queries, head.keys))
    out = cache.attend(0, batch, q, k, torch.eye(TOKENS).unsqueeze(1))
    cache.commit(batch)
    return out.squeeze(1).double()


@pytest.mark.parametrize("recent", [0, 9, 32])
@pytest.mark.parametrize("name", ["fp16", "fp8", "int8", "int4", "int4-kivi"])
def test_patterns_are_those_of_the_cache(heads, name, recent):
    for head in heads:
        assert head.keys.shape[1] == TOKENS  # so that values can be one-hot
        found = pattern(head, name, recent=recent)
        torch.testing.assert_close(
            found, of_the_cache(head, name, recent), atol=2e-5, rtol=0
        )


def test_keys_are_those_of_the_model(heads):
    model = real_model()[0]
    ids = torch.tensor([real_text()[:TOKENS]])
    with torch.inference_mode():
        layers = model(ids, use_cache=True).past_key_values.layers
    for head in heads:
        for found, given in (("keys", "keys"), ("values", "values")):
            theirs = getattr(layers[head.layer], given)[0, head.head // 3]
            ours = getattr(head, found).float()
            torch.testing.assert_close(ours, theirs, atol=0.01, rtol=1e-3)


def test_rows_are_shares_of_the_past(heads):
    p = pattern(heads[0], "int2-kivi")
    torch.testing.assert_close(p.sum(-1), torch.ones(TOKENS, dtype=torch.float64))
    assert (p.triu(1) == 0).all() and (p >= 0).all()


def test_a_window_of_everything_changes_nothing(heads):
    native = pattern(heads[1])
    assert moved(native, pattern(heads[1], "int4")) > 0.01
    assert moved(native, pattern(heads[1], "int4", recent=TOKENS)) == 0


def test_moved_is_a_share():
    half = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    other = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert moved(half, half) == 0
    assert moved(half, other) == 0.25


def test_what_cannot_be_read_is_refused(heads):
    model, text = real_model()[0], real_text()[:TOKENS]
    with pytest.raises(InvalidArgument, match="layer 30"):
        read_heads(model, text, [(30, 0)])
    with pytest.raises(InvalidArgument, match="heads are 0 to 8, got 9"):
        read_heads(model, text, [(0, 9)])
    with pytest.raises(InvalidArgument, match="native seals none"):
        sealed(heads[0], "native")
    with pytest.raises(InvalidArgument, match="seals none of 64"):
        sealed(heads[0], "int4", page_size=128)
    with pytest.raises(UnsupportedScheme, match="made for one model"):
        sealed(heads[0], "int4-feedback")
