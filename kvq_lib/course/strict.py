"""Warnings for what Sphinx lets pass, at the cell or line that has it.

A picture without words, a file from another host, a link to a page that is not there.
Warnings fail the build, and `course.site` names the cell.
"""

import posixpath
import re
from urllib.parse import unquote, urlsplit

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from .scan_page import Page, says_nothing

log = logging.getLogger(__name__)

# A link whose address is given nowhere stays text: [words][name], or [name][].
REFERENCE = re.compile(r"(?<![\w\])])\[[^\[\]]+\]\[[^\[\]]*\](?![\[(])")
GENERATED = ("404", "genindex", "search")
CELL = 10_000  # what MyST-NB adds to a line number for each cell, from the first on


class KeepLines(SphinxTransform):
    """Pictures keep their line: Sphinx sets that of an {image} to 0 right after."""

    default_priority = 9

    def apply(self) -> None:
        for image in self.document.findall(nodes.image):
            image["written_at"] = image.line


def line_of(node: nodes.Node) -> int | None:
    """The line of a node as MyST-NB counts, of its cell if the node has none."""
    while node is not None:
        if isinstance(node, nodes.Element):
            if "cell_index" in node:
                return (node["cell_index"] + 1) * CELL
            if line := node.get("written_at") or node.line:  # 0 where it is unknown
                return line
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


def prose(element: nodes.TextElement) -> str:
    """The words of a paragraph, with a dot for each piece of code or mathematics."""
    if isinstance(element, nodes.FixedTextElement | nodes.literal | nodes.math_block):
        return ""
    if not isinstance(element.parent, nodes.TextElement):
        kept = (nodes.Text, nodes.emphasis, nodes.strong)
        return "".join(
            child.astext() if isinstance(child, kept) else "·" for child in element
        )
    return ""  # part of a paragraph that is read as a whole


def check(app: Sphinx, doctree: nodes.document) -> None:
    """Warn of all that a page that was just read has."""
    docname = app.env.docname

    def warn(node: nodes.Node, what: str) -> None:
        log.warning(what, location=(docname, line_of(node)), type="kvq", subtype="page")

    for image in doctree.findall(nodes.image):
        if says_nothing(image.get("alt", "")):
            warn(image, "a picture without alt text that says what it shows")
    for raw in doctree.findall(nodes.raw):
        if "html" in raw.get("format", "").split():
            for problem in raw_problems(app, docname, raw.astext()):
                warn(raw, problem)
    for element in doctree.findall(nodes.TextElement):
        for reference in REFERENCE.findall(prose(element)):
            warn(element, f"a dead link: the address of {reference} is given nowhere")


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    # Only here: it imports what executes notebooks, and others import this module.
    from . import fatal

    fatal.name_last_cell()
    app.add_transform(KeepLines)
    app.connect("doctree-read", check)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
