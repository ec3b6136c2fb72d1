"""The built pages of the book as one page of HTML, ready to be printed.

What `pdf` prints: a title page, a table of contents whose page numbers are still
missing, and the articles of all pages, outputs included, with links that lead to places
in the same document.
"""

import datetime
import html as markup
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import yaml
from bs4 import BeautifulSoup, Tag

from ..errors import KVQError
from . import site

#: A host that does not exist: whatever the document loads comes from the built site.
HOST = "http://book.invalid/"
STYLE = Path(__file__).with_name("pdf.css")
MISSING = "The site is not built, or older than its sources: run `make book` first."

#: What scripts fill, finding it by ids of its own.
LIVE = ".kvqx, .kvqz"
#: What is nothing on paper; its words for readers without scripts stand there instead.
INTERACTIVE = ".kvqm:has(noscript)"
#: Marks to click, and words for readers without scripts, which run here.
DROPPED = "a.headerlink, button, noscript"

#: Captions of parts, each with its chapters.
Parts = list[tuple[str, list[Tag]]]


class CannotPrint(KVQError):
    """The book cannot be printed; the message says why and what to do."""


@dataclass(frozen=True)
class Book:
    """What is printed.

    Attributes:
        html: folder of the built site.
        parts: captions, "" for none, each with its pages as _toc.yml names them.
        title, author, edition: for the title page.
        logo: address of a picture for it below `html`, "" for none.
    """

    html: Path
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    title: str
    author: str = ""
    edition: str = ""
    logo: str = ""

    @property
    def pages(self) -> list[str]:
        """All pages, in their order."""
        return [page for _, pages in self.parts for page in pages]


def built_book(root: Path = site.ROOT) -> Book:
    """The book of the site on disk, in the edition in which it was built.

    Raises:
        CannotPrint: there is no site, or it is older than its sources.
    """
    built = [item for item in site.EDITIONS.items() if not site.is_stale(root, item[0])]
    if not built:
        raise CannotPrint(MISSING)
    name, left_out = built[0]
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    parts = [("", (toc["root"],))]
    for part in toc.get("parts", [toc]):
        caption = part.get("caption", "")
        if caption not in left_out:
            parts.append((caption, tuple(site.listed(part))))
    return Book(
        root / "_build" / "html",
        tuple(parts),
        config["title"],
        config.get("author", ""),
        f"{name} edition" + "".join(f", without {c.lower()}" for c in left_out),
        f"_static/{Path(config['logo']).name}" if "logo" in config else "",
    )


def place(page: str, fragment: str = "") -> str:
    """The id, in the document, of a page or of a place on it."""
    name = page.replace("/", "-")
    return f"{name}--{fragment}" if fragment else name


def read(html: Path, page: str) -> BeautifulSoup:
    """A built page.

    Raises:
        CannotPrint: the site has no such page, or the page has no title.
    """
    path = html / f"{page}.html"
    if not path.is_file():
        raise CannotPrint(f"{path} is missing. {MISSING}")
    soup = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
    if soup.select_one("article.bd-article h1") is None:
        raise CannotPrint(f"{path} has no article with a title")
    return soup


def article(soup: BeautifulSoup, page: str, pages: set[str]) -> Tag:
    """What a page says, with ids of its own and links that stay in the document.

    Args:
        soup: the built page; it is changed.
        page: its name in _toc.yml.
        pages: names of all pages of the document.
    """
    found = soup.select_one("article.bd-article")
    for element in found.select(INTERACTIVE):
        note = soup.new_tag("p")
        note.extend(element.noscript.contents[:])
        element.replace_with(note)
        for left in note.find_next_siblings(["style", "script"]):
            left.decompose()
    for element in found.select(DROPPED):
        element.decompose()
    for fold in found.select("details"):
        fold["open"] = ""
    here = f"{HOST}{page}.html"
    for link in found.select("a[href]"):
        target = urlsplit(urljoin(here, link["href"]))
        name, dot, _ = unquote(target.path).lstrip("/").rpartition(".html")
        if f"{target.scheme}://{target.netloc}/" != HOST:
            continue
        if dot and name in pages:
            link["href"] = f"#{place(name, unquote(target.fragment))}"
        else:  # a download, or a page that this edition leaves out
            link.unwrap()
    for loading in found.select("[src]"):
        loading["src"] = urljoin(here, loading["src"])
    for element in found.select(f"[id]:not({LIVE}, :is({LIVE}) *)"):
        element["id"] = place(page, element["id"])
    found["id"] = place(page)
    found["class"] = [*found["class"], "kvq-chapter"]
    return found


def words(heading: Tag) -> str:
    """The text of a heading, formulas as they are written."""
    return " ".join(heading.get_text().split())


def entries(chapter: Tag) -> Iterator[tuple[int, str, str]]:
    """Level, text and id of the headings that the table of contents lists."""
    for heading in chapter.select("h1, h2"):
        section = heading.find_parent("section")
        target = section["id"] if section and heading.name == "h2" else chapter["id"]
        yield int(heading.name[1]), words(heading), target


def title_page(book: Book, version: str, date: datetime.date) -> str:
    """The first page, as HTML."""
    logo = f'<img src="{HOST}{book.logo}" alt="">' if book.logo else ""
    said = [book.author, f"Version {version}, {date:%-d %B %Y}"]
    said.append(book.edition.capitalize())
    lines = "".join(f"<p>{markup.escape(line)}</p>" for line in said if line)
    name = f'<p class="kvq-name">{markup.escape(book.title)}</p>'
    return f'<header class="kvq-title">{logo}{name}{lines}</header>'


def contents(parts: Parts) -> str:
    """The table of contents, as HTML; page numbers come later."""
    lines = []
    for caption, chapters in parts:
        if caption:
            lines.append(f'<p class="kvq-part">{markup.escape(caption)}</p>')
        for chapter in chapters:
            lines += [
                f'<a class="kvq-level-{level}" href="#{markup.escape(target)}">'
                f"<span>{markup.escape(text)}</span>"
                f'<span data-of="{markup.escape(target)}">000</span></a>'
                for level, text, target in entries(chapter)
            ]
    return (
        '<nav class="kvq-contents"><p class="kvq-name">Contents</p>'
        f"<div>{''.join(lines)}</div></nav>"
    )


def running_head(number: int, chapter: Tag) -> str:
    """A style for a chapter: pages of its own, its title at their top."""
    title = words(chapter.select_one("h1"))
    quoted = title.replace("\\", "\\\\").replace('"', '\\"')
    chapter["style"] = f"page: chapter-{number}"
    return f'@page chapter-{number} {{ @top-left {{ content: "{quoted}"; }} }}'


def chapters(book: Book) -> tuple[list[str], Parts]:
    """Styles and scripts that the pages of a book load, each once, and its parts.

    Raises:
        CannotPrint: a page of the book is missing.
    """
    head: dict[str, None] = {}
    parts, known = [], set(book.pages)
    for caption, pages in book.parts:
        parts.append((caption, []))
        for page in pages:
            soup = read(book.html, page)
            for loaded in soup.select("head > link[rel=stylesheet], head > script"):
                if loaded.name == "script" and "mathjax" not in str(loaded).lower():
                    continue
                for name in {"href", "src"} & set(loaded.attrs):
                    loaded[name] = urljoin(f"{HOST}{page}.html", loaded[name])
                head[str(loaded)] = None
            parts[-1][1].append(article(soup, page, known))
    return list(head), parts


def document(book: Book, version: str, date: datetime.date) -> tuple[str, Parts]:
    """The whole book as one page of HTML, to be opened at `HOST`, and its parts.

    Raises:
        CannotPrint: a page of the book is missing.
    """
    head, parts = chapters(book)
    everything = [chapter for _, part in parts for chapter in part]
    heads = "".join(running_head(n, c) for n, c in enumerate(everything, start=1))
    source = (
        '<!DOCTYPE html><html lang="en" data-theme="light" data-mode="light"><head>'
        f'<meta charset="utf-8"><title>{markup.escape(book.title)}</title>'
        f"{''.join(head)}<style>{STYLE.read_text(encoding='utf-8')}{heads}</style>"
        f"</head><body>{title_page(book, version, date)}{contents(parts)}"
        f'<div class="bd-content">{"".join(map(str, everything))}</div></body></html>'
    )
    return source, parts
