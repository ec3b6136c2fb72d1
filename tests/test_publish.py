"""What makers of the book use: a chapter to begin with, the preview, releases."""

import difflib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml

from kvq_lib.course import ledger, site
from kvq_lib.course.publish import chapter, release, watch
from kvq_lib.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[1]
LISTED = [file for file, *_ in chapter.LISTS]


@pytest.fixture
def copy(tmp_path):
    """What `make new-chapter` reads and writes."""
    (tmp_path / "book").mkdir()
    for file in LISTED:
        shutil.copyfile(ROOT / file, tmp_path / file)
    return tmp_path


def texts(root):
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in root.rglob("*")
        if path.is_file()
    }


# -- a chapter to begin with -----------------------------------------------------------

LAST = chapter.listed(ROOT)[-1]
NEXT = f"{int(LAST[:2]) + 1:02}"


def test_a_notebookis_written_and_listed_after_the_last(copy):
    before = texts(copy)
    said = chapter.write(copy, f"{NEXT}_more_words", "  More words ")
    after = texts(copy)
    assert chapter.listed(copy) == [*chapter.listed(ROOT), f"{NEXT}_more_words"]
    assert site.pages(copy).index(f"book/{NEXT}_more_words") == (
        site.pages(copy).index(f"book/{LAST}") + 1
    )
    for file in LISTED:  # nothing else of them has changed
        changes = difflib.ndiff(before[file].splitlines(), after[file].splitlines())
        assert {line[0] for line in changes} == {" ", "+"}, file
    (claim,) = set(ledger.load(copy / "book/claims.yml")) - set(ledger.load())
    assert claim in said
    page = re.search(
        rf"^## {int(NEXT)} More words\n\n(.*)\Z", after[LISTED[3]], re.S | re.M
    )
    assert page[1] == f"```{{claims}} book/{NEXT}_more_words\n```\n"


def test_a_notebookbetween_two_stands_between_them_everywhere(copy):
    chapter.write(copy, "02b_words", "Words")
    chapters = chapter.listed(copy)
    assert chapters == sorted(chapters)
    for file in LISTED:
        text = (copy / file).read_text(encoding="utf-8")
        places = [text.index(f"{n}_") for n in ("02", "02b", "03")]
        assert places == sorted(places), file
        assert "\n\n\n" not in text
    assert list(ledger.load(copy / "book/claims.yml"))[5].startswith("C")


def test_a_notebookis_saved_as_chapters_are(copy):
    path = copy / "book" / f"{NEXT}_words.ipynb"
    chapter.write(copy, f"{NEXT}_words", "Words")
    first = path.read_bytes()
    saved = json.loads(first)
    assert first.decode() == json.dumps(saved, indent=1, ensure_ascii=False) + "\n"
    for file in LISTED:
        shutil.copyfile(ROOT / file, copy / file)
    path.unlink()
    chapter.write(copy, f"{NEXT}_words", "Words")
    assert path.read_bytes() == first
    other = json.loads((ROOT / "book" / f"{LAST}.ipynb").read_text(encoding="utf-8"))
    assert saved["metadata"] == other["metadata"]
    assert "{" not in re.sub(r"\{cite\}", "", saved["cells"][0]["source"][0])
    nbformat.validate(nbformat.reads(first.decode(), as_version=4))


@pytest.mark.parametrize(
    ("name", "title", "said"),
    [
        ("words", "Words", "named like"),
        (f"{NEXT}-words", "Words", "named like"),
        (f"{NEXT}_Words", "Words", "named like"),
        (f"../{NEXT}_words", "Words", "named like"),
        (f"{NEXT}_words; touch x", "Words", "named like"),
        ("", "Words", "named like"),
        ("02_words", "Words", "02_memory_bottleneck"),
        ("06b_words", "Words", "06b_how"),
        ("98_words", "Words", f"the next chapter is {NEXT}"),
        (f"{NEXT}b_words", "Words", "nothing to follow"),
        ("02c_words", "Words", "nothing to follow"),
        ("02a_words", "Words", "nothing to follow"),
        (f"{NEXT}_words", " ", "one line of words"),
        (f"{NEXT}_words", "One\nTwo", "one line of words"),
        (f"{NEXT}_words", "a | b", "one line of words"),
    ],
)
def test_what_would_be_no_notebookis_refused_and_nothing_is_written(
    copy, name, title, said
):
    before = texts(copy)
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        chapter.write(copy, name, title)
    assert texts(copy) == before


def test_a_notebook_that_nobody_lists_is_not_overwritten(copy):
    path = copy / "book" / f"{NEXT}_words.ipynb"
    path.write_text("mine")
    with pytest.raises(InvalidArgument, match=r"not in _toc\.yml"):
        chapter.write(copy, f"{NEXT}_words", "Words")
    assert path.read_text() == "mine"


def test_a_refusal_is_said_in_one_line(capsys):
    assert chapter.main(["words", "Words"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("make new-chapter NAME=") and said.count("\n") == 1


def test_the_notebookis_one_that_the_tests_of_chapters_accept(copy):
    """They read the repository that they lie in: here, a copy with one more chapter."""
    for folder in ("book", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, dirs_exist_ok=True)
    (copy / "kvq_lib").symlink_to(ROOT / "kvq_lib")
    chapter.write(copy, f"{NEXT}_words", "Words")
    code = f"""
import sys, pathlib, pytest
from kvq_lib.course import site
pages = site.pages(pathlib.Path({str(copy)!r}))
site.pages = lambda root=None: pages
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "words or start_page or
all_numbered", "tests/test_chapters.py", "tests/test_notebooks.py"]))
""".replace("or\nall", "or all")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 12


def test_a_chapter_survives_being_edited_as_text(tmp_path):
    """What CONTRIBUTING.md says of jupytext: only edited lines differ."""
    notebook, text = tmp_path / "chapter.ipynb", tmp_path / "chapter.md"
    shutil.copyfile(ROOT / "book" / "appendix_formats.ipynb", notebook)
    before = notebook.read_text(encoding="utf-8")
    jupytext("--to", "md:myst", "--output", text, notebook)
    jupytext("--to", "ipynb", "--update", "--output", notebook, text)
    assert notebook.read_text(encoding="utf-8") == before

    edited = text.read_text(encoding="utf-8").replace("Every code of", "Each code of")
    edited = edited.replace(
        "fig, ax = plt.subplots(", "fig, ax = plt.subplots(1, 1, ", 1
    )
    text.write_text(edited, encoding="utf-8")
    jupytext("--to", "ipynb", "--update", "--output", notebook, text)
    after = notebook.read_text(encoding="utf-8").splitlines()
    pairs = zip(before.splitlines(), after, strict=True)
    assert sum(old != new for old, new in pairs) == 2


def jupytext(*arguments):
    command = [sys.executable, "-m", "jupytext", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True)


# -- the preview -----------------------------------------------------------------------


def test_outputs_made_with_another_library_are_not_kept(tmp_path, monkeypatch):
    stamp = tmp_path / "_build" / "execution.key"
    stamp.parent.mkdir()
    stamp.write_text("old")
    monkeypatch.setattr(site, "execution_key", lambda root: "old")
    assert not watch.disown_executions(tmp_path, "old") and stamp.exists()
    monkeypatch.setattr(site, "execution_key", lambda root: "new")
    assert watch.disown_executions(tmp_path, "old") and not stamp.exists()


PREVIEW = """
import pathlib, sys
from kvq_lib.course.publish import watch
watch.watch(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
"""
CONFIG = """
title: Tiny
only_build_toc_files: true
execute: {execute_notebooks: cache}
launch_buttons: {thebe: false}
"""


def save(root, title, word):
    """A chapter of one cell, which notes in a file that it ran."""
    runs = f"open({str(root / 'runs')!r}, 'a').write('x')"
    chapter = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell(f"# {title}", id="title"),
            nbformat.v4.new_code_cell(f"{runs}\nprint({word!r} * 2)", id="code"),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(chapter, root / "book" / "chapter.ipynb")


def shown(address, word):
    """The page as it is served, once it has the word."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(address) as page:
                text = page.read().decode()
        except OSError:
            text = ""
        if word in text:
            return text
        time.sleep(0.2)
    pytest.fail(f"{word!r} was not shown within two minutes")


def test_a_page_follows_its_source_and_runs_only_if_its_cells_changed(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/chapter\n")
    save(tmp_path, "Once", "tick")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    preview = subprocess.Popen(
        [sys.executable, "-c", PREVIEW, str(tmp_path), str(port)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        address = f"http://127.0.0.1:{port}/book/chapter.html"
        page = shown(address, "ticktick")
        assert "livereload.js" in page and not list(
            site.external_files(tmp_path / "_build" / "watch" / "html")
        )
        save(tmp_path, "Twice", "tick")
        assert "ticktick" in shown(address, "Twice")
        assert (tmp_path / "runs").read_text() == "x"
        save(tmp_path, "Twice", "tock")
        shown(address, "tocktock")
        assert (tmp_path / "runs").read_text() == "xx"
    finally:
        preview.terminate()
        preview.wait()


# -- releases --------------------------------------------------------------------------

VERSION = release.version(ROOT)


@pytest.fixture
def built(tmp_path):
    """A repository in which everything was built for version 0.1.0."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    (tmp_path / "CITATION.cff").write_text("version: 0.1.0\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n- Not yet.\n\n"
        "## [0.1.0] - 2026-12-01\n\n### Added\n\n- All of it.\n\n"
        "## [0.0.1] - 2026-01-01\n\n- Old.\n"
    )
    wheel = release.FOLDER / "kvq_lib-0.1.0-py3-none-any.whl"
    for path in (release.PDF, release.DECK, wheel):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path.name)
    return tmp_path


@pytest.mark.parametrize("tag", ["", "v0.1.0"])
def test_a_release_has_three_files_and_notes(built, tag):
    names = [path.name for path in release.gather(built, tag)]
    assert names == [
        "kvq_lib-0.1.0-py3-none-any.whl",
        "kvq-book-0.1.0.pdf",
        "kvq-0.1.0.apkg",
    ]
    folder = built / release.FOLDER
    assert (folder / release.NOTES).read_text() == "### Added\n\n- All of it.\n"
    assert (folder / "kvq-book-0.1.0.pdf").read_text() == "kvq-book.pdf"
    assert (folder / "kvq-0.1.0.apkg").read_text() == "kvq.apkg"
    assert {p.name for p in folder.iterdir()} == {*names, release.NOTES}


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("CITATION.cff", "version: 0.2.0\n", "pyproject.toml has version 0.1.0"),
        ("CHANGELOG.md", "## [Unreleased]\n\n- New.\n", "no section [0.1.0]"),
        ("CHANGELOG.md", "## [0.1.0]\n\n## [0.0.1]\n- x\n", "no section [0.1.0]"),
        (release.PDF, None, "kvq-book.pdf was not built"),
        (release.DECK, None, "kvq.apkg was not built"),
        ("_build/release/kvq_lib-0.1.0-py3-none-any.whl", None, ".whl was not built"),
    ],
)
def test_an_incomplete_release_is_refused(built, file, text, said):
    if text is None:
        (built / file).unlink()
    else:
        (built / file).write_text(text)
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        release.gather(built)


@pytest.mark.parametrize("tag", ["0.1.0", "v0.1.1", "v0.1.0rc1"])
def test_a_tag_of_another_version_is_refused(built, tag):
    with pytest.raises(InvalidArgument, match=re.escape(repr(tag))):
        release.gather(built, tag)


def make(*arguments, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(
        ["make", "--no-print-directory", f"VENV={sys.prefix}", *arguments],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
    )


def test_publishing_passes_the_tag_and_the_files_to_gh(tmp_path):
    """Also a tag that a shell or make would take for a command."""
    told = tmp_path / "told"
    (tmp_path / "gh").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}\n')
    (tmp_path / "gh").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    tag = f"v1$(touch {tmp_path}/made);`touch {tmp_path}/made`"
    done = make("publish", PATH=path, TAG=tag)
    assert done.returncode == 0, done.stderr
    assert told.read_text().splitlines()[:4] == [
        "release",
        "create",
        tag,
        "--verify-tag",
    ]
    assert not (tmp_path / "made").exists()


# -- the project's papers --------------------------------------------------------------


def test_the_citation_names_what_is_cited():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert cited["title"] == config["title"]
    assert {"message", "authors", "version", "license"} <= set(cited)
    footer = config["sphinx"]["config"]["html_theme_options"]["extra_footer"]
    assert f"version {VERSION}" in footer and cited["title"] in footer


def test_the_licences_are_whole():
    code = (ROOT / "LICENSE").read_text(encoding="utf-8")
    text = (ROOT / "LICENSE-TEXT").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in code
    assert "END OF TERMS AND CONDITIONS" in code and len(code) > 11_000
    assert "Attribution 4.0 International" in text and len(text) > 15_000
    for section in range(1, 9):
        assert re.search(rf"Section {section} ", text), section


def test_the_changelog_is_in_order():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings[0] == "[Unreleased]"
    for heading in headings[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= kinds


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_what_contributors_are_told_to_call_is_there():
    targets = set(
        re.findall(
            r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
        )
    )
    called = set(re.findall(r"(?:^|`)make ([a-z-]+)", CONTRIBUTING, re.M))
    assert called and called <= targets


def test_files_that_contributors_are_sent_to_are_there():
    named = set(
        re.findall(
            r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|yml|toml|txt))`", CONTRIBUTING
        )
    )
    named |= set(re.findall(r"\]\(([^)#:]+)\)", CONTRIBUTING))
    assert named
    built = {path for path in named if path.startswith("_build/")}
    assert not {path for path in named - built if not (ROOT / path).exists()}


def test_the_wheel_holds_the_library_and_its_licence_alone(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "kvq_lib",
        source / "kvq_lib",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / file, source / file)
    build = (
        "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-I", "-c", build, str(tmp_path)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    with zipfile.ZipFile(tmp_path / f"kvq_lib-{VERSION}-py3-none-any.whl") as wheel:
        names = wheel.namelist()
        about = f"kvq_lib-{VERSION}.dist-info"
        metadata = wheel.read(f"{about}/METADATA").decode()
        assert (
            wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        )
    assert "License-Expression: Apache-2.0" in metadata
    assert {name.split("/")[0] for name in names} == {"kvq_lib", about}
    assert "kvq_lib/course/publish/chapter.md" in names
