"""Where the book's repository is: one setting, from which buttons and links are made.

`kvq_repository` in _config.yml, empty until `make set-repo URL=...` sets it.
"""

import re
from pathlib import Path

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


def offer_colab(app: Sphinx, config) -> None:
    """Give notebook pages a button that opens them in Colab, if that is possible."""
    if url := checked(config.kvq_repository):
        config.html_theme_options = {
            **config.html_theme_options,
            "repository_url": url,
            "repository_branch": "main",
            "launch_buttons": {"colab_url": COLAB},
        }


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_config_value("kvq_repository", "", "html", str)
    app.connect("config-inited", offer_colab)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
