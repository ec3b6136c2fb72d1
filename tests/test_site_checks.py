"""What fails a build is told with its file and its cell or line."""

import nbformat
import pytest
import yaml
from tinybook import CELL, shows, why, write_chapter

from kvq_lib.course import strict

IN_TEXT = "book/chapter.ipynb, cell 1 ('# A chapter')"
IN_CODE = "book/chapter.ipynb, cell 2 ('from IPython.display import HTML'"


def add_pages(root, **texts):
    """More pages for a book, of Markdown."""
    for name, text in texts.items():
        (root / "book" / f"{name}.md").write_text(text)
    chapters = [{"file": f"book/{name}"} for name in texts]
    toc = {"format": "jb-book", "root": "book/chapter", "chapters": chapters}
    (root / "_toc.yml").write_text(yaml.safe_dump(toc))


def test_what_html_lacks_is_told_with_cell_or_line(tiny, capsys):
    """One build for all places where HTML can be."""
    logo = tiny / "_static"
    logo.mkdir()
    (logo / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    config = tiny / "_config.yml"
    config.write_text(
        config.read_text()
        .replace("sphinx: {", "sphinx: {config: {html_static_path: [_static]}, ")
        .replace("cache}", "cache, exclude_patterns: ['book/kept*']}")
    )
    write_chapter(
        tiny,
        shows("<img src='../_static/a.svg' alt='chart'><svg id='s'><rect/></svg>"),
        text='# A chapter\n\nA dot: <img src="../_static/a.svg" alt=" ">',
    )
    kept = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# Kept"),
            nbformat.v4.new_code_cell("f()"),
        ],
        metadata={"language_info": {"name": "python"}},
    )
    picture = {"text/html": '<img src="../_static/a.svg" alt="">', "text/plain": ""}
    kept.cells[1].outputs = [nbformat.v4.new_output("display_data", picture)]
    nbformat.write(kept, tiny / "book" / "kept.ipynb")
    page = """# A page

Here: <img src="../_static/a.svg"> and
[a place](chapter.md).

<div>
<img src="../_static/a.svg" alt="_static/a.svg">
</div>

```{raw} html
<img src="assets/static/gone.png" alt="Loss against bits">
<map name="m"><area href="nowhere.htm" alt="Nowhere"></map>
<svg><image href="a&amp;b.svg"/></svg>
```

<img src="../_static/a.svg" alt="" aria-hidden="true">
"""
    add_pages(tiny, page=page)
    toc = yaml.safe_load((tiny / "_toc.yml").read_text())
    toc["chapters"].append({"file": "book/kept"})
    (tiny / "_toc.yml").write_text(yaml.safe_dump(toc))
    report = why(tiny, capsys)
    for place, text in (
        (IN_TEXT, '<img src="../_static/a.svg" alt=" ">'),
        (IN_CODE, "<img src='../_static/a.svg' alt='chart'>"),
        (IN_CODE, "<svg id='s'>"),
        ("book/kept.ipynb, cell 2 ('f()')", '<img src="../_static/a.svg" alt="">'),
        ("book/page.md, line 3", '<img src="../_static/a.svg">'),
        ("book/page.md, line 7", '<img src="../_static/a.svg" alt="_static/a.svg">'),
        ("book/page.md, line 11", "assets/static/gone.png"),
        ("book/page.md, line 12", "nowhere.htm"),
        ("book/page.md, line 13", "<svg>"),
        ("book/page.md, line 13", "a&b.svg"),
    ):
        lines = [one for one in report.splitlines() if one.endswith(f": {text}")]
        assert any(place in line for line in lines), (place, text, report)
    assert "aria-hidden" not in report


def test_what_pages_have_is_told_together_with_warnings(tiny, capsys):
    outside = "<svg aria-hidden='true'><image href='https://x.example/a'/></svg>"
    write_chapter(tiny, shows(outside), text='# A chapter\n\n<img src="no.png">')
    add_pages(tiny, page="# A page\n\n[words][nowhere] and [code][] `a[0][1]`\n")
    report = why(tiny, capsys)
    assert f"{IN_CODE}): WARNING: loads https://x.example/a from" in report.replace(
        "), line 1", ")"
    )
    assert report.count("https://x.example/a") == 1
    for reference in ("[words][nowhere]", "[code][]"):
        assert f"page.md:3: WARNING: a dead link: the address of {reference}" in report
    assert "[0][1]" not in report
    assert f'{IN_TEXT}: <img src="no.png">' in report
    assert f"{IN_TEXT}: no.png" in report


def test_a_figure_and_a_word_that_says_nothing_are_told_with_their_line(tiny, capsys):
    (tiny / "book" / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    page = "# A page\n\nText.\n\n```{figure} a.svg\nWords below.\n```\n\n"
    page += "```{image} a.svg\n```\n\n![Figure 1](a.svg)\n"
    add_pages(tiny, page=page)
    report = why(tiny, capsys)
    for line in (5, 9, 12):
        assert f"page.md:{line}: WARNING: a picture without alt text" in report, line


def test_a_kernel_that_dies_is_named_and_hides_no_other_failure(tiny, capsys):
    write_chapter(tiny, "import os\n\nos._exit(3)")
    other = nbformat.read(tiny / "book" / "chapter.ipynb", 4)
    other.cells[0].source = "# Another"
    other.cells[1].source = "15 / 0"
    nbformat.write(other, tiny / "book" / "other.ipynb")
    (tiny / "_toc.yml").write_text(
        "format: jb-book\nroot: book/chapter\nchapters: [{file: book/other}]\n"
    )
    for _ in range(2):  # nothing that died is kept as done
        report = why(tiny, capsys)
        assert "book/chapter.ipynb, cell 2 ('import os') failed" in report
        assert "DeadKernelError" in report and "more memory than there is" in report
        assert "book/other.ipynb, cell 2 ('15 / 0') failed" in report


def test_a_kernel_that_does_not_start_is_told_with_its_notebook(tiny, capsys):
    write_chapter(tiny, CELL)
    path = tiny / "book" / "chapter.ipynb"
    path.write_text(path.read_text().replace('"python3"', '"no-such-kernel"'))
    report = why(tiny, capsys)
    assert "book/chapter.ipynb failed" in report and "no-such-kernel" in report


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("See [words][nowhere].", ["[words][nowhere]"]),
        ("See [*loud* words][].", ["[loud words][]"]),
        ("See [`code`][nowhere].", ["[·][nowhere]"]),
        ("In `a[0][1]` and $b[0][1]$ and cache[layer][head].", []),
        ("See [words][somewhere].\n\n[somewhere]: https://example.org", []),
        ("```\n[words][nowhere]\n```", []),
    ],
)
def test_references_without_an_address_are_seen(text, found):
    from docutils import nodes
    from docutils.core import publish_doctree
    from myst_parser.parsers.docutils_ import Parser

    settings = {"myst_enable_extensions": ["dollarmath"], "report_level": 5}
    tree = publish_doctree(text, parser=Parser(), settings_overrides=settings)
    words = [strict.prose(element) for element in tree.findall(nodes.TextElement)]
    assert [r for one in words for r in strict.REFERENCE.findall(one)] == found
