"""Every page of the built site in a browser: wide and narrow, light and dark."""

import re

import pytest
from pagechecks import (
    CONTRAST,
    SET_THEME,
    assert_whole_light_and_readable,
    violations,
)
from sitepages import HTML, PAGES, source_of
from test_site_homework import HOMEWORK

every_page = pytest.mark.parametrize("page", PAGES)


@pytest.mark.browser
@pytest.mark.parametrize("page", [page for page in PAGES if page not in HOMEWORK])
def test_a_page_is_whole_light_and_readable_by_all(open_page, page):
    assert_whole_light_and_readable(open_page, page)


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


# -- does it see what is wrong? ------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize(("theme", "pale"), [("light", "#999"), ("dark", "#555")])
@pytest.mark.parametrize(
    ("page", "where"),
    [
        ("book/question_sheet.html", "main li > p"),
        ("book/appendix_api.html", "main dd > p"),
        ("book/02_memory_bottleneck.html", "main .highlight .nn"),
    ],
)
def test_one_pale_word_among_many_alike_is_seen(open_page, page, where, theme, pale):
    opened = open_page(page)
    opened.evaluate(SET_THEME, theme)
    many = opened.locator(where)
    assert many.count() > 2
    many.nth(2).evaluate("(e, pale) => { e.style.color = pale; }", pale)
    found = violations(opened, CONTRAST)
    assert len(found) == 1 and pale in found[0], found
