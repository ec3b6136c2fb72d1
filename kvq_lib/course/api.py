"""The library's reference, as Markdown, from its source: no module is imported.

Every public name of `kvq_lib` gets its signature and its docstring.  Docstrings keep to
one form: paragraphs, then sections such as `Args:`, whose entries are `names: text`.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
WIDTH = 60  # of a signature on one line, in characters
SECTIONS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
}
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):[ \t]*\n", re.M)
_ENTRY = re.compile(r"^(\*{0,2}\w[\w, *]*?): +(.*)", re.S)


def public_names(package: Path = PACKAGE) -> dict[str, list[str]]:
    """The names that `kvq_lib` offers, under the modules that define them, in the
    reading order that the package's docstring gives."""
    front = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    order = re.findall(r"\w+", ast.get_docstring(front).split("in this order:")[1])
    found = {
        statement.module: [alias.name for alias in statement.names]
        for statement in front.body
        if isinstance(statement, ast.ImportFrom) and statement.level
    }
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def modules(package: Path = PACKAGE) -> list[Path]:
    """The files that the reference is made from."""
    return [package / "__init__.py"] + [
        package / f"{module}.py" for module in public_names(package)
    ]


def reference(package: Path = PACKAGE) -> str:
    """All of it, from headings of the second level down."""
    parts = []
    for module, names in public_names(package).items():
        source = (package / f"{module}.py").read_text(encoding="utf-8")
        tree = ast.parse(source)
        parts += [f"## `{module}`", docstring(tree)]
        defined = {name: node for node in tree.body for name in _defines(node)}
        for name in names:
            parts += _entry(name, defined[name], source)
    return "\n\n".join(part for part in parts if part) + "\n"


def _defines(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _entry(name: str, node: ast.stmt, source: str) -> Iterator[str]:
    yield f"```{{index}} single: kvq.{name}\n```"
    # Labels do not tell capitals from small letters: `Scheme` is not `scheme`.
    kind = "class-" if isinstance(node, ast.ClassDef) else ""
    yield f"(api-{kind}{name})=\n### `{name}`"
    if isinstance(node, ast.FunctionDef):
        yield signature(f"kvq.{name}", node.args, node.returns)
        yield docstring(node)
    elif isinstance(node, ast.ClassDef):
        yield _class_signature(name, node)
        yield docstring(node)
        for method in _public_methods(node):
            yield _method(name, method)
    else:
        yield _constant(node, source)


def _class_signature(name: str, node: ast.ClassDef) -> str:
    """How an object is made; of an error, what it is."""
    bases = [ast.unparse(base) for base in node.bases]
    if any(base.endswith(("Error", "Exception")) for base in bases):
        return f"```python\nclass kvq.{name}({', '.join(bases)})\n```"
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return signature(f"kvq.{name}", statement.args, None, drop_self=True)
    fields = [
        f"{statement.target.id}: {_type(statement.annotation)}{_default(statement)}"
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and statement.target.id[0] != "_"
    ]
    return _call(f"kvq.{name}", fields, "")


def _default(statement: ast.AnnAssign) -> str:
    """What a field is if it is not given; "..." where it is made anew each time."""
    if statement.value is None:
        return ""
    made = isinstance(statement.value, ast.Call)
    return f" = {'...' if made else ast.unparse(statement.value)}"


def _public_methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [
        statement
        for statement in node.body
        if isinstance(statement, ast.FunctionDef)
        and not statement.name.startswith("_")
        and ast.get_docstring(statement)
    ]


def _method(owner: str, node: ast.FunctionDef) -> str:
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    if "property" in marks:
        kind = f": {_type(node.returns)}" if node.returns else ""
        shown = f"```python\n{owner}.{node.name}{kind}\n```"
    else:
        shown = signature(
            f"{owner}.{node.name}",
            node.args,
            node.returns,
            drop_self="staticmethod" not in marks,
        )
    return f"#### `{owner}.{node.name}`\n\n{shown}\n\n{docstring(node)}"


def signature(name: str, arguments: ast.arguments, returns, drop_self=False) -> str:
    """A call with its parameters, as a block of code, broken where it is long."""
    shown = ast.arguments(**dict(ast.iter_fields(arguments)))
    if drop_self:
        shown.args = shown.args[1:]
    # Taken apart by unparsing each parameter: defaults belong to the last ones.
    plain = [*shown.posonlyargs, *shown.args]
    gap = len(plain) - len(shown.defaults)
    parts = [_parameter(p) for p in plain[:gap]]
    parts += [
        _parameter(p, d) for p, d in zip(plain[gap:], shown.defaults, strict=True)
    ]
    if shown.vararg:
        parts.append(f"*{_parameter(shown.vararg)}")
    elif shown.kwonlyargs:
        parts.append("*")
    for parameter, default in zip(shown.kwonlyargs, shown.kw_defaults, strict=True):
        parts.append(_parameter(parameter, default))
    if shown.kwarg:
        parts.append(f"**{_parameter(shown.kwarg)}")
    return _call(name, parts, f" -> {_type(returns)}" if returns else "")


def _parameter(parameter: ast.arg, default: "ast.expr | None" = None) -> str:
    if parameter.annotation is None:
        return parameter.arg + (f"={ast.unparse(default)}" if default else "")
    shown = f"{parameter.arg}: {_type(parameter.annotation)}"
    return shown + (f" = {ast.unparse(default)}" if default else "")


def _type(annotation: ast.expr) -> str:
    """An annotation without the quotes that names not defined yet need."""
    return re.sub(r"'([^']*)'", r"\1", ast.unparse(annotation))


def _call(name: str, parts: list[str], returns: str) -> str:
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) > WIDTH:
        inside = "".join(f"    {part},\n" for part in parts)
        line = f"{name}(\n{inside}){returns}"
    return f"```python\n{line}\n```"


def _constant(node: ast.stmt, source: str) -> str:
    """The `#:` comment of a constant, or its definition if there is none."""
    lines, comment = source.splitlines()[: node.lineno - 1], []
    while lines and lines[-1].startswith("#:"):
        comment.insert(0, lines.pop().removeprefix("#:").strip())
    shown = "\n".join(comment)
    return shown or f"```python\n{ast.get_source_segment(source, node)}\n```"


def docstring(node: "ast.Module | ast.ClassDef | ast.FunctionDef") -> str:
    """A docstring as Markdown; "" if there is none."""
    prose, *sections = _SECTION.split(ast.get_docstring(node) or "")
    parts = [_paragraphs(prose)]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        parts += [f"**{SECTIONS[title]}**", _section(body)]
    return "\n\n".join(part for part in parts if part)


def _paragraphs(prose: str) -> str:
    """Paragraphs; indented ones are set as they stand."""
    shown = []
    for part in re.split(r"\n\s*\n", prose.strip("\n").rstrip()):
        if part.startswith("    "):
            block = textwrap.dedent(part)
            part = f"```{_language(block)}\n{block}\n```"
        shown.append(part)
    return "\n\n".join(shown)


def _language(block: str) -> str:
    try:
        ast.parse(block)
    except SyntaxError:
        return "text"
    return "python"


def _section(body: str) -> str:
    """Entries `names: text` as a list of definitions; other text as it is."""
    body = textwrap.dedent(body).strip()
    entries = [_ENTRY.match(block) for block in re.split(r"\n(?=\S)", body)]
    if not all(entries):
        return body
    return "\n\n".join(
        f"`{entry[1]}`\n: {' '.join(entry[2].split())}" for entry in entries
    )
