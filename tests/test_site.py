"""How the site is built, and each built page in a browser, wide and narrow."""

import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
import yaml

from kvq_lib.course import site

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html"
WIDTHS = (1280, 375)


PAGES = [*(f"{page}.html" for page in site.pages()), "genindex.html", "search.html"]
every_page = pytest.mark.parametrize("page", PAGES)


def source_of(page):
    path = HTML / page
    assert path.exists(), f"{page} is not built: run `make book`"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def address():
    assert (HTML / "index.html").exists(), "the site is not built: run `make book`"
    server = site.make_server(HTML, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def open_page(browser, address):
    """A function that opens a page of the site; whatever goes wrong fails the test."""
    troubles = []
    contexts = []

    def guard(route):
        if route.request.url.startswith(address) or route.request.url.startswith(
            "data:"
        ):
            route.continue_()
        else:
            troubles.append(f"request to another host: {route.request.url}")
            route.abort()

    def open_at(path, width=WIDTHS[0]):
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        context.route("**/*", guard)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(f"script error: {error}"))
        page.on(
            "console",
            lambda message: (
                message.type == "error"
                and troubles.append(f"console error: {message.text}")
            ),
        )
        page.on(
            "response",
            lambda response: (
                response.status >= 400
                and troubles.append(f"{response.status} for {response.url}")
            ),
        )
        page.goto(f"{address}/{path}", wait_until="networkidle")
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not troubles


# What reaches past the right edge, except inside a box that a reader can scroll.
# A box that only hides what is too wide loses it.
TOO_WIDE = """() => {
  const root = document.documentElement;
  const scrolls = (element) => {
    for (let e = element; e && e !== document.body; e = e.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  return [...document.querySelectorAll("main *")]
    .filter((e) => !e.closest("mjx-assistive-mml, .sr-only, .visually-hidden"))
    .filter((e) => e.getBoundingClientRect().right > root.clientWidth + 1)
    .filter((e) => !scrolls(e))
    .map((e) => `${e.tagName}.${e.className}: ${e.textContent.trim().slice(0, 60)}`)
    .concat(root.scrollWidth > root.clientWidth ? [`page: ${root.scrollWidth}`] : []);
}"""


RAW_MATH = """() => [...document.querySelectorAll(".math")]
  .filter((e) => !e.querySelector("mjx-container"))
  .map((e) => e.textContent)"""

# MathJax sets what it cannot read, and macros that it does not know, in red.
WRONG_MATH = """() => [...document.querySelectorAll(
    "mjx-merror, [data-mjx-error], mjx-mtext[style*='color: red']")]
  .map((e) => e.closest("mjx-container").querySelector("mjx-assistive-mml").textContent
    + " " + (e.getAttribute("data-mjx-error") || ""))"""


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
@every_page
def test_page_opens_clean_and_fits(open_page, page, width):
    opened = open_page(page, width)
    if 'class="math' in source_of(page):
        # MathJax loads late, and on a busy machine later than the page's own event.
        opened.wait_for_function("window.MathJax?.startup?.promise")
        opened.evaluate("MathJax.startup.promise")
        assert opened.evaluate(RAW_MATH) == [], "mathematics that was not rendered"
        assert opened.evaluate(WRONG_MATH) == [], "mathematics with errors"
    if "application/vnd.jupyter.widget-view+json" in source_of(page):
        opened.wait_for_selector(".jupyter-widgets", timeout=15_000)
    assert opened.evaluate(TOO_WIDE) == [], f"wider than {width} pixels"


@pytest.mark.browser
@every_page
def test_images_load_and_say_what_they_show(open_page, page):
    images = open_page(page).evaluate(
        """() => [...document.images].map(
        (i) => ({alt: i.alt, source: i.currentSrc, loaded: i.naturalWidth > 0}))"""
    )
    for image in images:
        alt = image["alt"].strip()
        assert image["loaded"], image
        assert alt and not re.search(r"\.(png|svg|jpe?g|gif|webp)$|^\S*/\S*$", alt), (
            image
        )


@pytest.mark.browser
def test_the_start_page_leads_to_the_book(open_page):
    opened = open_page("index.html")
    opened.wait_for_url("**/book/index.html", timeout=5_000)


@pytest.mark.browser
def test_search_finds_a_chapter_without_a_network(open_page):
    opened = open_page("search.html?q=cache")
    opened.wait_for_selector("#search-results li a", timeout=15_000)
    targets = opened.evaluate(
        """() => [...document.querySelectorAll("#search-results li a")].map(
        (a) => new URL(a.href).pathname)"""
    )
    assert any(target.startswith("/book/") for target in targets)


def test_every_built_page_is_tested():
    built = {p.relative_to(HTML).as_posix() for p in HTML.rglob("*.html")}
    built = {name for name in built if not name.startswith(("_static/", "reports/"))}
    assert built == {*PAGES, "index.html"}


@every_page
def test_nothing_was_written_to_standard_error(page):
    # Warnings and progress bars are for whoever runs a chapter, not for its readers.
    assert not re.search(r'class="[^"]*\boutput stderr\b', source_of(page))


@every_page
def test_the_widget_manager_is_loaded_only_where_there_are_widgets(page):
    text = source_of(page)
    has_widgets = "application/vnd.jupyter.widget-view+json" in text
    assert ("embed-amd.js" in text) == has_widgets


class _Links(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values.get("id"), values.get("name") if tag == "a" else None}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])


@every_page
def test_links_inside_the_site_lead_somewhere(page):
    for link in _Links(source_of(page)).links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = HTML / page
        if parts.path:
            target = (target.parent / unquote(parts.path)).resolve()
        assert target.exists(), f"dead link {link}"
        if parts.fragment and target.suffix == ".html":
            ids = _Links(target.read_text(encoding="utf-8")).ids
            assert unquote(parts.fragment) in ids, f"no such place: {link}"


CONFIG = """
title: Tiny
only_build_toc_files: true
execute: {execute_notebooks: cache}
launch_buttons: {thebe: false}
"""
CELL = "exec(open('../kvq_lib/code.py').read())\nprint('the answer is', answer)"


def write_chapter(root, code, text="# A chapter"):
    chapter = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell(text, id="title"),
            nbformat.v4.new_code_cell(code, id="code"),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    nbformat.write(chapter, root / "book" / "chapter.ipynb")


@pytest.fixture
def tiny(tmp_path):
    """A book of one chapter whose output comes from its library."""
    for folder in ("book", "kvq_lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/chapter\n")
    (tmp_path / "requirements.txt").write_text("numpy==2.0.0\n")
    (tmp_path / "kvq_lib" / "code.py").write_text("answer = 41\n")
    write_chapter(tmp_path, CELL)
    return tmp_path


def shown(root):
    return (root / "_build" / "html" / "book" / "chapter.html").read_text()


def test_a_build_is_skipped_or_repeated_as_it_should_be(tiny, capsys):
    assert site.build(tiny) == 0
    assert "the answer is 41" in shown(tiny)
    assert capsys.readouterr().out.rstrip().endswith("_build/html/index.html")

    assert site.build(tiny) == 0
    again = capsys.readouterr().out
    assert "Nothing has changed" in again and "reading sources" not in again
    assert again.rstrip().endswith("_build/html/index.html")

    # Only the text changed: the page is new, its output comes from the cache.
    write_chapter(tiny, CELL, text="# A better title")
    assert site.build(tiny) == 0
    assert "A better title" in shown(tiny)
    assert "Executing notebook" not in capsys.readouterr().out

    (tiny / "kvq_lib" / "code.py").write_text("answer = 42\n")
    assert site.build(tiny) == 0
    assert "the answer is 42" in shown(tiny)
    assert "all chapters run again" in capsys.readouterr().out


def test_a_failing_cell_fails_the_build_and_is_named(tiny, capsys):
    write_chapter(tiny, "scale = 0\n15 / scale")
    for _ in range(2):  # a second try must not pass for want of anything to do
        assert site.build(tiny) == 1
        report = capsys.readouterr().out.split("The site was not built.")[1]
        assert "The notebook book/chapter failed" in report
        assert "15 / scale" in report and "ZeroDivisionError" in report


def test_a_warning_fails_the_build_each_time(tiny, capsys):
    write_chapter(tiny, CELL, text="# A chapter\n\nSee {ref}`nowhere`.")
    for _ in range(2):
        assert site.build(tiny) == 1
        report = capsys.readouterr().out.split("The site was not built.")[1]
        assert "nowhere" in report and "chapter.ipynb" in report


def test_an_edition_leaves_its_parts_out_and_no_trace_of_them(tiny):
    (tiny / "solutions").mkdir()
    (tiny / "solutions" / "one.md").write_text("# Answers\n\nThe word is xylophone.\n")
    (tiny / "book" / "two.md").write_text("# Another page\n")
    toc = {
        "format": "jb-book",
        "root": "book/chapter",
        "parts": [
            {"caption": "Chapters", "chapters": [{"file": "book/two"}]},
            {"caption": "Solutions", "chapters": [{"file": "solutions/one"}]},
        ],
    }
    (tiny / "_toc.yml").write_text(yaml.safe_dump(toc))
    assert site.build(tiny) == 0 and not site.is_stale(tiny)
    html = tiny / "_build" / "html"
    told = [
        p for p in html.rglob("*") if p.is_file() and b"xylophone" in p.read_bytes()
    ]
    assert len(told) >= 2  # the page, and the search index

    assert site.is_stale(tiny, "course")
    assert site.build(tiny, edition="course") == 0 and "answer is 41" in shown(tiny)
    for path in html.rglob("*"):
        assert not (path.is_file() and b"xylophone" in path.read_bytes()), path
    assert site.is_stale(tiny) and not site.is_stale(tiny, "course")


def test_a_script_from_another_host_fails_the_build(tiny, capsys):
    script = "<script async src='https://cdn.example/plot.js'></script>"
    write_chapter(tiny, f'from IPython.display import HTML\n\nHTML("{script}")')
    assert site.build(tiny) == 1
    report = capsys.readouterr().out
    assert "book/chapter.html: https://cdn.example/plot.js" in report
    assert site.is_stale(tiny)


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<link rel="stylesheet" href="//fonts.example/a.css">', True),
        ('<link rel="preload" as="font" href="https://fonts.example/a.woff">', True),
        ('<img srcset="a.png 1x, https://img.example/b.png 2x">', True),
        ('<iframe src="http://video.example"></iframe>', True),
        ("<style>@import 'https://fonts.example/a.css';</style>", True),
        ('<p style="background: url(https://img.example/a.png)">', True),
        ('<a href="https://example.org">A link that a reader follows</a>', False),
        ('<link rel="canonical" href="https://example.org/book">', False),
        ('<img src="../_images/a.png" alt="//">', False),
        ('<img src="data:image/png;base64,//8=">', False),
        ("<style>/* url(https://example.org) */ p { color: red }</style>", False),
    ],
)
def test_files_from_other_hosts_are_recognized(tmp_path, page, found):
    (tmp_path / "page.html").write_text(page)
    assert bool(list(site.external_files(tmp_path))) is found


def test_style_sheets_are_searched_too(tmp_path):
    (tmp_path / "a.css").write_text("p { src: url('https://fonts.example/a.woff') }")
    assert list(site.external_files(tmp_path)) == [
        ("a.css", "https://fonts.example/a.woff")
    ]


@pytest.mark.parametrize(
    "path",
    [
        "kvq_lib/new.py",
        "kvq_lib/course/explorer.js",
        "kvq_lib/course/explorer.css",
        "kvq_lib/course/explorer.html",
        "requirements.txt",
        "book/results/quality.json",
        "book/questions/02_memory.yml",
    ],
)
def test_what_outputs_depend_on_changes_the_execution_key(tiny, path):
    before = site.execution_key(tiny)
    (tiny / path).parent.mkdir(parents=True, exist_ok=True)
    (tiny / path).write_text("changed")
    assert site.execution_key(tiny) != before


@pytest.mark.parametrize(
    "path", ["homework/grade.py", "browser.py", "pdf.py", "pdf.css", "pdf_document.py"]
)
def test_grader_and_printer_change_no_chapter(tiny, path):
    before = site.execution_key(tiny)
    (tiny / "kvq_lib/course" / path).parent.mkdir(parents=True)
    (tiny / "kvq_lib/course" / path).write_text("changed")
    assert site.execution_key(tiny) == before
    module = "course." + path.split(".")[0].split("/")[0]
    chapters = (site.ROOT / "book").glob("*.ipynb")
    assert not any(module in p.read_text(encoding="utf-8") for p in chapters)


def test_prose_and_configuration_make_only_the_site_stale(tiny):
    execution, whole = site.execution_key(tiny), site.site_key(tiny)
    for name in ("_config.yml", "_toc.yml", "book/page.md"):
        (tiny / name).write_text("changed")
        assert site.site_key(tiny) != whole, name
        whole = site.site_key(tiny)
    assert site.execution_key(tiny) == execution


def test_serving_a_taken_port_says_what_to_do(tiny, capsys):
    html = tiny / "_build" / "html"
    html.mkdir(parents=True)
    (html / "index.html").write_text("a page")
    with site.make_server(html, 0) as server:
        assert site.serve(tiny, server.server_port) == 1
    assert "make serve PORT=" in capsys.readouterr().out
