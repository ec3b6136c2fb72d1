"""Where the repository is, and what an edition leaves out."""

import re
import shutil

import nbformat
import pytest
import yaml

from kvq_lib.course import repository, site
from kvq_lib.errors import InvalidArgument

URL = "https://github.com/some-owner/some.book"
CONFIG = """\
sphinx:
  config:
    kvq_repository: ""
    other: "kept"
"""


def test_the_address_is_written_where_the_build_reads_it(tmp_path):
    (tmp_path / "_config.yml").write_text(CONFIG)
    for given in (URL, f"{URL}.git", f"{URL}/", ""):
        repository.set_repository(tmp_path, given)
        settings = yaml.safe_load((tmp_path / "_config.yml").read_text())
        wanted = {"kvq_repository": URL if given else "", "other": "kept"}
        assert settings["sphinx"]["config"] == wanted
        assert repository.current(tmp_path) == wanted["kvq_repository"]


@pytest.mark.parametrize(
    "url",
    [
        "github.com/a/b",
        "https://example.org/a/b",
        f"{URL}/tree/main",
        'x"y',
        " ",
        f" {URL}",
        "https://github.com/../..",
        "https://github.com/a/..",
        "https://github.com/a/.git",
        "https://github.com/a/.git.git/",
        "https://github.com/-a/b",
        "https://github.com/a/bücher",
    ],
)
def test_what_colab_could_not_open_is_refused(tmp_path, url):
    (tmp_path / "_config.yml").write_text(CONFIG)
    with pytest.raises(InvalidArgument, match="OWNER/NAME"):
        repository.set_repository(tmp_path, url)
    assert (tmp_path / "_config.yml").read_text() == CONFIG


def test_a_configuration_without_the_setting_is_told(tmp_path):
    (tmp_path / "_config.yml").write_text("title: other\n")
    with pytest.raises(InvalidArgument, match="0 lines"):
        repository.set_repository(tmp_path, URL)
    assert repository.current(tmp_path) == repository.current(tmp_path / "none") == ""


def test_the_book_s_own_configuration_has_the_setting():
    text = (site.ROOT / "_config.yml").read_text(encoding="utf-8")
    assert len(repository._SETTING.findall(text)) == 1


@pytest.mark.parametrize(
    ("url", "pages"),
    [
        ("", ""),
        (URL, "https://some-owner.github.io/some.book/"),
        ("https://github.com/Owner/owner.github.io", "https://owner.github.io/"),
        ("https://github.com/Owner/Book.git", "https://owner.github.io/Book/"),
    ],
)
def test_the_site_is_expected_where_github_serves_it(tmp_path, url, pages):
    assert repository.pages_address(url) == pages
    (tmp_path / "_config.yml").write_text(CONFIG)
    repository.set_repository(tmp_path, url)
    path = "/" + pages.partition(".io/")[2]
    assert repository.prefix(tmp_path) == path


BOOK = """title: Tiny
only_build_toc_files: true
execute: {execute_notebooks: "off"}
launch_buttons: {thebe: false}
sphinx:
  extra_extensions: [notfound.extension, sphinxext.opengraph, kvq_lib.course.repository]
  config:
    kvq_repository: ""
    templates_path: [templates]
    html_static_path: [static]
    html_additional_pages: {index: start.html}
    notfound_urls_prefix: /
    notfound_context: {title: Gone, body: '<a href="/book/one.html">start</a>'}
    ogp_social_cards: {enable: false}
    ogp_image: _static/picture.png
    html_theme_options: {show_toc_level: 2}
"""


@pytest.fixture
def small(tmp_path):
    """A book of one notebook, and the HTML of a page of its site."""
    (tmp_path / "book").mkdir()
    (tmp_path / "_config.yml").write_text(BOOK)
    start = site.ROOT / "book" / "assets" / "templates" / "start.html"
    (tmp_path / "templates").mkdir()
    shutil.copy(start, tmp_path / "templates")
    (tmp_path / "static").mkdir()
    shutil.copy(
        site.ROOT / "book" / "assets" / "static" / "logo.svg", tmp_path / "static"
    )
    toc = "format: jb-book\nroot: book/one\nchapters:\n  - file: book/two\n"
    (tmp_path / "_toc.yml").write_text(toc)
    (tmp_path / "book" / "two.md").write_text("# Another\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.3.0"\n')
    cells = [nbformat.v4.new_markdown_cell("# A chapter", id="title")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "book" / "one.ipynb")
    return tmp_path


def test_an_address_gives_buttons_a_map_and_titles_to_share(small):
    html = small / "_build" / "html"
    assert site.build(small) == 0
    before = (html / "book" / "one.html").read_text()
    assert "colab" not in before and not (html / "sitemap.xml").exists()
    assert '<a href="/book/one.html">start' in (html / "404.html").read_text()

    repository.set_repository(small, URL)
    assert site.build(small) == 0
    page = (html / "book" / "one.html").read_text()
    here = "https://some-owner.github.io/some.book/"
    assert f'href="{repository.COLAB}/github/some-owner/some.book/blob/v0.3.0/' in page
    assert f'<meta property="og:url" content="{here}book/one.html"' in page
    assert f'<meta property="og:image" content="{here}_static/picture.png"' in page
    assert f'<link rel="canonical" href="{here}book/one.html"' in page
    locations = re.findall(r"<loc>(.*?)</loc>", (html / "sitemap.xml").read_text())
    assert locations == [f"{here}book/{page}.html" for page in ("one", "two")]
    start = (html / "index.html").read_text()
    assert f'<meta property="og:url" content="{here}"' in start
    assert f'<link rel="canonical" href="{here}book/one.html"' in start
    assert '<a href="/some.book/book/one.html">start' in (html / "404.html").read_text()


def test_the_course_s_edition_has_all_pages_but_the_solutions():
    path = site.table_of_contents(site.ROOT, "course")
    listed = [
        entry["file"]
        for part in yaml.safe_load(path.read_text())["parts"]
        for entry in part["chapters"]
    ]
    everything = site.pages()
    solutions = {page for page in everything if page.startswith("solutions/")}
    assert ["book/index", *listed] == [p for p in everything if p not in solutions]
    assert site.table_of_contents(site.ROOT) == site.ROOT / "_toc.yml"
