"""Where the repository is, and what an edition leaves out."""

from types import SimpleNamespace

import pytest
import yaml

from kvq_lib.course import bootstrap, repository, site
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
    "url", ["github.com/a/b", "https://example.org/a/b", f"{URL}/tree/main", 'x"y', " "]
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


def test_pages_get_the_button_once_the_address_is_known():
    options = {"show_toc_level": 2}
    config = SimpleNamespace(kvq_repository="", html_theme_options=options)
    app = SimpleNamespace(srcdir=site.ROOT)
    repository.offer_colab(app, config)
    assert config.html_theme_options == options
    config.kvq_repository = URL
    repository.offer_colab(app, config)
    found = config.html_theme_options
    assert found["repository_url"] == URL and found["show_toc_level"] == 2
    assert found["repository_branch"] == bootstrap.tag(site.ROOT)
    assert found["launch_buttons"] == {"colab_url": "https://colab.research.google.com"}


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
