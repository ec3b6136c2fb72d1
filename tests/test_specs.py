"""Recipes: what exists, what does not, and what belongs to one model alone."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from helpers import MORE, advance, random_calibration, same_bits, stream, tiny_model

import kvq_lib as kvq

SHAPE = kvq.KVShape(2, 2, 32)
FP16, INT8 = kvq.Spec("fp16"), kvq.Spec("int8", "token")
FITTED = ["int4-feedback", "int2-feedback", "mixed", "int8-static", *MORE]


def made(name, shape=SHAPE):
    return kvq.fit(MORE.get(name, name), random_calibration(shape))


# -- specs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((), ()),
        ("rotate", ("rotate",)),
        (["feedback", "center"], ("center", "feedback")),
        (("clip", "clip", "smooth"), ("smooth", "clip")),
        (iter(["rotate"]), ("rotate",)),
        ({"clip": 1}, ("clip",)),
        (np.array(["clip", "center"]), ("center", "clip")),
    ],
)
def test_aids_come_in_their_order_and_once(given, wanted):
    spec = kvq.Spec("int4", "token", False, given)
    assert spec.aids == wanted
    assert hash(spec) == hash(kvq.Spec("int4", "token", False, wanted))
    assert spec == kvq.Spec("int4", "token", False, wanted)


@pytest.mark.parametrize(
    "aids",
    [
        *(None, 5, 2.5, [["clip"]], b"clip", [None], "Clip", ""),
        *(("clip", "sharpen"), torch.ones(1), [np.zeros(3)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["spec", "mixed"])
def test_other_aids_are_refused_with_the_known_ones(kind, aids):
    with pytest.raises(kvq.UnsupportedScheme, match="aid"):
        if kind == "spec":
            kvq.Spec("int4", "token", False, aids)
        else:
            kvq.Mixed(aids=aids)


@pytest.mark.parametrize(
    "arguments",
    [
        ("fp4", "token"),
        ("fp4", None),
        ("fp4", "block", False),
        ("int4", "block"),
        ("fp8", "block"),
        ("int8", "static", False),
        ("fp16", "static"),
        ("fp8", "page", True, "clip"),
        ("fp4", "block", True, "clip"),
        ("int8", "static", True, "clip"),
        ("fp16", None, True, "clip"),
        ("fp16", None, True, "feedback"),
        ("int8", ["token"]),
        (["int8"], "token"),
    ],
    ids=str,
)
def test_combinations_that_do_not_exist_are_refused(arguments):
    with pytest.raises(kvq.UnsupportedScheme):
        kvq.Spec(*arguments)


@pytest.mark.parametrize("aids", [(), "rotate", "center", "smooth", "clip", "feedback"])
def test_what_needs_calibration_says_so(aids):
    spec = kvq.Spec("int4", "token", False, aids)
    assert spec.calibrated == (aids not in ((), "rotate"))
    assert kvq.Scheme("x", spec, FP16).calibrated == spec.calibrated
    by_layer = kvq.Scheme("x", FP16, FP16, layers=((FP16, FP16), (spec, FP16)))
    assert by_layer.calibrated == spec.calibrated


# -- mixed widths ----------------------------------------------------------------------


@pytest.mark.parametrize("bits", [math.nan, math.inf, -1, 0, "6", None, True, 1j])
def test_a_budget_is_a_positive_number(bits):
    with pytest.raises(kvq.InvalidArgument, match="bits"):
        kvq.Mixed(bits)


@pytest.mark.parametrize(
    "channels",
    [[16, 0, 16], (np.int64(16), np.int32(0), np.uint8(16)), np.array([16, 0, 16])],
)
def test_channels_are_plain_whole_numbers(channels):
    mixed = kvq.Mixed(np.float32(6), channels)
    assert mixed == kvq.Mixed(6.0, (16, 0, 16))
    assert hash(mixed) == hash(kvq.Mixed(6.0, (16, 0, 16)))
    assert all(type(n) is int for n in mixed.channels) and type(mixed.bits) is float


@pytest.mark.parametrize(
    "channels",
    [None, 5, "abc", (16, 16), (16,) * 4, (8, 8, 16), (-16, 16, 16), (1.0, 0, 0)],
    ids=str,
)
def test_other_channels_are_refused(channels):
    with pytest.raises((kvq.InvalidArgument, kvq.UnsupportedScheme), match="channels"):
        kvq.Mixed(channels=channels)


@pytest.mark.parametrize("mixed", [kvq.Mixed(), kvq.Mixed(channels=(16, 16, 16))])
@pytest.mark.parametrize("dim", [0, 32, 64])
def test_channels_must_be_allocated_for_the_head_dim(mixed, dim):
    with pytest.raises(kvq.UnsupportedScheme, match=r"kvq\.fit"):
        mixed.runs(dim)


# -- schemes ---------------------------------------------------------------------------


def test_layers_may_be_lists_and_are_kept_as_tuples():
    scheme = kvq.Scheme("x", FP16, FP16, layers=[[INT8, FP16], (FP16, INT8)])
    assert scheme.layers == ((INT8, FP16), (FP16, INT8))
    assert isinstance(hash(scheme), int)
    assert scheme.sides(1) == (FP16, INT8)


@pytest.mark.parametrize(
    "layers",
    [
        *(5, None, "ab", {}, (1, 2), (FP16, FP16), ((FP16,),), ((FP16, None),)),
        *(((FP16, kvq.Mixed()),), ((FP16, FP16, FP16),), {(FP16, FP16)}),
    ],
    ids=lambda x: str(x)[:40],
)
def test_layers_that_are_no_pairs_are_refused(layers):
    with pytest.raises(kvq.UnsupportedScheme, match="keys and values"):
        kvq.Scheme("x", FP16, FP16, layers=layers)
    with pytest.raises(kvq.UnsupportedScheme):
        kvq.Scheme("x", None, None, layers=((FP16, FP16),))


@pytest.mark.parametrize("layer", [2, 99, -1, None, 0.0])
def test_there_are_as_many_layers_as_the_scheme_says(layer):
    scheme = MORE["by-layer"]
    with pytest.raises(kvq.InvalidArgument, match="layer"):
        scheme.sides(layer)
    with pytest.raises(kvq.InvalidArgument, match="layer"):
        scheme.page_nbytes(16, 32, layer)


def test_factors_go_for_keys_alone_and_values_have_one_width():
    with pytest.raises(kvq.UnsupportedScheme, match="smooth"):
        kvq.Scheme("x", FP16, kvq.Spec("int8", "token", aids="smooth"))
    with pytest.raises(kvq.UnsupportedScheme, match="Mixed"):
        kvq.Scheme("x", FP16, kvq.Mixed())


# -- what was found for one model ------------------------------------------------------


@pytest.mark.parametrize("name", FITTED)
def test_a_fitted_scheme_can_be_pickled_and_copied(name):
    scheme, s = made(name), stream(SHAPE, 40, dtype=torch.float32)
    outs = []
    for other in (scheme, pickle.loads(pickle.dumps(scheme)), copy.deepcopy(scheme)):
        assert isinstance(hash(other), int)
        cache = kvq.PagedKVCache(SHAPE, other, num_pages=6)
        outs.append(advance(cache, (cache.add(), s, 40))[0])
    assert same_bits(outs[0], outs[1]) and same_bits(outs[0], outs[2])
    # What was found is compared by identity.
    assert scheme == scheme and scheme != copy.deepcopy(scheme)
    assert kvq.scheme(scheme, recent=32).fit is scheme.fit
    assert dataclasses.replace(scheme, name="other").fit is scheme.fit


@pytest.mark.parametrize("name", FITTED)
def test_what_was_found_belongs_to_its_keys_and_values(name):
    scheme = made(name)
    for changes in (
        {"keys": INT8, "layers": ()},
        {"values": kvq.Spec("int4", "token", False, "clip"), "layers": ()},
        {"keys": None, "values": None, "layers": ()},
        {"fit": scheme.fit[:1], "layers": (scheme.sides(0),) * 2},
        {"fit": ()},
        {"fit": 5},
        {"fit": ((1, 2), (3, 4))},
    ):
        with pytest.raises(kvq.UnsupportedScheme, match="fit=None"):
            dataclasses.replace(scheme, **changes)
    again = dataclasses.replace(scheme, keys=INT8, values=FP16, layers=(), fit=None)
    kvq.PagedKVCache(SHAPE, again, num_pages=1)


@pytest.mark.parametrize("name", FITTED)
def test_another_models_scheme_is_refused(name):
    scheme = made(name)
    shapes = [kvq.KVShape(3, 2, 32), kvq.KVShape(2, 4, 32)]
    if name != "int8-static":  # its scales are of heads, whatever their dim
        shapes.append(kvq.KVShape(2, 2, 64))
    for shape in shapes:
        for call in (kvq.PagedKVCache, lambda *given: kvq.kv_bytes(*given, 100)):
            with pytest.raises(kvq.UnsupportedScheme):
                call(shape, scheme)
    assert kvq.kv_bytes(SHAPE, scheme, 100) > 0


def test_an_unfitted_scheme_is_refused_by_all_that_read():
    model, ids = tiny_model(), torch.arange(97)
    for name in ("int4-feedback", "mixed", "fp8-static"):
        for call in (
            lambda name=name: kvq.perplexity(model, ids[None], name),
            lambda name=name: kvq.logits(model, ids, name),
            lambda name=name: kvq.generate(model, Decoder(), [[1, 2]], name),
        ):
            with pytest.raises(kvq.UnsupportedScheme, match=r"kvq\.calibrate\(model"):
                call()


class Decoder:
    """As much of a tokenizer as `generate` needs."""

    eos_token_id = None

    def decode(self, tokens, **options):
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("name", FITTED)
def test_a_device_that_is_not_there_is_told(name):
    with pytest.raises(kvq.UnsupportedBackend, match="cuda"):
        kvq.PagedKVCache(SHAPE, made(name), device="cuda:99")


# -- fit's own arguments ---------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 0},
        {"page_size": 129},  # longer than the sample
        {"page_size": 16.0},
        {"smoothing": math.nan},
        {"smoothing": -0.1},
        {"smoothing": 1.1},
        {"damping": 0},
        {"damping": math.inf},
        {"damping": "x"},
        {"percentile": 0},
        {"percentile": math.nan},
        {"percentile": 100.1},
        {"percentile": True},
        {"percentile": "99"},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(options):
    for name in ("every-aid", "mixed-aids"):
        with pytest.raises(kvq.InvalidArgument):
            kvq.fit(MORE[name], random_calibration(SHAPE), **options)


@pytest.mark.parametrize("page_size", [1, 7, 64, 128])
@pytest.mark.parametrize("name", FITTED)
def test_pages_of_any_size_can_be_fitted_and_read(name, page_size):
    scheme = kvq.fit(MORE.get(name, name), random_calibration(SHAPE), page_size)
    cache = kvq.PagedKVCache(SHAPE, scheme, page_size, num_pages=140)
    s = stream(SHAPE, 130, dtype=torch.float16)
    (out,) = advance(cache, (cache.add(), s, 130))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("given", [None, "int8", {}, kvq.KVShape(1, 1, 1)], ids=str)
def test_a_calibration_comes_from_calibrate(given):
    for scheme in ("int8", "mixed"):
        with pytest.raises(kvq.InvalidArgument, match=r"kvq\.calibrate"):
            kvq.fit(scheme, given)


def test_a_page_that_the_sample_cannot_fill_is_told_as_such():
    with pytest.raises(kvq.InvalidArgument, match=r"128 tokens.*page of 129"):
        kvq.fit(MORE["every-aid"], random_calibration(SHAPE), page_size=129)


def test_a_calibration_of_other_layers_or_odd_dims_is_refused():
    with pytest.raises(kvq.UnsupportedScheme, match="2 layers, not for 3"):
        kvq.fit(MORE["by-layer"], random_calibration(kvq.KVShape(3, 2, 32)))
    with pytest.raises(kvq.UnsupportedScheme, match="16"):
        kvq.fit("mixed", random_calibration(kvq.KVShape(1, 2, 40)))
    plain = kvq.Scheme("x", FP16, FP16, layers=((FP16, FP16),))
    with pytest.raises(kvq.UnsupportedScheme, match="1 layers, not for 2"):
        kvq.fit(plain, random_calibration(SHAPE))


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 80, 96, 256])
def test_heads_of_any_dim_can_be_fitted(dim):
    shape = kvq.KVShape(1, 2, dim)
    keys = kvq.Spec("int8", "token", aids=("center", "smooth", "rotate", "feedback"))
    values = kvq.Spec("int8", "static", aids=("center", "rotate", "feedback"))
    scheme = kvq.fit(kvq.Scheme("x", keys, values), random_calibration(shape))
    cache = kvq.PagedKVCache(shape, scheme, num_pages=4)
    (out,) = advance(cache, (cache.add(), stream(shape, 40, dtype=torch.float32), 40))
    assert torch.isfinite(out).all()


def test_costs_and_scales_that_make_no_sense_are_told():
    cal = random_calibration(SHAPE)
    moment = cal.query_moment.clone()
    moment[1, 0, 2, 7] = moment[1, 0, 7, 2] = 99.0
    wrong = dataclasses.replace(cal, query_moment=moment)
    with pytest.raises(kvq.InvalidArgument, match="semidefinite"):
        kvq.fit("int4-feedback", wrong)
    wrong = dataclasses.replace(cal, key_high=cal.key_high + 1e30)
    with pytest.raises(kvq.ValueOutOfRange, match="scale"):
        kvq.fit("int8-static", wrong)
    nothing = {n: 0 * getattr(cal, n) for n in ("key_cost", "value_cost")}
    nothing |= {n: 0 * getattr(cal, n) for n in ("query_moment", "output_gram")}
    for name in FITTED:  # heads that nobody reads
        kvq.fit(MORE.get(name, name), dataclasses.replace(cal, **nothing))
