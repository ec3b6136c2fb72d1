"""Rounding with feedback: an error is pushed to where it costs least."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.fit import expected_cost, feedback_shares
from kvq_lib.quantize import quantize_as
from kvq_lib.storage import Aid

FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()

SPECS = [
    *(
        (fmt, granularity, symmetric)
        for fmt, granularity, symmetric in itertools.product(
            ("int2", "int4", "int8"), ("page", "token", "channel"), (False, True)
        )
    ),
    *((fmt, "static", True) for fmt in ("int4", "int8", "fp8")),
    *(("fp8", granularity, True) for granularity in ("page", "token", "channel")),
    ("fp4", "block", True),
]


def normal(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def correlated(kv_heads, dim, seed=0):
    """Matrices with eigenvalues from 1 to 1/1000, in no special direction."""
    turned = torch.linalg.qr(normal(kv_heads, dim, dim, seed=seed))[0]
    return turned * torch.logspace(0, -3, dim, dtype=torch.float64) @ turned.mT


def plain_and_fed(x, how, moment, damping=0.0):
    """x quantized without feedback, and with it."""
    fmt, granularity, symmetric = how
    scale = None
    if granularity == "static":
        largest = {"int4": 7, "int8": 127, "fp8": 448}[fmt]
        scale = (x.abs().amax((1, 2, 3)) / largest).half().view(-1, 1, 1, 1)
    shares = feedback_shares(moment, damping)
    plain = quantize_as(x, kvq.Spec(fmt, granularity, symmetric), [Aid(scale=scale)])
    spec = kvq.Spec(fmt, granularity, symmetric, ("feedback",))
    return plain, quantize_as(x, spec, [Aid(scale=scale, feedback=shares)])


def nearest(x, z):
    """What a number of steps rounds to, by tables and definitions."""
    fmt, symmetric = z.spec.format, z.spec.symmetric
    if fmt in ("fp4", "fp8"):
        table = FP4 if fmt == "fp4" else FP8
        distance = np.abs(table - abs(x))
        best = np.flatnonzero(distance == distance.min())
        return np.copysign(
            table[best[best % 2 == 0][0] if len(best) > 1 else best[0]], x
        )
    bits = int(fmt[3:])
    most = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    return min(max(np.rint(x), -most if symmetric else 0), most)


def slowly(x, z, shares):
    """GPTQ's rounding, one number after the other, in float64: what codes mean."""
    x, shares = x.numpy(), shares.numpy().astype(np.float64)
    if z.spec.format == "fp4":
        inner = z.scale.view(torch.float8_e4m3fn).double().numpy()
        scale = np.repeat(inner * z.outer.double().numpy(), 16, axis=-1)
    else:
        scale = np.broadcast_to(z.scale.double().numpy(), x.shape)
    zero = 0.0 if z.zero is None else z.zero.double().numpy()
    zero, out = np.broadcast_to(zero, x.shape), np.zeros_like(x)
    for head, page, token in np.ndindex(x.shape[:3]):
        at = head, page, token
        rest = x[at].copy()
        for d in range(x.shape[-1]):
            s, low = scale[at][d], zero[at][d]
            out[at][d] = nearest((rest[d] - low) / s, z)
            error = rest[d] - (out[at][d] * s + low)
            for later in range(d + 1, x.shape[-1]):
                rest[later] -= shares[head, d, later] * error
    return torch.from_numpy(out)


@pytest.mark.parametrize("how", SPECS, ids=str)
def test_feedback_rounds_as_gptq_does(how):
    x, moment = normal(2, 2, 4, 16, seed=1) + 0.5, correlated(2, 16)
    plain, fed = plain_and_fed(x, how, moment)
    assert torch.equal(fed.unpack().double(), slowly(x, fed, fed.aid.feedback))
    assert not torch.equal(fed.codes, plain.codes)
    # Scales are those of the numbers as they are.
    for name in ("scale", "zero", "outer"):
        a, b = getattr(plain, name), getattr(fed, name)
        assert (a is b is None) or torch.equal(a, b)


def test_shares_answer_an_error_in_one_channel_by_the_best_change_of_the_rest():
    moment = correlated(3, 12)
    shares = feedback_shares(moment, 0.0).double()
    for head, d in itertools.product(range(3), range(11)):
        rest = moment[head, d + 1 :, d + 1 :]
        # e_d = 1; the rest of e minimizes eᵀ M e.
        best = -torch.linalg.solve(rest, moment[head, d + 1 :, d])
        assert (shares[head, d, d + 1 :] - best).abs().max() < 1e-5
    assert (shares.tril() == 0).all()


def test_damping_is_in_units_of_the_mean_of_the_diagonal():
    moment = correlated(2, 8)
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1).view(2, 1, 1)
    damped = moment + 0.3 * mean * torch.eye(8, dtype=torch.float64)
    wanted = feedback_shares(damped, 0.0)
    assert (feedback_shares(moment, 0.3) - wanted).abs().max() < 1e-6
    # Units do not matter, and a head that no query reads is left alone.
    assert torch.equal(
        feedback_shares(1024 * moment, 0.3), feedback_shares(moment, 0.3)
    )
    assert (feedback_shares(0 * moment, 0.01) == 0).all()


def test_a_matrix_that_is_no_moment_is_refused():
    with pytest.raises(kvq.InvalidArgument, match="positive semidefinite"):
        feedback_shares(-correlated(1, 8), 0.01)


@pytest.mark.parametrize("how", SPECS, ids=str)
def test_under_the_identity_feedback_is_plain_rounding(how):
    x = normal(2, 3, 8, 32, seed=2) + 0.3
    for dtype in (torch.float32, torch.float64):
        plain, fed = plain_and_fed(x.to(dtype), how, torch.eye(32).expand(2, 32, 32))
        assert all(map(torch.equal, plain.tensors, fed.tensors))


@pytest.mark.parametrize(
    ("how", "most"),
    [
        (("int4", "token", False), 0.5),
        (("int4", "channel", False), 0.5),
        (("int4", "page", True), 0.5),
        (("int8", "static", True), 0.5),
        (("int2", "channel", False), 0.7),
        (("fp4", "block", True), 0.7),
        (("fp8", "page", True), 0.7),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(4))
def test_feedback_lowers_the_cost_of_errors(how, most, seed):
    moment = correlated(2, 32, seed=seed)
    x = normal(2, 8, 16, 32, seed=10 + seed)
    costs = [
        expected_cost((x - z.dequantize(torch.float64)).flatten(1, 2), moment)
        for z in plain_and_fed(x, how, moment, damping=0.01)
    ]
    assert (costs[1] < most * costs[0]).all(), costs[1] / costs[0]


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), spread=st.floats(-4, 0))
def test_feedback_never_costs_more_on_average(seed, spread):
    turned = torch.linalg.qr(normal(1, 16, 16, seed=seed))[0]
    weights = torch.logspace(0, spread, 16, dtype=torch.float64)
    moment = turned * weights @ turned.mT
    x = normal(1, 4, 32, 16, seed=seed + 1)
    plain, fed = (
        expected_cost((x - z.dequantize(torch.float64)).flatten(1, 2), moment).item()
        for z in plain_and_fed(x, ("int4", "page", True), moment, damping=0.01)
    )
    assert fed < 1.02 * plain


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), angle=st.floats(0, 3.14), ratio=st.floats(0.001, 1))
def test_the_second_of_two_channels_gets_the_best_of_all_codes(seed, angle, ratio):
    c, s = np.cos(angle), np.sin(angle)
    turned = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    moment = turned * torch.tensor([1.0, ratio], dtype=torch.float64) @ turned.mT
    x = normal(1, 1, 16, 2, seed=seed)
    _, z = plain_and_fed(x, ("int4", "page", True), moment[None])
    scale = z.scale.double().item()
    for numbers, codes in zip(x[0, 0], z.unpack()[0, 0].double(), strict=True):
        # The first one is rounded to the nearest, the second one to the best.
        assert (numbers[0] / scale - codes[0]).abs() <= 0.5 + 1e-9
        tried = torch.arange(-7, 8, dtype=torch.float64)
        errors = numbers - scale * torch.stack([codes[0].expand(15), tried], dim=1)
        costs = ((errors @ moment) * errors).sum(1)
        own = costs[int(codes[1]) + 7]
        assert own <= costs.min() * (1 + 1e-5) + 1e-12
