"""Grading keys: the probes of a homework and what they must give.

A value must be worth guessing at: a bare True is right half of the time, whatever the
student wrote.  `weakness` says what makes a value too easy to guess.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

from .source import Homework

FORMAT = 1
MIN_BITS = 8  # a blind guess hits once in 256 tries, or less


def make(homework: Homework, values: Mapping) -> dict:
    """The key of a homework.

    Args:
        values: what each probe gave under the author's solution, by (id of the
            question, name of the probe).
    """
    found = {
        "homework": homework.id,
        "format": FORMAT,
        "title": homework.title,
        "torch": homework.torch,
        "questions": [
            {
                "id": question.id,
                "title": question.title,
                "cells": len(homework.answers(question.id)),
                "probes": [
                    {
                        "name": probe.name,
                        "points": probe.points,
                        "rtol": probe.rtol,
                        "atol": probe.atol,
                        "seed": probe.seed,
                        "code": probe.code,
                        "expected": values[question.id, probe.name],
                    }
                    for probe in question.probes
                ],
            }
            for question in homework.questions
        ],
    }
    return found | {"hash": digest(found)}


def digest(key: Mapping) -> str:
    """SHA-256 of all of a key but its hash."""
    rest = {name: value for name, value in key.items() if name != "hash"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write(key: Mapping) -> bytes:
    """A key as the bytes of its file."""
    text = json.dumps(key, indent=1, sort_keys=True, allow_nan=False)
    return f"{text}\n".encode()


def keep_values(key: dict, old: Mapping, same) -> dict:
    """The key, with the values of an older one where those agree.

    Args:
        same: (value, expected, rtol, atol) -> whether they agree.
    """
    before = {
        (question["id"], probe["name"], probe["code"], probe["seed"]): probe["expected"]
        for question in old.get("questions", ())
        for probe in question["probes"]
    }
    for question in key["questions"]:
        for probe in question["probes"]:
            name = (question["id"], probe["name"], probe["code"], probe["seed"])
            kept, value = before.get(name), probe["expected"]
            if kept is not None and same(value, kept, probe["rtol"], probe["atol"]):
                probe["expected"] = kept
    return key | {"hash": digest(key)}


def weakness(value) -> str | None:
    """Why a value is too easy to guess, or cannot be kept; None if it is good."""
    if value is None or isinstance(value, bool):
        return f"the value is a bare {value}: return what was computed instead"
    leaves = list(_leaves(value))
    if any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves):
        return "the value holds infinity or no number: choose other inputs"
    if all(leaf is None or isinstance(leaf, bool) for leaf in leaves):
        return "the value holds nothing but True, False and None: return numbers"
    bits = sum(map(_bits, set(map(_hashable, leaves))))
    if bits < MIN_BITS:
        return f"the value {value!r} is easy to guess: return several values at once"
    return None


def _leaves(value):
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _hashable(leaf):
    """A leaf that a set tells from others: True is not 1."""
    return type(leaf).__name__, leaf


def _bits(leaf: tuple) -> float:
    """Roughly how many yes-or-no answers a guesser needs for a leaf."""
    _, value = leaf
    if value is None or isinstance(value, bool):
        return 1
    if isinstance(value, str):
        return 4.0 * len(value)
    if isinstance(value, float) and not value.is_integer():
        digits = f"{abs(value):.12e}".split("e")[0].replace(".", "").strip("0")
        return min(16, 4 * len(digits))
    return 1 + math.log2(1 + abs(value))
