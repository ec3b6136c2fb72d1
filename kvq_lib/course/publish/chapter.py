"""Write a chapter to begin with, and enter it wherever chapters are listed.

    python -m kvq_lib.course.publish.chapter 12_topic "A title"

The chapter builds and passes the tests of chapters as it is.  Its text says what
belongs where, and its numbers are real, so that each kind of cell is there to be
changed.  All that is wrong with a name is told before anything is written.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

import jupytext

from ...errors import InvalidArgument
from .. import bootstrap, ledger, repository
from ..site import ROOT

TEMPLATE = Path(__file__).with_name("chapter.md")
_NAME = re.compile(r"(\d\d)([a-z]?)_[a-z0-9]+(?:_[a-z0-9]+)*")

#: Where chapters are listed: a file, a pattern for one entry, a new entry, and what
#: stands between two.
LISTS = (
    ("_toc.yml", r"^ +- file: book/(\d\d\w+)\n", "      - file: book/{name}\n", ""),
    (
        "book/index.md",
        r"^\| \[[^]]+\]\((\d\d\w+)\) .*\n",
        "| [{number} {title}]({name}) | say what one will be able to do | 30 |\n",
        "",
    ),
    (
        "book/claims.yml",
        r"^book/(\w+):\n(?:  .+\n)+",
        'book/{name}:\n  {claim}: "{words}"\n',
        "\n",
    ),
    (
        "book/appendix_claims.md",
        r"^## .+\n\n```\{claims\} book/(\w+)\n```\n",
        "## {number} {title}\n\n```{{claims}} book/{name}\n```\n",
        "\n",
    ),
)

NEXT = """\
Written: book/{name}.ipynb
Listed: _toc.yml, book/index.md, book/claims.yml, book/appendix_claims.md

Next:
  make watch                    see the page, and again after each save
  book/index.md                 say in one line what readers will be able to do, and the
                                minutes
  book/claims.yml               replace the example claim {claim} here and in the
                                chapter; a chapter without claims is named neither here
                                nor in book/appendix_claims.md, and has no such cell
  book/questions/               at least eight questions on the chapter, five of them
                                closed; then give it the cell
                                    from kvq_lib.course.questions import quiz

                                    quiz("book/{name}")
  make test                     fails until those questions are there
"""


def listed(root: Path) -> list[str]:
    """The names of the chapters, "02_memory_bottleneck", in their order."""
    toc = (root / "_toc.yml").read_text(encoding="utf-8")
    return re.findall(r"^ +- file: book/(\d\d\w+)$", toc, re.M)


def check(root: Path, name: str, title: str) -> None:
    """Refuse what would not become a chapter.

    Raises:
        InvalidArgument: a malformed or taken name, a gap in the numbers, or a title
            that a table and a heading cannot hold.
    """
    form = _NAME.fullmatch(name)
    if not form:
        raise InvalidArgument(
            f"a chapter is named like 12_topic or 06b_more_words, got {name!r}"
        )
    if not title.strip() or re.search(r"[\n|\[\]`$#]", title):
        raise InvalidArgument(f"a title is one line of words, got {title!r}")
    chapters = listed(root)
    numbers = [chapter.split("_")[0] for chapter in chapters]
    number = form[1] + form[2]
    if number in numbers:
        taken = chapters[numbers.index(number)]
        raise InvalidArgument(f"chapter {number} is there: book/{taken}.ipynb")
    if (root / "book" / f"{name}.ipynb").exists():
        raise InvalidArgument(f"book/{name}.ipynb is there, but not in _toc.yml")
    last = max(number[:2] for number in numbers)
    if not form[2] and int(form[1]) != int(last) + 1:
        raise InvalidArgument(f"the next chapter is {int(last) + 1:02}, got {number}")
    if form[2]:
        before = "" if form[2] == "b" else chr(ord(form[2]) - 1)
        if form[2] == "a" or form[1] + before not in numbers:
            raise InvalidArgument(
                f"{number} has nothing to follow: letters begin with b, in order"
            )


def notebook(number: str, title: str, claim_id: str) -> dict:
    """The chapter, with ids that depend on its cells alone."""
    text = TEMPLATE.read_text(encoding="utf-8")
    values = {"{number}": number, "{title}": title, "{claim}": claim_id}
    text = re.sub("|".join(values), lambda found: values[found[0]], text)
    cells = []
    for cell in jupytext.reads(text, fmt="md:myst")["cells"]:
        digest = hashlib.sha256(cell["source"].encode()).hexdigest()[:8]
        made = {
            "cell_type": cell["cell_type"],
            "id": f"ch{number}-{digest}",
            "metadata": dict(cell["metadata"]),
            "source": cell["source"].splitlines(keepends=True),
        }
        if cell["cell_type"] == "code":
            made |= {"execution_count": None, "outputs": []}
        cells.append(dict(sorted(made.items())))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def insert(text: str, place: str, name: str, new: str, gap: str) -> str:
    """Put an entry before the first one whose name comes after its own, or last.

    Args:
        text: of a file that lists chapters in order.
        place: a pattern that finds whole entries; its group is a chapter's name.
        name: the chapter's.
        new: its entry, with the end of its last line.
        gap: what stands between two entries.
    """
    found = list(re.finditer(place, text, re.M))
    for entry in found:
        if entry[1] > name:
            return text[: entry.start()] + new + gap + text[entry.start() :]
    end = found[-1].end()
    return text[:end] + gap + new + text[end:]


def write(root: Path, name: str, title: str) -> str:
    """Write the chapter and list it; what to do next.

    Raises:
        InvalidArgument: as in `check`; then nothing is written.
    """
    title = title.strip()
    check(root, name, title)
    number = name.split("_")[0].lstrip("0")
    known = ledger.load(root / "book" / "claims.yml")
    claim_id = f"C{1 + max(int(i[1:]) for i in known if i[0] == 'C'):02}"
    made = notebook(number, title, claim_id)
    bootstrap.put(made, bootstrap.source(made, root, repository.current(root)))
    code = "\n".join("".join(cell["source"]) for cell in made["cells"])
    words = re.search('^claim = "(.+)"$', code, re.M)[1]

    made = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
    files = {f"book/{name}.ipynb": made}
    said = {"number": number, "title": title, "name": name}
    for file, place, entry, gap in LISTS:
        new = entry.format(**said, claim=claim_id, words=words)
        text = (root / file).read_text(encoding="utf-8")
        files[file] = insert(text, place, name, new, gap)
    for file, text in files.items():
        (root / file).write_text(text, encoding="utf-8")
    return NEXT.format(claim=claim_id, name=name)


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the top of this file."""
    parser = argparse.ArgumentParser(prog="make new-chapter")
    parser.add_argument("name", help="12_topic")
    parser.add_argument("title", help='"What the chapter is about"')
    options = parser.parse_args(arguments)
    try:
        print(write(ROOT, options.name, options.title), end="")
    except InvalidArgument as error:
        print(f'make new-chapter NAME=12_topic TITLE="…": {error}', file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
