"""The notebooks of a homework: the exercise, the solution, and what students hand in.

All of them come from the same cells, with ids that say what a cell is ("q2-check") and
stay as they are when another question changes.  Nothing of a probe or a mutant is in
any of them.  Those that import kvq_lib begin with the cell that fetches it on Colab.
"""

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode, v4

from .. import bootstrap, repository
from . import blocks
from .source import Cell, Homework, Mutant, Problem, SourceError

CELL_SECONDS = 600  # that a cell of a solution may take: a busy machine is slow

CHECKING = """\
*{points} in {questions}; about {minutes} minutes.*

Put your code where a cell says `raise NotImplementedError` or `# your code here`.
Then run the check below it: it prints a line, or says what may be wrong.
Checks are small; the grade comes from other inputs as well.
Keep the lines that begin with `# @`: by them your answers are found.
[How to do the homework](../book/homework_students.md) says more."""

SOLVED = """\
*{points} in {questions}; about {minutes} minutes.*

These are solutions; the exercise is [here](../exercises/{name}.ipynb)."""

# What must not be in an output: it would be another one elsewhere, or the next time.
UNSTABLE = {
    re.compile(r"\b0x[0-9a-f]{6,}"): "a memory address",
    re.compile(r"(?<![\w/.:])/(home|root|tmp|usr|var|Users|opt|mnt|work)/\w"): (
        "a path of this machine"
    ),
    re.compile(r"\b[A-Z]:\\\w"): "a path of this machine",
}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def exercise(homework: Homework) -> NotebookNode:
    """What students get: stubs, no outputs."""
    return _notebook(
        homework,
        homework.exercise,
        CHECKING,
        lambda cell: blocks.stub(cell.source, cell.question),
    )


def solution(homework: Homework) -> NotebookNode:
    """The author's answers, not run yet."""
    return _notebook(
        homework, homework.solution, SOLVED, lambda cell: blocks.solved(cell.source)
    )


def with_mutant(homework: Homework, mutant: Mutant) -> NotebookNode:
    """The solution with one wrong answer."""
    wrong = homework.answers(mutant.question)[mutant.replaces - 1]
    return _notebook(
        homework,
        homework.solution,
        SOLVED,
        lambda cell: mutant.code if cell is wrong else blocks.solved(cell.source),
    )


def write(notebook: NotebookNode) -> bytes:
    """A notebook as the bytes of its file, after nbformat has checked it."""
    nbformat.validate(notebook)
    return (nbformat.writes(notebook).rstrip("\n") + "\n").encode()


def _notebook(
    homework: Homework, cells: Sequence[Cell], note: str, answer
) -> NotebookNode:
    """A notebook of some cells; `answer` gives the text of an answer cell."""
    notebook = v4.new_notebook(
        metadata={
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
            "kvq": {"homework": homework.id, "chapter": homework.chapter},
        }
    )
    for cell, name in zip(cells, ids(cells), strict=True):
        metadata = nbformat.from_dict(_plain(cell.metadata))
        if cell.kind == "markdown":
            text = _with_points(homework, cell, note)
            made = v4.new_markdown_cell(text, id=name, metadata=metadata)
        else:
            text = answer(cell) if cell.role == "answer" else cell.source
            made = v4.new_code_cell(text, id=name, metadata=metadata)
        notebook.cells.append(made)
    if bootstrap.needed(notebook):
        address = repository.current(homework.root)
        bootstrap.put(notebook, bootstrap.source(notebook, homework.root, address))
    return notebook


def _plain(value):
    """Metadata as plain dictionaries and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def ids(cells: Sequence[Cell]) -> list[str]:
    """What each cell is called in a notebook: "q1-answer", "q1-answer-2", ..."""
    found, counts = [], Counter()
    for cell in cells:
        name = f"q{cell.section}" if cell.section else "intro"
        name = f"{name}-{cell.role}"
        counts[name] += 1
        found.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return found


def _with_points(homework: Homework, cell: Cell, note: str) -> str:
    """The Markdown of a cell: the first one with totals, headings with their points."""
    if cell is homework.cells[0]:
        totals = note.format(
            points=_points(homework.points),
            questions=_count(len(homework.questions), "question"),
            minutes=homework.minutes,
            name=homework.name,
        )
        title = cell.source
        if note is SOLVED:  # the exercise has a page, too
            title = title.replace("# Homework ", "# Solution of homework ", 1)
        return f"{title}\n\n{totals}"
    first, *others = cell.source.split("\n")
    for question in homework.questions:
        if first.startswith(f"## Question {question.id[1:]}:"):
            text = "\n".join(others).strip("\n")
            return f"{first}\n\n*{_points(question.points)}.*\n\n{text}".rstrip()
    return cell.source


def _points(points: float) -> str:
    return f"{points:g} point" + ("" if points == 1 else "s")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# -- running -------------------------------------------------------------------------


def execute(notebook: NotebookNode, homework: Homework) -> None:
    """Run a solution in place, with this Python and this kvq_lib.

    Pictures are dropped from the outputs, because their bytes change with versions of
    other packages; the text that stands for a figure stays.

    Raises:
        SourceError: a cell fails, warns, or prints what would differ elsewhere.
    """
    from jupyter_client import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    # One line of the source for each cell that is shown.
    cells = homework.solution
    lines = dict(zip(ids(cells), (cell.line for cell in cells), strict=True))
    lines[bootstrap.ID] = 1
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            km=AsyncKernelManager(kernel_spec_manager=kernels(sys.executable)),
            timeout=CELL_SECONDS,
            allow_errors=True,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        try:
            # nbclient would leave a kernel alone whose manager it was given.
            client.execute(cleanup_kc=True, env=_environment(Path(folder)))
        except (CellTimeoutError, DeadKernelError) as error:
            ran = [c for c in notebook.cells if c.get("execution_count")]
            line = lines[ran[-1].id] if ran else 1
            said = f"running stopped after this cell: {str(error).splitlines()[0]}"
            raise SourceError([Problem(homework.path, line, said)]) from None
    notebook.metadata.language_info = {"name": "python"}
    problems = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_without_pictures(output) for output in cell.outputs]
            problems += [
                Problem(homework.path, lines[cell.id], message)
                for output in cell.outputs
                for message in _output_problems(output)
            ]
    if problems:
        raise SourceError(problems)


def kernels(python: str):
    """Kernels of one Python, whatever else is installed."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

    class OnePython(KernelSpecManager):
        def get_kernel_spec(self, kernel_name):
            command = [python, "-m", "ipykernel_launcher", "--log-level=ERROR"]
            return KernelSpec(
                argv=[*command, "-f", "{connection_file}"],
                display_name="Python 3",
                language="python",
            )

    return OnePython()


def _environment(folder: Path) -> dict[str, str]:
    """Variables of a run: the user's own settings must not change what is printed."""
    library = Path(__file__).resolve().parents[3]
    found = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(library), *([found] if found else [])]),
        "IPYTHONDIR": str(folder / ".ipython"),
        "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", str(folder / ".matplotlib")),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "TQDM_DISABLE": "1",
        # The same outputs with a GPU and without one.
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }


def _without_pictures(output: NotebookNode) -> NotebookNode:
    if "data" in output:
        output.data = {k: v for k, v in output.data.items() if "image/" not in k}
        output.metadata = {
            k: v
            for k, v in output.metadata.items()
            if "image/" not in k and k != "needs_background"
        }
    return output


def _output_problems(output: NotebookNode) -> list[str]:
    if output.output_type == "error":
        said = _ANSI.sub("", f"{output.ename}: {output.evalue}").split("\n")[0]
        return [f"the solution fails in this cell: {said}"]
    if output.get("name") == "stderr":
        return [f"a warning: {output.text.strip().splitlines()[-1]}"]
    if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
        return ["a widget: solutions are read where no kernel runs"]
    text = output.get("text") or "\n".join(map(str, output.get("data", {}).values()))
    return [
        f"the output holds {what}: {match[0]!r}"
        for pattern, what in UNSTABLE.items()
        if (match := pattern.search(text))
    ]
