"""Hygiene of the chapters: what every notebook of the book keeps to."""

import ast
import re
import statistics
from pathlib import Path

import nbformat
import pytest

from kvq_lib.course import site
from kvq_lib.course.scan_page import says_nothing

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 25
MAX_MEDIAN_LINES = 8
MAX_WIDTH = 88

# Names whose call draws a figure, and calls on them that only prepare one.
DRAWING_NAMES = {"ax", "axes", "fig", "figures", "plt"}
PREPARING = re.compile(r"\bplt\.(rc|rcParams|style|switch_backend)\b")


def chapters():
    """Homework is another matter: see test_homeworks."""
    listed = {
        f"{page}.ipynb"
        for page in site.pages()
        if page.startswith("book/") and not (ROOT / f"{page}.md").exists()
    }
    found = {p.relative_to(ROOT).as_posix() for p in (ROOT / "book").rglob("*.ipynb")}
    return sorted(
        name for name in listed | found if ".ipynb_checkpoints" not in name.split("/")
    )


@pytest.fixture(params=chapters())
def notebook(request):
    path = ROOT / request.param
    assert path.exists(), f"_toc.yml lists {request.param}, which is not there"
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_cells(notebook):
    """Yield (what to call the cell in a message, cell)."""
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            first = cell.source.split("\n", 1)[0]
            yield f"cell {number} ({first!r})", cell


def test_notebook_is_valid(notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5), "cells need ids"
    ids = [cell.id for cell in notebook.cells]
    assert len(ids) == len(set(ids)), "two cells have the same id"


def test_kernel_is_the_one_every_reader_has(notebook):
    assert notebook.metadata.kernelspec.name == "python3"


def test_outputs_are_stripped(notebook):
    for name, cell in code_cells(notebook):
        assert cell.outputs == [], f"{name} has outputs: clear them"
        assert cell.execution_count is None, f"{name} has an execution count"
    assert "widgets" not in notebook.metadata, "the notebook holds widget states"


def test_code_parses_without_magics(notebook):
    for name, cell in code_cells(notebook):
        assert cell.source.strip(), f"{name} is empty"
        try:
            ast.parse(cell.source)
        except SyntaxError as error:
            pytest.fail(f"{name} is not plain Python (magics are not wanted): {error}")


def test_code_cells_are_short(notebook):
    lengths = []
    for name, cell in code_cells(notebook):
        lines = cell.source.splitlines()
        lengths.append(len(lines))
        assert len(lines) <= MAX_LINES, f"{name} has {len(lines)} lines"
        for line in lines:
            assert len(line) <= MAX_WIDTH, f"{name}: wider than {MAX_WIDTH}: {line}"
    assert lengths, "a chapter without code"
    assert statistics.median(lengths) <= MAX_MEDIAN_LINES


def test_no_import_that_breaks_on_colab(notebook):
    for name, cell in code_cells(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            assert not any(m.split(".")[0] == "myst_nb" for m in modules), name


def draws(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and not PREPARING.search(ast.unparse(node.func)):
            function = node.func
            while isinstance(function, ast.Attribute | ast.Subscript):
                function = function.value
            if isinstance(function, ast.Name) and function.id in DRAWING_NAMES:
                return True
    return False


def test_figures_have_alt_text(notebook):
    for name, cell in code_cells(notebook):
        if draws(cell.source) and "remove-output" not in cell.metadata.get("tags", []):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            assert not says_nothing(alt), (
                f"{name} draws: set mystnb.image.alt in its metadata"
            )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("fig, ax = plt.subplots()", True),
        ("axes[0].plot(x)", True),
        ("figures.error_by_length(rows)", True),
        ("plt.style.use('ggplot')", False),
        ("plt.rcParams.update(size=3)", False),
        ("import matplotlib.pyplot as plt", False),
        ("total = figure_count(rows)", False),
    ],
)
def test_drawing_is_recognized(source, expected):
    assert draws(source) is expected


NOT_PROSE = [
    re.compile(r"^([`~:]{3,}).*?^\1[`~:]*\s*$", re.M | re.S),  # fences and directives
    re.compile(r"\$\$.*?\$\$", re.S),
    re.compile(r"^\s*\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.M | re.S),
    re.compile(r"<!--.*?-->", re.S),
    re.compile(r"`+[^`]*`+"),
    re.compile(r"\$[^$\n]+\$"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"^\s*(\||<|:[\w-]+:|#).*$", re.M),  # tables, HTML, options, headings
]
LIST_MARKER = re.compile(r"^\s*(?:>\s*)*(?:[-*+]|\d+[.)])\s+")
ABBREVIATION = re.compile(
    r"\b(?:e\.g|i\.e|et al|etc|cf|vs|resp|approx|[Ff]igs?|[Ee]qs?|[Ss]ecs?|[Cc]h|[Nn]o"
    r"|[A-Z])\.(?=\s)"
)
TWO_SENTENCES = re.compile(r"[.!?][)\]\"'”’*_]*\s+[(\[\"'“‘*_]*[A-Z]")


def unwrap_directives(markdown):
    """Drop the fences of directives that hold prose, so that their text is checked."""
    prose = r"note|tip|warning|important|admonition|dropdown|seealso|hint|caution"
    opening = re.compile(r"^[`:]{3,}\{(?:" + prose + r")\}.*$", re.M)
    if not opening.search(markdown):
        return markdown
    without = opening.sub("", markdown)
    return re.sub(r"^:{3,}\s*$", "", without, flags=re.M)


def crowded_lines(markdown):
    """The lines of prose that hold more than one sentence."""
    text = unwrap_directives(markdown)
    for pattern in NOT_PROSE:
        text = pattern.sub("·", text)
    return [
        line.strip()
        for line in text.splitlines()
        if TWO_SENTENCES.search(ABBREVIATION.sub("", LIST_MARKER.sub("", line)))
    ]


def test_markdown_has_one_sentence_a_line(notebook):
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            crowded = crowded_lines(cell.source)
            assert not crowded, f"cell {number}: one sentence a line, please: {crowded}"


@pytest.mark.parametrize(
    "page", sorted((ROOT / "book").glob("*.md")), ids=lambda p: p.name
)
def test_pages_have_one_sentence_a_line(page):
    assert not crowded_lines(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "markdown",
    [
        "One sentence. Another one.",
        "Is it so? It is.",
        "- A list item. With two sentences.",
        "A **bold end.** Then more.",
        ":::{note}\nOne sentence. Another one.\n:::",
        "```{admonition} Title\nOne sentence. Another one.\n```",
        "It ends with $x$. Then more.",
    ],
)
def test_crowded_lines_are_found(markdown):
    assert len(crowded_lines(markdown)) == 1


@pytest.mark.parametrize(
    "markdown",
    [
        "One sentence.\nAnother one.",
        "Models, e.g. Llama, i.e. Meta's; see Fig. 3 and Liu et al. That is all.",
        "1. First step.\n2. Second step.",
        "# 2. The memory bottleneck",
        "| a. B | c. D |",
        "```python\n# One. Two.\n```",
        "$$\na. B\n$$",
        "Use `a. B` and [text](a. B), 3.5 GB.",
        "```{figure} x.png\n:alt: One. Two.\n```",
        "S. Kim wrote it.",
    ],
)
def test_lines_of_one_sentence_pass(markdown):
    assert crowded_lines(markdown) == []
