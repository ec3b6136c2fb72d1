"""A deck of cards for Anki. Importing a newer deck updates the cards, since every id
comes from the id of a question or of a topic and not from its text.

    deck.write(bank.load(), Path("kvq.apkg"))
"""

import hashlib
import html as escaping
import time
from collections.abc import Sequence
from pathlib import Path

from . import bank, text
from .bank import Question
from .numbers import asked_in
from .sheet import ASKS, letters

NAME = "KV-Cache Quantization"
FIELDS = ("Id", "Question", "Choices", "Answer", "Section")
FRONT = "{{Question}}{{Choices}}"
BACK = "{{Question}}{{#Choices}}<hr>{{/Choices}}<hr id=answer>{{Answer}}{{Section}}"
CSS = """\
.card { font: 18px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #ffffff;
  max-width: 40em; margin: 0 auto; text-align: left; }
.nightMode.card, .nightMode .card { color: #f0f0f0; background: #16191d; }
.head { font-size: 0.8em; opacity: 0.8; }
ol { list-style: lower-alpha; }
li { margin: 0.3em 0; }
.right { font-weight: bold; }
"""


def number(name: str) -> int:
    """A number that stands for a name for ever, in the range that Anki wants."""
    digest = hashlib.sha256(f"kvq {name}".encode()).digest()
    return 2**30 + int.from_bytes(digest[:4], "big") % 2**30


def fields(question: Question) -> dict[str, str]:
    """What a card shows, as HTML."""
    head = f"{bank.TOPICS[question.topic]} · {question.level} · {ASKS[question.kind]}"
    head += escaping.escape(asked_in(question.unit))
    section = question.section
    place = f"Section {section.number} {text.plain(section.title)}"
    tail = "<br>".join(escaping.escape(line) for line in (place, *question.cited))
    return {
        "Id": question.id,
        "Question": f'<p class="head">{head}</p>{text.html(question.question)}',
        "Choices": _list(question, answered=False),
        "Answer": _answer(question),
        "Section": f'<p class="head">{tail}</p>',
    }


def _list(question: Question, answered: bool) -> str:
    if not question.choices:
        return ""
    rows = []
    for place in letters(question):
        choice = question.choices[place]
        kind = ' class="right"' if answered and choice.right else ""
        sign = ("✓ " if choice.right else "✗ ") if answered else ""
        why = f"<br><em>{text.line(choice.why)}</em>" if answered else ""
        rows.append(f"<li{kind}>{sign}{text.line(choice.text)}{why}</li>")
    return f"<ol>{''.join(rows)}</ol>"


def _answer(question: Question) -> str:
    if question.choices:
        return _list(question, answered=True)
    if question.kind == "numeric":
        wrong = "".join(
            f"<li>{escaping.escape(m.shown)}: {text.line(m.why)}</li>"
            for m in question.mistakes
        )
        near = f"±{question.tolerance:.1%}" if question.tolerance else "exactly"
        return (
            f'<p class="right" data-answer="{question.answer!r}" '
            f'data-tolerance="{question.tolerance!r}">{escaping.escape(question.shown)}'
            f"</p><p>({near})</p>{text.html(question.why)}"
            f"<p>Mistakes:</p><ul>{wrong}</ul>"
        )
    lines = "".join(
        f'<li data-points="{line.points}">{text.line(line.text)} ({line.points})</li>'
        for line in question.rubric
    )
    return f"{text.html(question.model)}<p>What counts:</p><ul>{lines}</ul>"


def write(questions: Sequence[Question], path: Path, now: float | None = None) -> None:
    """Write the deck, a part for each topic.

    Args:
        questions: those of the cards.
        path: of the file, `….apkg`.
        now: when the cards were made, in seconds; Anki takes over only newer ones.
    """
    import genanki

    model = genanki.Model(
        number("model"),
        f"{NAME}: question",
        fields=[{"name": name} for name in FIELDS],
        templates=[{"name": "Card", "qfmt": FRONT, "afmt": BACK}],
        css=CSS,
    )
    decks = []
    for topic, title in bank.TOPICS.items():
        here = [question for question in questions if question.topic == topic]
        deck = genanki.Deck(number(f"topic {topic}"), f"{NAME}::{title}")
        for question in here:
            shown = fields(question)
            deck.add_note(
                genanki.Note(
                    model,
                    fields=[shown[name] for name in FIELDS],
                    guid=genanki.guid_for("kvq", question.id),
                    tags=[question.level, question.kind, *question.tags],
                )
            )
        if here:
            decks.append(deck)
    path.parent.mkdir(parents=True, exist_ok=True)
    package = genanki.Package(decks)
    package.write_to_file(str(path), timestamp=time.time() if now is None else now)
