"""The deck of cards and the sheet: read back, counted, and the same for ever."""

import dataclasses
import json
import re
import sqlite3
import zipfile

import pytest
from questions import ROOT, SAMPLE, everything, sample

from kvq_lib.course import site
from kvq_lib.course.questions import bank, deck, sheet, text

SITE = ROOT / "_build" / "html" / "book"


def read(path, tmp_path):
    """The notes, cards and decks of an .apkg file."""
    with zipfile.ZipFile(path) as package:
        package.extract("collection.anki2", tmp_path)
    base = sqlite3.connect(tmp_path / "collection.anki2")
    try:
        columns = "guid, mid, mod, tags, flds"
        notes = [
            dict(zip(columns.split(", "), row, strict=True))
            for row in base.execute(f"select {columns} from notes")
        ]
        cards = base.execute("select nid, did from cards").fetchall()
        models, decks = base.execute("select models, decks from col").fetchone()
    finally:
        base.close()
    return notes, cards, json.loads(models), json.loads(decks)


def test_a_deck_has_a_card_for_every_question(tmp_path):
    questions = everything()
    deck.write(questions, tmp_path / "all.apkg")
    notes, cards, models, decks = read(tmp_path / "all.apkg", tmp_path)
    assert len(notes) == len(cards) == len(questions)
    assert len({note["guid"] for note in notes}) == len(questions)
    for note, question in zip(notes, _by_topic(questions), strict=True):
        shown = dict(zip(deck.FIELDS, note["flds"].split("\x1f"), strict=True))
        assert shown == deck.fields(question)
        assert {question.level, question.kind} <= set(note["tags"].split())
    model = models[str(deck.number("model"))]
    assert [field["name"] for field in model["flds"]] == list(deck.FIELDS)
    used = {deck.number(f"topic {q.topic}") for q in questions}
    assert {did for _, did in cards} == used <= {int(number) for number in decks}
    for topic in {q.topic for q in questions}:
        name = decks[str(deck.number(f"topic {topic}"))]["name"]
        assert name == f"{deck.NAME}::{bank.TOPICS[topic]}"


def _by_topic(questions):
    return sorted(questions, key=lambda q: list(bank.TOPICS).index(q.topic))


def test_a_newer_deck_updates_the_cards_of_an_older_one(tmp_path):
    old = sample()
    new = [dataclasses.replace(q, question=f"{q.question} Or not?") for q in old[::-1]]
    deck.write(old, tmp_path / "old.apkg", now=1e9)
    deck.write(new, tmp_path / "new.apkg", now=2e9)
    before, _, models_before, decks_before = read(tmp_path / "old.apkg", tmp_path)
    after, _, models_after, decks_after = read(tmp_path / "new.apkg", tmp_path)
    assert {n["guid"]: n["mid"] for n in before} == {n["guid"]: n["mid"] for n in after}
    assert set(models_before) == set(models_after)
    assert set(decks_before) == set(decks_after)
    assert {n["mod"] for n in before} == {10**9}
    assert {n["mod"] for n in after} == {2 * 10**9}
    assert all("Or not?" in note["flds"] for note in after)


def test_ids_of_the_deck_stay_as_they_are():
    # Other numbers would make a second deck beside the one that readers have.
    assert deck.number("model") == MODEL
    assert deck.number("topic memory") == MEMORY


MODEL, MEMORY = 1332927630, 1943727572


def test_fronts_do_not_give_the_answer_away():
    for question in everything():
        front = deck.fields(question)
        front = front["Question"] + front["Choices"]
        assert 'class="right"' not in front and "✓" not in front
        for choice in question.choices:
            assert text.line(choice.why) not in front


def test_cards_name_section_and_sources():
    shown = deck.fields(next(q for q in sample() if q.id == "memory-kv-heads"))
    assert (
        "Section 2.2 Count the tensors<br>Ainslie and others, 2023" in shown["Section"]
    )


@pytest.mark.parametrize(
    ("unit", "said"),
    [("MiB", "a number, in MiB"), ("times", "a number of times"), ("", "a number ·"),
     ("KV heads", "a number of KV heads"), ("%", "a number, in percent"),
     ("tokens/s", "a number, in tokens/s")],
)  # fmt: skip
def test_the_sheet_asks_for_units_in_plain_words(unit, said):
    question = next(q for q in sample() if q.kind == "numeric")
    assert said in sheet.markdown([dataclasses.replace(question, unit=unit)])


def test_formulas_are_those_that_anki_shows():
    shown = deck.fields(next(q for q in sample() if q.id == "memory-what-grows"))
    assert r"\(L\)" in shown["Choices"] and "$x$" in shown["Choices"]
    assert r"\(x &lt; 2\)" in shown["Choices"]


# -- the sheet -------------------------------------------------------------------------


def test_the_sheet_has_every_question_once_and_answers_at_the_end():
    written = sheet.markdown(everything())
    questions, answers = written.split("\n## Answers\n")
    for number, question in enumerate(everything(), start=1):
        assert questions.count(f"(question-{question.id})=\n\n**{number}** ") == 1
        assert answers.count(f"(answer-{question.id})=\n\n[**{number}**]") == 1
        assert question.question in questions and question.question not in answers
    for question in everything():
        for part in (*question.choices, *question.mistakes):
            assert part.why not in questions
        assert not any(line.text in questions for line in question.rubric)


@pytest.mark.parametrize("question", everything(), ids=lambda q: q.id)
def test_letters_of_the_sheet_lead_to_the_right_choices(question):
    written = sheet.markdown([question])
    questions, answers = written.split("\n## Answers\n")
    if question.choices:
        listed = dict(re.findall(r"^- ([a-e])\) (.*(?:\n  .*)*)", questions, re.M))
        short = re.search(r"\] #|\]\(#question-[^)]*\) · (.*)", answers)[1]
        rights = {" ".join(listed[letter].split()) for letter in short.split(", ")}
        assert rights == {
            " ".join(choice.text.split()) for choice in question.choices if choice.right
        }
    elif question.kind == "numeric":
        assert f"· {question.shown}\n" in answers


def test_right_choices_are_spread_over_the_letters():
    places = [q.order.index(q.rights[0]) for q in everything() if q.kind == "single"]
    assert max(map(places.count, set(places))) < 0.6 * len(places)


# -- a book ----------------------------------------------------------------------------

CONFIG = """
title: Tiny
only_build_toc_files: true
execute: {execute_notebooks: "off"}
launch_buttons: {thebe: false}
bibtex_bibfiles: [book/references.bib]
parse: {myst_enable_extensions: [dollarmath]}
sphinx:
  config:
    mathjax_path: ../mathjax.js # not from another host
    html_extra_path: [extra]
    extensions: [myst_nb, jupyter_book, sphinx_comments, sphinx_external_toc,
      sphinx_book_theme, sphinxcontrib.bibtex, kvq_lib.course.questions.pages]
"""
PAGES = {
    "book/mock_interview.md": "# Mock\n\n```{mock-interview}\n```\n",
    "book/question_sheet.md": "# Sheet\n\n```{question-sheet}\n```\n",
    "book/end.md": "# End\n\n```{bibliography}\n```\n",
}


@pytest.fixture
def tiny(tmp_path):
    """A book of two chapters that have headings alone, with the sample as its bank."""
    (tmp_path / bank.FOLDER).mkdir(parents=True)
    for path in SAMPLE.glob("*.yml"):
        (tmp_path / bank.FOLDER / path.name).write_bytes(path.read_bytes())
    for name in ("02_memory_bottleneck", "03_quantization_strategies"):
        headings = bank.surroundings().sections[f"book/{name}"]
        source = "\n\n".join(f"## {n} {title}\n\nIt." for n, title in headings.items())
        cell = {"cell_type": "markdown", "id": "a", "metadata": {}}
        cell["source"] = f"# {name}\n\n{source}"
        notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        (tmp_path / "book" / f"{name}.ipynb").write_text(json.dumps(notebook))
    for name, content in PAGES.items():
        (tmp_path / name).write_text(content)
    works = (ROOT / "book" / "references.bib").read_text(encoding="utf-8")
    (tmp_path / "book" / "references.bib").write_text(works)
    (tmp_path / "_config.yml").write_text(CONFIG)
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "mathjax.js").write_text("// nothing is typeset here\n")
    listed = [f"book/{p.stem}" for p in sorted((tmp_path / "book").glob("*.ipynb"))]
    listed += [name.removesuffix(".md") for name in PAGES]
    (tmp_path / "_toc.yml").write_text(
        f"format: jb-book\nroot: {listed[0]}\nchapters:\n"
        + "".join(f"  - file: {page}\n" for page in listed[1:])
    )
    return tmp_path


def test_a_book_has_interview_sheet_and_deck(tiny):
    assert site.build(tiny) == 0
    html = tiny / "_build" / "html" / "book"
    page = (html / "mock_interview.html").read_text(encoding="utf-8")
    links = set(re.findall(r'"href": "(02_memory_bottleneck\.html#[^"]+)"', page))
    chapter = (html / "02_memory_bottleneck.html").read_text(encoding="utf-8")
    assert "mathjax.js" in page, "formulas of questions would stay as they are"
    assert "02_memory_bottleneck.html#count-the-tensors" in links
    assert all(f'id="{link.split("#")[1]}"' in chapter for link in links)
    assert all(f'"id": "{question.id}"' in page for question in sample())
    written = (html / "question_sheet.html").read_text(encoding="utf-8")
    for kind in ("question", "answer"):
        assert written.count(f'id="{kind}-') == len(sample())
    assert "Ainslie" in written
    notes, *_ = read(html / "kvq.apkg", tiny)
    assert len(notes) == len(sample())


def test_a_problem_of_the_bank_fails_the_build_and_is_named(tiny, capsys):
    path = tiny / bank.FOLDER / "02_memory.yml"
    path.write_text(path.read_text().replace("level: hard", "level: heavy"))
    assert site.build(tiny) == 1
    report = capsys.readouterr().out.split("The site was not built.")[1]
    for question in ("memory-time-of-a-step", "memory-why-cache"):
        assert re.search(rf"02_memory\.yml:\d+: {question}: level is one of", report)


# -- the book --------------------------------------------------------------------------


def test_the_deck_of_the_site_has_every_question(tmp_path):
    assert (SITE / "kvq.apkg").exists(), "the site is not built: run `make book`"
    notes, *_ = read(SITE / "kvq.apkg", tmp_path)
    ids = {note["flds"].split("\x1f")[0] for note in notes}
    assert ids == {question.id for question in bank.load()} and len(notes) == len(ids)


def test_the_pages_of_the_site_have_every_question():
    page = (SITE / "mock_interview.html").read_text(encoding="utf-8")
    written = (SITE / "question_sheet.html").read_text(encoding="utf-8")
    for question in bank.load():
        assert f'"id": "{question.id}"' in page
        assert f'id="question-{question.id}"' in written
        assert f'id="answer-{question.id}"' in written
    assert 'href="kvq.apkg"' in page
