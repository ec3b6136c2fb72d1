"""What the chapters promise: their order, what they need, and code that is the
library's."""

import ast
import json
import re
import textwrap
from pathlib import Path

import nbformat
import pytest

from kvq_lib.course import site

ROOT = Path(__file__).resolve().parents[1]
EXECUTED = ROOT / "_build" / "jupyter_execute"
CHAPTERS = [page for page in site.pages() if re.match(r"book/\d\d", page)]
LIBRARY = {
    path: path.read_text(encoding="utf-8") for path in (ROOT / "kvq_lib").rglob("*.py")
}


def cells(page, kind):
    notebook = nbformat.read(ROOT / f"{page}.ipynb", as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def prose(page):
    return "\n\n".join(cells(page, "markdown"))


def executed(page):
    """(source, what it printed) of each code cell of a chapter that was run."""
    path = EXECUTED / f"{page}.ipynb"
    assert path.exists(), f"{page} was not executed: run `make book`"
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            texts = [o["text"] for o in cell["outputs"] if o.get("name") == "stdout"]
            yield "".join(cell["source"]), "".join(map("".join, texts))


def test_they_are_all_numbered_in_order():
    """The lesson's eleven, chapter 6 in two parts, and then what was added."""
    numbers = [Path(page).name.split("_")[0] for page in CHAPTERS]
    assert numbers == sorted(numbers) and "06b" in numbers
    whole = [number for number in numbers if number.isdigit()]
    assert whole == [f"{n:02}" for n in range(1, len(whole) + 1)] and len(whole) >= 11


# -- one form --------------------------------------------------------------------------


@pytest.mark.parametrize("page", CHAPTERS)
def test_a_chapter_says_first_what_it_is_for_and_what_it_needs(page):
    text = prose(page)
    number = Path(page).name.split("_")[0].lstrip("0")
    opening = text[: text.index("\n## ")]
    assert opening.startswith(f"# {number} ")
    places = [
        opening.index(part)
        for part in (
            "After this chapter you can\n\n- ",
            # Words between them keep two lists from becoming one.
            "\n\nBefore you begin:\n\n- **You need:** ",
            "- **Time:** about ",
            "- **GPU:** not needed",
        )
    ]
    assert places == sorted(places)
    assert re.search(r"\*\*Time:\*\* about \d+ minutes.*\b(minute) to run", opening)


@pytest.mark.parametrize("page", CHAPTERS)
def test_a_chapter_ends_with_summary_exercises_questions_and_reading(page):
    headings = re.findall(r"^## (.+)$", prose(page), re.M)
    assert headings[-4:] == ["Summary", "Exercises", "Questions", "Further reading"]


@pytest.mark.parametrize("page", CHAPTERS)
def test_sections_are_counted(page):
    number = Path(page).name.split("_")[0].lstrip("0")
    found = re.findall(rf"^## {number}\.(\d+) ", prose(page), re.M)
    assert found == [str(n) for n in range(1, len(found) + 1)] and len(found) > 3


def test_the_start_page_gives_the_minutes_of_the_chapters():
    start = (ROOT / "book" / "index.md").read_text(encoding="utf-8")
    for page in CHAPTERS:
        (minutes,) = re.findall(r"\*\*Time:\*\* about (\d+)", prose(page))
        (row,) = re.findall(rf"^\| \[[^]]+\]\({Path(page).name}\) .*$", start, re.M)
        assert row.endswith(f"| {minutes} |"), page


# -- code ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", CHAPTERS)
def test_the_model_is_where_the_cells_expect_it(page):
    """Without a device it goes to a GPU where there is one; other tensors do not."""
    for source in cells(page, "code"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                "load_model"
            ):
                named = {keyword.arg for keyword in node.keywords}
                assert len(node.args) > 1 or "device" in named, ast.unparse(node)


def is_excerpt(text):
    """Whether lines stand in one file of the library, one after the other."""
    wanted = [line.rstrip() for line in text.strip("\n").splitlines()]
    for source in LIBRARY.values():
        lines = [line.rstrip() for line in source.splitlines()]
        for start in range(len(lines) - len(wanted) + 1):
            part = "\n".join(lines[start : start + len(wanted)])
            if textwrap.dedent(part).splitlines() == wanted:
                return True
    return False


def test_an_excerpt_is_recognized():
    (path,) = (p for p in LIBRARY if p.name == "memory.py")
    lines = LIBRARY[path].splitlines()
    assert is_excerpt(textwrap.dedent("\n".join(lines[20:30])))
    assert not is_excerpt("\n".join([*lines[20:25], "changed = True", *lines[26:30]]))


def test_code_that_is_shown_as_the_library_s_is_the_library_s():
    shown = [
        output
        for page in CHAPTERS
        for source, output in executed(page)
        if re.search(r"print\((first_loop|inspect\.getsource)\(", source)
    ]
    assert shown
    for output in shown:
        assert len(output.splitlines()) > 3 and is_excerpt(output), output[:80]


@pytest.mark.parametrize("page", CHAPTERS)
def test_prose_holds_no_code_that_nobody_runs(page):
    assert not re.findall(r"^```(?:python|py)\b", prose(page), re.M)


#: What chapters print that compare code of their own with the library.
COMPARED = {
    "book/02_memory_bottleneck": [r"^True$"],
    "book/03_quantization_strategies": [
        r"^codes equal the library's: +True$",
        r"^scales equal the library's: +True$",
    ],
    "book/04_precision_tradeoffs": [
        r"^the model's own attention (\d+\.\d{4})\d+, our cache \1\d+$"
    ],
    "book/06b_how_the_kernel_reads_a_page": [
        r"^a byte is channel d \+ 16 · channel \(d \+ D/2\): True$"
    ],
    "book/09_from_scratch": [
        r"^8 bits: 0 of \d+ codes differ .*\n4 bits: 0 of \d+ codes differ",
        r"^bit for bit what the kernel made of our pages: True$",
        r"^8 bits: ours (\d+), cache\.nbytes \1, kv_bytes \1$",
        r"^layer 15: 0 codes differ",
    ],
    "book/11_interview": [r"^as the library counts: True$"],
}


@pytest.mark.parametrize("page", COMPARED)
def test_code_of_a_chapter_s_own_does_what_the_library_does(page):
    printed = "\n".join(output for _, output in executed(page))
    for pattern in COMPARED[page]:
        assert re.search(pattern, printed, re.M), pattern


# -- time ------------------------------------------------------------------------------


def test_chapters_and_book_run_in_little_time():
    """On an idle machine of two cores a chapter has 90 seconds and the book fifteen
    minutes; machines that tests run on are not always idle, hence twice as much."""
    status = ROOT / "_build" / "html" / "book" / "appendix_status.html"
    rows = re.findall(r"<tr.*?</tr>", status.read_text(encoding="utf-8"), re.S)
    seconds = {}
    for row in rows[1:]:
        found = [
            re.sub(r"<[^>]+>", "", cell).strip()
            for cell in re.findall(r"<td.*?</td>", row, re.S)
        ]
        seconds[found[0]] = float(found[2])
    assert len(seconds) > len(CHAPTERS)
    slow = {page: s for page, s in seconds.items() if s > 180}
    assert not slow and sum(seconds.values()) < 1800
