"""Every homework of the repository: built from its source, run again, proven."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from test_notebooks import MAX_WIDTH, code_cells, crowded_lines, draws

from kvq_lib.course import bootstrap
from kvq_lib.course.homework import (
    build,
    cell_rules,
    notebooks,
    rules,
    source,
    verify,
)
from kvq_lib.course.scan_page import says_nothing

ROOT = Path(__file__).resolve().parents[1]
NAMES = [f"hw{number:02}" for number in range(2, 11)]
CELL_SECONDS = 300  # on a busy machine


@pytest.fixture(params=NAMES)
def homework(request):
    found = sorted((ROOT / build.SOURCES).glob(f"{request.param}_*.md"))
    assert len(found) == 1, f"{request.param} has {len(found)} sources"
    return source.read(found[0])


@pytest.fixture(params=["exercise", "solution"])
def notebook(request, homework):
    folder = {"exercise": build.EXERCISES, "solution": build.SOLUTIONS}[request.param]
    path = ROOT / folder / f"{homework.name}.ipynb"
    assert path.exists(), f"{path} is missing: run `kvq homework build {homework.id}`"
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def test_there_is_a_homework_for_each_chapter_and_no_other():
    found = [path.stem.split("_")[0] for path in build.sources(ROOT)]
    assert found == NAMES
    assert build.stale(ROOT) == []


def test_it_says_where_it_belongs(homework):
    assert any(
        (ROOT / f"{homework.chapter}{end}").exists() for end in (".ipynb", ".md")
    )


def test_it_is_what_its_source_makes(homework):
    made = build.build(ROOT, [homework.id], check=True)
    assert made.problems == [] and made.differences == {}


def test_a_notebook_keeps_to_the_rules_of_chapters(notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5), "cells need ids"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert notebook.metadata.kernelspec.name == "python3"
    for name, cell in code_cells(notebook):
        lines = cell.source.splitlines()
        role = cell.metadata.get("kvq", {}).get("role", "given")
        assert len(lines) <= cell_rules.MAX_LINES[role], (
            f"{name} has {len(lines)} lines"
        )
        assert all(len(line) <= MAX_WIDTH for line in lines), name
        if draws(cell.source):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert not says_nothing(alt), (
                f"{name} draws: set mystnb.image.alt in its metadata"
            )


def test_a_notebook_has_one_sentence_a_line(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            assert crowded_lines(cell.source) == [], f"one sentence a line: {cell.id}"


def test_links_lead_to_files(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for link in rules.links(cell.source):
                if "://" not in link and not link.startswith("#"):
                    target = ROOT / build.EXERCISES / link.split("#")[0]
                    assert target.resolve().exists(), f"{cell.id} links to {link}"


def test_every_cell_of_a_solution_was_run(homework):
    path = ROOT / build.SOLUTIONS / f"{homework.name}.ipynb"
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    counts = [cell.execution_count for _, cell in code_cells(notebook)]
    # nbval compares nothing in a cell without a count.
    assert counts == list(range(1, len(counts) + 1))


def test_a_solution_gives_its_outputs_again(homework):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--nbval", "--nbval-current-env"]
    command += [f"--nbval-cell-timeout={CELL_SECONDS}"]
    command.append(str(ROOT / build.SOLUTIONS / f"{homework.name}.ipynb"))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    cells = sum(cell.role in ("given", "answer", "check") for cell in homework.solution)
    cells += bootstrap.needed(notebooks.solution(homework))  # the cell for Colab
    assert f"{cells} passed" in run.stdout, run.stdout[-5000:]


def test_its_key_is_proven(homework):
    found = verify.verify(homework, ROOT)
    assert [str(problem) for problem in found.failures] == []
    assert len(found.rows) >= 2 + 2 * len(homework.questions)
