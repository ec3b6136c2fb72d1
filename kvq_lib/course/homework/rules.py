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

from . import blocks
from .source import HEADING, OPTIONS, Cell, headings, questions_named

MAX_WIDTH = 88
MAX_LINES = {"given": 25, "check": 25, "answer": 40}
ID = re.compile(r"hw\d\d")
AT_LEAST = {"answer": 1, "check": 1, "hidden": 2, "mutant": 2}

Found = Iterator[tuple[int, str]]

_BAD_VALUES = (ast.Compare, ast.BoolOp)


def check(path: Path, text: str, front: Mapping, cells: Sequence[Cell]) -> list:
    """All rules that a source breaks."""
    found = [*_front(path, text, front), *_first_cell(front, cells)]
    found += _headings(cells)
    for cell in cells:
        markdown = cell.kind == "markdown"
        found += _markdown(cell, cell is cells[0]) if markdown else _code(cell)
    return [*found, *_questions(cells)]


def check_private(homework, cells: Sequence[Cell]) -> list:
    """All rules that a private file of probes and mutants breaks."""
    found = [] if cells else [(1, "no cell with role hidden or mutant")]
    known = {question.id: question for question in homework.questions}
    for cell in cells:
        problems = list(_code(cell, anywhere=True))
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


def _front(path: Path, text: str, front: Mapping) -> Found:
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
    if type(block.get("torch")) is not bool:
        yield line("torch"), "torch: must be true or false: whether a cell imports it"
    kernel = front.get("kernelspec")
    if not isinstance(kernel, Mapping) or kernel.get("name") != "python3":
        yield 1, "the front matter must hold a kernelspec with name: python3"


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
    yield from _options(cell) or _place(cell)
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


# -- code cells ----------------------------------------------------------------------


def _code(cell: Cell, anywhere: bool = False) -> Found:
    """Rules of one code cell; `anywhere`: it needs no question's heading above it."""
    yield from _options(cell) or ([] if anywhere else _place(cell))
    yield from _layout(cell)
    if "question" not in cell.options and cell.role != "given":
        return
    error = blocks.syntax_error(cell.source)
    if cell.role == "answer":
        for offset, message in blocks.problems(cell.source, cell.question):
            yield cell.line + offset, message
    else:
        for offset, text in blocks.marks(cell.source):
            yield cell.line + offset, f"{text!r} belongs into cells with role answer"
        if error:
            yield cell.line + error[0], error[1]
    if cell.role in ("answer", "check", "mutant"):
        yield from _first_line(cell)
    elif re.search(r"^# @(answer|check)\b", cell.source, re.M):
        yield cell.line, f"a mark in a cell with role {cell.role}: give it its role"
    if error is None:
        tree = ast.parse(cell.source)
        own = {"answer": _signatures, "check": _check_cell, "hidden": _probe}
        for offset, message in own.get(cell.role, lambda *_: ())(tree, cell):
            yield cell.line + offset - 1, message


def _place(cell: Cell) -> list[tuple[int, str]]:
    """Whether a cell of a question stands under that question's heading."""
    if not cell.question or cell.question == f"q{cell.section}":
        return []
    above = f"Question {cell.section}" if cell.section else "no question"
    return [(cell.line, f"a cell of {cell.question} under {above}")]


def _options(cell: Cell) -> list[tuple[int, str]]:
    """What is wrong with the role of a cell and all that belongs to it."""
    block = cell.metadata.get("kvq", {})
    markdown = cell.kind == "markdown"
    roles = [r for r in OPTIONS if (r in ("text", "explain")) == markdown]
    if not isinstance(block, Mapping):
        return [(cell.line, "kvq must be like {role: answer, question: q1}")]
    if "role" not in block and block:
        return [(cell.line, f"kvq says no role: {', '.join(roles)}")]
    if cell.role not in roles:
        kind = "Markdown" if markdown else "code"
        text = f"unknown role {cell.role!r}: {kind} has {', '.join(roles)}"
        return [(cell.line, text)]
    listed = ", ".join(OPTIONS[cell.role]) or "nothing"
    found = [
        (cell.line, f"{key!r} is not for role {cell.role}, which takes {listed}")
        for key in sorted(set(block) - {"role", *OPTIONS[cell.role]}, key=str)
    ]
    return found + list(_values(cell, block) if OPTIONS[cell.role] else ())


def _values(cell: Cell, block: Mapping) -> Found:
    if not re.fullmatch(r"q\d+", str(block.get("question"))):
        yield cell.line, f"question: must be like q1, got {block.get('question')!r}"
    needs_name = cell.role in ("hidden", "mutant")
    name = block.get("name")
    if needs_name and not (isinstance(name, str) and name.strip()):
        yield cell.line, f"name: must be a few words, got {name!r}"
    if cell.role == "hidden":
        yield from _numbers(cell, block)
    replaces = block.get("replaces", 1)
    if type(replaces) is not int or replaces < 1:
        yield cell.line, f"replaces: must be 1, 2, ..., got {replaces!r}"


def _numbers(cell: Cell, block: Mapping) -> Found:
    points = block.get("points")
    if type(points) not in (int, float) or not 0 < points < math.inf:
        yield cell.line, f"points: must be a number above 0, got {points!r}"
    for key in ("rtol", "atol"):
        try:  # YAML reads 1e-6, without a dot, as text
            value = float(block.get(key, 0))
        except (TypeError, ValueError):
            value = math.nan
        if type(block.get(key)) is bool or not 0 <= value < math.inf:
            yield cell.line, f"{key}: must be 0 or above, got {block.get(key)!r}"
    if type(block.get("seed", 0)) is not int:
        yield cell.line, f"seed: must be a whole number, got {block['seed']!r}"


def _layout(cell: Cell) -> Found:
    lines = blocks.solved(cell.source).split("\n")
    if not cell.source.strip():
        yield cell.line, "an empty cell: drop it"
    for number, text in enumerate(cell.source.split("\n")):
        if len(text) > MAX_WIDTH:
            yield cell.line + number, f"{len(text)} characters: at most {MAX_WIDTH}"
        if re.match(r"\s*(`{3,}|~{3,})\s*\{", text) or text.rstrip() == "+++":
            yield cell.line + number, "a fence before this line is not closed"
    limit = MAX_LINES.get(cell.role, math.inf)
    if len(lines) > limit:
        yield cell.line, f"{len(lines)} lines: at most {limit} for role {cell.role}"


def _first_line(cell: Cell) -> Found:
    role = "check" if cell.role == "check" else "answer"
    wanted = blocks.mark(role, cell.question)
    first, *others = cell.source.split("\n")
    if first.rstrip() != wanted:
        yield cell.line, f"the first line must be {wanted!r}, not {first!r}"
    for number, text in enumerate(others, 1):
        if re.match(r"\s*#\s*@(answer|check)\b", text):
            yield cell.line + number, f"a second mark in one cell: {text.strip()!r}"


def _signatures(tree: ast.Module, cell: Cell) -> Found:
    """Functions that students fill in say what they take and return."""
    error = blocks.syntax_error(cell.source) or list(blocks.problems(cell.source, "q1"))
    if error:
        return
    lines = cell.source.split("\n")
    kept = ast.parse(blocks.stub(cell.source, cell.question))
    for node in ast.walk(kept):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        line = next(n for n, t in enumerate(lines, 1) if f"def {node.name}(" in t)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg != "self"]
        if bare or (node.returns is None and node.name != "__init__"):
            missing = ", ".join(bare) or "what it returns"
            yield line, f"{node.name}: annotate {missing}"
        if ast.get_docstring(node) is None and not node.name.startswith("_"):
            yield line, f"{node.name}: say what it does in a docstring, with shapes"


def _check_cell(tree: ast.Module, cell: Cell) -> Found:
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if not asserts:
        yield 1, "a check needs an assert"
    for node in asserts:
        if node.msg is None:
            yield node.lineno, "an assert without a message: say what may be wrong"
    prints = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    last = tree.body[-1] if tree.body else None
    fixed = (
        isinstance(last, ast.Expr)
        and prints == [last.value]
        and len(prints[0].args) == 1
        and isinstance(prints[0].args[0], ast.Constant)
    )
    if not fixed:
        yield 1, 'a check ends with its only print, of a fixed text: print("q1: ...")'


def _probe(tree: ast.Module, cell: Cell) -> Found:
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        yield 1, "a probe ends with an expression: the value that is compared"
        return
    value = last.value
    forged = isinstance(value, _BAD_VALUES) or (
        isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    )
    if forged:
        yield last.lineno, "a probe must not compare: return the values themselves"
    elif not any(isinstance(node, ast.Name | ast.Call) for node in ast.walk(value)):
        yield last.lineno, "a probe of fixed values: use what the student wrote"


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
        for other in also:
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
