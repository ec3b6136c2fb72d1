"""What a code cell of a homework must keep to, by its role; see `rules`."""

import ast
import math
import re
from collections.abc import Iterator, Mapping

from . import blocks
from .source import OPTIONS, Cell

MAX_WIDTH = 88
MAX_LINES = {"given": 25, "check": 25, "answer": 40}

Found = Iterator[tuple[int, str]]

_BAD_VALUES = (ast.Compare, ast.BoolOp)


def check(cell: Cell, anywhere: bool = False) -> Found:
    """Rules of one code cell; `anywhere`: it needs no question's heading above it."""
    yield from options(cell) or ([] if anywhere else place(cell))
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


def place(cell: Cell) -> list[tuple[int, str]]:
    """Whether a cell of a question stands under that question's heading."""
    if not cell.question or cell.question == f"q{cell.section}":
        return []
    above = f"Question {cell.section}" if cell.section else "no question"
    return [(cell.line, f"a cell of {cell.question} under {above}")]


def options(cell: Cell) -> list[tuple[int, str]]:
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
