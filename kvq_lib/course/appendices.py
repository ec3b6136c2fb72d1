"""A Sphinx extension: the parts of the appendices that a build itself finds out.

    ```{claims} book/02_memory_bottleneck
    ```

lists the claims that a chapter judges, with the verdicts that its cells gave when they
ran, `{claims-summary}` counts all of them, `{executions}` says when each page ran, and
where, and `{api}` is replaced by the library's reference.

Verdicts are read from the executed notebooks, page by page, and put in their places
when all pages are known.  Whatever does not fit is a warning, and fails the build.
"""

import datetime
import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
from docutils import nodes
from jupyter_cache import get_cache
from myst_nb.sphinx_ import NbMetadataCollector
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from . import api, claims, ledger, site

logger = logging.getLogger(__name__)
API = "```{api}\n```\n"


class later(nodes.General, nodes.Element):
    """A place that is filled when every page has been read; `kind` says with what."""


def text(content: str, *classes: str) -> nodes.inline:
    return nodes.inline("", content, classes=list(classes))


def paragraph(*children: nodes.Node, classes=()) -> nodes.paragraph:
    return nodes.paragraph("", "", *children, classes=list(classes))


def bullets(rows: "list[list[nodes.Node]]") -> nodes.bullet_list:
    return nodes.bullet_list(
        "", *[nodes.list_item("", paragraph(*row)) for row in rows], bullet="-"
    )


def table(columns: list[str], rows: "list[list[nodes.Node]]") -> nodes.table:
    """A table with headings; each cell is one inline node."""

    def row(cells):
        return nodes.row("", *[nodes.entry("", paragraph(cell)) for cell in cells])

    group = nodes.tgroup(
        "",
        *[nodes.colspec(colwidth=1) for _ in columns],
        nodes.thead("", row([text(column) for column in columns])),
        nodes.tbody("", *map(row, rows)),
        cols=len(columns),
    )
    return nodes.table("", group)


# -- what was executed -----------------------------------------------------------------


def setting(app: Sphinx) -> dict:
    """The machine and the versions on which the cached executions ran."""
    path = Path(app.srcdir) / site.ENVIRONMENT
    if not path.exists():  # someone runs Sphinx alone: then the pages run here, too
        return site.environment()
    return json.loads(path.read_text(encoding="utf-8"))


def executed(app: Sphinx, page: str) -> nbformat.NotebookNode:
    """A notebook with its outputs, as it lies in the folder of executed notebooks.

    MyST-NB writes it there, but without the outputs that come from its cache: so these
    are put in.
    """
    path = Path(app.outdir).parent / "jupyter_execute" / f"{page}.ipynb"
    notebook = nbformat.read(path, 4)
    cache = get_cache(app.env.mystnb_config.execution_cache_path)
    try:
        _, notebook = cache.merge_match_into_notebook(notebook)
    except KeyError:  # it is not executed by the build
        return notebook
    nbformat.write(notebook, path)
    return notebook


def gather(app: Sphinx, doctree: nodes.document) -> None:
    """Note the verdicts of a page that was executed and has just been read."""
    page = app.env.docname
    is_notebook = app.env.doc2path(page).endswith(".ipynb")
    found = list(claims.collect(executed(app, page))) if is_notebook else []
    app.env.kvq_verdicts[page] = found


def forget(app: Sphinx, env, page: str) -> None:
    env.kvq_verdicts.pop(page, None)


def merge(app: Sphinx, env, pages: "set[str]", other) -> None:
    env.kvq_verdicts |= {page: other.kvq_verdicts.get(page, []) for page in pages}


def begin(app: Sphinx) -> None:
    if not hasattr(app.env, "kvq_verdicts"):
        app.env.kvq_verdicts = {}
    app.env.kvq_ledger = ledger.load(Path(app.srcdir) / "book" / "claims.yml")


def check(app: Sphinx, env) -> list[str]:
    """Warn of what is missing; name the pages that depend on all others."""
    for trouble in ledger.troubles(env.kvq_ledger, env.found_docs, env.kvq_verdicts):
        logger.warning("claims: %s", trouble)
    return [page for page in env.found_docs if env.metadata[page].get("kvq_later")]


# -- the ledger ------------------------------------------------------------------------


class Claims(SphinxDirective):
    """The claims that a chapter judges."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.metadata[self.env.docname]["kvq_later"] = True
        listed = [
            claim
            for claim in self.env.kvq_ledger.values()
            if claim.chapter == self.arguments[0]
        ]
        if not listed:
            raise self.error(f"no claim belongs to {self.arguments[0]!r}")
        boxes = []
        for claim in listed:
            box = nodes.container("", classes=["claim"], ids=[ledger.anchor(claim.id)])
            box += later(kind="claim", claim=claim.id)
            boxes.append(box)
        return boxes


class Later(SphinxDirective):
    """A place for what is known only in the end; the directive's name says what."""

    def run(self) -> list[nodes.Node]:
        self.env.metadata[self.env.docname]["kvq_later"] = True
        return [later(kind=self.name)]


class Fill(SphinxPostTransform):
    """Put in their places what all pages together know."""

    default_priority = 400

    def run(self, **options) -> None:
        fill = {
            "claim": self.claim,
            "claims-summary": lambda place: self.summary(),
            "executions": lambda place: self.executions(),
        }
        for place in list(self.document.findall(later)):
            place.replace_self(list(fill[place["kind"]](place)))

    def link(self, words: str, page: str, anchor: str = "") -> nodes.reference:
        uri = self.app.builder.get_relative_uri(self.env.docname, page)
        uri += f"#{anchor}" if anchor else ""
        return nodes.reference("", words, internal=True, refuri=uri)

    def verdicts(self) -> dict[str, dict]:
        pages = self.env.kvq_verdicts.values()
        return {found["id"]: found for page in pages for found in page}

    def claim(self, place: later) -> Iterator[nodes.Node]:
        claim = self.env.kvq_ledger[place["claim"]]
        found = self.verdicts().get(claim.id)
        ruling = found["ruling"] if found else "to come"
        sign, _ = claims.RULINGS.get(ruling, ("…", ""))
        place.parent["classes"].append(f"claim-{ruling.replace(' ', '-')}")
        name = nodes.strong("", claim.id)
        yield paragraph(name, nodes.Text(" "), text(f"{sign} {ruling}", "ruling"))
        yield paragraph(text(claim.words), classes=["claim-words"])
        if found:
            measured = found["measured"].items()
            yield bullets(
                [
                    [text(f"{label}: "), nodes.strong("", claims.show(value))]
                    for label, value in measured
                ]
            )
            there = claim.chapter, claims.anchor(claim.id)
            yield paragraph(self.link("The cell that measured it", *there))

    def summary(self) -> Iterator[nodes.Node]:
        rows = []
        for ruling, ids in ledger.tally(self.env.kvq_ledger, self.verdicts()).items():
            if not ids and ruling not in claims.RULINGS:
                continue  # every claim is judged
            sign, _ = claims.RULINGS.get(ruling, ("…", ""))
            row = [nodes.strong("", f"{sign} {ruling}: {len(ids)}.")]
            for claim_id in ids:
                anchor = ledger.anchor(claim_id)
                link = nodes.reference("", claim_id, internal=True, refid=anchor)
                row += [nodes.Text(" "), link]
            rows.append(row)
        yield bullets(rows)

    def executions(self) -> Iterator[nodes.Node]:
        rows = []
        for page in site.pages(Path(self.app.srcdir)):
            ran = NbMetadataCollector.get_exec_data(self.env, page)
            if ran is None:
                continue
            when = datetime.datetime.fromtimestamp(ran["mtime"], datetime.UTC)
            rows.append(
                [
                    self.link(self.env.titles[page].astext(), page),
                    text(f"{when:%Y-%m-%d %H:%M}"),
                    text(f"{ran['runtime']:.0f}"),
                    text("succeeded" if ran["succeeded"] else "failed"),
                    text(str(len(self.env.kvq_verdicts[page]))),
                ]
            )
        columns = ["page", "executed (UTC)", "seconds", "result", "verdicts"]
        yield table(columns, rows)
        for kind, found in setting(self.app).items():
            yield paragraph(nodes.strong("", kind.capitalize()))
            yield bullets(
                [
                    [text(f"{name.replace('_', ' ')}: {value}")]
                    for name, value in found.items()
                    if value is not None
                ]
            )


# -- the reference ---------------------------------------------------------------------


def write_reference(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the directive `{api}` by the library's reference, as Markdown."""
    if API in source[0]:
        for module in api.modules():
            app.env.note_dependency(str(module))
        source[0] = source[0].replace(API, api.reference())


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_node(later)
    app.add_directive("claims", Claims)
    app.add_directive("claims-summary", Later)
    app.add_directive("executions", Later)
    app.add_post_transform(Fill)
    app.connect("builder-inited", begin)
    app.connect("source-read", write_reference)
    app.connect("env-purge-doc", forget)
    app.connect("doctree-read", gather)
    app.connect("env-merge-info", merge)
    app.connect("env-updated", check)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
