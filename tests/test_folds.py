"""Why scales and zeros fold out of dot products: in float64, apart from kernels."""

import pytest
import torch

TOKENS, DIM = 48, 64


@pytest.fixture
def parts():
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    codes = torch.randint(16, (TOKENS, DIM), generator=random).double()
    return normal, codes


def close(a, b):
    return torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_scale_per_token_multiplies_the_score(parts):
    normal, codes = parts
    q, s, z = normal(DIM), normal(TOKENS, 1), normal(TOKENS, 1)
    expanded = (codes * s + z) @ q
    assert close((codes @ q) * s[:, 0] + q.sum() * z[:, 0], expanded)


def test_a_scale_per_channel_multiplies_the_query(parts):
    normal, codes = parts
    q, s, z = normal(DIM), normal(1, DIM), normal(1, DIM)
    expanded = (codes * s + z) @ q
    assert close(codes @ (q * s[0]) + q @ z[0], expanded)


def test_a_scale_per_token_multiplies_the_probability(parts):
    normal, codes = parts
    p, s, z = normal(TOKENS).softmax(0), normal(TOKENS, 1), normal(TOKENS, 1)
    expanded = p @ (codes * s + z)
    assert close((p * s[:, 0]) @ codes + (p * z[:, 0]).sum(), expanded)


def test_a_scale_per_channel_of_values_does_not_come_out_of_the_sum(parts):
    normal, codes = parts
    p, s = normal(2, TOKENS).softmax(1), normal(2, 1, DIM)
    # Two pages with scales of their own: no one factor serves their sum.
    expanded = p[0] @ (codes * s[0]) + p[1] @ (codes * s[1])
    assert not close((p[0] @ codes + p[1] @ codes) * s[0, 0], expanded)


def test_packed_halves_need_two_dots_and_no_interleave(parts):
    normal, codes = parts
    q = normal(DIM)
    low, high = codes.chunk(2, dim=1)
    packed = low + 16 * high
    again = packed % 16 @ q[: DIM // 2] + (packed // 16) @ q[DIM // 2 :]
    assert close(again, codes @ q)


def test_partial_softmax_merges_by_log_sum_exp(parts):
    normal, codes = parts
    scores = 10 * normal(TOKENS)
    partial = []
    for s, v in zip(scores.split(13), codes.split(13), strict=True):
        p = (s - s.max()).exp()
        partial.append((s.max(), p.sum(), p @ v))
    top = torch.stack([m for m, _, _ in partial]).max()
    total = sum((m - top).exp() * n for m, n, _ in partial)
    merged = sum((m - top).exp() * acc for m, _, acc in partial) / total
    assert close(merged, scores.softmax(0) @ codes)


def test_a_zero_far_from_the_codes_must_not_be_added_in_half_precision(parts):
    _, codes = parts
    step, zero = 0.25, 600.0
    exact = codes * step + zero
    rounded = (codes.half() * step + zero).double()
    assert (rounded - exact).abs().max() >= step / 2
