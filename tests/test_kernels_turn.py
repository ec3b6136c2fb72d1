"""The `turn` kernel against PyTorch: bit for bit, and in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_bounds import TURN_STEPS, UNIT
from kernel_cases import DEVICE, DTYPES, NAN, cases, new_flags, strided

from kvq_lib import turns
from kvq_lib.kernels.launch import NONFINITE, TOO_LARGE
from kvq_lib.kernels.turn import prepare, turn

DIMS = [16, 24, 40, 64, 80, 96, 128, 256]


def drawn_turn(draw, kv_heads: int, dim: int, random) -> turns.Turn:
    """A turn of which each step is there or not; a factor is never zero."""

    def maybe(make):
        return make().to(DEVICE) if draw(st.booleans()) else None

    def each():
        return torch.randn(kv_heads, dim, generator=random)

    def orders():
        return torch.stack(
            [torch.randperm(dim, generator=random) for _ in range(kv_heads)]
        )

    return turns.Turn(
        before=maybe(each),
        gain=maybe(lambda: (0.5 * each()).exp()),
        block=draw(st.sampled_from([1, turns.hadamard_block(dim)])),
        order=maybe(orders),
        after=maybe(each),
    )


def run(x, how, kv_heads, dtype, flags=None):
    """What the kernel writes, also where `turn` would see that nothing is to do."""
    out = torch.full(x.shape, NAN, dtype=dtype, device=DEVICE)
    for launch in prepare(x, out, how, kv_heads, flags):
        launch.run()
    return out


@pytest.mark.parametrize("dim", DIMS)
@given(data=st.data())
@cases(12)
def test_turn_gives_the_bits_of_pytorch(dim, data):
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    tokens, dtype = draw(st.integers(1, 40)), draw(st.sampled_from(DTYPES))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = strided(draw, (tokens, kv_heads * group, dim), dtype, NAN)
    x.copy_(torch.randn(x.shape, generator=random))
    how = drawn_turn(draw, kv_heads, dim, random)
    flags = new_flags(kv_heads)
    out, expected = run(x, how, kv_heads, torch.float32, flags), turns.turn(x, how)
    assert torch.equal(out, expected)
    assert flags.tolist() == [0] * kv_heads
    assert torch.equal(run(x, how, kv_heads, torch.float16), expected.half())


@pytest.mark.parametrize("dim", DIMS)
def test_turn_is_the_matrix_within_rounding(dim):
    # Not by way of PyTorch's butterflies: the matrix itself, from parities.
    random, block = torch.Generator().manual_seed(dim), turns.hadamard_block(dim)
    at = torch.arange(dim)
    both = (at % block).unsqueeze(1) & (at % block)
    parity = sum((both >> i) & 1 for i in range(8)) % 2
    same = (at // block).unsqueeze(1) == at // block
    matrix = (1.0 - 2.0 * parity.double()) * same * block**-0.5
    order = torch.stack([torch.randperm(dim, generator=random) for _ in range(2)])
    x, before, gain, after = (
        torch.randn(n, dim, generator=random) for n in (10 * 6, 2, 2, 2)
    )
    x = x.view(10, 6, dim).half()
    first, factor, places, last = (t.to(DEVICE) for t in (before, gain, order, after))
    how = turns.Turn(first, factor, block, places, last)
    heads = [h // 3 for h in range(6)]
    y = (x.double() - before[heads]) * gain[heads] @ matrix
    exact = y.gather(-1, order[heads].expand(y.shape)) + after[heads]
    for dtype in DTYPES:
        out = run(x.to(DEVICE), how, 2, dtype).cpu().double()
        size = y.norm(dim=-1) + after[heads].norm(dim=-1)
        allowed = TURN_STEPS * UNIT[torch.float32] * size
        allowed += UNIT[dtype] * exact.norm(dim=-1)
        assert ((out - exact).norm(dim=-1) <= allowed).all()


@pytest.mark.parametrize(
    ("bad", "dtype", "bit"),
    [
        (NAN, torch.float32, NONFINITE),
        (float("inf"), torch.float32, NONFINITE),
        (-float("inf"), torch.float16, NONFINITE),
        (3e38, torch.float32, TOO_LARGE),
        (6e4, torch.float16, TOO_LARGE),
        (6e4, torch.float32, 0),
    ],
)
def test_turn_flags_what_it_cannot_store(bad, dtype, bit):
    x = torch.zeros(20, 6, 64, device=DEVICE)
    x[17, 4, 33:35] = bad  # the two add up
    how, flags = (
        turns.Turn(gain=torch.full((2, 64), 8.0, device=DEVICE), block=64),
        new_flags(2),
    )
    out = turn(x, how, 2, dtype, flags)
    assert flags.tolist() == [0, bit]
    assert torch.equal(out[:17], torch.zeros_like(out[:17]))


def test_an_output_saturates():
    x = torch.full((3, 2, 64), 60000.0, device=DEVICE)
    after = torch.full((2, 64), -5520.0, device=DEVICE)
    how = turns.Turn(after=after)
    assert (turn(x, how, 2, torch.float16) == 54480).all()
    assert (turn(-x, how, 2, torch.float16) == -65504).all()


def test_nothing_to_do_is_not_done():
    x = torch.ones(3, 2, 64, device=DEVICE)
    assert turn(x, turns.Turn(), 2, torch.float32) is x
