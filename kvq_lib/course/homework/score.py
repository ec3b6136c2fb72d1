"""A key and a transcript: the points of every question, and what went wrong."""

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from ...errors import InvalidArgument
from .compare import same
from .session import Cell, Probe, Transcript

_DEFINED = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Score:
    """The result of one question.

    Attributes:
        question: its id.
        title: its words.
        points, most: reached and possible, exact.
        right, probes: how many probes agree, of how many.
        failures: what the others did, each once, in order: "wrong" for another value,
            or one of session.FAILURES.
        stopped: a probe cost the process, or was not reached.
    """

    question: str
    title: str
    points: Decimal
    most: Decimal
    right: int
    probes: int
    failures: tuple[str, ...]
    stopped: bool


def load(path: Path) -> dict:
    """A key, as `kvq homework build` wrote it.

    Raises:
        InvalidArgument: there is none, or it was changed since.
    """
    try:
        key = json.loads(path.read_text(encoding="utf-8"))
        rest = {name: value for name, value in key.items() if name != "hash"}
        hashed = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
        whole = key["hash"] == hashed and key["format"] == 1
    except OSError as error:
        raise InvalidArgument(f"no key: {error}") from None
    except (ValueError, KeyError, AttributeError):
        raise InvalidArgument(f"{path} is no key") from None
    if not whole:
        raise InvalidArgument(f"{path} was changed after it was built: build it again")
    return key


def probes(key: dict) -> list[Probe]:
    """All probes of a key, question by question."""
    return [
        Probe(question["id"], probe["code"], probe["seed"])
        for question in key["questions"]
        for probe in question["probes"]
    ]


def asks_for(key: dict, cells: Iterable[Cell]) -> bool:
    """Whether some answer cell defines a function or class of which a probe of its
    question speaks: none does, where the notebook is another homework's."""
    defined = {
        (question, name)
        for cell in cells
        for question in (cell.questions if cell.role == "answer" else ())
        for name in _DEFINED.findall(cell.code)
    }
    return any(
        (question["id"], name) in defined
        for question in key["questions"]
        for probe in question["probes"]
        for name in _needed(probe["code"])
    )


def _needed(code: str) -> set[str]:
    """Names that a probe uses and does not bind."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    return {node.id for node in names} - bound


def score(key: dict, transcript: Transcript) -> list[Score]:
    """Points of each question, in the key's order.

    Args:
        key: as `kvq homework build` writes it.
        transcript: of `probes(key)`.
    """
    outcomes = iter(transcript.outcomes)
    found = []
    for question in key["questions"]:
        reached, right, failures, stopped = Decimal(0), 0, {}, False
        for probe in question["probes"]:
            outcome = next(outcomes)
            failure, stopped = outcome.failure, stopped or outcome.fatal
            if not failure:
                value, expected = outcome.value, probe["expected"]
                if same(value, expected, probe["rtol"], probe["atol"]):
                    reached, right = reached + points(probe), right + 1
                    continue
                failure = "wrong"
            failures[failure] = None
        found.append(
            Score(
                question["id"],
                question["title"],
                reached,
                sum(map(points, question["probes"]), Decimal(0)),
                right,
                len(question["probes"]),
                tuple(failures),
                stopped,
            )
        )
    return found


def points(probe: dict) -> Decimal:
    """Points of a key's probe, exactly as its decimal number is written."""
    return Decimal(repr(probe["points"]))
