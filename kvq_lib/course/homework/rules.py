"""What a homework's source must keep to; each rule broken is a (line, message).

A message says what to do.  Rules look at the text alone: what the cells do when they
run is for `build` and `verify`.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from . import blocks, cell_rules
from .cell_rules import Found
from .source import HEADING, Cell, headings, questions_named

TORCH = {"torch", "kvq_lib", "triton", "transformers"}  # importing it, or what does
ID = re.compile(r"hw\d\d")
AT_LEAST = {"answer": 1, "check": 1, "hidden": 2, "mutant": 2}


def check(path: Path, text: str, front: Mapping, cells: Sequence[Cell]) -> list:
    """All rules that a source breaks."""
    found = [*_front(path, text, front, cells), *_first_cell(front, cells)]
    found += _headings(cells)
    for cell in cells:
        markdown = cell.kind == "markdown"
        found += (
            _markdown(cell, cell is cells[0]) if markdown else cell_rules.check(cell)
        )
    return [*found, *_questions(cells)]


def check_private(homework, cells: Sequence[Cell]) -> list:
    """All rules that a private file of probes and mutants breaks."""
    found = [] if cells else [(1, "no cell with role hidden or mutant")]
    known = {question.id: question for question in homework.questions}
    for cell in cells:
        problems = list(cell_rules.check(cell, anywhere=True))
        if not problems and cell.role not in ("hidden", "mutant"):
            problems = [(cell.line, f"role {cell.role} is not for private files")]
        elif not problems and cell.question not in known:
            problems = [(cell.line, f"{homework.id} has no question {cell.question}")]
        found += problems
    answers = [cell for cell in homework.cells if cell.role == "answer"]
    found += [*_names(cells), *_mutants([*answers, *cells], set(known))]
    for question in () if found else known.values():
        probes = [c for c in cells if c.question == question.id and c.role == "hidden"]
        points = sum(cell.options["points"] for cell in probes)
        if probes and not math.isclose(points, question.points):
            text = f"{question.id} is worth {question.points:g} points in the exercise"
            found.append((probes[0].line, f"{text}, and these probes give {points:g}"))
    return found


# -- the file and its Markdown -------------------------------------------------------


def _front(path: Path, text: str, front: Mapping, cells: Sequence[Cell]) -> Found:
    block = front.get("kvq")
    wanted = "kvq: with homework, chapter, minutes and torch below it"
    if not isinstance(block, Mapping):
        yield 1, f"the front matter lacks the block {wanted}"
        return
    lines = text.splitlines()

    def line(key: str) -> int:
        starts = (n for n, t in enumerate(lines, 1) if t.strip().startswith(f"{key}:"))
        return next(starts, 1)

    for key in block:
        if key not in ("homework", "chapter", "minutes", "torch"):
            yield line(key), f"unknown key {key!r} in the front matter: {wanted}"
    named = block.get("homework")
    if not isinstance(named, str) or not ID.fullmatch(named):
        yield line("homework"), f'homework: must be like "hw02", got {named!r}'
    elif not re.fullmatch(rf"{named}(_[a-z0-9]+)+", path.stem):
        yield 1, f"the file must be named {named}_topic.md, in small letters"
    chapter = block.get("chapter")
    if not isinstance(chapter, str) or not re.fullmatch(r"book/\w+", chapter):
        yield line("chapter"), f"chapter: must be like book/02_words, got {chapter!r}"
    minutes = block.get("minutes")
    if type(minutes) is not int or minutes <= 0:
        yield line("minutes"), f"minutes: must be a whole number, got {minutes!r}"
    needs = bool(TORCH & set(_imported(cells)))
    if block.get("torch") is not needs:
        why = "a cell imports it" if needs else "no cell imports it"
        yield line("torch"), f"torch: must be {str(needs).lower()}: {why}"
    kernel = front.get("kernelspec")
    if not isinstance(kernel, Mapping) or kernel.get("name") != "python3":
        yield 1, "the front matter must hold a kernelspec with name: python3"


def _imported(cells: Sequence[Cell]) -> Iterator[str]:
    """The packages that code cells import; those that do not parse say so elsewhere."""
    for cell in cells:
        if cell.kind == "markdown" or blocks.syntax_error(cell.source):
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield (node.module or "").split(".")[0]


def _first_cell(front: Mapping, cells: Sequence[Cell]) -> Found:
    if not cells or cells[0].kind != "markdown" or not cells[0].source.startswith("# "):
        yield cells[0].line if cells else 1, "the first cell must begin with `# Title`"
        return
    block = front.get("kvq")
    chapter = block.get("chapter") if isinstance(block, Mapping) else None
    found = links(cells[0].source)
    if isinstance(chapter, str) and not any(chapter in link for link in found):
        yield cells[0].line, f"the first cell must link to ../{chapter}.ipynb"


def links(markdown: str) -> list[str]:
    """Where the links of a text lead."""
    return re.findall(r"\]\(([^)\s]*)\)", markdown)


def _headings(cells: Sequence[Cell]) -> Found:
    if not headings(cells):
        yield 1, "no question: a Markdown cell must begin with `## Question 1: words`"
    expected = 1
    for cell in cells:
        match = HEADING.match(cell.source) if cell.kind == "markdown" else None
        if match and int(match[1]) != expected:
            yield cell.line, f"Question {match[1]} stands where {expected} is due"
        expected = int(match[1]) + 1 if match else expected


def _markdown(cell: Cell, first: bool) -> Found:
    yield from cell_rules.options(cell) or cell_rules.place(cell)
    fenced = False
    for number, text in enumerate(cell.source.split("\n")):
        line = cell.line + number
        if re.match(r"\s*(```|~~~)", text):
            fenced = not fenced
        if "{code-cell}" in text:
            yield line, "a code cell inside a list or another block: unindent it"
        elif fenced:
            continue
        elif text.startswith("# ") and not (first and number == 0):
            yield line, "one `# ` title only, in the first cell"
        elif re.match(r"#+\s*Question\b", text) and not (
            number == 0 and HEADING.fullmatch(text.strip())
        ):
            yield (
                line,
                "a question's heading reads `## Question 1: words` and opens its own "
                "cell: put a line `+++` before it",
            )
    opened, closed = (cell.source.count(tag) for tag in ("<details", "</details>"))
    if opened != closed:
        yield cell.line, f"{opened} <details> and {closed} </details> in one cell"


# -- questions -----------------------------------------------------------------------


def _questions(cells: Sequence[Cell]) -> Found:
    starts = {
        int(HEADING.match(cell.source)[1]): cell.line
        for cell in cells
        if cell.kind == "markdown" and HEADING.match(cell.source)
    }
    for number, line in starts.items():
        own = [cell for cell in cells if cell.question == f"q{number}"]
        for role, least in AT_LEAST.items():
            count = sum(cell.role == role for cell in own)
            if count < least:
                needed = f"at least {least} with role {role}"
                yield line, f"question {number} has {count} cells of {needed}"
        prose = "\n".join(
            cell.source
            for cell in cells
            if cell.kind == "markdown" and cell.section == number
        )
        if not re.search(r"<details>\s*<summary>[^<]*Hint", prose):
            hint = "<details><summary>Hint</summary> ... </details>"
            yield line, f"question {number} has no hint: {hint}"
        answers = [cell.line for cell in own if cell.role == "answer"]
        checks = [cell.line for cell in own if cell.role == "check"]
        if answers and checks and min(checks) < max(answers):
            yield min(checks), "a check must come after the answers of its question"
    yield from _names(cells)
    yield from _mutants(cells, {f"q{number}" for number in starts})


def _names(cells: Sequence[Cell]) -> list[tuple[int, str]]:
    """Two probes, or two mutants, of one name in one question."""
    named = [c for c in cells if c.role in ("hidden", "mutant") and "name" in c.options]
    keys = [(c.role, c.question, str(c.options["name"])) for c in named]
    return [
        (cell.line, f"two cells with role {key[0]} of {key[1]} are named {key[2]!r}")
        for cell, key in zip(named, keys, strict=True)
        if Counter(keys)[key] > 1
    ]


def _mutants(cells: Sequence[Cell], known: set[str]) -> Found:
    """Mutants against the answers that they replace."""
    seen: dict[tuple, str] = {}
    for cell in cells:
        if cell.role != "mutant" or blocks.syntax_error(cell.source):
            continue
        also = cell.options.get("also", [])
        also = questions_named(also) if isinstance(also, str | list) else [also]
        for other in map(str, also):
            if other not in known or other == cell.question:
                yield cell.line, f"also: {other} is no other question"
        same = [c for c in cells if c.question == cell.question]
        answers = [c for c in same if c.role == "answer"]
        place = cell.options.get("replaces", 1)
        if type(place) is not int or not 1 <= place <= max(1, len(answers)):
            yield cell.line, f"replaces: {cell.question} has {len(answers)} answers"
            continue
        right = answers[place - 1].source if answers else ""
        code = ast.dump(ast.parse(cell.source))
        if not blocks.syntax_error(right) and code == ast.dump(ast.parse(right)):
            yield cell.line, "the mutant is the solution"
        name = str(cell.options.get("name"))
        twin = seen.setdefault((cell.question, place, code), name)
        if twin != name:
            yield cell.line, f"the mutant does what {twin!r} does"
