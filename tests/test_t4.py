"""Colab's free GPU, a T4, computes neither in bfloat16 nor in FP8: nothing needs it to.

No T4 is here.  What PyTorch is asked to compute does not depend on the device, so it is
watched on the CPU; the kernels are read as source, and `test_compile` reads what they
become for a T4.
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest
import torch
from helpers import SCHEMES, read_through, recipe, stream, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvq_lib as kvq
from kvq_lib import model as model_module
from kvq_lib.kernels import launch

ROOT = Path(__file__).resolve().parents[1]
T4 = torch.device("cuda")  # named, and never touched
FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}

#: What moves FP8 numbers without computing in them.
CASTS = {"_to_copy", "to", "view", "copy_", "clone", "detach", "empty", "empty_like"}


class OnlyTuring(TorchDispatchMode):
    """Refuses every operation that a T4 has no instructions for."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, out))
        found = {x.dtype for x in leaves if isinstance(x, torch.Tensor)}
        self.seen |= found
        assert torch.bfloat16 not in found, f"{func} in bfloat16"
        name = func.overloadpacket.__name__
        assert not found & FP8 or name in CASTS, f"{func} computes in FP8"
        return out


def test_the_watch_sees_what_it_should():
    x = torch.ones(2)
    with OnlyTuring() as watch:
        x.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.float8_e4m3fn in watch.seen
    with pytest.raises(AssertionError, match="bfloat16"), OnlyTuring():
        x.to(torch.bfloat16)
    eight = x.to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="FP8"), OnlyTuring():
        torch.stack([eight, eight])


@pytest.mark.parametrize("name", SCHEMES)
def test_no_scheme_computes_in_bfloat16_or_fp8(name):
    shape = kvq.KVShape(num_layers=2, num_kv_heads=2, head_dim=32)
    scheme = recipe(name, shape, 8, recent=8, sinks=8)
    read = stream(shape, 40, 4, seed=1, dtype=torch.float16)
    with OnlyTuring() as watch:
        cache = kvq.PagedKVCache(shape, scheme, 8, num_pages=16, dtype=torch.float16)
        out = read_through(cache, cache.add(), read, [17, 1, 22])
    assert out.isfinite().all() and torch.float16 in watch.seen


def test_measuring_and_generating_does_not_either():
    model = tiny_model(dtype=torch.float16)
    ids = torch.randint(3, 97, (1, 48), generator=torch.Generator().manual_seed(0))
    with OnlyTuring():
        kvq.perplexity(model, ids, "fp8", page_size=8)
        kvq.perplexity(model, ids, "int4-kivi", page_size=8)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_a_model_in_bfloat16_is_loaded_in_float16(
    tmp_path, monkeypatch, capability, dtype
):
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr(model_module, "usable_device", lambda _: T4)
    monkeypatch.setattr(torch.nn.Module, "to", stay_on_the_cpu(torch.nn.Module.to))
    loaded, _ = kvq.load_model(str(tmp_path), "cuda")
    assert loaded.dtype == dtype


def stay_on_the_cpu(move):
    """`Module.to` that changes types and leaves modules where they are."""
    return lambda self, to: self if to == T4 else move(self, to)


def test_kernels_refuse_bfloat16_there_and_say_what_to_use(monkeypatch):
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(launch, "capability", lambda _: 75)
    launch.require(T4, torch.float16, torch.float32)
    with pytest.raises(kvq.UnsupportedBackend, match="no bfloat16: use float16"):
        launch.require(T4, torch.bfloat16)
    monkeypatch.setattr(launch, "capability", lambda _: 80)
    launch.require(T4, torch.bfloat16)


def test_kernels_name_no_such_type_themselves():
    named = [
        (path.name, node.attr)
        for path in sorted((ROOT / "kvq_lib" / "kernels").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) == "tl"
        and re.match(r"bfloat|float8", node.attr)
    ]
    # The table from PyTorch's types to Triton's: for models that bring them.
    assert named == [("launch.py", "bfloat16")]


def notebooks_for_a_gpu():
    """Notebooks that put something on a GPU, each with its lines of code."""
    for folder in ("book", "exercises", "solutions"):
        for path in sorted((ROOT / folder).glob("*.ipynb")):
            cells = nbformat.read(path, as_version=4).cells
            code = "\n".join(c.source for c in cells if c.cell_type == "code")
            if '"cuda"' in code:
                yield path.stem, code.splitlines()


def test_notebooks_that_use_a_gpu_need_no_such_type_on_it():
    found = dict(notebooks_for_a_gpu())
    assert {name.split("_")[0] for name in found} == {
        *("02", "04", "06b"),
        *("hw06", "hw09"),
    }
    for name, lines in found.items():
        for line in lines:
            assert "bfloat16" not in line, f"{name}: {line}"
            # Bytes that are looked at as FP8 are widened at once: a cast.
            assert "float8" not in re.sub(r"\.view\(\S+\)\.float\(\)", "", line), name
