"""The built site, served, and opened in a browser that tells what else it asks for."""

import threading
from contextlib import contextmanager
from pathlib import Path

from kvq_lib.course import site

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html"

PAGES = [
    *(f"{page}.html" for page in site.pages()),
    "404.html",
    "genindex.html",
    "search.html",
]


# What reaches past the right edge, except inside a box that a reader can scroll.
# A box that only hides what is too wide loses it.
TOO_WIDE = """() => {
  const root = document.documentElement;
  const scrolls = (element) => {
    for (let e = element; e && e !== document.body; e = e.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) return true;
    return false;
  };
  return [...document.querySelectorAll("main *")]
    .filter((e) => !e.closest("mjx-assistive-mml, .sr-only, .visually-hidden"))
    .filter((e) => e.getBoundingClientRect().right > root.clientWidth + 1)
    .filter((e) => !scrolls(e))
    .map((e) => `${e.tagName}.${e.className}: ${e.textContent.trim().slice(0, 60)}`)
    .concat(root.scrollWidth > root.clientWidth ? [`page: ${root.scrollWidth}`] : []);
}"""

RAW_MATH = """() => [...document.querySelectorAll(".math")]
  .filter((e) => !e.querySelector("mjx-container"))
  .map((e) => e.textContent)"""

# MathJax sets what it cannot read, and macros that it does not know, in red.
WRONG_MATH = """() => [...document.querySelectorAll(
    "mjx-merror, [data-mjx-error], mjx-mtext[style*='color: red']")]
  .map((e) => e.closest("mjx-container").querySelector("mjx-assistive-mml").textContent
    + " " + (e.getAttribute("data-mjx-error") || ""))"""


def source_of(page):
    path = HTML / page
    assert path.exists(), f"{page} is not built: run `make book`"
    return path.read_text(encoding="utf-8")


@contextmanager
def served(folder=HTML, server=None):
    """The address at which a folder is served meanwhile, by the site's server or one
    that is given."""
    server = server or site.make_server(folder, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Visitor:
    """Opens pages, and writes down whatever a page does that it should not."""

    def __init__(self, browser, address):
        self.browser, self.address = browser, address
        self.troubles, self.contexts = [], []

    def read_request(self, request):
        if not request.url.startswith((self.address, "data:")):
            self.note(f"request to another host: {request.url}")

    def open(self, path, width=1280, height=900, seen=None, **settings):
        context = self.browser.new_context(
            viewport={"width": width, "height": height}, **settings
        )
        self.contexts.append(context)
        context.on("request", self.read_request)
        page = context.new_page()
        page.on("pageerror", lambda error: self.note(f"script error: {error}"))
        page.on("console", self.read_console)
        page.on("response", self.read_response)
        if seen is not None:
            page.on("response", lambda response: seen.append(response))
        page.goto(f"{self.address}/{path}", wait_until="networkidle")
        return page

    def note(self, trouble):
        self.troubles.append(trouble)

    def read_console(self, message):
        if message.type == "error":
            self.note(f"console error: {message.text}")

    def read_response(self, response):
        if response.status >= 400:
            self.note(f"{response.status} for {response.url}")

    def close(self):
        for context in self.contexts:
            context.close()
        assert not self.troubles, self.troubles
