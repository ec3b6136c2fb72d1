"""The quiz at the end of a chapter: jupyterquiz, fed from the bank.

    from kvq_lib.course.questions import quiz

    quiz("book/02_memory_bottleneck")

jupyterquiz makes the questions and marks them. What it does is kept, and what it lacks
is added by `quiz.js` and `quiz.css`: keys, labels, both themes, narrow pages, numbers
with commas and units. Its output is closed where it leaves a box open, and it never
sees MathJax, which it would otherwise try to load from another host. Nothing is loaded,
so a quiz works on a static page, in a notebook and on Colab.
"""

import hashlib
import json
import math
import random
import re
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from ...errors import InvalidArgument

LEAST, MOST = 5, 8
#: At most so many of these kinds; the others are single.
PARTS = {"multiple": 2, "numeric": 2}
_FILES = Path(__file__).parent
_ASKS = {
    "single": "choose one",
    "multiple": "choose all that are right",
    "numeric": "a number",
}
_SCRIPT_END = re.compile(r"<(?=/script|!--)", re.I)


class Quiz:
    """What a cell shows.

    Attributes:
        questions: those of the quiz, in their order.
        html: the whole output.
    """

    def __init__(self, page: str, questions):
        self.questions = tuple(questions)
        self.html = _html(page, self.questions)

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        from .text import plain

        lines = []
        for number, question in enumerate(self.questions, start=1):
            lines += [f"{number}. {plain(question.question)}"]
            lines += [f"   - {plain(choice.text)}" for choice in question.choices]
        return "\n".join(lines)


def quiz(page: str) -> Quiz | None:
    """The quiz of a chapter, for the end of a cell.

    Where a package or the bank is missing, a line says so, and the chapter goes on.

    Args:
        page: the chapter as `_toc.yml` calls it, "book/02_memory_bottleneck".

    Raises:
        InvalidArgument: no such chapter, or too few questions.
        BankError: the bank has problems.
    """
    from . import bank

    try:
        return Quiz(page, chosen(bank.of_chapter(bank.load(), page)))
    except ModuleNotFoundError as missing:
        print(f"The quiz needs a package: pip install {missing.name}")
    except bank.NoBank as missing:
        print(f"There is no quiz here: {missing}")
    return None


def chosen(questions: Iterable) -> list:
    """The questions of a quiz: always the same, of every kind, from many sections.

    Raises:
        InvalidArgument: fewer than `LEAST` can be asked in a quiz.
    """
    from .bank import LEVELS

    def order(question):
        # Questions that are added must not reshuffle the others.
        return hashlib.sha256(question.id.encode()).hexdigest()

    left = sorted((q for q in questions if q.kind in _ASKS), key=order)
    if len(left) < LEAST:
        raise InvalidArgument(f"a quiz has {LEAST} questions, not {len(left)}")
    found: list = []

    def take(kinds: Iterable[str], most: int) -> None:
        for _ in range(most):
            fit = [q for q in left if q.kind in kinds]
            if not fit or len(found) == MOST:
                return
            used = [q.section.number for q in found]
            best = min(fit, key=lambda q: used.count(q.section.number))
            left.remove(best)
            found.append(best)

    for kind, most in PARTS.items():
        take([kind], most)
    take(["single"], MOST)
    take(_ASKS, MOST)
    return sorted(found, key=lambda q: (LEVELS.index(q.level), order(q)))


# -- what jupyterquiz is given, and what is made of what it gives ----------------------


def _safe(html: str) -> str:
    """HTML in which jupyterquiz sees neither formulas nor links of its own kind."""
    return html.replace("$", "&#36;").replace("[", "&#91;")


def entry(question) -> dict:
    """A question as jupyterquiz reads it."""
    from .text import html, line

    head = f"{question.section.number} · {question.level} · {_ASKS[question.kind]}"
    shown = f'<p class="kvqz-head">{head}</p>{html(question.question)}'
    if question.kind == "numeric":
        answers = [_range(question, question.answer, True, f"✓ {line(question.why)}")]
        for known in question.mistakes:
            answers.append(_range(question, known.value, False, f"✗ {line(known.why)}"))
        hint = f"✗ Not this number: section {question.section.number} says how."
        answers.append({"type": "default", "feedback": hint})
        return {"question": _safe(shown), "type": "numeric", "answers": answers}
    answers = [
        {
            "answer": _safe(line(choice.text)),
            "correct": choice.right,
            "feedback": _safe(f"{'✓' if choice.right else '✗'} {line(choice.why)}"),
        }
        for choice in question.choices
    ]
    kind = "many_choice" if question.kind == "multiple" else "multiple_choice"
    return {"question": _safe(shown), "type": kind, "answers": answers} | {
        "answer_cols": 1
    }


def _range(question, value: float, right: bool, feedback: str) -> dict:
    """The numbers near enough to one; jupyterquiz leaves the upper end out."""
    from .marking import width

    far = width(value, question.tolerance)
    ends = [value - far, math.nextafter(value + far, math.inf)]
    answer = {"type": "range", "range": ends, "correct": right}
    return answer | {"feedback": _safe(feedback)}


#: Its colours become those of `quiz.css`, which knows both themes.
COLOURS = {
    "--jq-multiple-choice-bg": "var(--kvqz-bg)",
    "--jq-many-choice-bg": "var(--kvqz-bg)",
    "--jq-numeric-bg": "var(--kvqz-bg)",
    "--jq-mc-button-bg": "var(--kvqz-field)",
    "--jq-mc-button-border": "var(--kvqz-line)",
    "--jq-numeric-input-bg": "var(--kvqz-field)",
    "--jq-numeric-input-label": "var(--kvqz-fg)",
    "--jq-text-color": "var(--kvqz-fg)",
    "--jq-incorrect-color": "var(--kvqz-wrong)",
    "--jq-correct-color": "var(--kvqz-right)",
    "--jq-link-color": "var(--kvqz-fg)",
}


def _emitted(page: str, entries: list[dict]) -> tuple[str, str]:
    """What jupyterquiz would display: a box that it leaves open, and a script."""
    from jupyterquiz import display_quiz

    shown: list = []
    state = random.getstate()
    # It calls the box by random letters; a page must be the same whenever it is built.
    random.seed(page)
    try:
        with mock.patch.dict(display_quiz.__globals__, {"display": shown.append}):
            display_quiz(entries, colors=COLOURS, max_width=900, border_radius=4)
    finally:
        random.setstate(state)
    box, script = (output.data for output in shown)
    return box, script


def _html(page: str, questions) -> str:
    from . import numbers

    box, script = _emitted(page, [entry(question) for question in questions])
    style, ours = (
        (_FILES / name).read_text(encoding="utf-8") for name in ("quiz.css", "quiz.js")
    )
    name = f"kvqz-{page.rsplit('/', 1)[-1]}"
    units = json.dumps([question.unit for question in questions], ensure_ascii=False)
    # Parameters hide what the script must not find, or would fill the console with.
    call = f"kvqQuiz(document.getElementById('{name}'), {units}, (MathJax, console) => "
    script = f"(() => {{{numbers.script()}{ours}{call}{{{script}}});}})();"
    # jupyterquiz leaves its box open, which would swallow the rest of a page.
    ends = "</div>" * (box.count("<div") - box.count("</div"))
    return (
        f'<div class="kvqz" id="{name}" role="group" aria-label="Quiz of '
        f'{len(questions)} questions">{box}{ends}'
        "<noscript>The quiz needs JavaScript.</noscript></div>"
        f"<style>{style}</style><script>{contained(script)}</script>"
    )


def contained(script: str) -> str:
    """A script, none of whose texts can end the element that holds it."""
    return _SCRIPT_END.sub(lambda _: "<\\", script)
