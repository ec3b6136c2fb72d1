"""The claims ledger: every claim, the chapter that judges it, and what that chapter's
executed cells found.

`book/claims.yml` holds the claims; nobody writes a verdict there.  Verdicts come out of
executed notebooks (`claims.collect`), so none can outlive its measurement.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..errors import InvalidArgument
from . import claims, site

PATH = site.ROOT / "book" / "claims.yml"


@dataclass(frozen=True)
class Claim:
    """A claim of the lesson.

    Attributes:
        id: "C01" to "C34", "M1" to "M4".
        chapter: the page that judges it, as _toc.yml would name it.
        words: the claim, in our own words.
    """

    id: str
    chapter: str
    words: str


def load(path: Path = PATH) -> dict[str, Claim]:
    """All claims by id, in the order of the file.

    Raises:
        InvalidArgument: an id occurs twice.
    """
    found: dict[str, Claim] = {}
    chapters = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    for chapter, listed in chapters.items():
        for claim_id, words in listed.items():
            if claim_id in found:
                raise InvalidArgument(f"{claim_id} stands twice in {path}")
            found[claim_id] = Claim(claim_id, chapter, words)
    return found


def anchor(claim_id: str) -> str:
    """Where a claim stands on the ledger's page."""
    return f"ledger-{claim_id}"


def troubles(
    ledger: Mapping[str, Claim],
    pages: Collection[str],
    verdicts: Mapping[str, Collection[Mapping]],
) -> Iterator[str]:
    """What keeps the ledger from being true, one sentence each.

    Args:
        ledger: all claims, by id.
        pages: the pages of the book.
        verdicts: what `claims.collect` found in each executed page.
    """
    judged = set()
    for page, found in verdicts.items():
        for verdict in found:
            claim = ledger.get(verdict["id"])
            if claim is None:
                yield f"{page} judges {verdict['id']}, which claims.yml does not list"
                continue
            if claim.chapter != page:
                yield f"{page} judges {claim.id}, which belongs to {claim.chapter}"
                continue
            judged.add(claim.id)
            if claim.words != verdict["claim"]:
                yield (
                    f"{claim.id} reads {claim.words!r} in claims.yml and "
                    f"{verdict['claim']!r} in {page}"
                )
            if verdict["execution_count"] is None:
                yield f"the cell in {page} that judges {claim.id} was not executed"
    for claim in ledger.values():
        if claim.chapter in pages and claim.id not in judged:
            yield f"no cell of {claim.chapter} gave a verdict on {claim.id}"


def tally(ledger: Mapping[str, Claim], verdicts: Mapping[str, Mapping]) -> dict:
    """The ids under each ruling, in the ledger's order, and last those to come.

    Args:
        ledger: all claims, by id.
        verdicts: the verdicts that there are, by id.
    """
    rulings = {ruling: [] for ruling in (*claims.RULINGS, "to come")}
    for claim_id in ledger:
        found = verdicts.get(claim_id)
        rulings[found["ruling"] if found else "to come"].append(claim_id)
    return rulings
