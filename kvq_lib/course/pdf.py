"""Print the built site as one document with a table of contents: a PDF.

    python -m kvq_lib.course.pdf [--out _build/kvq-book.pdf]

Nothing is executed again.  The articles of the built pages, outputs included, become
one page of HTML whose links lead to places in the same document, and Chromium prints
it.  `book/assets/static/print.css` says how an article looks on paper, for this as for
a reader who prints a page of the site; `pdf.css` adds what only a whole book has.

A style sheet cannot say on which page of paper something stands.  So the book is
printed, the numbers are read from that print and written into the table of contents,
and the book is printed again.
"""

import argparse
import datetime
import importlib.metadata
import io
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pikepdf

from ..errors import KVQError
from . import browser, site
from .pdf_document import HOST, Book, CannotPrint, Parts, built_book, document, entries

TEXT_WIDTH = 658  # CSS pixels between the margins of print.css on A4
WAIT = 300_000  # ms for formulas, on a busy machine

READY = """async () => {
  await window.MathJax?.startup?.promise;
  await Promise.allSettled([...document.images].map((image) => image.decode()));
  await document.fonts.ready;
}"""

#: What reaches past the right edge, or is cut off by its own box.
TOO_WIDE = """() => {
  const edge = document.documentElement.clientWidth + 1;
  const wide = (e) => e.getBoundingClientRect().right > edge
    || (getComputedStyle(e).overflowX !== "visible" && e.clientWidth > 0
      && e.scrollWidth > e.clientWidth + 1);
  return [...document.querySelectorAll("body *")]
    // Formulas are measured whole: their pieces cut each other on purpose.
    .filter((e) => !e.matches("mjx-math *, mjx-assistive-mml, mjx-assistive-mml *"))
    .filter((e) => wide(e) && !wide(e.parentElement))
    .map((e) => `${e.closest(".kvq-chapter")?.id}: <${e.localName} class="`
      + `${e.className}"> ${e.textContent.trim().slice(0, 60)}`);
}"""

FILL = """(numbers) => {
  for (const shown of document.querySelectorAll("[data-of]"))
    shown.textContent = numbers[shown.dataset.of];
}"""


def page_numbers(pdf: pikepdf.Pdf) -> dict[str, int]:
    """The page, counted from 1, of each place that a link of a PDF leads to."""
    pages = {page.objgen: number for number, page in enumerate(pdf.pages, start=1)}
    return {
        str(name).removeprefix("/"): pages[target[0].objgen]
        for name, target in pdf.Root.get("/Dests", {}).items()
    }


def printed(chrome, source: str, html: Path) -> pikepdf.Pdf:
    """The PDF of a document, its table of contents filled in.

    Args:
        chrome: a running browser.
        source: from `document`.
        html: the folder from which pictures, scripts and styles come.

    Raises:
        CannotPrint: a file is missing, a script fails, or something does not fit the
            width of the paper.
    """
    troubles: list[str] = []

    def serve(route) -> None:
        target = urlsplit(route.request.url)
        path = html / unquote(target.path).lstrip("/")
        if route.request.url == HOST:
            route.fulfill(body=source, content_type="text/html; charset=utf-8")
        elif route.request.url.startswith(HOST) and path.is_file():
            route.fulfill(path=path)
        else:
            troubles.append(f"nothing at {route.request.url}")
            route.abort()

    page = chrome.new_page(viewport={"width": TEXT_WIDTH, "height": 900})
    page.set_default_timeout(WAIT)
    page.route("**/*", serve)
    page.on("pageerror", lambda error: troubles.append(f"a script failed: {error}"))
    page.emulate_media(media="print")
    page.goto(HOST)
    page.evaluate(READY)
    troubles += [f"too wide: {what}" for what in page.evaluate(TOO_WIDE)]
    if troubles:
        raise CannotPrint("\n".join(["The book was not printed.", *troubles]))
    look = {"prefer_css_page_size": True, "print_background": True}
    numbers = page_numbers(pikepdf.open(io.BytesIO(page.pdf(**look))))
    page.evaluate(FILL, numbers)
    content = page.pdf(**look, tagged=True)  # tags help readers who listen
    page.close()
    pdf = pikepdf.open(io.BytesIO(content))
    if page_numbers(pdf) != numbers:
        raise CannotPrint("The numbers in the table of contents moved the pages.")
    return pdf


def add_outline(pdf: pikepdf.Pdf, parts: Parts) -> None:
    """Give a PDF the outline that viewers show beside it: parts, chapters, sections.

    Chromium's own loses the spaces at which a heading is wrapped.
    """

    def item(text: str, target: str) -> pikepdf.OutlineItem:
        return pikepdf.OutlineItem(text, pdf.Root.Dests[f"/{target}"])

    with pdf.open_outline() as outline:
        for caption, part in parts:
            above = outline.root
            if caption and part:
                above.append(item(caption, part[0]["id"]))
                above = above[-1].children
            for chapter in part:
                (_, title, target), *sections = entries(chapter)
                above.append(item(title, target))
                above[-1].is_closed = True
                above[-1].children += [item(text, place) for _, text, place in sections]


def write(book: Book, out: Path) -> int:
    """Print a book to a file; return the number of its pages.

    Raises:
        CannotPrint: see `document` and `printed`.
        NoBrowser: Chromium is not installed.
    """
    version = importlib.metadata.version("kvq-lib")
    today = datetime.datetime.now(datetime.UTC).date()
    source, parts = document(book, version, today)
    with browser.chromium() as chrome:
        pdf = printed(chrome, source, book.html)
    add_outline(pdf, parts)
    pdf.docinfo["/Author"] = book.author
    pdf.docinfo["/Subject"] = f"Version {version}"
    pdf.Root.PageMode = pikepdf.Name.UseOutlines
    out.parent.mkdir(parents=True, exist_ok=True)
    # Streams of objects take less than half the space of objects one by one.
    pdf.save(out, object_stream_mode=pikepdf.ObjectStreamMode.generate)
    return len(pdf.pages)


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m kvq_lib.course.pdf")
    out = site.ROOT / "_build" / "kvq-book.pdf"
    parser.add_argument("--out", type=Path, default=out, help="file to write")
    options = parser.parse_args(arguments)
    try:
        count = write(built_book(), options.out)
    except KVQError as error:
        print(error)
        return 1
    print(f"{options.out}: {count} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
