"""What the tests of the question bank share: banks, answers and a page in a browser."""

import functools
import time
from pathlib import Path

import pytest

from kvq_lib.course.questions import bank

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = Path(__file__).parent / "bank"


@functools.cache
def sample() -> tuple[bank.Question, ...]:
    """A small bank with every kind of question and awkward signs."""
    return bank.load(SAMPLE)


@functools.cache
def everything() -> tuple[bank.Question, ...]:
    """The sample and the bank of the book."""
    return (*sample(), *bank.load())


def typed(value: float) -> list[str]:
    """Ways to write one number."""
    ways = [repr(float(value)), f"{value:.12e}", f" about {float(value)!r} "]
    if float(value).is_integer() and 0 <= value < 1e15:
        whole = f"{int(value):,}"
        ways += [whole, whole.replace(",", " "), f"{int(value)}."]
    return ways


def answers(question: bank.Question) -> list:
    """Right, wrong and partly right answers, and none."""
    if question.kind == "numeric":
        width = question.tolerance * abs(question.answer)
        least = 1e-7 * abs(question.answer) + 1e-9
        near = [question.answer + sign * width * 0.999 for sign in (-1, 1)]
        far = [question.answer + sign * (1.001 * width + least) for sign in (-1, 1)]
        wrong = [known.value for known in question.mistakes]
        texts = [way for value in [question.answer] for way in typed(value)]
        return [*texts, *map(repr, [*near, *far, *wrong]), "", "nothing", "1,5", None]
    if question.kind == "open":
        lines = range(len(question.rubric))
        return [[], [0], [*lines], [lines[-1], 0], None]
    places = range(len(question.choices))
    subsets = [[i for i in places if bits >> i & 1] for bits in range(2 ** len(places))]
    return [*subsets, None]


def by_rule(question: bank.Question, answer) -> float:
    """The points of an answer, from the sentences of the mock interview's page."""
    if question.kind == "open":
        chosen = answer or []
        met = sum(question.rubric[i].points for i in chosen)
        return met / sum(line.points for line in question.rubric)
    rights = {i for i, choice in enumerate(question.choices) if choice.right}
    chosen = set(answer or ())
    if question.kind == "single":
        return 1 if chosen == rights else 0
    share = 1 / len(rights)
    return max(0, share * len(chosen & rights) - share * len(chosen - rights))


# Seconds in which Chromium passes on what a page stored, on a busy machine, too.
SETTLED = 0.5


def reload(page):
    """Load a page again, once what it stored has arrived."""
    time.sleep(SETTLED)
    page.reload()


@pytest.fixture
def show(browser, tmp_path):
    """A function that opens HTML as a page; whatever goes wrong fails the test."""
    troubles, contexts = [], []

    def open_html(body, width=1280, theme="light", context=None, before="", clock=None):
        file = tmp_path / "page.html"
        file.write_text(
            f'<!doctype html><html lang="en" data-theme="{theme}"><head>'
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>A page</title>{before}</head><body><main>{body}</main>",
            encoding="utf-8",
        )
        if context is None:
            context = browser.new_context(viewport={"width": width, "height": 900})
            context.set_default_timeout(120_000)
            contexts.append(context)
        else:
            time.sleep(SETTLED)
        if clock is not None:  # seconds; time then stands until a test moves it
            context.clock.install(time=clock)
            context.clock.pause_at(clock + 1)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(f"script error: {error}"))
        page.on("console", lambda m: troubles.append(f"console: {m.text}"))
        page.on(
            "request",
            lambda r: (
                r.url.startswith(("file:", "blob:"))
                or troubles.append(f"request: {r.url}")
            ),
        )
        page.goto(file.as_uri())
        return page

    yield open_html
    for context in contexts:
        context.close()
    assert not troubles
