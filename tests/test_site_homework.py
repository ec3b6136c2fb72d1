"""The pages of exercises and solutions in a browser: a file of their own, so that two
workers of pytest-xdist share the site."""

import pytest
from pagechecks import assert_whole_light_and_readable
from sitepages import PAGES

HOMEWORK = [page for page in PAGES if page.startswith(("exercises/", "solutions/"))]


@pytest.mark.browser
@pytest.mark.parametrize("page", HOMEWORK)
def test_a_page_is_whole_light_and_readable_by_all(open_page, page):
    assert_whole_light_and_readable(open_page, page)
