"""Answer cells: what lies between BEGIN and END, and the stub that is left without it.

Blocks are found by line, functions by Python's own parser: the marks are comments, so a
cell with them is still the author's solution.
"""

import ast
import re
from collections.abc import Iterator

BEGIN = "### BEGIN SOLUTION"
END = "### END SOLUTION"
HERE = "# your code here"

_LIKE_A_MARK = re.compile(r"#+\s*(begin|end)[\s_-]*solution", re.I)


def mark(role: str, question: str) -> str:
    """The first line of an answer or a check: "# @answer q1"."""
    return f"# @{role} {question}"


def marks(source: str) -> Iterator[tuple[int, str]]:
    """Offset and text of every line that is a mark of a block, or nearly one."""
    for offset, line in enumerate(source.split("\n")):
        if _LIKE_A_MARK.match(line.strip()):
            yield offset, line.strip()


def problems(source: str, question: str) -> Iterator[tuple[int, str]]:
    """What is wrong with an answer cell's blocks: (offset of the line, message)."""
    found = list(_pairing(source))
    if not found and not _spans(source):
        found = [(0, f"no block: put what students write between {BEGIN} and {END}")]
    if found or (error := syntax_error(source)):
        yield from found or [error]
        return
    if error := syntax_error(stub(source, question)):
        shown = stub(source, question).split("\n")[error[0]]
        yield 0, f"the stub would be no Python ({error[1]}, at {shown.strip()!r})"


def _pairing(source: str) -> Iterator[tuple[int, str]]:
    lines, start = source.split("\n"), None
    for offset, text in marks(source):
        if text not in (BEGIN, END):
            yield offset, f"{text!r} must read {BEGIN!r} or {END!r}"
        elif text == BEGIN and start is not None:
            yield offset, f"a block inside the block of line +{start}: end that first"
        elif text == BEGIN:
            start = offset
        elif start is None:
            yield offset, f"{END!r} without {BEGIN!r} before it"
        else:
            if _indent(lines[offset]) != _indent(lines[start]):
                yield offset, f"{END!r} must be indented like its {BEGIN!r}"
            if not any(line.strip() for line in lines[start + 1 : offset]):
                yield start, "an empty block: it holds no solution"
            start = None
    if start is not None:
        yield start, f"{BEGIN!r} without {END!r} after it"


def syntax_error(source: str) -> tuple[int, str] | None:
    """Where and why a cell is no plain Python; None if it is."""
    try:
        ast.parse(source)
    except SyntaxError as error:
        return max(0, (error.lineno or 1) - 1), f"no plain Python: {error.msg}"
    return None


def solved(source: str) -> str:
    """A cell as the solution shows it: without the marks of its blocks."""
    lines = source.split("\n")
    return "\n".join(line for line in lines if line.strip() not in (BEGIN, END))


def stub(source: str, question: str) -> str:
    """A cell as the exercise shows it.

    The first block of each function becomes `raise NotImplementedError("q1")`, later
    ones of the same function vanish.  Outside of functions nothing may raise: plain
    assignments keep their names and get `...`, anything else becomes a comment.
    """
    lines, tree, raising = source.split("\n"), ast.parse(source), set()
    kept, position = [], 0
    for start, end in _spans(source):
        kept += lines[position:start]
        indent = lines[start][: _indent(lines[start])]
        function = _function_around(tree, start + 1)
        if function is None:
            kept += [indent + line for line in _open_lines(tree, start, end)]
        elif function not in raising:
            raising.add(function)
            kept.append(f'{indent}raise NotImplementedError("{question}")')
        position = end + 1
    return "\n".join(kept + lines[position:]).rstrip()


def _spans(source: str) -> list[tuple[int, int]]:
    """Offsets of the BEGIN and END line of every block."""
    found = [offset for offset, text in marks(source) if text in (BEGIN, END)]
    return list(zip(found[::2], found[1::2], strict=False))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _function_around(tree: ast.Module, line: int) -> int | None:
    """The line of the innermost function that holds a line; None outside of any."""
    around = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno < line <= node.end_lineno
    ]
    return max(around, default=None)


def _open_lines(tree: ast.Module, start: int, end: int) -> list[str]:
    """What stands for a block outside of functions."""
    inside = [node for node in tree.body if start < node.lineno <= end]
    names = [_names(node) for node in inside]
    if not names or not all(names):
        return [HERE]
    return [HERE, *(f"{name} = ..." for listed in names for name in listed)]


def _names(node: ast.stmt) -> list[str]:
    """The names that a plain assignment binds; none if it is something else."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [f"{node.target.id}: {ast.unparse(node.annotation)}"]
    if not isinstance(node, ast.Assign):
        return []
    bound = []
    for target in node.targets:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        if not all(isinstance(part, ast.Name) for part in parts):
            return []
        bound += [part.id for part in parts]
    return bound
