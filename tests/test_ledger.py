"""The ledger: no claim without a verdict, no verdict without an executed cell."""

import ast
import html
import json
import re
from pathlib import Path

import nbformat
import pytest

from kvq_lib.course import claims, ledger, site
from kvq_lib.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[1]
EXECUTED = ROOT / "_build" / "jupyter_execute"
PAGE = ROOT / "_build" / "html" / "book" / "appendix_claims.html"
LESSON = {*(f"C{n:02}" for n in range(1, 35)), *(f"M{n}" for n in range(1, 5))}
LEDGER = ledger.load()
PAGES = site.pages()
OWED = [claim for claim in LEDGER.values() if claim.chapter in PAGES]


def calls(page):
    """The calls of `verdict` in a chapter's source: id, and claim if it is written
    there or in a name that the cells set to a text."""
    notebook = nbformat.read(ROOT / f"{page}.ipynb", as_version=4)
    texts = {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                texts[ast.unparse(node.targets[0])] = node.value.value
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                "verdict"
            ):
                claim_id, words = node.args[:2]
                words = (
                    words.value
                    if isinstance(words, ast.Constant)
                    else texts.get(ast.unparse(words))
                )
                yield claim_id.value, words


@pytest.fixture(scope="module")
def verdicts():
    """What each executed chapter found."""
    notebooks = [page for page in PAGES if (ROOT / f"{page}.ipynb").exists()]
    missing = [page for page in notebooks if not (EXECUTED / f"{page}.ipynb").exists()]
    assert not missing, f"not executed: {missing}: run `make book`"
    return {
        page: list(claims.collect(EXECUTED / f"{page}.ipynb")) for page in notebooks
    }


def test_the_ledger_lists_every_claim_of_the_lesson_and_leaves_no_number_out():
    numbers = sorted(int(claim_id[1:]) for claim_id in LEDGER if claim_id[0] == "C")
    assert set(LEDGER) >= LESSON
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_claim_listed_twice_is_refused(tmp_path):
    path = tmp_path / "claims.yml"
    path.write_text("book/a:\n  C01: x\nbook/b:\n  C01: y\n")
    with pytest.raises(InvalidArgument, match="C01"):
        ledger.load(path)


@pytest.mark.parametrize("claim", OWED, ids=lambda claim: claim.id)
def test_the_chapter_states_the_claim_in_the_ledger_s_words(claim):
    stated = [words for found, words in calls(claim.chapter) if found == claim.id]
    assert stated == [claim.words]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if (ROOT / f"{page}.ipynb").exists()]
)
def test_a_chapter_judges_only_what_it_owes(page):
    owed = {claim.id for claim in LEDGER.values() if claim.chapter == page}
    assert {claim_id for claim_id, _ in calls(page)} == owed


def test_the_executed_chapters_keep_what_the_ledger_says(verdicts):
    assert list(ledger.troubles(LEDGER, PAGES, verdicts)) == []


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        (lambda found: found.clear(), "no cell of book/a gave a verdict on C01"),
        (lambda found: found[0].update(id="C77"), "claims.yml does not list"),
        (lambda found: found[0].update(id="C02"), "belongs to book/b"),
        (lambda found: found[0].update(claim="else"), "'else' in book/a"),
        (lambda found: found[0].update(execution_count=None), "was not executed"),
    ],
)
def test_what_is_wrong_is_said(change, trouble):
    listed = {
        "C01": ledger.Claim("C01", "book/a", "one"),
        "C02": ledger.Claim("C02", "book/b", "two"),
    }
    found = [{"id": "C01", "claim": "one", "ruling": "holds", "execution_count": 1}]
    verdicts = {"book/a": found}
    assert list(ledger.troubles(listed, {"book/a"}, verdicts)) == []
    assert ledger.tally(listed, {"C01": found[0]})["to come"] == ["C02"]
    change(found)
    assert any(
        trouble in said for said in ledger.troubles(listed, ["book/a"], verdicts)
    )


def test_the_page_shows_each_verdict_and_links_to_its_cell(verdicts):
    page = PAGE.read_text(encoding="utf-8")
    boxes = dict(
        re.findall(r'<div class="claim[^>]*id="ledger-(\w+)">(.*?)</div>', page, re.S)
    )
    assert set(boxes) == set(LEDGER)
    found = {v["id"]: (source, v) for source in verdicts for v in verdicts[source]}
    for claim in LEDGER.values():
        shown = html.unescape(re.sub(r"<[^>]+>", "", boxes[claim.id]))
        assert claim.words in shown
        if claim.chapter not in PAGES:
            assert "to come" in shown
            continue
        source, verdict = found[claim.id]
        assert f"{claims.RULINGS[verdict['ruling']][0]} {verdict['ruling']}" in shown
        for label, value in verdict["measured"].items():
            assert f"{label}: {claims.show(value)}" in shown
        link = f"{Path(source).name}.html#{claims.anchor(claim.id)}"
        assert f'href="{link}"' in boxes[claim.id]
        cell = (PAGE.parent / f"{Path(source).name}.html").read_text(encoding="utf-8")
        assert f'id="{claims.anchor(claim.id)}"' in cell


def test_the_verdicts_can_be_searched_for():
    index = (ROOT / "_build" / "html" / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)", index, re.S)[1])
    ledger_page = found["docnames"].index("book/appendix_claims")
    for word in ("c16", "c34"):  # one that was judged, one that may be to come
        pages = found["terms"][word]
        assert ledger_page in (pages if isinstance(pages, list) else [pages])


def test_the_sheet_has_the_colours_of_the_verdicts():
    sheet = (ROOT / "book/assets/static/book.css").read_text(encoding="utf-8")
    for ruling, (_, color) in claims.RULINGS.items():
        rule = re.search(rf"\.claim-{ruling.replace(' ', '-')} {{(.*?)}}", sheet, re.S)
        assert color.lower() in rule[1]


# -- a build whose outputs come from the cache -----------------------------------------

CONFIG = """
title: Tiny
only_build_toc_files: true
execute: {execute_notebooks: cache}
launch_buttons: {thebe: false}
sphinx: {extra_extensions: [kvq_lib.course.appendices]}
"""
CELL = """
from kvq_lib.course.claims import verdict

verdict("C01", "Two and two are four.", "holds", {"sum": 2 + 2})
"""


def test_a_verdict_from_the_cache_counts(tmp_path, capsys):
    """A chapter whose text alone was edited is not executed again, and owes no less."""
    (tmp_path / "book").mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/chapter\n")
    words = 'book/chapter:\n  C01: "Two and two are four."\n'
    (tmp_path / "book" / "claims.yml").write_text(words)
    executed = tmp_path / "_build" / "jupyter_execute" / "book" / "chapter.ipynb"
    for title, runs in (("# Once", True), ("# Twice", False)):
        chapter = nbformat.v4.new_notebook(
            cells=[
                nbformat.v4.new_markdown_cell(title, id="title"),
                nbformat.v4.new_code_cell(CELL.strip(), id="code"),
            ],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        nbformat.write(chapter, tmp_path / "book" / "chapter.ipynb")
        assert site.build(tmp_path) == 0
        assert ("Executing notebook" in capsys.readouterr().out) == runs
        (found,) = claims.collect(executed)
        assert found["id"] == "C01" and found["execution_count"] == 1
