"""A Sphinx extension: pages light enough for a slow line, and plain to listeners.

Scripts wait until the page is read (here those that Sphinx adds, in
book/assets/templates those of the theme).  The theme draws its icons with a font and
once more with 1.5 MB of script: the font does.  A figure needs no more than 256
colours, and is a third of the size with them.

Docutils marks works cited as a list whose entries are none, and the empty corner of a
table as a heading: both become what they are.
"""

import io
from pathlib import Path

from PIL import Image
from sphinx.application import Sphinx

ICONS = Path("_static/scripts/fontawesome.js")
# A script in the page sets it, for one that waits.
SETTING = "DOCUMENTATION_OPTIONS."
PLAIN = {
    ' role="list" class="citation-list"': ' class="citation-list"',
    ' role="doc-biblioentry"': "",
    '<th class="head"><p></p></th>': "<td></td>",
}


def waiting(script):
    """The same script, but waiting; Sphinx shares the given one among all pages."""
    if script.filename:
        more = {"defer": "defer"}
    elif script.attributes.get("body", "").startswith(SETTING):
        more = {"type": "module"}  # waits, and keeps its place
    else:
        return script
    attributes = {**script.attributes, **more}
    return type(script)(script.filename, priority=script.priority, **attributes)


def defer(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Let a page's scripts run once its text is there, in the same order.

    On the page of search results the text is what the scripts find.
    """
    if page != "search":
        context["script_files"] = [*map(waiting, context.get("script_files", ()))]


def make_plain(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Take out of a page's text what only misleads those who hear it."""
    for given, plain in PLAIN.items():
        context["body"] = context.get("body", "").replace(given, plain)


def drop_icons(app: Sphinx, exception: Exception | None) -> None:
    """Empty the script of the icons; pages ask for it by name."""
    path = Path(app.outdir) / ICONS
    if path.exists():
        path.write_text("// Icons come from the theme's font.\n", encoding="utf-8")


def shrink_pictures(app: Sphinx, exception: Exception | None) -> None:
    """Write the figures with a palette, where that is smaller."""
    for path in (Path(app.outdir) / "_images").glob("*.png"):
        smaller = io.BytesIO()
        with Image.open(path) as image:
            flat = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        flat.save(smaller, "PNG", optimize=True)
        if smaller.tell() < path.stat().st_size:
            path.write_bytes(smaller.getvalue())


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.connect("html-page-context", defer, priority=900)
    app.connect("html-page-context", make_plain)
    app.connect("build-finished", drop_icons)
    app.connect("build-finished", shrink_pictures)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
