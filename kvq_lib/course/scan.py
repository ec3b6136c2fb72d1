"""What built pages load and where their links lead, read from their HTML."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes through which a page loads a file; a link that a reader follows is none.
LOADING_ATTRIBUTES = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "track": ("src",),
    "video": ("src", "poster"),
}
LINKS_NOT_LOADED = {"author", "canonical", "help", "license", "next", "prev", "search"}
EXTERNAL = re.compile(r"(?:^|[\s,])((?:https?:)?//[^\s,]+)")
EXTERNAL_IN_CSS = re.compile(
    r"""(?:url\(|@import)\s*(?:url\()?\s*["']?((?:https?:)?//[^"')\s]+)"""
)
CSS_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


class Page(HTMLParser):
    """One page, or a piece of one.

    Attributes:
        external: addresses on other hosts from which it would load something.
        links: where its links lead, as written.
        ids: the places in it to which links can lead.
    """

    def __init__(self, text: str):
        super().__init__()
        self.external: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._in_style = tag == "style"
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values.get("id"), values.get("name") if tag == "a" else None}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        self.external += EXTERNAL_IN_CSS.findall(values.get("style", ""))
        if tag == "link" and set(values.get("rel", "").split()) & LINKS_NOT_LOADED:
            return
        for name in LOADING_ATTRIBUTES.get(tag, ()):
            if not values.get(name, "").startswith("data:"):
                self.external += EXTERNAL.findall(values.get(name, ""))

    def handle_data(self, data):
        if self._in_style:
            self.external += EXTERNAL_IN_CSS.findall(CSS_COMMENT.sub("", data))

    def handle_endtag(self, tag):
        self._in_style = False


def read_pages(html: Path) -> dict[Path, Page]:
    """All pages of a site by their path; reports of failed cells are none."""
    return {
        path: Page(path.read_text(encoding="utf-8"))
        for path in sorted(html.rglob("*.html"))
        if path.relative_to(html).parts[0] not in ("_static", "reports")
    }


def external_files(html: Path) -> Iterator[tuple[str, str]]:
    """Yield (file of the site, address) for all that would load from another host."""
    for path, page in read_pages(html).items():
        for address in page.external:
            yield path.relative_to(html).as_posix(), address
    for sheet in sorted(html.rglob("*.css")):
        rules = CSS_COMMENT.sub("", sheet.read_text(encoding="utf-8"))
        for address in EXTERNAL_IN_CSS.findall(rules):
            yield sheet.relative_to(html).as_posix(), address


def dead_links(html: Path, prefix: str = "/") -> Iterator[tuple[str, str]]:
    """Yield (page, link) for links inside the site that lead to no file or no place.

    `prefix` is the path under which the site is served.  One page has links that begin
    with it: the one shown for an address that does not exist, whatever that is.
    """
    pages = read_pages(html)
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target, where = path, unquote(parts.path)
            if where.startswith(prefix):
                target = html / where.removeprefix(prefix)
            elif where:
                target = (path.parent / where).resolve()
            there = target.exists()
            if there and parts.fragment and target in pages:
                there = unquote(parts.fragment) in pages[target].ids
            if not there:
                yield path.relative_to(html).as_posix(), link


def outside_links(html: Path) -> dict[str, list[str]]:
    """The addresses outside the site to which its pages lead, each with the pages."""
    found: dict[str, list[str]] = {}
    for path, page in read_pages(html).items():
        name = path.relative_to(html).as_posix()
        for link in page.links:
            if urlsplit(link).netloc and name not in found.setdefault(link, []):
                found[link].append(name)
    return dict(sorted(found.items()))
