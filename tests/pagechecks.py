"""Is a page of the built site whole, light, and readable by all?"""

import functools
import gzip
import mimetypes
import re
from urllib.parse import unquote, urlsplit

from axe_playwright_python.sync_playwright import Axe
from sitepages import HTML, RAW_MATH, TOO_WIDE, WRONG_MATH, source_of

from kvq_lib.course.scan_page import says_nothing

# WCAG 2.2 at level AA, and what axe-core calls best practice: the order of headings,
# landmarks.
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RULES = {
    "runOnly": TAGS,
    "rules": {
        # A choice of a quiz is a <label> of jupyterquiz's without a field: ARIA in HTML
        # lets such a label be a button, axe-core does not know.
        "aria-allowed-role": {"enabled": False},
    },
}
CONTRAST = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
LIGHT_BYTES = 1_500_000  # of all that a page without widgets loads

IMAGES = """() => [...document.images].map(
  (i) => ({alt: i.alt, source: i.currentSrc, loaded: i.naturalWidth > 0}))"""

# The theme lets keys reach boxes that scroll 0.3 s after a change of width.
REACHABLE = """() => [...document.querySelectorAll(
    "pre, .cell_output > .output, .pst-scrollable-table-container")]
  .every((e) => (e.tabIndex === 0)
    === (e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight))"""

# A positive tabindex takes a control out of the order in which it stands.
OUT_OF_ORDER = """() => [...document.querySelectorAll("[tabindex]")]
  .filter((e) => e.tabIndex > 0).map((e) => e.outerHTML.slice(0, 80))"""

# Colours at once: half way from one theme to the other nothing has contrast.
SET_THEME = """(theme) => {
  const style = document.head.appendChild(document.createElement("style"));
  style.textContent = "* { transition: none !important; }";
  document.documentElement.dataset.mode = theme;
  document.documentElement.dataset.theme = theme;
}"""


# Thousands of words look alike.  Contrast depends on the text's colour, size and weight
# and on what lies behind it: axe-core judges one element of each kind.  Words of code
# that repeat a kind become plain text, since every element costs it time.
ONE_OF_EACH = """() => {
  const kinds = new Set(), behind = new Map(), repeated = [];
  const kind = (e) => [e.tagName, e.getAttribute("class")];
  const ground = (e) => {
    if (!e) return "";
    if (!behind.has(e)) {
      const s = getComputedStyle(e);
      const own = [s.backgroundColor, s.backgroundImage, s.opacity, s.filter].join();
      behind.set(e, own + ground(e.parentElement));
    }
    return behind.get(e);
  };
  for (const e of document.body.querySelectorAll("*")) {
    e.removeAttribute("data-one");
    const s = getComputedStyle(e);
    const look = [s.color, s.fontSize, s.fontWeight, s.textShadow];
    const key = [kind(e), kind(e.parentElement), look, ground(e)].join();
    const words = e.matches("input, select, textarea")
      || [...e.childNodes].some((n) => n.data?.trim());
    if (words && !kinds.has(key)) {
      kinds.add(key);
      e.setAttribute("data-one", "");
    } else if (e.matches(".highlight pre span")) repeated.push(e);
  }
  for (const e of repeated) e.replaceWith(...e.childNodes);
}"""
FIND = """(options) => {
  axe.configure({rules: [{id: "color-contrast", selector: "[data-one]"}]});
  return axe.run(document, options);
}"""


def settled(page, source):
    """A page on which mathematics and widgets are drawn; late on a busy machine."""
    if 'class="math' in source:
        page.wait_for_function("window.MathJax?.startup?.promise", timeout=60_000)
        page.evaluate("MathJax.startup.promise")
    if "application/vnd.jupyter.widget-view+json" in source:
        page.wait_for_selector(".jupyter-widgets", timeout=60_000)
    return page


def violations(page, rules):
    """What axe-core finds, one line an element."""
    page.evaluate(ONE_OF_EACH)
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(Axe().axe_script)
    # Without `preload`: it looks for style sheets beside the page.
    options = {"resultTypes": ["violations"], "preload": False, **rules}
    return [
        f"{v['id']}: {node['target']} {node['html'][:160]} "
        f"{[c['message'][:200] for c in node['any'] + node['all'] + node['none']][:1]}"
        for v in page.evaluate(FIND, options)["violations"]
        for node in v["nodes"]
    ]


@functools.cache
def sent(path):
    """Bytes of a file on the line: servers compress text, GitHub's among them."""
    content, kind = (HTML / path).read_bytes(), mimetypes.guess_type(path)[0] or ""
    text = re.search(r"text/|javascript|json|xml", kind)
    return len(gzip.compress(content, 6)) if text else len(content)


def assert_whole_light_and_readable(open_page, page):
    """Mathematics, pictures, widths, what axe-core finds, and the bytes loaded."""
    source, loaded = source_of(page), []
    opened = settled(open_page(page, seen=loaded), source)
    assert opened.evaluate(RAW_MATH) == [], "mathematics that was not rendered"
    assert opened.evaluate(WRONG_MATH) == [], "mathematics with errors"
    assert opened.evaluate(TOO_WIDE) == []
    for image in opened.evaluate(IMAGES):
        assert image["loaded"], image
        assert not says_nothing(image["alt"]), image
    assert opened.evaluate(OUT_OF_ORDER) == []
    for width in (1920, 768, 375):
        opened.set_viewport_size({"width": width, "height": 900})
        assert opened.evaluate(TOO_WIDE) == [], f"{width} pixels wide"
    opened.set_viewport_size({"width": 1280, "height": 900})
    opened.wait_for_function(REACHABLE)
    opened.evaluate(SET_THEME, "light")
    assert violations(opened, RULES) == []
    opened.evaluate(SET_THEME, "dark")
    assert violations(opened, CONTRAST) == []
    if "embed-amd.js" not in source:
        paths = {unquote(urlsplit(r.url).path).lstrip("/") for r in loaded if r.ok}
        sizes = {path: sent(path) for path in paths}
        most = sorted(sizes.items(), key=lambda item: -item[1])[:5]
        assert sum(sizes.values()) <= LIGHT_BYTES, most
