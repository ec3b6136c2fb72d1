"""What built pages load, where their links lead, and which pictures say nothing."""

import functools
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .scan_page import Page, outside_in_css, outside_in_script

# Scripts of others: the theme's, and those of book/assets/vendor, which name hosts that
# they are told not to use.  The tests in a browser see what they ask for.
VENDORED = ("html-manager/", "mathjax/", "requirejs/")
THEIRS = (*VENDORED, "_static/scripts/", "_static/vendor/")


@functools.lru_cache(maxsize=256)
def _page(text: str) -> Page:
    """A page is read once for all that is asked about it."""
    return Page(text)


def read_pages(html: Path) -> dict[Path, Page]:
    """All pages of a site by their path; reports of failed cells are none."""
    return {
        path: _page(path.read_text(encoding="utf-8"))
        for path in sorted(html.rglob("*.html"))
        if path.relative_to(html).parts[0] not in ("_static", "reports")
    }


def external_files(html: Path) -> Iterator[tuple[str, str]]:
    """Yield (file of the site, address) for all that would load from another host."""
    for path, page in read_pages(html).items():
        for address in dict.fromkeys(page.external):
            yield path.relative_to(html).as_posix(), address
    for kind, outside in ((".css", outside_in_css), (".js", outside_in_script)):
        for path in sorted(html.rglob(f"*{kind}")):
            name = path.relative_to(html).as_posix()
            if kind == ".js" and name.startswith(THEIRS):
                continue
            for address in outside(path.read_text(encoding="utf-8")):
                yield name, address


def target(html: Path, path: Path, link: str, prefix: str) -> tuple[Path, str] | None:
    """The file and the place to which a link of a page leads, None outside the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    where = unquote(parts.path)
    if where.startswith(prefix):
        path = html / where.removeprefix(prefix)
    elif where:
        path = (path.parent / where).resolve()
    return path, unquote(parts.fragment)


def dead_links(html: Path, prefix: str = "/") -> Iterator[tuple[str, str]]:
    """Yield (page, link) for links inside the site that lead to no file or no place.

    `prefix` is the path under which the site is served.  One page has links that begin
    with it: the one shown for an address that does not exist, whatever that is.
    """
    pages = read_pages(html)
    for path, page in pages.items():
        for link in page.links:
            if (found := target(html, path, link, prefix)) is None:
                continue
            file, place = found
            there = file.exists()
            if there and place and file in pages:
                there = place in pages[file].ids
            if not there:
                yield path.relative_to(html).as_posix(), link


def missing_files(html: Path, prefix: str = "/") -> Iterator[tuple[str, str]]:
    """Yield (page, address) for files that a page loads and the site does not have."""
    for path, page in read_pages(html).items():
        for address in page.loaded:
            found = target(html, path, address, prefix)
            if found and not found[0].exists():
                yield path.relative_to(html).as_posix(), address


def wordless_pictures(html: Path) -> Iterator[tuple[str, str]]:
    """Yield (page, tag) for pictures without words that say what they show."""
    for path, page in read_pages(html).items():
        for tag in page.wordless:
            yield path.relative_to(html).as_posix(), tag


def outside_links(html: Path) -> dict[str, list[str]]:
    """The addresses outside the site to which its pages lead, each with the pages."""
    found: dict[str, list[str]] = {}
    for path, page in read_pages(html).items():
        name = path.relative_to(html).as_posix()
        for link in page.links:
            if urlsplit(link).netloc and name not in found.setdefault(link, []):
                found[link].append(name)
    return dict(sorted(found.items()))
