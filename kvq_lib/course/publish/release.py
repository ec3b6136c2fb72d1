"""Gather what a release carries: the wheel, the PDF, the deck of cards, and notes.

    python -m kvq_lib.course.publish.release [--check] [v0.1.0]

`make release` builds them first, and checks before that.  A tag that does not match the
version, or a version that CHANGELOG.md does not describe, is refused.
"""

import argparse
import re
import shutil
import sys
import tomllib
from pathlib import Path

import yaml

from ...errors import InvalidArgument
from ..site import ROOT

FOLDER = Path("_build") / "release"
NOTES = "notes.md"
DECK = Path("_build") / "html" / "book" / "kvq.apkg"
PDF = Path("_build") / "kvq-book.pdf"


def version(root: Path) -> str:
    """The version, which two files state.

    Raises:
        InvalidArgument: they differ.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    stated = project["project"]["version"]
    cited = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    if cited["version"] != stated:
        raise InvalidArgument(
            f"pyproject.toml has version {stated}, CITATION.cff {cited['version']}"
        )
    return stated


def notes(root: Path, version: str) -> str:
    """What CHANGELOG.md says of a version.

    Raises:
        InvalidArgument: nothing.
    """
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = dict(
        re.findall(r"^## \[([^]]+)\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.M | re.S)
    )
    if not sections.get(version, "").strip():
        raise InvalidArgument(
            f"CHANGELOG.md has no section [{version}]: number and date [Unreleased]"
        )
    return sections[version].strip() + "\n"


def check(root: Path, tag: str = "") -> tuple[str, str]:
    """The version, and what CHANGELOG.md says of it.

    Raises:
        InvalidArgument: version, tag or CHANGELOG.md do not agree.
    """
    stated = version(root)
    if tag and tag != f"v{stated}":
        raise InvalidArgument(f"the tag of version {stated} is v{stated}, got {tag!r}")
    return stated, notes(root, stated)


def gather(root: Path, tag: str = "") -> list[Path]:
    """Put everything into `FOLDER`; the files that readers get.

    Args:
        root: of the repository, with site and PDF built and the wheel in `FOLDER`.
        tag: of the release; without one the version is taken as it is.

    Raises:
        InvalidArgument: as in `check`, or a file was not built.
    """
    stated, said = check(root, tag)
    folder = root / FOLDER
    wheel = folder / f"kvq_lib-{stated}-py3-none-any.whl"
    for path in (wheel, root / PDF, root / DECK):
        if not path.exists():
            raise InvalidArgument(f"{path.relative_to(root)} was not built")
    (folder / NOTES).write_text(said, encoding="utf-8")
    book, deck = folder / f"kvq-book-{stated}.pdf", folder / f"kvq-{stated}.apkg"
    shutil.copyfile(root / PDF, book)
    shutil.copyfile(root / DECK, deck)
    return [wheel, book, deck]


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(prog="make release")
    parser.add_argument("tag", nargs="?", default="", help="v0.1.0")
    parser.add_argument("--check", action="store_true", help="build nothing")
    options = parser.parse_args(arguments)
    try:
        if options.check:
            stated, _ = check(ROOT, options.tag)
            print(f"Version {stated} can be released.")
            return 0
        for path in gather(ROOT, options.tag):
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
    except InvalidArgument as error:
        print(f"No release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
