"""What a text of the bank may hold: no face shows all of Markdown.

list(wording.faults("See [there](02)."))  # ["a link or an image"]
"""

import re
from collections.abc import Iterator

from . import text

LONGEST = 2000  # characters of one text
#: Parts of formulas that every face can show: those with a sign, and these.
COMMANDS = set(text.SIGNS) | set(
    """text mathrm operatorname mathbf mathit frac tfrac dfrac hat tilde bar
    sqrt""".split()
)
#: What stands nowhere, also in no code and no formula.
_NOWHERE = {
    "a code fence": re.compile(r"^\s*(?:```|~~~)", re.M),
    "a role of the site": re.compile(r"\{[a-z:-]+\}`"),
    "a note to its author": re.compile(r"\b(?:TODO|FIXME|TBD|XXX)\b"),
    "a control character": re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ue000-\uf8ff]"),
}
_FORBIDDEN = {
    "HTML": re.compile(r"</?[A-Za-z][^>]*>|<!--"),
    "a link or an image": re.compile(r"\]\("),
    "a bare address": re.compile(r"\bhttps?://|\bwww\.", re.I),
    "a heading": re.compile(r"^ {0,3}#+ |^ {0,3}(?:=+|-+) *$", re.M),
    "a table": re.compile(r"^\s*\||^[ :|-]*-{3,}[ :|-]*$", re.M),
    "a list": re.compile(r"^\s*(?:[-*+]|\d+[.)])\s", re.M),
    "a quotation": re.compile(r"^ {0,3}>", re.M),
}
_PARAGRAPH = re.compile(r"\n\s*\n")
_LETTERS = r"\(?[a-e]\)?(?: ?[,/] ?\(?[a-e]\)?)* ?(?:,|and|or|nor|&) \(?[a-e]\)?"
_OTHERS = re.compile(
    r"\bof the (?:above|others?)\b|\b(?:above|previous|other|first|second|third|last) "
    r"(?:answer|choice|option)s?\b|\b(?:answer|choice|option) \(?[a-e]\b"
    r"|^(?:all|none|both|neither|any|each|some|one) of (?:these|them)\b\W*$"
    rf"|^(?:both |neither |either |only )?{_LETTERS}\W*$"
    rf"|\b(?:both|neither|either) {_LETTERS}(?!\w)",
    re.I,
)


def faults(value: str, inline: bool = False) -> Iterator[str]:
    """What a text holds that some face cannot show, a noun each.

    Args:
        value: Markdown.
        inline: whether it must be one paragraph, as a choice is.
    """
    if len(value) > LONGEST:
        yield f"more than {LONGEST} characters"
        return
    bare = text.CODE_OR_MATH.sub("x", value)
    yield from (name for name, sign in _NOWHERE.items() if sign.search(value))
    yield from (name for name, sign in _FORBIDDEN.items() if sign.search(bare))
    if inline and _PARAGRAPH.search(value.strip()):
        yield "several paragraphs"
    for found in text.CODE_OR_MATH.finditer(value):
        for command in re.findall(r"\\([A-Za-z]+)", found[2] or ""):
            if command not in COMMANDS:
                yield f"the unknown command \\{command}"


def speaks_of_others(value: str) -> bool:
    """Whether a choice refers to the other ones, which are shuffled."""
    return _OTHERS.search(" ".join(value.split())) is not None
