"""Calibrations on disk: numbers and words, whatever the file claims to be."""

import contextlib
import copy
import dataclasses
import json
import os
import pickle
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import random_calibration, same_bits
from safetensors.torch import load_file, save_file

import kvq_lib as kvq

SHAPE = kvq.KVShape(2, 3, 16)
WORDS = {"model": "random", "text": "none", "tokens": "128"}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "some.safetensors"
    random_calibration(SHAPE).save(path)
    return path


def assert_same(a, b):
    for field in dataclasses.fields(kvq.Calibration):
        x, y = getattr(a, field.name), getattr(b, field.name)
        assert same_bits(x, y) if isinstance(x, torch.Tensor) else x == y


def test_what_is_saved_is_loaded_bit_by_bit(saved):
    wanted = random_calibration(SHAPE)
    for path in (saved, str(saved)):
        found = kvq.Calibration.load(path)
        assert_same(found, wanted)
        assert found.shape == SHAPE and isinstance(found.tokens, int)
    scheme = kvq.fit("int2-feedback", kvq.Calibration.load(saved))
    same = kvq.fit("int2-feedback", wanted)
    for a, b in zip(scheme.fit[1][1].aids, same.fit[1][1].aids, strict=True):
        assert same_bits(a.clip, b.clip) and same_bits(a.feedback, b.feedback)


def test_the_file_says_model_text_and_tokens_and_holds_no_code(saved):
    blob = saved.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    assert header["__metadata__"] == WORDS
    kinds = {name: x["dtype"] for name, x in header.items() if name != "__metadata__"}
    assert set(kinds.values()) == {"F32", "F16"}
    assert {name for name, kind in kinds.items() if kind == "F16"} == {"keys", "values"}


def test_it_can_be_copied_and_compared_by_identity():
    one = random_calibration(SHAPE)
    assert_same(copy.deepcopy(one), one)
    assert_same(pickle.loads(pickle.dumps(one)), one)
    assert one == one and one != copy.deepcopy(one) and isinstance(hash(one), int)


# -- files that are none ---------------------------------------------------------------


def refused(path):
    with pytest.raises(kvq.InvalidArgument) as caught:
        kvq.Calibration.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("name", ["it.safetensors", "it.pt", "it.pkl"])
def test_a_pickle_is_not_read(tmp_path, name):
    mark, path = tmp_path / "mark", tmp_path / name
    path.write_bytes(pickle.dumps(Trap(mark)))
    refused(path)
    torch.save({"key_mean": Trap(mark)}, path)
    refused(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Trap(mark)))  # the trap works
    assert mark.exists()


@pytest.mark.parametrize("part", [0, 4, 8, 100, 0.5, -1])
def test_a_truncated_file_is_refused(saved, part):
    blob = saved.read_bytes()
    kept = part if isinstance(part, int) else int(part * len(blob))
    saved.write_bytes(blob[:kept])
    refused(saved)


def test_garbage_and_other_things_are_refused(tmp_path):
    path = tmp_path / "x"
    for blob in (b"", b"hello", os.urandom(5000), b"{}" * 99, b"\xff" * 8 + b"{}"):
        path.write_bytes(blob)
        refused(path)
    refused(tmp_path)  # a directory
    refused(tmp_path / "missing")
    refused(path / "below a file")
    refused(None)
    refused("a\0b")


def changed(path, words=None, **tensors):
    """The saved file again with other words or tensors; None takes one away."""
    held = {**load_file(path), **tensors}
    held = {name: t.contiguous() for name, t in held.items() if t is not None}
    save_file(held, path, metadata=WORDS if words is None else words)


NAMES = [f.name for f in dataclasses.fields(kvq.Calibration) if f.name not in WORDS]


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_must_be_there_and_fit_the_others(saved, name):
    good = saved.read_bytes()
    was = load_file(saved)[name]
    for bad in (
        None,
        was[:1],
        was[..., :8],
        was[:, :2],
        was.flatten(),
        torch.tensor(1.0),
        was[:0],
        was.double(),
        was.to(torch.int32),
        was.to(torch.float8_e4m3fn),
        was.bool(),
        was.unsqueeze(0),
    ):
        changed(saved, **{name: bad})
        refused(saved)
        saved.write_bytes(good)
    kvq.Calibration.load(saved)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_finite(saved, name, bad):
    tensor = load_file(saved)[name].clone()
    tensor.flatten()[3] = bad
    changed(saved, **{name: tensor})
    assert name in refused(saved)


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"model": "x", "text": "y"},
        {**WORDS, "tokens": "many"},
        {**WORDS, "tokens": "-5"},
        {**WORDS, "tokens": "1.5"},
        {**WORDS, "tokens": "9" * 5000},
    ],
)
def test_the_words_must_be_there(saved, words):
    changed(saved, words=words)
    refused(saved)


def test_samples_come_in_stretches_of_64(saved):
    held = load_file(saved)
    changed(saved, keys=held["keys"][:, :, :100], values=held["values"][:, :, :100])
    assert "64" in refused(saved)


def test_another_models_weights_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"lm_head.weight": torch.zeros(4, 4)}, path)
    refused(path)


# -- where nothing can be written ------------------------------------------------------


def test_a_place_that_cannot_be_written_is_told(tmp_path, saved):
    calibration = random_calibration(SHAPE)
    for path in (tmp_path, tmp_path / "no" / "folder", saved / "below", "/proc/x/y"):
        with pytest.raises(kvq.InvalidArgument) as caught:
            calibration.save(path)
        assert str(path) in str(caught.value)
    kvq.Calibration.load(saved)


@contextlib.contextmanager
def as_anyone():
    """Without the rights of root, who may read and write whatever the file says."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_no_permission_is_told(saved):
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are private
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "some.safetensors"
        shutil.copy(saved, path)
        path.chmod(0o444)
        with as_anyone():
            kvq.Calibration.load(path)
        path.chmod(0)
        folder.chmod(0o555)
        with as_anyone():
            refused(path)
            with pytest.raises(kvq.InvalidArgument, match="Permission"):
                random_calibration(SHAPE).save(folder / "other")
        folder.chmod(0o755)


def test_made_by_hand_it_is_checked_alike():
    one = random_calibration(SHAPE)
    for bad in (
        {"key_mean": one.key_mean[0]},
        {"values": one.values.float()},
        {"key_cost": one.key_cost.to("meta")},
        {"keys": None},
        {"tokens": 0},
    ):
        with pytest.raises(kvq.InvalidArgument):
            dataclasses.replace(one, **bad)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"key_low": lambda t: t + 99}, "key_low is above key_high"),
        ({"value_high": lambda t: t - 99}, "value_low is above value_high"),
        ({"value_square": lambda t: -t}, "mean of squares"),
        ({"key_cost": lambda t: t.triu()}, "key_cost is not symmetric"),
        ({"output_gram": lambda t: -t}, "negative diagonal"),
        ({"model": lambda _: None}, "model is a text"),
        ({"text": lambda _: 5}, "text is a text"),
    ],
)
def test_what_no_text_could_have_given_is_refused(changes, told):
    made = random_calibration(kvq.KVShape(2, 3, 32))
    wrong = {name: change(getattr(made, name)) for name, change in changes.items()}
    with pytest.raises(kvq.InvalidArgument, match=told):
        dataclasses.replace(made, **wrong)


@pytest.mark.parametrize("path", [None, 5, b"a", ["a"]])
def test_a_path_is_a_text_or_a_path(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kvq.InvalidArgument, match="path is"):
        random_calibration(kvq.KVShape(2, 3, 32)).save(path)
    assert not list(tmp_path.iterdir())
