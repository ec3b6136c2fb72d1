"""How pages look where it has gone wrong before: tables on phones, figures in the dark,
code without scripts, verdicts on paper."""

import pytest
from pagechecks import RULES, SET_THEME, settled, violations
from sitepages import PAGES, source_of

TABLES = [page for page in PAGES if "<table" in source_of(page)]
PHONE = {"width": 375, "height": 900}
BOXES = ".cell_output > .output, .pst-scrollable-table-container, pre"

# Tables of which nothing but the first column is seen.
ALL_NAMES = """() => [...document.querySelectorAll("main table")]
  .filter((table) => table.rows[0].cells.length > 1)
  .map((table) => [table, table.closest(".output, .pst-scrollable-table-container")])
  .filter(([table, box]) => box?.scrollWidth > box?.clientWidth + 1)
  .filter(([table, box]) => table.rows[0].cells[1].getBoundingClientRect().left
    > box.getBoundingClientRect().left + 0.7 * box.clientWidth)
  .map(([table]) => table.textContent.trim().slice(0, 80))"""

TALL = """() => [...document.querySelectorAll("main .table tr")]
  .filter((row) => row.getBoundingClientRect().height > 200)
  .map((row) => row.textContent.trim().slice(0, 80))"""

# Words of links in tables that begin on one line and end on another.  At a hyphen a
# word may break.
BROKEN = r"""() => [...document.querySelectorAll("main :is(.table, .text_html) a")]
  .flatMap((a) => {
  const walk = document.createTreeWalker(a, NodeFilter.SHOW_TEXT), broken = [];
  for (let node; (node = walk.nextNode()); )
    for (const word of node.data.matchAll(/[^\s-]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const tops = [...range.getClientRects()].map((r) => Math.round(r.top));
      if (new Set(tops).size > 1) broken.push(word[0]);
    }
  return broken;
})"""

SCROLLING = """(boxes) => [...document.querySelectorAll(boxes)]
  .filter((e) => e.checkVisibility() && e.tabIndex === 0)
  .filter((e) => e.scrollWidth > e.clientWidth + 1)
  .map((e) => ({role: e.role, name: e.ariaLabel, faded: e.dataset.more,
                mask: getComputedStyle(e).maskImage}))"""

# Lightness from 0 to 1 of the text of each match, and of the first ground behind it.
LIGHTNESS = """(where) => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
    return (0.3 * r + 0.6 * g + 0.1 * b) / 255;
  };
  const ground = (e) => {
    const color = e ? getComputedStyle(e).backgroundColor : "rgb(255, 255, 255)";
    return /, 0\\)$/.test(color) ? ground(e.parentElement) : color;
  };
  return [...document.querySelectorAll(where)].map(
    (e) => [light(getComputedStyle(e).color), light(ground(e))]);
}"""


@pytest.mark.browser
@pytest.mark.parametrize("page", TABLES)
def test_a_table_on_a_phone_shows_numbers_and_whole_words(open_page, page):
    opened = settled(open_page(page, **PHONE), source_of(page))
    assert opened.evaluate(ALL_NAMES) == []
    assert opened.evaluate(TALL) == []
    assert opened.evaluate(BROKEN) == []
    opened.set_viewport_size({"width": 1280, "height": 900})
    assert opened.evaluate(BROKEN) == []


@pytest.mark.browser
def test_a_box_that_scrolls_says_so(open_page):
    page = "book/05_error_compensation.html"
    opened = settled(open_page(page, **PHONE), source_of(page))
    boxes = opened.evaluate(SCROLLING, BOXES)
    assert len(boxes) > 3
    for box in boxes:
        assert box["role"] in ("region", "group") and box["name"], box
        assert box["faded"] == "right" and "gradient" in box["mask"], box
    regions = [box["name"] for box in boxes if box["role"] == "region"]
    assert regions and len(regions) == len(set(regions))
    table = opened.locator(f":is({BOXES})[data-more]:has(table)").first
    table.evaluate("(e) => { e.scrollLeft = e.scrollWidth; }")
    opened.wait_for_function(
        "(e) => e.dataset.more === 'left'", arg=table.element_handle()
    )
    opened.evaluate(SET_THEME, "light")
    assert violations(opened, RULES) == []
    folded = opened.locator("details.hide:has(pre)").first
    folded.locator("summary").click()
    folded.locator("pre[role=group]").first.wait_for()
    opened.set_viewport_size({"width": 1920, "height": 900})
    opened.wait_for_function(
        "() => !document.querySelector('.text_html[data-more], .text_html[role]')"
    )


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_is_legible_without_scripts(open_page, scheme):
    opened = open_page(
        "book/03_quantization_strategies.html",
        color_scheme=scheme,
        java_script_enabled=False,
    )
    looks = opened.evaluate(LIGHTNESS, "main .highlight pre, main .highlight span")
    assert len(looks) > 100
    assert all(abs(text - ground) > 0.5 for text, ground in looks)


@pytest.mark.browser
def test_a_figure_in_the_dark_stands_on_one_ground(open_page):
    opened = open_page("book/03_quantization_strategies.html")
    opened.evaluate(SET_THEME, "dark")
    grounds = opened.evaluate(
        """() => [...document.querySelectorAll("main .cell_output img")].map((e) => {
          const s = getComputedStyle(e);
          return [s.padding, s.backgroundColor];
        })"""
    )
    assert len(grounds) > 2
    assert all(g == ["0px", "rgb(255, 255, 255)"] for g in grounds), grounds


@pytest.mark.browser
@pytest.mark.parametrize(
    ("page", "where"),
    [
        ("book/07_deployment.html", 'main [role="note"] span[style]'),
        ("book/appendix_claims.html", "main .ruling"),
    ],
)
def test_a_verdict_on_paper_needs_no_background(open_page, page, where):
    opened = open_page(page)
    opened.emulate_media(media="print")
    looks = opened.evaluate(LIGHTNESS, where)
    assert looks and all(text < 0.2 and ground > 0.9 for text, ground in looks)


@pytest.mark.browser
def test_the_mock_interview_on_paper_says_what_is_missing(open_page):
    opened = open_page("book/mock_interview.html")
    opened.emulate_media(media="print")
    said = opened.evaluate(
        "() => getComputedStyle(document.querySelector('.kvqm'), '::before').content"
    )
    assert "screen" in said and "sheet" in said
