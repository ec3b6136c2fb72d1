"""The pages of the built site in a browser: wide and narrow, light and dark."""

import gzip
import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from sitepages import (
    HTML,
    PAGES,
    RAW_MATH,
    TOO_WIDE,
    WRONG_MATH,
    Visitor,
    served,
    source_of,
)

from kvq_lib.course import strict

every_page = pytest.mark.parametrize("page", PAGES)

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


# Thousands of words of code have a dozen colours: one of each is enough for axe-core.
ONE_OF_EACH = """() => {
  const seen = new Set();
  for (const word of document.querySelectorAll(".highlight pre span")) {
    if (seen.has(word.className)) word.replaceWith(...word.childNodes);
    seen.add(word.className);
  }
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
    # Without `preload`: it looks for style sheets beside the page.
    options = {"resultTypes": ["violations"], "preload": False, **rules}
    found = Axe().run(page, options=options).response["violations"]
    return [
        f"{v['id']}: {node['target']} {node['html'][:160]} "
        f"{[c['message'][:200] for c in node['any'] + node['all'] + node['none']][:1]}"
        for v in found
        for node in v["nodes"]
    ]


def sent(response):
    """Bytes on the line: servers compress text, GitHub's among them."""
    body = response.body()
    kind = response.headers.get("content-type", "")
    text = re.search(r"text/|javascript|json|xml", kind)
    return len(gzip.compress(body, 6)) if text else len(body)


@pytest.mark.browser
@every_page
def test_a_page_is_whole_light_and_readable_by_all(open_page, page):
    source, loaded = source_of(page), []
    opened = settled(open_page(page, seen=loaded), source)
    assert opened.evaluate(RAW_MATH) == [], "mathematics that was not rendered"
    assert opened.evaluate(WRONG_MATH) == [], "mathematics with errors"
    assert opened.evaluate(TOO_WIDE) == []
    for image in opened.evaluate(IMAGES):
        assert image["loaded"], image
        assert image["alt"].strip() and not strict.PATH.search(image["alt"]), image
    assert opened.evaluate(OUT_OF_ORDER) == []
    opened.set_viewport_size({"width": 375, "height": 812})
    assert opened.evaluate(TOO_WIDE) == [], "on a phone"
    opened.set_viewport_size({"width": 1280, "height": 900})
    opened.evaluate(ONE_OF_EACH)
    opened.evaluate(SET_THEME, "light")
    assert violations(opened, RULES) == []
    opened.evaluate(SET_THEME, "dark")
    assert violations(opened, CONTRAST) == []
    if "embed-amd.js" not in source:
        sizes = {r.url: sent(r) for r in loaded if r.ok}
        most = sorted(sizes.items(), key=lambda item: -item[1])[:5]
        assert sum(sizes.values()) <= LIGHT_BYTES, most


def test_every_built_page_is_tested():
    built = {p.relative_to(HTML).as_posix() for p in HTML.rglob("*.html")}
    built = {name for name in built if not name.startswith(("_static/", "reports/"))}
    assert built == {*PAGES, "index.html"}


@every_page
def test_nothing_was_written_to_standard_error(page):
    # Warnings and progress bars are for whoever runs a chapter, not for its readers.
    assert not re.search(r'class="[^"]*\boutput stderr\b', source_of(page))


@every_page
def test_the_widget_manager_is_loaded_only_where_there_are_widgets(page):
    text = source_of(page)
    has_widgets = "application/vnd.jupyter.widget-view+json" in text
    assert ("embed-amd.js" in text) == has_widgets


# -- speed ---------------------------------------------------------------------------

HEAVY = ["book/01_visual_demonstration.html", "book/08_scenarios.html"]
HEAVY += ["book/appendix_api.html", "book/mock_interview.html", "book/index.html"]
PAINTED = """() => new Promise((done) => {
  const seen = () => performance.getEntriesByName("first-contentful-paint")[0];
  const wait = () => seen() ? done(seen().startTime) : setTimeout(wait, 20);
  wait();
})"""


@pytest.mark.browser
@pytest.mark.parametrize("page", HEAVY)
def test_text_is_there_soon_on_a_slow_line(browser, address, page):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    line = context.new_cdp_session(opened)
    line.send("Network.enable")
    megabytes = 10e6 / 8
    line.send(
        "Network.emulateNetworkConditions",
        {
            "offline": False,
            "latency": 40,
            "downloadThroughput": megabytes,
            "uploadThroughput": megabytes,
        },
    )
    times = []
    for _ in range(3):  # the best of three: this measures the page, not the machine
        line.send("Network.clearBrowserCache")
        opened.goto(f"{address}/{page}", wait_until="commit")
        times.append(opened.evaluate(PAINTED))
    context.close()
    assert min(times) <= 2500, times


@pytest.mark.parametrize("page", [page for page in PAGES if page != "search.html"])
def test_no_script_holds_up_the_text(page):
    head = source_of(page).split("</head>")[0]
    blocking = [
        tag
        for tag in re.findall(r"<script[^>]*\bsrc=[^>]*>", head)
        if not re.search(r"\b(defer|async)\b", tag)
    ]
    assert blocking == []


# -- with a keyboard -----------------------------------------------------------------

FOCUS = """() => {
  const e = document.activeElement, box = e.getBoundingClientRect();
  const style = getComputedStyle(e);
  return {
    what: e.outerHTML.slice(0, 120),
    text: e.textContent.trim().slice(0, 60),
    seen: box.width > 0 && box.height > 0 && style.visibility !== "hidden",
    // Something around it says where one is: by itself, or on what it lies in.
    marked: [e, ...e.querySelectorAll("*"), e.parentElement].some((x) => {
      const s = getComputedStyle(x);
      return (s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0)
        || s.boxShadow !== "none" || s.textDecorationLine.includes("underline");
    }),
    inside: Boolean(e.closest("main")),
  };
}"""


@pytest.mark.browser
@pytest.mark.parametrize("page", HEAVY)
def test_the_keyboard_reaches_the_text_first_and_shows_where_it_is(open_page, page):
    opened = open_page(page)
    opened.keyboard.press("Tab")
    assert opened.evaluate(FOCUS)["text"] == "Skip to main content"
    opened.keyboard.press("Enter")
    for _ in range(25):
        opened.keyboard.press("Tab")
        focus = opened.evaluate(FOCUS)
        assert focus["seen"] and focus["marked"], focus
        assert focus["inside"], f"left the text: {focus}"
        if page == "book/index.html" and "next" in focus["what"]:
            break


# -- search --------------------------------------------------------------------------

# What readers type, and the page that should be among the first ten.
SEARCHES = {
    "KIVI": "book/03_quantization_strategies",
    "perplexity": "book/04_precision_tradeoffs",
    "zero point": "book/appendix_glossary",
    "Hadamard": "book/05_error_compensation",
    "error feedback": "book/05_error_compensation",
    "page table": "book/06_paged_attention",
    "fragmentation": "book/06_paged_attention",
    "split": "book/06b_how_the_kernel_reads_a_page",
    "vLLM": "book/07_deployment",
    "Little's law": "book/08_scenarios",
    "misconceptions": "book/10_misconceptions",
    "submit": "book/homework_students",
    "instructor": "book/homework_instructors",
    "bubblewrap": "book/homework_instructors",
    "flashcards": "book/mock_interview",
    "kv_bytes": "book/appendix_api",
    "bfloat16": "book/appendix_formats",
}
RESULTS = """() => [...document.querySelectorAll("#search-results li > a")]
  .slice(0, 10).map((a) => new URL(a.href).pathname.replace(/\\.html$/, ""))"""
# Sphinx has no excerpt for a place without words, and stumbles over that alone.
NO_EXCERPT = "Failed to execute 'appendChild'"


@pytest.mark.browser
@pytest.mark.parametrize("words", SEARCHES)
def test_search_finds_what_readers_type(browser, address, words):
    visitor = Visitor(browser, address)
    opened = visitor.open(f"search.html?q={words}")
    opened.wait_for_selector("#search-results li a", timeout=30_000)
    opened.wait_for_function(
        "/finished/i.test(document.querySelector('#search-results').textContent)"
    )
    assert f"/{SEARCHES[words]}" in opened.evaluate(RESULTS)
    assert opened.evaluate(TOO_WIDE) == []
    visitor.troubles = [t for t in visitor.troubles if NO_EXCERPT not in t]
    visitor.close()


# -- other places --------------------------------------------------------------------


@pytest.mark.browser
def test_the_site_works_under_a_path(browser, tmp_path):
    (tmp_path / "name").symlink_to(HTML)
    with served(tmp_path) as address:
        visitor = Visitor(browser, f"{address}/name")
        for page in ("index.html", "book/01_visual_demonstration.html"):
            visitor.open(page)
        opened = visitor.open("search.html?q=cache")
        opened.wait_for_selector("#search-results li a", timeout=30_000)
        opened.click("#search-results li a")
        opened.wait_for_load_state("networkidle")
        assert "/name/book/" in opened.url
        visitor.close()


@pytest.mark.browser
def test_a_wrong_address_leads_back_into_the_book(browser, address):
    visitor = Visitor(browser, address)
    opened = visitor.open("book/no/such/page.html")
    assert "Page not found" in opened.inner_text("main")
    opened.click("text=2 The memory bottleneck")
    opened.wait_for_url("**/book/02_memory_bottleneck.html")
    visitor.troubles = [t for t in visitor.troubles if "no/such" not in t]
    visitor.troubles = [t for t in visitor.troubles if "404" not in t]
    visitor.close()


@pytest.mark.browser
def test_a_chosen_theme_is_kept_on_the_next_page(open_page):
    opened = open_page("book/index.html", color_scheme="light")
    theme = "document.documentElement.dataset.theme"
    assert opened.evaluate(theme) == "light"
    for _ in range(3):
        if opened.evaluate(theme) != "dark":
            opened.click("button.theme-switch-button:visible")
    assert opened.evaluate(theme) == "dark"
    opened.goto(opened.url.replace("index", "02_memory_bottleneck"))
    assert opened.evaluate(theme) == "dark"


@pytest.mark.browser
def test_the_start_page_leads_to_the_book(open_page):
    opened = open_page("index.html")
    opened.wait_for_url("**/book/index.html", timeout=5_000)


def test_those_who_share_a_link_show_its_title_and_a_picture():
    head = source_of("book/06_paged_attention.html").split("</head>")[0]
    told = dict(re.findall(r'<meta property="(og:[\w:]+)" content="([^"]*)"', head))
    assert told["og:title"].startswith("6 ")
    assert told["og:image"].endswith("price-and-damage.png") and told["og:image:alt"]
    assert len(told["og:description"]) > 50
    assert re.search(r'<link rel="icon" href="\.\./_static/logo.svg"', head)
