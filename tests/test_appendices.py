"""The appendices: symbols, words, the library's reference, the status page, works."""

import inspect
import json
import os
import re
from pathlib import Path

import nbformat
import pytest

import kvq_lib as kvq
from kvq_lib.course import api, site

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html" / "book"
# Homework explains its letters where it uses them.
PAGES = [
    page
    for page in site.pages()
    if page.startswith("book/") and page != "book/appendix_notation"
]
NOTATION = (ROOT / "book" / "appendix_notation.md").read_text(encoding="utf-8")


def prose(page):
    """The Markdown of a page."""
    path = ROOT / f"{page}.md"
    if path.exists():
        return path.read_text(encoding="utf-8")
    cells = nbformat.read(ROOT / f"{page}.ipynb", as_version=4).cells
    return "\n\n".join(c.source for c in cells if c.cell_type == "markdown")


def built(page):
    path = HTML / f"{page}.html"
    assert path.exists(), f"{page} is not built: run `make book`"
    return path.read_text(encoding="utf-8")


# -- the table of contents -------------------------------------------------------------


def test_pages_are_read_from_parts_chapters_and_sections(tmp_path):
    toc = """
        format: jb-book
        root: a
        parts:
          - caption: One
            chapters:
              - file: b
                sections: [{file: c}]
              - url: https://example.org
          - caption: Two
            chapters: [{file: d}]
    """
    (tmp_path / "_toc.yml").write_text(inspect.cleandoc(toc))
    assert site.pages(tmp_path) == ["a", "b", "c", "d"]
    (tmp_path / "_toc.yml").write_text("root: a\nchapters: [{file: b}, {file: c}]\n")
    assert site.pages(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("place", range(1, len(site.pages()) - 1))
def test_each_page_leads_to_the_one_before_and_the_one_after(place):
    before, page, after = (f"{p}.html" for p in site.pages()[place - 1 : place + 2])
    text = (HTML.parent / page).read_text(encoding="utf-8")
    links = dict(
        re.findall(r'class="(left|right)-(?:prev|next)"\s+href="([^"]+)"', text)
    )
    here = Path(page).parent
    assert links == {
        "left": os.path.relpath(before, here),
        "right": os.path.relpath(after, here),
    }


# -- notation --------------------------------------------------------------------------

MATH = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$([^$\n]+?)\$", re.S)
# Commands that set words, draw signs or arrange; all others are symbols or functions.
WORDS = re.compile(r"\\(?:text|mathrm|operatorname)\{[^}]*\}")
SYMBOL = re.compile(
    r"\\(?:alpha|beta|gamma|delta|Delta|epsilon|varepsilon|eta|theta|kappa|lambda|mu"
    r"|nu|pi|rho|sigma|Sigma|tau|phi|varphi|omega|Omega|ell)(?![A-Za-z])|(?<![\\A-Za-z])[A-Za-z]"
)


def symbols(markdown):
    """Letters that stand for something in the formulas of a page."""
    found = set()
    code = re.compile(r"^(`{3,}).*?^\1`*\s*$|`[^`\n]*`", re.M | re.S)
    for display, inline in MATH.findall(code.sub("", markdown)):
        formula = WORDS.sub(" ", display or inline)
        formula = re.sub(
            r"_\{?[A-Za-z]{2,}\}?", "", formula
        )  # subscripts that are words
        # Commands that are no symbols end where their letters end.
        formula = re.sub(rf"(?!{SYMBOL.pattern})\\[A-Za-z]+", " ", formula)
        found |= set(SYMBOL.findall(formula))
    return found


def test_symbols_are_found():
    page = r"""
$$
\hat{x} = c\,\Delta + x_{min}, \quad \mathrm{PPL} = \frac{1}{N}\sum_{i=1}^{N} p(y_i)
$$ (label)

Money: a `$b$` in code and $N_{layers}$, $d_{head}$, $\lambda_d = \max_t |k_{td}|$.
"""
    listed = {"x", "c", "N", "i", "p", "y", "d", "t", "k", r"\Delta", r"\lambda"}
    assert symbols(page) == listed


@pytest.mark.parametrize("page", PAGES)
def test_the_table_has_every_symbol_of_the_page(page):
    missing = symbols(prose(page)) - symbols(NOTATION)
    assert not missing, f"explain {sorted(missing)} in book/appendix_notation.md"


def test_the_table_has_no_symbol_that_no_page_uses():
    used = set().union(*(symbols(prose(page)) for page in PAGES))
    assert symbols(NOTATION) <= used


def test_names_in_code_exist():
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("kvq_lib", "book")
        for path in (ROOT / folder).glob("*.py" if folder == "kvq_lib" else "*.ipynb")
    )
    for name in re.findall(r"`(\w+)`", NOTATION):
        assert re.search(rf"\b{name}\b", sources), name


# -- glossary --------------------------------------------------------------------------

ENTRY = re.compile(r"^(\S.*)\n((?:  .*\n)+)", re.M)
GLOSSARY = dict(
    ENTRY.findall(
        re.search(
            r"^```\{glossary\}\n(.*?)^```", prose("book/appendix_glossary"), re.S | re.M
        )[1]
    )
)


def test_the_glossary_is_in_order_and_not_small():
    assert len(GLOSSARY) > 40
    assert list(GLOSSARY) == sorted(GLOSSARY, key=str.lower)


@pytest.mark.parametrize("term", GLOSSARY)
def test_each_word_leads_to_a_page(term):
    targets = re.findall(r"\]\((\w+)\)", GLOSSARY[term])
    assert targets and {f"book/{target}" for target in targets} <= set(PAGES)


# -- the library's reference -----------------------------------------------------------


def public():
    return {
        name
        for name, value in vars(kvq).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def test_the_reference_names_everything_that_is_public():
    listed = [name for names in api.public_names().values() for name in names]
    assert set(listed) == public() and len(listed) == len(set(listed))


@pytest.mark.parametrize("name", sorted(public()))
def test_the_reference_has_signature_and_docstring(name):
    entry = re.search(rf"^### `{name}`\n(.*?)(?=^##|\Z)", api.reference(), re.M | re.S)[
        1
    ]
    value = getattr(kvq, name)
    if not callable(value):
        assert len(entry.strip()) > 20
        return
    doc = inspect.cleandoc(value.__doc__)
    assert doc.split("\n")[0] in entry
    assert "```python\n" in entry
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    shown = {p for p in inspect.signature(value).parameters if not p.startswith("_")}
    block = re.search(r"```python\n(.*?)```", entry, re.S)[1]
    assert all(re.search(rf"\b{parameter}\b", block) for parameter in shown)


def test_docstrings_become_markdown():
    import ast

    tree = ast.parse(
        inspect.cleandoc(
            '''
            def f(a, *, b: "int | None" = None, **more) -> "tuple[str, ...]":
                """What it does.

                    f(1, b=2)

                Args:
                    a, b: numbers,
                        on two lines.

                Returns:
                    A tuple.

                Raises:
                    ValueError: it is not.
                """
            '''
        )
    )
    (function,) = tree.body
    assert api.signature("f", function.args, function.returns) == (
        "```python\nf(a, *, b: int | None = None, **more) -> tuple[str, ...]\n```"
    )
    assert api.docstring(function) == inspect.cleandoc(
        """
        What it does.

        ```python
        f(1, b=2)
        ```

        **Arguments**

        `a, b`
        : numbers, on two lines.

        **Returns**

        A tuple.

        **Raises**

        `ValueError`
        : it is not.
        """
    )


def test_the_page_has_a_heading_and_an_index_entry_for_every_name():
    page = built("appendix_api")
    index = (HTML.parent / "genindex.html").read_text(encoding="utf-8")
    for name in public():
        kind = "class-" if inspect.isclass(getattr(kvq, name)) else ""
        assert f'id="api-{kind}{name.lower().replace("_", "-")}"' in page
        assert f"kvq.{name}</a>" in index
    assert "{api}" not in page


# -- the status page -------------------------------------------------------------------


def test_the_status_page_lists_each_executed_page_and_where_it_ran():
    page = built("appendix_status")
    rows = re.findall(r"<tr.*?</tr>", page, re.S)
    notebooks = [p for p in PAGES if (ROOT / f"{p}.ipynb").exists()]
    assert len(rows) == 1 + len(notebooks)
    for row, notebook in zip(rows[1:], notebooks, strict=True):
        assert f'href="{Path(notebook).name}.html"' in row and "succeeded" in row
        assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d", row)
    ran = json.loads((ROOT / site.ENVIRONMENT).read_text(encoding="utf-8"))
    for value in (ran["machine"]["cpu"], ran["versions"]["torch"]):
        assert value in page


def test_other_versions_or_another_machine_run_the_chapters_again(monkeypatch):
    before = site.execution_key()
    other = {**site.environment(), "versions": {"torch": "0.1"}}
    monkeypatch.setattr(site, "environment", lambda: other)
    assert site.execution_key() != before


# -- works -----------------------------------------------------------------------------

BIBLIOGRAPHY = (ROOT / "book" / "references.bib").read_text(encoding="utf-8")
WORKS = dict(re.findall(r"^@\w+\{(\w+),\n(.*?)^\}", BIBLIOGRAPHY, re.M | re.S))
CITED = {
    key.strip()
    for page in site.pages()
    for keys in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", prose(page))
    for key in keys.split(",")
}


def test_works_are_listed_once():
    assert len(WORKS) == BIBLIOGRAPHY.count("\n@") == len(set(WORKS))


@pytest.mark.parametrize("key", WORKS)
def test_each_work_has_an_address_and_is_cited(key):
    assert re.search(
        r"^\s*(url\s*=\s*\{https://[^\s}]+\}|doi\s*=\s*\{10\.[^\s}]+\})",
        WORKS[key],
        re.M,
    )
    assert key in CITED, "cited nowhere: cite it, or take it out"


def test_each_work_is_listed_with_a_link():
    entries = re.findall(
        r'<dt class="label" id="id\d+">|<div class="citation"', built("references")
    )
    listed = re.split(r'<div class="citation"', built("references"))[1:]
    assert len(listed) == len(WORKS) == len(entries)
    assert all('reference external" href="https://' in entry for entry in listed)
