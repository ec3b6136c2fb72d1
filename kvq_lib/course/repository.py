"""Where the book's repository is: one setting, from which all that names it is made.

`kvq_repository` in _config.yml, empty until `make set-repo URL=...` sets it.  From it
come the buttons of the site, the first cells of notebooks and the address to cite.  The
site is then expected where GitHub Pages serves it, https://OWNER.github.io/NAME/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import InvalidArgument
from . import bootstrap

if TYPE_CHECKING:  # building homework needs the address, and no Sphinx
    from sphinx.application import Sphinx

COLAB = "https://colab.research.google.com"
_ADDRESS = re.compile(
    r"https://github\.com/[a-z\d](?:[-_]?[a-z\d])*/(?!\.\.?/?$|(?:\.git)+/?$)[\w.-]+/?",
    re.I | re.A,
)
_SETTING = re.compile(r'^(\s+kvq_repository: )"(.*)"', re.M)
_CITED = re.compile(r"^repository-code:.*\n", re.M)


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


def current(root: Path) -> str:
    """The address that is set; "" where none is, or where there is no _config.yml."""
    path = root / "_config.yml"
    found = _SETTING.search(path.read_text(encoding="utf-8")) if path.exists() else None
    return found[2] if found else ""


def set_repository(root: Path, url: str) -> list[Path]:
    """Write the setting and all that follows from it; return the files that changed.

    Another address, "" for none among them, undoes the one before to the byte.

    Raises:
        InvalidArgument: as in `checked`, _config.yml has no such setting, or a notebook
            cannot be read; then nothing is written.
    """
    url = checked(url)
    path = root / "_config.yml"
    text = path.read_text(encoding="utf-8")
    if (count := len(_SETTING.findall(text))) != 1:
        raise InvalidArgument(f"{path} has {count} lines `kvq_repository: ...`, not 1")
    texts = {path: _SETTING.sub(rf'\g<1>"{url}"', text)}
    citation = root / "CITATION.cff"
    if citation.exists():
        cited = f'repository-code: "{url}"\n' if url else ""
        text = citation.read_text(encoding="utf-8")
        texts[citation] = _CITED.sub("", text) + cited
    texts |= bootstrap.cells(root, url)
    changed = [p for p, text in texts.items() if p.read_text(encoding="utf-8") != text]
    for path in changed:
        path.write_text(texts[path], encoding="utf-8")
    return changed


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
    return urlsplit(pages_address(current(root))).path or "/"


def use_address(app: Sphinx, config) -> None:
    """What an address makes possible: a button that opens a notebook in Colab, a site
    map, pictures and titles for those who share a link.

    The button opens the tag of this version, whose library the notebook's first cell
    fetches.
    """
    if url := checked(config.kvq_repository):
        config.html_theme_options = {
            **config.html_theme_options,
            "repository_url": url,
            "repository_branch": bootstrap.tag(Path(app.srcdir)),
            "launch_buttons": {"colab_url": COLAB},
        }
        here = pages_address(url)
        config.html_baseurl = config.ogp_site_url = here
        path = config.notfound_urls_prefix = urlsplit(here).path
        page = dict(getattr(config, "notfound_context", {}))
        page["body"] = page.get("body", "").replace('="/', f'="{path}')
        config.notfound_context = page
        app.setup_extension("sphinx_sitemap")
        config.sitemap_url_scheme = "{link}"  # neither a language nor a version
        apart = ("index", "search", "genindex", "404")
        config.sitemap_excludes = [f"{page}.html" for page in apart]


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_config_value("kvq_repository", "", "html", str)
    # Before other extensions read what it sets.
    app.connect("config-inited", use_address, priority=100)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
