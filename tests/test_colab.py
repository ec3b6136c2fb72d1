"""The first cell of a notebook: what it does on Colab, and what becomes of it here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from test_install import COLAB, read_lock

from kvq_lib.course import bootstrap, colab, repository, site
from kvq_lib.course.homework import author, build, score, submission
from kvq_lib.course.homework.session import run_cells
from kvq_lib.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[1]
URL = "https://github.com/some-owner/some.book"
NOTEBOOKS = [
    path
    for folder in ("book", "exercises", "solutions")
    for path in sorted((ROOT / folder).glob("*.ipynb"))
]
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
#: What a package is called where it is imported, if that is something else.
DISTRIBUTIONS = {"optimum": "optimum-quanto"}


def read(path):
    return nbformat.read(path, as_version=4)


def chapter(gpu="not needed."):
    """A notebook that imports kvq_lib."""
    cells = [
        nbformat.v4.new_markdown_cell(f"# Title\n\n- **GPU:** {gpu}", id="title"),
        nbformat.v4.new_code_cell("import kvq_lib", id="first"),
    ]
    kernel = {"name": "python3", "display_name": "Python 3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def text_of(url, gpu="not needed."):
    return bootstrap.source(chapter(gpu), ROOT, url)


# -- what the cell does ----------------------------------------------------------------

# What kvq_lib is to a cell that could fetch it.
LIBRARY = "def say_gpu(difference=''): print('fetched;', difference)"
PIP = """#!/bin/sh
printf '%s\\n' "$@" > arguments
mkdir -p kvq-lib/kvq_lib/course
echo "$LIBRARY" > kvq-lib/kvq_lib/course/colab.py
echo 'pip says much'
echo 'ERROR: it was the network' >&2
exit $STATUS
"""


def run_cell(folder, text, status=0):
    """Run the cell in a fresh Python that has the standard library and nothing else,
    with a program in place of Python that pretends to be pip."""
    pip = folder / "pip"
    pip.write_text(PIP)
    pip.chmod(0o755)
    start = "import sys; sys.executable = sys.argv[1]; sys.path.append('here')\n"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + text, str(pip)],
        cwd=folder,
        env={**os.environ, "LIBRARY": LIBRARY, "STATUS": str(status)},
        capture_output=True,
        text=True,
    )


def test_where_the_library_is_there_nothing_is_fetched(tmp_path):
    here = tmp_path / "here" / "kvq_lib" / "course"
    here.mkdir(parents=True)
    (here / "colab.py").write_text(LIBRARY.replace("fetched", "was here"))
    for url in ("", URL):
        ran = run_cell(tmp_path, text_of(url))
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == "was here; \n"
    assert not (tmp_path / "arguments").exists()


def test_without_an_address_it_says_what_to_do(tmp_path):
    ran = run_cell(tmp_path, text_of(""))
    assert ran.returncode == 1 and not (tmp_path / "arguments").exists()
    said = ran.stderr.strip().splitlines()[-1]
    assert said.startswith("RuntimeError: This notebook needs kvq_lib")
    assert "make set-repo" in said and "make book" in said


def test_with_an_address_pip_is_asked_for_exactly_this(tmp_path):
    ran = run_cell(tmp_path, text_of(URL))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "fetched; \n"
    command = "-m pip install -q --no-deps --src . -e".split()
    command += [f"git+{URL}@{bootstrap.tag(ROOT)}#egg=kvq-lib"]
    asked = (tmp_path / "arguments").read_text().splitlines()
    assert asked == [*command, *bootstrap.packages(ROOT)]


def test_if_pip_fails_its_reason_is_shown(tmp_path):
    ran = run_cell(tmp_path, text_of(URL), status=1)
    assert ran.returncode == 1 and "fetched" not in ran.stdout
    assert "kvq_lib was not fetched from" in ran.stderr
    assert ran.stderr.rstrip().endswith("ERROR: it was the network")


def test_it_leaves_alone_what_colab_has():
    wanted = read_lock() | read_lock("requirements-weights.txt")
    for package in bootstrap.packages(ROOT):
        name, version = package.split("==")
        assert name not in COLAB and str(wanted[name].specifier) == f"=={version}"
    assert not {"torch", "numpy", "triton"} & set(bootstrap.PACKAGES)


def test_a_lock_without_a_package_is_told(tmp_path):
    (tmp_path / "requirements.txt").write_text("gguf==1\n")
    (tmp_path / "requirements-weights.txt").write_text("")
    with pytest.raises(InvalidArgument, match="jupyterquiz"):
        bootstrap.packages(tmp_path)


# -- what it says of a GPU -------------------------------------------------------------

WITH_GPU = "not needed; where there is one, the last section measures it."


@pytest.mark.parametrize(
    ("gpu", "difference"),
    [("not needed.", ""), (WITH_GPU, "the last section measures it")],
)
def test_it_says_what_the_notebook_s_opening_says(tmp_path, gpu, difference):
    here = tmp_path / "here" / "kvq_lib" / "course"
    here.mkdir(parents=True)
    (here / "colab.py").write_text(LIBRARY)
    assert run_cell(tmp_path, text_of("", gpu)).stdout == f"fetched; {difference}\n"


def test_homework_with_kernels_says_what_triton_does():
    (exercise,) = (p for p in NOTEBOOKS if p.match("exercises/hw06_*"))
    assert "interpreting" in bootstrap.difference(read(exercise))


def test_without_a_gpu_it_says_what_one_would_change(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    colab.say_gpu()
    assert capsys.readouterr().out == "No GPU, and this notebook would not use one.\n"
    colab.say_gpu("section 2 is longer")
    said = "No GPU, and none is needed; where there is one, section 2 is longer.\n"
    assert capsys.readouterr().out == said
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    colab.say_gpu("section 2 is longer")
    assert capsys.readouterr().out.startswith(f"{said}Colab lends one")


def test_a_gpu_is_named(monkeypatch, capsys):
    class T4:
        name, total_memory = "Tesla T4", 15_828_320_256

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: T4)
    colab.say_gpu()
    assert capsys.readouterr().out == (
        "GPU: Tesla T4, 15 GiB; this notebook does not use it.\n"
    )
    colab.say_gpu("section 2 is longer")
    assert capsys.readouterr().out == "GPU: Tesla T4, 15 GiB; section 2 is longer.\n"


def test_triton_is_not_imported_before_a_notebook_can_choose_its_interpreter():
    code = "import sys; from kvq_lib.course import colab; colab.say_gpu('x')\n"
    code += "assert 'triton' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the notebooks ---------------------------------------------------------------------


def test_the_cell_is_put_behind_the_title_once():
    notebook = chapter()
    for text in ("1", "2"):
        bootstrap.put(notebook, text)
        assert [cell.id for cell in notebook.cells] == ["title", bootstrap.ID, "first"]
        assert notebook.cells[1].source == text


@every_notebook
def test_a_notebook_that_needs_the_library_begins_with_the_cell(path):
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    own = [cell for cell in code if cell.id == bootstrap.ID]
    if not bootstrap.needed(notebook):
        assert own == []
        return
    assert own == code[:1] and own[0].metadata.tags == ["remove-cell"]
    wanted = bootstrap.source(notebook, ROOT, repository.current(ROOT))
    advice = f'make set-repo URL="{repository.current(ROOT)}"'
    assert own[0].source == wanted, f"{path.name}: run {advice}"


@every_notebook
def test_colab_has_what_a_notebook_imports_or_its_cell_fetches_it(path):
    there, notebook = set(COLAB), read(path)
    if bootstrap.needed(notebook):
        there |= {"kvq-lib", *bootstrap.PACKAGES}
    for name in bootstrap.imported(notebook) - set(sys.stdlib_module_names):
        assert DISTRIBUTIONS.get(name, name.replace("_", "-")) in there, name


def test_chapters_have_the_cell_and_homework_where_it_imports_the_library():
    have = {
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in NOTEBOOKS
        if bootstrap.needed(read(path))
    }
    chapters = {page for page in have if page.startswith("book/")}
    assert chapters == {f"book/{p.stem}" for p in (ROOT / "book").glob("*.ipynb")}
    assert have - chapters == {"exercises/hw06_pages", "solutions/hw06_pages"}


# -- make set-repo ---------------------------------------------------------------------


def state(root):
    """All files of a folder, as bytes."""
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def copy(tmp_path):
    """What the address is written into, and what that is made from."""
    files = [*NOTEBOOKS, *(ROOT / "solutions").glob("*/hw06*")]
    files += [ROOT / name for name in ("_config.yml", "pyproject.toml")]
    files += ROOT.glob("requirements*.txt")
    for path in files:
        copied = tmp_path / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(path.read_bytes())
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\n")
    repository.set_repository(tmp_path, "")
    return tmp_path


def test_an_address_is_written_everywhere_and_taken_back_to_the_byte(copy):
    before = state(copy)
    changed = repository.set_repository(copy, f"{URL}.git")
    needing = [path for path in NOTEBOOKS if bootstrap.needed(read(path))]
    assert {path.relative_to(copy) for path in changed} == {
        Path("_config.yml"),
        Path("CITATION.cff"),
        *(path.relative_to(ROOT) for path in needing),
    }
    assert repository.current(copy) == URL
    assert yaml.safe_load((copy / "CITATION.cff").read_text())["repository-code"] == URL
    for path in changed[2:]:
        text = path.read_text(encoding="utf-8")
        assert text.count(URL) == 1 and "make set-repo" not in text
        assert json.loads(text)["cells"][1]["id"] == bootstrap.ID
    assert repository.set_repository(copy, URL) == []
    repository.set_repository(copy, "https://github.com/another/one")
    repository.set_repository(copy, "")
    assert state(copy) == before


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("%time 1 + 1", "cell 2 ('%time 1 + 1') is no Python"),
        (None, "not appear to be"),
    ],
)
def test_a_notebook_that_cannot_be_read_is_named_and_nothing_is_written(
    copy, source, said
):
    path = copy / "book" / "08_scenarios.ipynb"
    if source is None:
        path.write_text("{")
    else:
        notebook = read(path)
        notebook.cells.insert(1, nbformat.v4.new_code_cell(source))
        nbformat.write(notebook, path)
    before = state(copy)
    with pytest.raises(InvalidArgument, match=r"^book/08_scenarios\.ipynb: ") as error:
        repository.set_repository(copy, URL)
    assert said in str(error.value)
    assert state(copy) == before


def test_homework_is_what_its_sources_make_with_an_address_too(copy):
    repository.set_repository(copy, URL)
    made = build.build(copy, ["hw06"], check=True)
    assert made.problems == [] and made.differences == {} and len(made.same) == 3


def test_a_cell_for_another_version_is_told(copy):
    project = copy / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "', 'version = "9.'))
    changed = repository.set_repository(copy, URL)
    assert bootstrap.tag(copy).startswith("v9.")
    assert f"@{bootstrap.tag(copy)}#egg" in changed[-1].read_text(encoding="utf-8")


# -- graded ----------------------------------------------------------------------------

#: What students may make of the cell; None: they delete it.
EDITED = {
    "with an address": text_of(URL),
    "installed by hand": "!pip install kvq-lib",
    "failing": "raise SystemExit",
    "removed": None,
}


@pytest.mark.parametrize("text", EDITED.values(), ids=EDITED)
def test_a_submission_gets_its_marks_whatever_became_of_the_cell(tmp_path, text):
    notebook = read(ROOT / "solutions" / "hw06_pages.ipynb")
    (own,) = (cell for cell in notebook.cells if cell.id == bootstrap.ID)
    own.source = text or ""
    if text is None:
        notebook.cells.remove(own)
    nbformat.write(notebook, tmp_path / "someone.ipynb")
    key = score.load(ROOT / build.KEYS / "hw06.json")
    cells = submission.read(tmp_path / "someone.ipynb").cells
    ran = run_cells(cells, score.probes(key), author.sandbox(), author.LIMITS)
    for found in score.score(key, ran):
        assert found.points == found.most > 0, (found.question, found.failures)


# -- the button ------------------------------------------------------------------------

CONFIG = """
title: Tiny
only_build_toc_files: true
execute: {{execute_notebooks: "off"}}
sphinx:
  extra_extensions: [kvq_lib.course.repository]
  config:
    kvq_repository: "{}"
"""
TOC = """
format: jb-book
root: book/page
chapters:
  - file: book/01_chapter
  - file: exercises/hw01_pages
  - file: solutions/hw01_pages
"""


@pytest.fixture(scope="module", params=["", URL])
def built(request, tmp_path_factory):
    """(address, folder of the site) of a small book."""
    root = tmp_path_factory.mktemp("book")
    for folder in ("book", "exercises", "solutions"):
        (root / folder).mkdir()
    for page in ("book/01_chapter", "exercises/hw01_pages", "solutions/hw01_pages"):
        notebook = chapter()
        bootstrap.put(notebook, text_of(request.param))
        nbformat.write(notebook, root / f"{page}.ipynb")
    (root / "book" / "page.md").write_text("# A page without a notebook\n")
    (root / "_toc.yml").write_text(TOC)
    (root / "_config.yml").write_text(CONFIG.format(request.param))
    (root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert site.build(root) == 0
    return request.param, root / "_build" / "html"


def to_colab(html, page):
    found = re.findall(r'href="([^"]+)"', (html / f"{page}.html").read_text())
    return {link for link in found if "colab" in link}


@pytest.mark.parametrize("page", re.findall(r"file: (\S+)", TOC))
def test_the_button_opens_the_tag_of_the_page(built, page):
    url, html = built
    path = f"some-owner/some.book/blob/{bootstrap.tag(ROOT)}/{page}.ipynb"
    wanted = {f"https://colab.research.google.com/github/{path}"} if url else set()
    assert to_colab(html, page) == wanted


def test_a_page_without_a_notebook_has_no_button(built):
    assert to_colab(built[1], "book/page") == set()


def test_pages_do_not_show_the_cell(built):
    text = (built[1] / "book" / "01_chapter.html").read_text(encoding="utf-8")
    assert "import kvq_lib" in re.sub(r"<[^>]+>", "", text) and "say_gpu" not in text
