"""The mock interview: a page that asks, times, marks and keeps the progress.

Everything happens in the reader's browser: the bank is in the page as data, texts as
HTML, and the scripts `mock*.js` do the rest. `marking.js`
marks as `marking` does; a test compares the two on every question.
"""

import hashlib
import html as escaping
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from . import bank, numbers, text
from .bank import Question, Section
from .quiz import contained

_FILES = Path(__file__).parent
SCRIPTS = (
    "mock_state.js",
    "mock_store.js",
    "mock_elements.js",
    "mock_review.js",
    "mock.js",
)


def data(questions: Sequence[Question], href: Callable[[Section], str]) -> dict:
    """The bank as the page holds it.

    Args:
        questions: all that can be asked.
        href: the address of a section, as a link on the page has it.
    """
    entries = [_entry(question, href(question.section)) for question in questions]
    used = {question.topic for question in questions}
    topics = {name: title for name, title in bank.TOPICS.items() if name in used}
    # A session that was made from other questions cannot go on.
    mark = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
    return {
        "fingerprint": mark.hexdigest()[:16],
        "topics": topics,
        "questions": entries,
    }


def _entry(question: Question, href: str) -> dict:
    section = {
        "number": question.section.number,
        "title": text.plain(question.section.title),
        "href": href,
    }
    entry = {
        "id": question.id,
        "kind": question.kind,
        "level": question.level,
        "topic": question.topic,
        "section": section,
        "question": text.html(question.question),
    }
    if question.cited:
        entry["sources"] = escaping.escape("; ".join(question.cited))
    if question.choices:
        entry["choices"] = [
            {"text": text.line(c.text), "right": c.right, "why": text.line(c.why)}
            for c in question.choices
        ]
    if question.kind == "numeric":
        entry |= {
            "answer": question.answer,
            "shown": question.shown,
            "unit": question.unit,
            "tolerance": question.tolerance,
            "why": text.html(question.why),
            "mistakes": [
                {"value": m.value, "why": text.line(m.why)} for m in question.mistakes
            ],
        }
    if question.kind == "open":
        entry["model"] = text.html(question.model)
        entry["rubric"] = [
            {"points": line.points, "text": text.line(line.text)}
            for line in question.rubric
        ]
    return entry


def page(questions: Sequence[Question], href: Callable[[Section], str]) -> str:
    """The interview as HTML with its style, its scripts and its data."""
    style = (_FILES / "mock.css").read_text(encoding="utf-8")
    body = (_FILES / "mock.html").read_text(encoding="utf-8")
    scripts = numbers.script()
    scripts += "".join((_FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    content = json.dumps(data(questions, href), ensure_ascii=False, allow_nan=False)
    script = (
        f"(() => {{{scripts}kvqMock(document.getElementById('kvqm'), {content});}})();"
    )
    return f"<style>{style}</style>{body}<script>{contained(script)}</script>"
