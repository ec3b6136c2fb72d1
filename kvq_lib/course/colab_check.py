"""Run chapters and homework as they run on Colab.

    python -m kvq_lib.course.colab_check --python .venv-colab/bin/python [PAGE ...]

The Python that is named has Colab's versions and nothing of the book; `make` makes it
from requirements-colab.txt.  A repository of the files as they lie here stands in for
the one on the network.  From there the first cell of a notebook installs kvq_lib, in a
folder far from any copy of the book; then every notebook runs in that folder:

    chapters, solutions    every cell must run
    exercises              a check may fail, but for want of a package; any other
                           cell must run or meet a stub's NotImplementedError

Without names it also compiles the kernels for the GPU that Colab lends, a T4, with
Colab's Triton.  Prints a line for each notebook, and what failed; exits with 1 if
something did.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbformat import NotebookNode, v4

from . import bootstrap
from .homework.notebooks import kernels
from .site import ANSI, ROOT

CELL_SECONDS = 900
ROW = "{:<46} {:>7}  {}"

#: Of this process, and not of Colab.
NOT_THERE = {"KVQ_STATIC_PAGE", "PYTHONPATH", "TQDM_DISABLE", "TRITON_INTERPRET"}


def stand_in(root: Path, folder: Path) -> str:
    """Commit the checkout's files, as they lie there, in a new repository under the tag
    of this version; return its address."""
    git = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    listed = subprocess.check_output([*git, "--exclude-standard"], text=True)
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():  # not one that was removed, and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)
    who = ["-c", "user.name=kvq", "-c", "user.email=kvq@localhost"]
    for command in (
        ["init", "--quiet"],
        ["add", "--all", "--force"],
        [*who, "commit", "--quiet", "--message", "As it lies here"],
        ["tag", bootstrap.tag(root)],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder.as_uri()


def notebooks(root: Path, named: list[str]) -> list[Path]:
    """Chapters, exercises and solutions, in this order; those named, or all."""
    found = [
        path
        for folder in ("book", "exercises", "solutions")
        for path in sorted((root / folder).glob("*.ipynb"))
    ]
    pages = {path.relative_to(root).with_suffix("").as_posix(): path for path in found}
    if unknown := set(named) - set(pages):
        raise SystemExit(f"no such notebook: {', '.join(sorted(unknown))}")
    return [path for page, path in pages.items() if not named or page in named]


def run(notebook: NotebookNode, python: str, folder: Path, stubs: bool) -> list[str]:
    """Run a notebook in place; what failed, as "cell 3: error"."""
    from jupyter_client import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import (
        CellExecutionError,
        CellTimeoutError,
        DeadKernelError,
    )

    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_spec_manager=kernels(python)),
        timeout=CELL_SECONDS,
        allow_errors=stubs,
        resources={"metadata": {"path": str(folder)}},
    )
    environment = {k: v for k, v in os.environ.items() if k not in NOT_THERE}
    environment |= {
        "IPYTHONDIR": str(folder.parent / "ipython"),
        "OMP_WAIT_POLICY": "PASSIVE",  # as in `site`: on a busy machine, too
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # no words about a debugger
        "XDG_CACHE_HOME": str(folder.parent / "cache"),  # weights are unpacked anew
    }
    try:
        client.execute(cleanup_kc=True, env=environment)  # and end the kernel
    except CellExecutionError:
        pass  # its output says so
    except (CellTimeoutError, DeadKernelError) as error:
        return [str(error).splitlines()[0]]
    return [
        f"cell {number} ({cell.source.strip().splitlines()[0]}): {said}"
        for number, cell in enumerate(notebook.cells)
        for output in cell.get("outputs", ())
        if (said := _failed(cell, output, stubs))
    ]


def _failed(cell: NotebookNode, output: NotebookNode, stubs: bool) -> str:
    """What an output says of an error that was not to be expected; "" else."""
    if output.output_type != "error":
        return ""
    check = cell.metadata.get("kvq", {}).get("role") == "check"
    missing = output.ename in ("ImportError", "ModuleNotFoundError")
    if stubs and (output.ename == "NotImplementedError" or (check and not missing)):
        return ""
    return ANSI.sub("", f"{output.ename}: {output.evalue}").strip().splitlines()[0]


#: Compiles every listed variant for a T4; prints what failed, a line each.
KERNELS = """
from kvq_lib.kernels import compile as ahead

for variant in (v for v in ahead.listed() if v.target == 75):
    try:
        ahead.build(variant)
    except Exception as error:
        print(f"{variant}: {type(error).__name__}: {str(error).splitlines()[0]}")
"""


def compiled(python: str, folder: Path) -> list[str]:
    """Compile the kernels for a T4; what failed."""
    environment = {k: v for k, v in os.environ.items() if k not in NOT_THERE}
    ran = subprocess.run(
        [python, "-W", "ignore", "-c", KERNELS],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    return (ran.stdout + ran.stderr * bool(ran.returncode)).splitlines()


def installed(python: str) -> set[str]:
    """What pip says is installed: "numpy==2.1.3"."""
    command = [python, "-m", "pip", "list", "--format=freeze"]
    return set(subprocess.check_output(command, text=True).split())


def check(root: Path, python: str, named: list[str]) -> int:
    """Run the notebooks and print a line for each, and what failed; the exit status."""
    failed = []

    def row(name: str, found: list[str], seconds: float) -> None:
        print(ROW.format(name, f"{seconds:.1f}", "failed" if found else "ok"))
        print("".join(f"    {line}\n" for line in found), end="", flush=True)
        failed.extend([name] if found else [])

    def timed(name: str, work: Callable[..., list[str]], *arguments) -> None:
        start = time.monotonic()
        row(name, work(*arguments), time.monotonic() - start)

    gone = [python, "-m", "pip", "uninstall", "-q", "-y", "kvq-lib"]
    subprocess.run([*gone, *bootstrap.PACKAGES], check=True, stderr=subprocess.DEVNULL)
    before = installed(python)
    print(ROW.format("notebook", "seconds", "verdict"))
    with tempfile.TemporaryDirectory(prefix="kvq-colab-") as folder:
        content, repository = Path(folder, "content"), Path(folder, "repository")
        content.mkdir()
        repository.mkdir()
        url = stand_in(root, repository)
        first = v4.new_notebook(cells=[v4.new_markdown_cell("# The first cell alone")])
        bootstrap.put(first, bootstrap.source(first, root, url))
        place = python, content
        timed("the first cell, where kvq_lib is missing", run, first, *place, False)
        lost = sorted(before - installed(python))
        row("Colab's own packages are as they were", lost, 0)
        for path in notebooks(root, named):
            notebook = nbformat.read(path, as_version=4)
            if bootstrap.needed(notebook):
                bootstrap.put(notebook, bootstrap.source(notebook, root, url))
            stubs = path.parent.name == "exercises"
            name = path.relative_to(root).as_posix()
            timed(name, run, notebook, *place, stubs)
        if not named:
            timed("the kernels for a T4", compiled, *place)
    print(f"failed: {', '.join(failed)}" if failed else "All of it runs as on Colab.")
    return int(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m kvq_lib.course.colab_check")
    parser.add_argument("--python", required=True, help="of the environment like Colab")
    parser.add_argument("pages", nargs="*", help="such as book/02_memory_bottleneck")
    options = parser.parse_args(arguments)
    python = Path(options.python).absolute()  # resolved, it would leave its venv
    if python.parent.resolve() == Path(sys.executable).parent.resolve():
        parser.error(
            "--python names the book's own environment, which would lose kvq_lib"
        )
    return check(ROOT, str(python), options.pages)


if __name__ == "__main__":
    sys.exit(main())
