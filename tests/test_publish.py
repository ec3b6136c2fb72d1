"""What makers of the book use: a chapter to begin with, and the preview."""

import asyncio
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from tornado.websocket import websocket_connect

from kvq_lib.course import ledger, site
from kvq_lib.course.publish import chapter, watch
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


def test_a_title_is_a_title_whatever_it_says(copy):
    chapter.write(copy, f"{NEXT}_words", "The {claim} of {number}")
    notebook = json.loads((copy / "book" / f"{NEXT}_words.ipynb").read_text())
    title = notebook["cells"][0]["source"][0].strip()
    assert title == f"# {NEXT} The {{claim}} of {{number}}"
    assert f"[{NEXT} The {{claim}} of" in (copy / "book" / "index.md").read_text()


def made_by(*words):
    """What make asks Python for: here it is `echo`, and nothing is to install."""
    return subprocess.run(
        ["make", "--no-print-directory", "PY=echo", "STAMP=Makefile", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "words",
    ['"; touch {f}; echo "', "`touch {f}`", "$(touch {f})", "$(shell touch {f})"],
)
def test_words_of_the_command_line_are_no_commands(tmp_path, words):
    words = words.format(f=tmp_path / "made")
    said = made_by("set-repo", f"URL={words}").stdout
    assert said == f"-m kvq_lib.course.site set-repo -- {words}\n"
    said = made_by("new-chapter", f"NAME={words}", f"TITLE={words} $5").stdout
    assert said == f"-m kvq_lib.course.publish.chapter -- {words} {words} $5\n"
    made_by("release-check", f"TAG={words}")
    assert not (tmp_path / "made").exists()


def test_an_address_is_taken_back_only_if_one_says_so(monkeypatch):
    monkeypatch.setenv("URL", "https://github.com/some/other")
    ran = made_by("set-repo")
    assert ran.returncode and "URL= for none" in ran.stdout
    assert made_by("set-repo", "URL=").stdout.endswith("set-repo -- \n")


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


def test_a_port_that_is_taken_is_told_at_once(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert watch.main(["--port", str(port)]) == 1
    assert f"make watch PORT={port + 1}" in capsys.readouterr().out


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


async def told(port):
    """What the preview tells a page that is open."""
    line = await websocket_connect(f"ws://127.0.0.1:{port}/livereload")
    for command in ({"command": "hello"}, {"command": "info", "url": "page"}):
        await line.write_message(json.dumps(command))
    await line.read_message()  # its greeting
    return json.loads(await asyncio.wait_for(line.read_message(), 60))["command"]


def test_a_page_follows_its_source_and_runs_only_if_its_cells_changed(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/chapter\n")
    save(tmp_path, "Once", "tick")
    with socket.create_server(("127.0.0.1", 0)) as free:
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
        save(tmp_path, "Thrice", "tock")
        time.sleep(1.2)  # meanwhile the build has begun, or is about to
        with (
            ThreadPoolExecutor() as beside
        ):  # Playwright may have a loop in this thread
            assert beside.submit(asyncio.run, told(port)).result() == "reload"
        assert "Thrice" in shown(address, "tocktock")
    finally:
        preview.terminate()
        preview.wait()
