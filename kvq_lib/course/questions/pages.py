"""A Sphinx extension: the pages of the question bank.

`{mock-interview}` is replaced by the interview, `{question-sheet}` by all questions and
their answers, and the deck of cards is written beside the pages. A problem of the bank
is a warning, and fails the build.
"""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from ...errors import InvalidArgument
from . import bank, deck, mock, sheet

logger = logging.getLogger(__name__)
SHEET = "```{question-sheet}\n```\n"
DECK = Path("book") / "kvq.apkg"
QUIZ = '<div class="kvqz"'  # how the output of a quiz begins


class interview(nodes.General, nodes.Element):
    """The place of the interview: links to sections are known when all are read."""


def questions(app: Sphinx) -> tuple[bank.Question, ...]:
    """The bank of the book; none if it has problems."""
    try:
        return bank.load(root=Path(app.srcdir))
    except InvalidArgument:  # `check` has said why
        return ()


def check(app: Sphinx) -> None:
    """Warn of each problem of the bank."""
    try:
        bank.load(root=Path(app.srcdir))
    except bank.BankError as error:
        for problem in error.problems:
            logger.warning("questions: %s", problem)
    except InvalidArgument as error:
        logger.warning("questions: %s", error)


class Interview(SphinxDirective):
    """The place of the mock interview."""

    def run(self) -> list[nodes.Node]:
        return [interview()]


def want_formulas(app: Sphinx, doctree: nodes.document) -> None:
    """Have MathJax loaded by a page whose only formulas are those of its questions."""
    found = [*doctree.findall(interview)]
    found += [raw for raw in doctree.findall(nodes.raw) if QUIZ in raw.astext()]
    if found:
        app.env.get_domain("math").data["has_equations"][app.env.docname] = True


class Place(SphinxPostTransform):
    """Put the interview in its place."""

    default_priority = 400

    def run(self, **options) -> None:
        for place in list(self.document.findall(interview)):
            html = mock.page(questions(self.app), self.address)
            place.replace_self(nodes.raw("", html, format="html"))

    def address(self, section: bank.Section) -> str:
        """The address of a section, from this page."""
        uri = self.app.builder.get_relative_uri(self.env.docname, section.page)
        toc = self.env.tocs.get(section.page, nodes.bullet_list())
        for link in toc.findall(nodes.reference):
            if link.astext().startswith(f"{section.number} "):
                return f"{uri}{link['anchorname']}"
        logger.warning("questions: no section %s in %s", section.number, section.page)
        return uri


def write_sheet(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the directive `{question-sheet}` by the sheet, as Markdown."""
    if SHEET in source[0]:
        for path in sorted((Path(app.srcdir) / bank.FOLDER).glob("*.yml")):
            app.env.note_dependency(str(path))
        source[0] = source[0].replace(SHEET, sheet.markdown(questions(app)))


def write_deck(app: Sphinx, error: Exception | None) -> None:
    """Write the deck beside the pages."""
    found = questions(app)
    if error is None and app.builder.format == "html" and found:
        deck.write(found, Path(app.outdir) / DECK)


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_node(interview)
    app.add_directive("mock-interview", Interview)
    app.add_post_transform(Place)
    app.connect("builder-inited", check)
    app.connect("source-read", write_sheet)
    app.connect("doctree-read", want_formulas)
    app.connect("build-finished", write_deck)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
