"""The check against Colab's versions, without Colab's versions."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from kvq_lib.course import bootstrap, colab_check

ROOT = Path(__file__).resolve().parents[1]


def notebook(*cells):
    """A notebook of code cells, given as text or as (text, role)."""
    made = []
    for cell in cells:
        text, role = cell if isinstance(cell, tuple) else (cell, "given")
        made.append(nbformat.v4.new_code_cell(text, metadata={"kvq": {"role": role}}))
    return nbformat.v4.new_notebook(cells=made)


def run(tmp_path, *cells, stubs=False):
    folder = tmp_path / "content"
    folder.mkdir()
    return colab_check.run(notebook(*cells), sys.executable, folder, stubs)


def test_a_failing_cell_is_named_with_its_error(tmp_path):
    assert run(tmp_path, "x = 1", "y = x / 0", "z = x") == [
        "cell 1 (y = x / 0): ZeroDivisionError: division by zero"
    ]


def test_notebooks_run_far_from_the_book(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = run(
        tmp_path,
        "import os; here = os.getcwd(), os.environ.get('TRITON_INTERPRET')",
        f"assert here == ({str(tmp_path / 'content')!r}, None), here",
        "assert 'PYTHONPATH' not in os.environ",
    )
    assert found == []


def test_of_an_exercise_only_what_a_stub_does_may_fail(tmp_path):
    stub = "def f():\n    raise NotImplementedError('q1')"
    check = "assert f() == 1"
    assert run(
        tmp_path,
        stub,
        "f()",  # what is given may call it
        (check, "check"),
        ("import no_such_package", "check"),
        ("1 + None", "check"),
        "1 / 0",
        stubs=True,
    ) == [
        "cell 3 (import no_such_package): ModuleNotFoundError: No module named "
        "'no_such_package'",
        "cell 5 (1 / 0): ZeroDivisionError: division by zero",
    ]


def test_no_kernel_stays(tmp_path):
    assert run(tmp_path, "import os\nopen('pid', 'w').write(str(os.getpid()))") == []
    pid = (tmp_path / "content" / "pid").read_text()
    assert not Path("/proc", pid).exists()


def test_a_kernel_that_ends_is_told(tmp_path):
    (found,) = run(tmp_path, "import os; os._exit(3)")
    assert "died" in found.lower()


@pytest.fixture
def checkout(tmp_path):
    """A repository with a tracked file, one that is new, one ignored, one removed."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("tracked", "removed", "new", "ignored"):
        (root / name).write_text(f"{name}\n")
    (root / ".gitignore").write_text("ignored\n")
    (root / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    git = ["git", "-C", str(root)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "tracked", "removed"], check=True)
    (root / "removed").unlink()
    (root / "tracked").write_text("changed\n")
    return root


def test_the_stand_in_holds_the_files_as_they_lie_there(checkout, tmp_path):
    folder = tmp_path / "stand in"
    folder.mkdir()
    url = colab_check.stand_in(checkout, folder)
    clone = ["git", "clone", "-q", "--branch", "v1.2.3", url, str(tmp_path / "clone")]
    subprocess.run(clone, check=True, capture_output=True)
    found = {path.name for path in (tmp_path / "clone").iterdir()}
    assert found == {".git", ".gitignore", "tracked", "new", "pyproject.toml"}
    assert (tmp_path / "clone" / "tracked").read_text() == "changed\n"


def test_all_notebooks_are_run_or_those_named():
    found = colab_check.notebooks(ROOT, [])
    assert [p.parent.name for p in found] == sorted(p.parent.name for p in found)
    assert len(found) == len({*ROOT.glob("*/*.ipynb")}) > 30
    (one,) = colab_check.notebooks(ROOT, ["exercises/hw02_memory"])
    assert one == ROOT / "exercises" / "hw02_memory.ipynb"
    with pytest.raises(SystemExit, match="no such notebook: book/none"):
        colab_check.notebooks(ROOT, ["book/none"])


def test_the_book_s_own_environment_is_left_alone(capsys):
    with pytest.raises(SystemExit):
        colab_check.main(["--python", sys.executable])
    assert "would lose kvq_lib" in capsys.readouterr().err


class Fake:
    """What `check` calls, and a Python that is none."""

    def __init__(self, monkeypatch, failures=(), lost=()):
        self.ran, self.failures = [], dict(failures)
        self.installed = [{"numpy==1", "torch==2"}, {"torch==2", "numpy==1", "gguf==3"}]
        self.installed[1] -= set(lost)
        monkeypatch.setattr(colab_check, "run", self.run)
        monkeypatch.setattr(
            colab_check, "installed", lambda python: self.installed.pop(0)
        )

    def run(self, made, python, folder, stubs):
        texts = [c.source for c in made.cells if c.get("id") == bootstrap.ID]
        self.ran.append((texts, stubs))
        return self.failures.get(len(self.ran) - 1, [])


def test_every_notebook_fetches_from_the_stand_in(monkeypatch, capsys):
    fake = Fake(monkeypatch)
    named = ["book/02_memory_bottleneck", "exercises/hw02_memory"]
    assert colab_check.check(ROOT, "true", named) == 0
    printed = capsys.readouterr().out
    assert printed.count(" ok\n") == 4 and "exercises/hw02_memory.ipynb" in printed
    assert printed.endswith("All of it runs as on Colab.\n")
    (first, _), (chapter, _), (exercise, stubs) = fake.ran
    assert "git+{url}@v" in first[0] and 'url = "file:///' in chapter[0]
    assert exercise == [] and stubs


def test_a_failure_is_printed_and_fails_the_check(monkeypatch, capsys):
    Fake(monkeypatch, failures={1: ["cell 4 (x): KeyError: 'y'"]})
    assert colab_check.check(ROOT, "true", ["book/02_memory_bottleneck"]) == 1
    assert capsys.readouterr().out.endswith(
        "  failed\n    cell 4 (x): KeyError: 'y'\n"
        "failed: book/02_memory_bottleneck.ipynb\n"
    )


def test_an_install_that_touches_what_colab_has_fails_the_check(monkeypatch, capsys):
    Fake(monkeypatch, lost={"numpy==1"})
    assert colab_check.check(ROOT, "true", ["exercises/hw02_memory"]) == 1
    printed = capsys.readouterr().out
    assert "failed\n    numpy==1\n" in printed
    assert printed.endswith("failed: Colab's own packages are as they were\n")


def test_kernels_are_compiled_where_all_notebooks_are_run(monkeypatch, capsys):
    Fake(monkeypatch)
    monkeypatch.setattr(colab_check, "notebooks", lambda root, named: [])
    asked = []
    monkeypatch.setattr(
        colab_check, "compiled", lambda *given: asked.append(given) or ["75 x: Error"]
    )
    assert colab_check.check(ROOT, "true", []) == 1 and len(asked) == 1
    assert capsys.readouterr().out.endswith("failed: the kernels for a T4\n")


def test_a_kernel_that_does_not_compile_is_named(tmp_path, monkeypatch):
    broken = """
import os, types, sys
ahead = types.ModuleType("kvq_lib.kernels.compile")
ahead.listed = lambda: [types.SimpleNamespace(target=t) for t in (75, 80)]
ahead.build = lambda variant: 1 // 0
sys.modules["kvq_lib.kernels.compile"] = ahead
import kvq_lib.kernels
kvq_lib.kernels.compile = ahead
"""
    monkeypatch.setattr(colab_check, "KERNELS", broken + colab_check.KERNELS)
    assert colab_check.compiled(sys.executable, tmp_path) == [
        "namespace(target=75): ZeroDivisionError: integer division or modulo by zero"
    ]
    monkeypatch.setattr(colab_check, "KERNELS", "raise SystemExit('no triton')")
    assert colab_check.compiled(sys.executable, tmp_path) == ["no triton"]
