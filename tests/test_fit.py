"""From a calibration to a scheme: each aid against its definition."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from helpers import MORE, cold_pools, coordinates, random_calibration, same_bits

import kvq_lib as kvq
from kvq_lib.fit import feedback_shares, loudness, side_losses
from kvq_lib.quantize import quantize_as
from kvq_lib.storage import Aid

SHAPE = kvq.KVShape(2, 3, 32)
FP16 = kvq.Spec("fp16")
AIDS = ("center", "smooth", "rotate", "clip", "feedback")
SUBSETS = [c for n in range(1, 6) for c in itertools.combinations(AIDS, n)]


def calibration(shape=SHAPE, **changes):
    """Random numbers, but with the means and extremes of the sample itself, and two
    heavy-tailed channels."""
    made = random_calibration(shape)
    keys = made.keys.clone()
    keys[..., 1] *= 20
    keys[:, :, ::17] *= 3
    found = {"keys": keys, "key_mean": keys.float().mean(2)}
    found |= {"key_low": keys.amin(2).float(), "key_high": keys.amax(2).float()}
    found |= {"value_mean": made.values.float().mean(2)}
    return dataclasses.replace(made, **{**found, **changes})


def fitted(keys=FP16, values=FP16, shape=SHAPE, cal=None, **options):
    scheme = kvq.Scheme("mine", keys, values)
    return kvq.fit(scheme, cal or calibration(shape), **options)


def stored(cal, side, found, layer=0, which="key"):
    """The sample in the coordinates that it is stored in, the cost there and the matrix
    of feedback: float64, by dense matrices."""
    sample = getattr(cal, f"{which}s")[layer].double()
    cost = getattr(cal, f"{which}_cost")[layer].double()
    moment = cal.query_moment if which == "key" else cal.output_gram
    heads, _, dim = sample.shape
    away, back, center = coordinates(side, found, (heads, dim))
    there = (sample - center.unsqueeze(1)) @ away
    return there, *(back @ m @ back.mT for m in (cost, moment[layer].double()))


# -- schemes as a whole ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n, s in kvq.SCHEMES.items() if not s.calibrated]
)
def test_a_scheme_that_needs_no_calibration_is_returned_as_it_is(name):
    scheme = kvq.scheme(name, recent=5, sinks=7)
    assert kvq.fit(scheme, calibration()) == scheme
    assert kvq.fit(scheme, calibration()).fit is None
    assert kvq.fit(name, calibration()) == kvq.SCHEMES[name]


@pytest.mark.parametrize("aids", SUBSETS, ids="+".join)
def test_each_combination_of_aids_gets_what_it_needs_and_nothing_else(aids):
    values = tuple(aid for aid in aids if aid != "smooth")
    spec = kvq.Spec("int4", "token", False, aids)
    scheme = fitted(spec, kvq.Spec("int4", "channel", False, values))
    if not scheme.calibrated:
        assert scheme.fit is None and aids == ("rotate",)
        return
    assert len(scheme.fit) == 2 and scheme.layers == ()
    for both in scheme.fit:
        for found, own in zip(both, (aids, values), strict=True):
            assert (found.center is not None) == ("center" in own)
            assert (found.factor is not None) == ("smooth" in own)
            assert found.order is None
            (aid,) = found.aids
            assert aid.scale is None
            assert (aid.clip is not None) == ("clip" in own)
            assert (aid.feedback is not None) == ("feedback" in own)
    cache = kvq.PagedKVCache(SHAPE, scheme, num_pages=2)
    assert cache.bits_per_element == scheme.bits_per_element(16, 32)


# -- aid by aid ------------------------------------------------------------------------


def test_center_makes_the_mean_of_every_channel_zero():
    cal, side = calibration(), kvq.Spec("int8", "token", aids=("center",))
    scheme = fitted(side, side, cal=cal)
    for layer, (keys, values) in enumerate(scheme.fit):
        assert torch.equal(keys.center, cal.key_mean[layer])
        assert torch.equal(values.center, cal.value_mean[layer])
        for found, which in ((keys, "key"), (values, "value")):
            there, *_ = stored(cal, side, found, layer, which)
            assert there.mean(1).abs().max() < 1e-5
            assert getattr(cal, f"{which}s")[layer].float().mean(1).abs().max() > 1


@pytest.mark.parametrize("smoothing", [0, 0.25, 0.5, 1])
def test_factors_are_powers_of_two_that_even_out_what_they_should(smoothing):
    cal, side = calibration(), kvq.Spec("int8", "token", aids=("smooth",))
    scheme = fitted(side, cal=cal, smoothing=smoothing)
    for layer, (keys, _) in enumerate(scheme.fit):
        logs = keys.factor.log2()
        assert torch.equal(logs, logs.round()) and logs.abs().max() <= 8
        assert logs.mean(1).abs().max() <= 0.5
        reach = cal.keys[layer].double().abs().amax(1)
        query = cal.query_moment[layer].double().diagonal(dim1=-2, dim2=-1).sqrt()
        ideal = smoothing * reach.log2() - (1 - smoothing) * query.log2()
        ideal -= ideal.mean(1, keepdim=True)
        assert (logs - ideal).abs().max() <= 0.5 + 1e-4
    spread = (reach / keys.factor, query * keys.factor)
    for x, evened in zip(spread, (smoothing == 1, smoothing == 0), strict=True):
        if evened:
            assert (x.amax(1) <= 2.001 * x.amin(1)).all()


def grid_search(there, cost, spec, page_size):
    """Every part that clip may choose, by what it costs: [parts, kv_heads]."""
    heads, tokens, dim = there.shape
    pages = there[:, : tokens // page_size * page_size].float()
    pages = pages.view(heads, -1, page_size, dim)
    costs = []
    for part in (1 - i / 40 for i in range(21)):
        aid = Aid(clip=torch.full((heads, 1, 1, 1), part))
        plain = dataclasses.replace(spec, aids=("clip",))
        back = quantize_as(pages, plain, [aid]).dequantize(torch.float64)
        e = (pages.double() - back).flatten(1, 2)
        costs.append(torch.einsum("htd,hde,hte->h", e, cost, e) / e.shape[1])
    return torch.stack(costs)


@pytest.mark.parametrize("page_size", [7, 16])
@pytest.mark.parametrize(
    "spec",
    [
        kvq.Spec("int2", "token", False, ("clip",)),
        kvq.Spec("int4", "channel", False, ("clip", "center", "rotate")),
        kvq.Spec("int4", "page", True, ("clip", "rotate", "feedback")),
        kvq.Spec("int2", "channel", False, ("clip", "smooth")),
    ],
    ids=str,
)
def test_the_clip_is_the_cheapest_of_its_grid(spec, page_size):
    cal = calibration()
    scheme = fitted(spec, cal=cal, page_size=page_size)
    chosen = []
    for layer, (found, _) in enumerate(scheme.fit):
        there, cost, _ = stored(cal, spec, found, layer)
        costs = grid_search(there, cost, spec, page_size)
        part = found.aids[0].clip.flatten()
        chosen += part.tolist()
        index = ((1 - part) * 40).round().long()
        assert (part - (1 - index / 40)).abs().max() < 1e-6
        own = costs.gather(0, index[None])[0]
        assert (own <= costs.amin(0) * (1 + 1e-5)).all()
    assert page_size == 7 or min(chosen) < 1  # and it is no idle question


@pytest.mark.parametrize("percentile", [50, 97.5, 100])
def test_a_percentile_keeps_that_part_of_the_groups(percentile):
    cal, spec = calibration(), kvq.Spec("int4", "token", False, ("clip",))
    scheme = fitted(spec, cal=cal, percentile=percentile)
    x = cal.keys[0].double().numpy()
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    # How far each number is from the middle of its group, in units of half the range.
    away = np.abs(2 * x - low - high) / (high - low)
    wanted = np.percentile(away.reshape(3, -1), percentile, axis=1).clip(0.5, 1)
    found = scheme.fit[0][0].aids[0].clip.flatten().numpy()
    assert np.abs(found - wanted).max() < 5e-3


@pytest.mark.parametrize("aids", [(), ("center", "rotate")], ids=["plain", "turned"])
@pytest.mark.parametrize(("fmt", "largest"), [("int8", 127), ("int4", 7), ("fp8", 448)])
def test_a_static_scale_holds_the_largest_number_seen(fmt, largest, aids):
    cal, spec = calibration(), kvq.Spec(fmt, "static", aids=aids)
    # Extremes are of all tokens, also of those that are no part of the sample.
    cal = dataclasses.replace(cal, key_low=cal.key_low - 1000)
    scheme = fitted(spec, spec, cal=cal)
    for layer, both in enumerate(scheme.fit):
        for found, which in zip(both, ("key", "value"), strict=True):
            there, *_ = stored(cal, spec, found, layer, which)
            reach = there.abs().amax((1, 2))
            if not aids:
                low, high = (
                    getattr(cal, f"{which}_{e}")[layer] for e in ("low", "high")
                )
                reach = torch.maximum(low.abs(), high.abs()).amax(1).double()
            scale = found.aids[0].scale
            assert scale.dtype == torch.float16 and scale.shape == (3, 1, 1, 1)
            scale = scale.flatten().numpy()
            ideal = (reach / largest).numpy()
            assert (scale >= ideal * (1 - 1e-6)).all()
            below = np.nextafter(scale, np.float16(0)).astype(np.float64)
            assert (below < ideal * (1 + 1e-6)).all()


@pytest.mark.parametrize("percentile", [1e-3, 50, 99, 100])
def test_a_static_scale_may_hold_a_percentile_only(percentile):
    cal, spec = calibration(), kvq.Spec("int8", "static")
    scheme = fitted(spec, cal=cal, percentile=percentile)
    x = cal.keys[1].double().abs().flatten(1).numpy()
    ideal = np.percentile(x, percentile, axis=1) / 127
    found = scheme.fit[1][0].aids[0].scale.flatten().double().numpy()
    assert (found >= ideal * (1 - 1e-5)).all()
    assert (found <= ideal * 1.002 + 2.0**-24).all()


@pytest.mark.parametrize("aids", [(), ("center", "smooth", "rotate"), ("clip",)])
def test_feedback_rounds_under_the_moment_in_its_own_coordinates(aids):
    cal = calibration()
    spec = kvq.Spec("int4", "token", False, ("feedback", *aids))
    scheme = fitted(spec, cal=cal, damping=0.02)
    values = dataclasses.replace(spec, aids=[a for a in spec.aids if a != "smooth"])
    scheme = fitted(spec, values, cal=cal, damping=0.02)
    for layer, both in enumerate(scheme.fit):
        for found, side, which in zip(
            both, (spec, values), ("key", "value"), strict=True
        ):
            *_, moment = stored(cal, side, found, layer, which)
            wanted = feedback_shares(moment, 0.02)
            assert (found.aids[0].feedback - wanted).abs().max() < 1e-3


# -- mixed widths ----------------------------------------------------------------------


@pytest.mark.parametrize("aids", [(), ("center", "rotate", "smooth")], ids=str)
def test_the_order_is_by_need(aids):
    cal = calibration()
    scheme = fitted(kvq.Mixed(8.0, aids=aids), cal=cal)
    plain = kvq.Spec("int8", "token", aids=aids)
    for layer, (found, _) in enumerate(scheme.fit):
        there, cost, _ = stored(cal, plain, found, layer)
        need = cost.diagonal(dim1=-2, dim2=-1).sqrt() * there.abs().amax(1)
        assert (found.order.sort(-1).values == torch.arange(32)).all()
        sorted_need = need.gather(1, found.order)
        assert (sorted_need[:, 1:] <= sorted_need[:, :-1] * (1 + 1e-5)).all()
        assert (found.order != torch.arange(32)).any()


@pytest.mark.parametrize("bits", [5.5, 7.0, 9.0, 11.0, 13.0])
def test_no_other_widths_within_the_budget_cost_less(bits):
    cal = calibration()
    scheme = fitted(kvq.Mixed(bits), cal=cal)
    options = []
    for layer, (found, _) in enumerate(scheme.fit):
        side = scheme.layers[layer][0]
        there, cost, _ = stored(cal, side, found, layer)
        pages = there.float().view(3, -1, 16, 32)
        row = {}
        for a, b in itertools.product((0, 16, 32), repeat=2):
            if a + b > 32:
                continue
            way = kvq.Mixed(channels=(a, b, 32 - a - b))
            e = (pages - quantize_as(pages, way).dequantize()).double().flatten(1, 2)
            loss = torch.einsum("htd,hde,hte->", e, cost, e).item() / e.shape[1]
            row[way.channels] = (way.nbytes(16, 32), loss)
        options.append(row)
    room = 2 * bits * 16 * 32 / 8
    within = [
        x[1] + y[1]
        for x, y in itertools.product(*(row.values() for row in options))
        if x[0] + y[0] <= room
    ]
    own = [
        row[s.layers[i][0].channels] for s in [scheme] for i, row in enumerate(options)
    ]
    assert sum(cost for cost, _ in own) <= room
    assert sum(loss for _, loss in own) <= min(within) * (1 + 1e-4)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 256])
@pytest.mark.parametrize("bits", [5.6, 6.0, 7.3, 16.0])
def test_pools_of_mixed_keys_stay_within_the_budget(dim, bits):
    shape = kvq.KVShape(3, 2, dim)
    scheme = fitted(kvq.Mixed(bits), shape=shape, cal=random_calibration(shape))
    cache = kvq.PagedKVCache(shape, scheme, num_pages=5)
    values = 3 * 2 * 5 * 16 * dim * 2  # in 16 bits
    keys = sum(t.nbytes for t in cold_pools(cache)) - values
    assert 8 * keys / (3 * 2 * 5 * 16 * dim) <= bits
    for keys, _ in scheme.layers:
        assert sum(keys.channels) == dim
        assert all(n % 16 == 0 for n in keys.channels)
    assert kvq.kv_bytes(shape, scheme, 160) > 0
    assert (bits == 16) == all(k.channels == (dim, 0, 0) for k, _ in scheme.layers)


def test_a_budget_below_four_bits_is_refused():
    for bits in (0.5, 4.0, 4.5):
        with pytest.raises(kvq.InvalidArgument, match="too small"):
            fitted(kvq.Mixed(bits))


def test_channels_that_are_given_are_kept():
    mine = kvq.Mixed(4.0, channels=(16, 0, 16))
    scheme = fitted(mine)
    assert [keys.channels for keys, _ in scheme.layers] == [(16, 0, 16)] * 2
    layers = ((mine, FP16), (kvq.Mixed(16.0), FP16))
    scheme = kvq.Scheme("two", FP16, FP16, layers=layers)
    found = kvq.fit(scheme, calibration()).layers
    assert [keys.channels for keys, _ in found] == [(16, 0, 16), (32, 0, 0)]


# -- again, and elsewhere --------------------------------------------------------------


@pytest.mark.parametrize("name", ["int2-feedback", "mixed", "int8-static", *MORE])
def test_a_fitted_scheme_can_be_fitted_again(name):
    scheme = MORE.get(name, name)
    once = kvq.fit(scheme, random_calibration(SHAPE))
    moment = random_calibration(SHAPE).query_moment.flip(1)
    other = kvq.fit(once, calibration(query_moment=moment))
    twice = kvq.fit(other, random_calibration(SHAPE))
    assert (once.keys, once.values, once.layers) == (
        twice.keys,
        twice.values,
        twice.layers,
    )
    differs = False
    for a, b, c in zip(once.fit, twice.fit, other.fit, strict=True):
        for x, y, z in zip(a, b, c, strict=True):
            for one, two, three in zip(tensors(x), tensors(y), tensors(z), strict=True):
                assert same_bits(one, two)
                differs |= not same_bits(one, three)
    assert differs


def tensors(found):
    held = [found.center, found.factor, found.order]
    held += [t for aid in found.aids for t in (aid.scale, aid.clip, aid.feedback)]
    return [t for t in held if t is not None]


@pytest.mark.parametrize("name", ["int4-feedback", "mixed", "fp8-static", "every-aid"])
def test_before_calibration_nothing_is_stored(name):
    scheme = kvq.scheme(MORE.get(name, name))
    with pytest.raises(kvq.UnsupportedScheme, match=rf"kvq.fit\('{name}', kvq.calib"):
        kvq.PagedKVCache(SHAPE, scheme)


def test_side_losses_are_what_plain_storage_costs():
    cal, spec = calibration(), kvq.Spec("int4", "token", False, ("center", "clip"))
    mixed = kvq.Mixed(channels=(0, 16, 16), aids=("feedback",))
    losses = side_losses(cal, "key", [spec, mixed, FP16], 16)
    for layer, row in enumerate(losses):
        row = [loss * loudness(cal)[layer] for loss in row]
        found = fitted(spec, cal=cal).fit[layer][0]
        there, cost, _ = stored(cal, spec, found, layer)
        wanted = grid_search(there, cost, spec, 16)[0].sum().item()
        assert row[0] == pytest.approx(wanted, rel=1e-3)
        assert row[2] < row[0] / 100
        by_order = fitted(mixed, cal=cal).fit[layer][0]
        there, cost, _ = stored(cal, mixed, by_order, layer)
        pages = there.float().view(3, -1, 16, 32)
        plain = dataclasses.replace(mixed, aids=())
        e = (pages - quantize_as(pages, plain).dequantize()).double().flatten(1, 2)
        wanted = torch.einsum("htd,hde,hte->", e, cost, e).item() / e.shape[1]
        assert row[1] == pytest.approx(wanted, rel=1e-3)


def test_loudness_is_the_mean_square_of_what_values_become():
    cal = calibration()
    for layer, found in enumerate(loudness(cal)):
        v, gram = cal.values[layer].double(), cal.output_gram[layer].double()
        wanted = torch.einsum("htd,hde,hte->", v, gram, v) / v.shape[1]
        assert found == pytest.approx(wanted.item(), rel=1e-6)


def test_costs_do_not_depend_on_the_units_of_a_layer():
    """A layer whose values and projection are louder is worth no more bits."""
    cal, sides = calibration(), [kvq.Spec("int4", "token", False)]
    for times in (0.125, 8):  # a power of two rounds nothing
        matrices = {
            name: getattr(cal, name).clone()
            for name in ("key_cost", "value_cost", "output_gram")
        }
        for m in matrices.values():
            m[0] *= times
        louder = dataclasses.replace(cal, **matrices)
        for which in ("key", "value"):
            a, b = (side_losses(c, which, sides) for c in (cal, louder))
            assert np.allclose(a, b, rtol=1e-6, atol=0)
        a, b = (fitted(kvq.Mixed(8.0), cal=c).layers for c in (cal, louder))
        assert a == b


def test_a_layer_that_says_nothing_has_finite_costs():
    cal = calibration(values=torch.zeros_like(calibration().values))
    losses = side_losses(cal, "value", [kvq.Spec("int4", "token", False)])
    assert losses == [[0.0]] * SHAPE.num_layers


def test_a_budget_that_is_too_small_is_told_in_bits():
    with pytest.raises(kvq.InvalidArgument, match=r"4\.2 bits.*keys of 5 are"):
        fitted(kvq.Mixed(4.2), shape=kvq.KVShape(2, 3, 32))


@pytest.mark.parametrize("name", ["int8-static", "int4-feedback", "every-aid"])
def test_a_fit_of_another_head_dim_is_refused(name):
    scheme = kvq.fit(MORE.get(name, name), calibration(kvq.KVShape(2, 3, 64)))
    with pytest.raises(kvq.UnsupportedScheme, match="64 channels, not 32"):
        kvq.PagedKVCache(SHAPE, scheme)
