"""Where the book's repository is: one setting, from which buttons and links are made.

`kvq_repository` in _config.yml, empty until `make set-repo URL=...` sets it.  The site
is then expected where GitHub Pages serves it, https://OWNER.github.io/NAME/.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from sphinx.application import Sphinx

from ..errors import InvalidArgument

COLAB = "https://colab.research.google.com"
_ADDRESS = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+?(?:\.git)?/?")
_SETTING = re.compile(r'^(\s+kvq_repository: )".*"', re.M)


def checked(url: str) -> str:
    """An address as the theme and Colab want it; "" stays.

    Raises:
        InvalidArgument: no repository on GitHub, the only kind that Colab opens.
    """
    if url and not _ADDRESS.fullmatch(url):
        raise InvalidArgument(
            f"a repository is https://github.com/OWNER/NAME, got {url[:80]!r}"
        )
    return url.rstrip("/").removesuffix(".git")


def set_repository(root: Path, url: str) -> None:
    """Write the setting.

    Raises:
        InvalidArgument: as in `checked`, or _config.yml has no such setting.
    """
    path = root / "_config.yml"
    text, count = _SETTING.subn(
        lambda found: f'{found[1]}"{checked(url)}"', path.read_text(encoding="utf-8")
    )
    if count != 1:
        raise InvalidArgument(f"{path} has {count} lines `kvq_repository: ...`, not 1")
    path.write_text(text, encoding="utf-8")


def repository(root: Path) -> str:
    """The setting, "" if there is none."""
    text = (root / "_config.yml").read_text(encoding="utf-8")
    config = yaml.safe_load(text).get("sphinx", {}).get("config", {})
    return checked(config.get("kvq_repository", ""))


def pages_address(url: str) -> str:
    """Where GitHub Pages serves the site of a repository; "" of none."""
    if not checked(url):
        return ""
    owner, name = urlsplit(checked(url)).path.strip("/").split("/")
    host = f"{owner.lower()}.github.io"
    return f"https://{host}/" + ("" if name.lower() == host else f"{name}/")


def prefix(root: Path) -> str:
    """The path under which the site is served: of its links none but those of the page
    for addresses that do not exist begin with it."""
    return urlsplit(pages_address(repository(root))).path or "/"


def use_address(app: Sphinx, config) -> None:
    """What an address makes possible: a button that opens a notebook in Colab, a site
    map, pictures and titles for those who share a link."""
    if url := checked(config.kvq_repository):
        config.html_theme_options = {
            **config.html_theme_options,
            "repository_url": url,
            "repository_branch": "main",
            "launch_buttons": {"colab_url": COLAB},
        }
        here = pages_address(url)
        config.html_baseurl = config.ogp_site_url = here
        config.notfound_urls_prefix = urlsplit(here).path
        app.setup_extension("sphinx_sitemap")
        config.sitemap_url_scheme = "{link}"  # neither a language nor a version


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_config_value("kvq_repository", "", "html", str)
    # Before other extensions read what it sets.
    app.connect("config-inited", use_address, priority=100)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
