"""The printed book: one document out of many pages, and what of it is on paper."""

import contextlib
import dataclasses
import datetime
import html
import re
import shutil

import nbformat
import pikepdf
import pypdfium2
import pytest
from PIL import Image

from kvq_lib.course import browser as chrome
from kvq_lib.course import pdf, pdf_document, site

STATIC = site.ROOT / "book" / "assets" / "static"
TODAY = datetime.date(2026, 12, 1)
# A line as long as style allows, and one that must be broken.
LINE = "value = " + "+".join(f"{n:03}" for n in range(20)) + "  "
LINE += "#" * (88 - len(LINE))
LONG = "".join(f"{n:04}" for n in range(100))

FIRST = f"""
<h1>1 First</h1><p>Read <a href="../more/second.html">on</a>, or
<a href="../more/second.html#part">a part</a>, or <a href="left_out.html">that</a>, or
<a href="https://example.org/x">elsewhere</a>, or <a href="#part">below</a>.</p>
<section id="part"><h2>1.1 A "part" \\ here</h2>
<div class="cell"><div class="cell_input"><div class="highlight"><pre>{LINE}
{LONG}</pre></div></div>
<div class="cell_output"><img src="../_images/picture.png" alt="a picture"></div></div>
<p>The caption.</p>
<details><summary>Hint</summary><p>Unfolded.</p></details>
<details class="hide"><summary>Show code cell source</summary><p>Shown.</p></details>
<button>Press</button><a class="headerlink" href="#part">#</a>
<table><tr>{"".join(f"<td>the column {n}</td>" for n in range(15))}</tr></table>
</section>"""
SECOND = """
<h1>2 A second one, whose title is so long that it needs more than a line on paper</h1>
<section id="part"><h2>2.1 The other part</h2>
<style>p { color: red }</style>
<div class="kvqm" id="kvqm"><noscript>Needs <b>JavaScript</b>.</noscript>
<form>Ask</form></div><script>never(called)</script>
<div class="kvqz" id="quiz"><label id="choice" for="x">One</label></div></section>"""


def page(article):
    return f"""<html><head><link rel="stylesheet" href="../_static/print.css">
<script>throw new Error("the site's own script")</script></head><body><nav>Menu</nav>
<article class="bd-article">{article}</article></body></html>"""


@pytest.fixture
def book(tmp_path):
    """A built site of two pages, as a book."""
    for folder in ("book", "more", "_static", "_images"):
        (tmp_path / folder).mkdir()
    (tmp_path / "book/first.html").write_text(page(FIRST))
    (tmp_path / "more/second.html").write_text(page(SECOND))
    shutil.copy(STATIC / "print.css", tmp_path / "_static")
    shutil.copy(STATIC / "logo.svg", tmp_path / "_static")
    Image.new("RGB", (1500, 1200), "#804020").save(tmp_path / "_images/picture.png")
    parts = (("", ("book/first",)), ("The rest", ("more/second",)))
    return pdf_document.Book(
        tmp_path, parts, "A <tiny> book", "us", "full edition", "_static/logo.svg"
    )


def articles(book):
    return [a for _, part in pdf_document.chapters(book)[1] for a in part]


# -- the document ----------------------------------------------------------------------


def test_links_stay_in_the_document_and_ids_stay_apart(book):
    first, second = articles(book)
    assert [a["href"] for a in first.select("a")] == [
        "#more-second",
        "#more-second--part",
        "https://example.org/x",
        "#book-first--part",
    ]
    ids = [e["id"] for a in (first, second) for e in [a, *a.select("[id]")]]
    assert len(ids) == len(set(ids))
    assert {"book-first", "book-first--part", "more-second--part"} <= set(ids)
    # Scripts look for these.
    assert {"quiz", "choice"} <= set(ids) and second.select_one("#quiz label[for=x]")
    assert first.img["src"] == f"{pdf_document.HOST}_images/picture.png"


def test_what_is_nothing_on_paper_is_left_out(book):
    first, second = articles(book)
    assert "Press" not in first.text and not first.select(".headerlink")
    assert "that" in first.text and not first.select("[href*=left_out]")
    assert all(fold.has_attr("open") for fold in first.select("details"))
    # An interview leaves its words for readers without scripts.
    assert "Needs JavaScript." in second.text and not second.select(".kvqm, script")
    assert second.select_one(".kvqz")


def test_the_document_holds_everything_in_its_order(book):
    source, parts = pdf_document.document(book, "1.2", TODAY)
    assert [caption for caption, _ in parts] == ["", "The rest"]
    marks = [
        "A &lt;tiny&gt; book",
        "us",
        "Version 1.2, 1 December 2026",
        "Full edition",
    ]
    marks += ["Contents", 'href="#book-first"', "The rest", 'href="#more-second--part"']
    marks += ["<h1>1 First</h1>", "<h1>2 A second"]
    places = [source.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "Menu" not in source and "the site's own script" not in source
    assert source.count("print.css") == 1


def test_a_title_can_hold_quotes(book):
    (first, _) = articles(book)
    first.h1.string = 'A "part" \\ here'
    assert 'content: "A \\"part\\" \\\\ here";' in pdf_document.running_head(1, first)


def test_the_built_book_is_that_of_its_edition(tmp_path, monkeypatch):
    for name in ("_toc.yml", "_config.yml"):
        shutil.copy(site.ROOT / name, tmp_path)
    monkeypatch.setattr(site, "is_stale", lambda root, edition: edition != "course")
    course = pdf_document.built_book(tmp_path)
    assert course.edition == "course edition, without solutions"
    assert not any(page.startswith("solutions/") for page in course.pages)
    monkeypatch.setattr(site, "is_stale", lambda root, edition: edition != "full")
    full = pdf_document.built_book(tmp_path)
    assert full.edition == "full edition" and full.pages == site.pages()
    assert (STATIC.parent / full.logo.replace("_static", "static")).exists()
    assert set(course.pages) < set(full.pages)


# -- what can go wrong -----------------------------------------------------------------


def test_without_a_site_it_says_what_to_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(site, "is_stale", lambda root, edition: True)
    assert pdf.main(["--out", str(tmp_path / "book.pdf")]) == 1
    assert "run `make book` first" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_without_a_browser_it_says_what_to_install(book, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chrome, "NAMES", ("no-such-browser",))
    monkeypatch.setattr(pdf, "built_book", lambda: book)
    assert pdf.main(["--out", str(tmp_path / "book.pdf")]) == 1
    assert "apt-get install chromium" in capsys.readouterr().out
    assert not (tmp_path / "book.pdf").exists()


def test_a_missing_or_strange_page_is_named(book):
    (book.html / "more/second.html").write_text("<p>no article</p>")
    with pytest.raises(pdf.CannotPrint, match=r"second\.html has no article"):
        pdf_document.document(book, "1", TODAY)
    (book.html / "more/second.html").unlink()
    with pytest.raises(pdf.CannotPrint, match=r"second\.html is missing.*make book"):
        pdf_document.document(book, "1", TODAY)


@pytest.mark.browser
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('<div style="width: 2000px">wide</div>', "too wide: book-first: <div"),
        (
            '<div style="overflow: hidden"><p style="width: 900px">cut</p></div>',
            "too wide: book-first: <div",
        ),
        ('<img src="none.png" alt="">', "nothing at http://book.invalid/book/none.png"),
        ('<img src="https://example.org/a.png" alt="">', "nothing at https://example"),
        ("<script>none()</script>", "a script failed: .*none is not defined"),
    ],
)
def test_a_book_that_does_not_print_well_is_refused(browser, book, content, message):
    (book.html / "book/first.html").write_text(page("<h1>One</h1>" + content))
    source, _ = pdf_document.document(book, "1", TODAY)
    with pytest.raises(pdf.CannotPrint, match=message):
        pdf.printed(browser, source, book.html)


# -- on paper --------------------------------------------------------------------------


def write(browser, monkeypatch, book):
    """Print a book with the browser that is running; returns the path."""
    monkeypatch.setattr(chrome, "chromium", lambda: contextlib.nullcontext(browser))
    out = book.html.parent / f"{book.html.name}.pdf"
    count = pdf.write(book, out)
    with pikepdf.open(out) as content:
        assert len(content.pages) == count
    return out


def texts(paper):
    """The text of each page, line by line; spaces side by side count as one."""
    found = [sheet.get_textpage().get_text_range() for sheet in paper]
    return ["\n".join(map(spaced, text.splitlines())) for text in found]


def spaced(text):
    return " ".join(text.split())


def outside(paper):
    """(page, bounds) of text and pictures that reach beyond the margins, in points."""
    margin, found = 17.5 / 25.4 * 72, []
    for number, sheet in enumerate(paper, start=1):
        width, height = sheet.get_size()
        for thing in sheet.get_objects((1, 3), max_depth=1):
            left, bottom, right, top = thing.get_bounds()
            inside = margin <= left and right <= width - margin
            if not (inside and 0 <= bottom and top <= height):
                found.append((number, thing.get_bounds()))
    return found


def outline(content):
    """(depth, title, page from 1) of each entry of a PDF's outline."""

    def below(items, depth):
        for item in items:
            number = content.pages.index(pikepdf.Page(item.destination[0])) + 1
            yield depth, item.title, number
            yield from below(item.children, depth + 1)

    with content.open_outline() as found:
        return list(below(found.root, 0))


@pytest.mark.browser
def test_a_book_on_paper(browser, book, monkeypatch):
    path = write(browser, monkeypatch, book)
    paper = pypdfium2.PdfDocument(path)
    title, contents, first, second = texts(paper)

    assert "A <tiny> book" in title and not re.search(r"^\d+$", title, re.M)
    for line in ("1 First 3", '1.1 A "part" \\ here 3', "2.1 The other part 4"):
        assert line in contents.replace("\n", " "), contents
    # The running head and the number of the page, then the page.
    assert first.splitlines()[:3] == ["1 First", "3", "1 First"]
    assert second.startswith("2 A second one") and second.splitlines()[1] == "4"

    assert spaced(LINE) in first.splitlines()
    assert LONG in first.replace("\n", "")
    assert "the column 14" in first.replace("\n", " ")
    assert "The caption." in first and "Hint" in first and "Unfolded." in first
    assert "Shown." in first and "Show code" not in first
    assert outside(paper) == []
    kinds = [[o.type for o in sheet.get_objects(max_depth=1)] for sheet in paper]
    assert [kind.count(3) for kind in kinds] == [0, 0, 1, 0]


@pytest.mark.browser
def test_code_and_figures_stay_whole_and_captions_beside_them(
    browser, book, monkeypatch
):
    """Wherever on the paper they come: each chapter begins with more empty space."""
    lines = "\n".join(f"line {n}" for n in range(8))
    names = []
    for height in range(90, 220, 2):  # millimetres
        names.append(f"book/after{height}")
        (book.html / f"{names[-1]}.html").write_text(
            page(
                f'<h1>After {height}</h1><div style="height: {height}mm"></div>'
                f'<div class="cell"><div class="cell_input"><pre>{lines}</pre></div>'
                '<div class="cell_output"><img src="../_images/picture.png" alt="">'
                "</div></div><p>The caption.</p>"
            )
        )
    book = dataclasses.replace(book, parts=(("", tuple(names)),))
    paper = pypdfium2.PdfDocument(write(browser, monkeypatch, book))
    pages = texts(paper)
    figures = [any(o.type == 3 for o in sheet.get_objects()) for sheet in paper]
    assert sum("line 0" in text for text in pages) == len(names)
    assert all(("line 0" in text) == ("line 7" in text) for text in pages)
    assert sum(figures) == len(names)
    assert figures == ["The caption." in text for text in pages]


@pytest.mark.browser
def test_outline_links_and_title_of_a_book_on_paper(browser, book, monkeypatch):
    with pikepdf.open(write(browser, monkeypatch, book)) as content:
        assert outline(content) == [
            (0, "1 First", 3),
            (1, '1.1 A "part" \\ here', 3),
            (0, "The rest", 4),
            (1, pdf_document.words(articles(book)[1].h1), 4),
            (2, "2.1 The other part", 4),
        ]
        links = [a for sheet in content.pages for a in sheet.get("/Annots", [])]
        outer = [str(link.A.URI) for link in links if "/A" in link]
        assert outer == ["https://example.org/x"]
        inner = [str(link.Dest).removeprefix("/") for link in links if "/Dest" in link]
        assert set(inner) == set(pdf.page_numbers(content))
        # Four lines of the contents, one of which may be two, and three in the text.
        assert len(inner) >= 7
        assert content.docinfo.Title == "A <tiny> book"
        assert content.docinfo.Author == "us"
        assert content.check_pdf_syntax() == []


@pytest.mark.browser
def test_pages_of_the_book_on_paper(browser, monkeypatch, tmp_path):
    assert (site.ROOT / "_build/html/index.html").exists(), "run `make book`"
    monkeypatch.setattr(site, "is_stale", lambda root, edition: False)
    whole = pdf_document.built_book()
    names = ("book/01_visual_demonstration", "book/mock_interview", "book/references")
    html_copy = dataclasses.replace(whole, parts=(("", names),))
    monkeypatch.setattr(pdf, "built_book", lambda: html_copy)
    monkeypatch.setattr(chrome, "chromium", lambda: contextlib.nullcontext(browser))
    path = tmp_path / "pages.pdf"
    assert pdf.main(["--out", str(path)]) == 0
    paper = pypdfium2.PdfDocument(path)
    lines = {line for text in texts(paper) for line in text.splitlines()}
    everything = spaced(" ".join(texts(paper)))

    notebook = nbformat.read(site.ROOT / f"{names[0]}.ipynb", as_version=4)
    shown = [
        c for c in notebook.cells if "remove-cell" not in c.metadata.get("tags", ())
    ]
    code = [c.source for c in shown if c.cell_type == "code"]
    expected = {spaced(line) for cell in code for line in cell.splitlines()}
    assert len(expected) > 100 and expected - lines <= {""}
    assert outside(paper) == []

    built = (site.ROOT / f"_build/html/{names[0]}.html").read_text(encoding="utf-8")
    figures = built.count('src="../_images/')
    kinds = [o.type for sheet in paper for o in sheet.get_objects(max_depth=1)]
    assert figures >= 1 and kinds.count(3) == figures + built.count("<canvas")

    # The explorer's words and numbers, the choices of the quiz; nothing to set.
    for word in (
        "Price and damage",
        "of its attention has moved",
        "Every scheme on this",
    ):
        assert word in everything, word
    assert "Bits of each weight" not in everything and "Check" not in everything
    choices = re.findall(r'"answer": "([^"<&\\]{20,})"', html.unescape(built))
    assert len(choices) >= 10
    assert all(spaced(choice) in everything for choice in choices)
    assert "needs JavaScript; the sheet" in everything and "Start" not in lines
    assert "\\(" not in everything and "\\[" not in everything
    assert re.search(r"github\.com/\S+/\S+/\S+", everything), "a shortened address"


@pytest.mark.browser
def test_a_page_of_the_site_prints_light_and_alone(browser):
    html_folder = site.ROOT / "_build" / "html"
    assert (html_folder / "index.html").exists(), "the site is not built: `make book`"
    context = browser.new_context(color_scheme="dark")
    opened = context.new_page()
    opened.goto((html_folder / "book/appendix_glossary.html").as_uri())
    theme = "document.documentElement.dataset.theme"
    assert opened.evaluate(theme) == "dark"
    paper = pypdfium2.PdfDocument(
        opened.pdf(prefer_css_page_size=True, print_background=True)
    )
    assert opened.evaluate(theme) == "dark"
    context.close()

    first = texts(paper)[0]
    assert "Glossary" in first.splitlines() and "Search" not in "".join(texts(paper))
    assert "Contents" not in first and "previous" not in texts(paper)[-1]
    assert outside(paper) == []
    picture = paper[0].render(scale=1).to_pil().convert("L")
    shades = picture.histogram()
    assert sum(shades[200:]) > 0.8 * sum(shades) and sum(shades[:100]) > 0
