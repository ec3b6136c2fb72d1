"""Warnings for what Sphinx lets pass, at the cell or line that has it.

A picture without words, a file from another host, a link to a page that is not there.
Warnings fail the build, and `course.site` names the cell.
"""

import posixpath
import re
from urllib.parse import unquote, urlsplit

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

from .scan import Page

log = logging.getLogger(__name__)

# What a picture gets from its path if nobody has given it words.
PATH = re.compile(r"\.(png|svg|jpe?g|gif|webp)$|^\S*/\S*$", re.I)
GENERATED = ("404", "genindex", "search")
CELL = 10_000  # what MyST-NB adds to a line number for each cell, from the first on


def line_of(node: nodes.Node) -> int | None:
    """The line of a node as MyST-NB counts, of its cell if the node has none."""
    while node is not None:
        if isinstance(node, nodes.Element):
            if "cell_index" in node:
                return (node["cell_index"] + 1) * CELL
            if node.line:  # 0 where it is unknown
                return node.line
        node = node.parent
    return None


def raw_problems(app: Sphinx, docname: str, text: str) -> list[str]:
    """What is wrong with a piece of HTML that a cell or a page brings along."""
    page = Page(text)
    found = [f"loads {address} from another host" for address in page.external]
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or not parts.path.endswith(".html"):
            continue
        target = posixpath.join(posixpath.dirname(docname), unquote(parts.path))
        name = posixpath.normpath(target).removesuffix(".html")
        if name not in app.env.found_docs and name not in GENERATED:
            found.append(f"a dead link: {link} leads to no page")
    return found


def check(app: Sphinx, doctree: nodes.document) -> None:
    """Warn of all that a page that was just read has."""
    docname = app.env.docname

    def warn(node: nodes.Node, what: str) -> None:
        log.warning(what, location=(docname, line_of(node)), type="kvq", subtype="page")

    for image in doctree.findall(nodes.image):
        words = image.get("alt", "").strip()
        if not words or PATH.search(words):
            warn(image, "a picture without alt text that says what it shows")
    for raw in doctree.findall(nodes.raw):
        if "html" in raw.get("format", "").split():
            for problem in raw_problems(app, docname, raw.astext()):
                warn(raw, problem)


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.connect("doctree-read", check)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
