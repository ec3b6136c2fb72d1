"""Lines of IPython that are no Python: taken out as text, nothing is parsed or run.

Only lines where a statement begins are looked at, not those inside strings, brackets
or after a backslash.  Every line keeps its number.
"""

import re
from collections.abc import Iterator

#: Cell magics whose body is Python that runs as it stands.
_BODY_RUNS = {"time", "timeit", "capture", "prun"}
_MAGIC = re.compile(
    r"""[ \t]*(?:[%!?] | [\w.]+[ \t]*\?{1,2}[ \t]*$)  # %pip, !ls, ?name, name?
    | [\w.,\[\] \t]+=[ \t]*[!%]  # files = !ls
    """,
    re.VERBOSE,
)
_TOKEN = re.compile(
    r"""(?P<long>\"{3}|'{3}) | "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? | \#[^\n]*
    | (?P<open>[(\[{]) | (?P<close>[)\]}]) | \\\n | (?P<end>\n)
    | [^\s"'\#()\[\]{}\\]+ | [ \t]+ | .""",
    re.VERBOSE | re.DOTALL,
)
_LONG_END = {
    quotes: re.compile(rf"(?:\\.|[^\\])*?(?:{quotes}|\Z)", re.DOTALL)
    for quotes in ('"""', "'''")
}


def neutral(code: str) -> tuple[str, int]:
    """The code without magics, and how many lines or cell magics were taken out."""
    code = code.replace("\r\n", "\n").replace("\r", "\n")
    lines = code.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    taken = 0
    if found := re.match(r"%%(\w*)", lines[first].strip()):
        if found[1] not in _BODY_RUNS:
            return "\n".join(f"# {line}" for line in lines), 1
        lines[first] = "# a cell magic stood here"
        taken = 1
    code = "\n".join(lines)
    for number in _magic_lines(code):
        line = lines[number]
        lines[number] = f"{line[: len(line) - len(line.lstrip())]}pass  # a magic"
        taken += 1
        while line.endswith("\\") and number + 1 < len(lines):  # it goes on
            number += 1
            line, lines[number] = lines[number], ""
    return "\n".join(lines), taken


def _magic_lines(code: str) -> Iterator[int]:
    """Numbers of the lines, from 0, where a statement begins that is a magic."""
    line = depth = position = 0
    fresh = True
    while position < len(code):
        end = None
        if fresh and _MAGIC.match(code, position, _line_end(code, position)):
            yield line
            end = _line_end(code, position)
            while code[end - 1 : end + 1] == "\\\n":
                end = _line_end(code, end + 1)
        fresh = False
        found = _TOKEN.match(code, position)
        if end is None:
            end = found.end()
            if found["long"]:
                end = _LONG_END[found["long"]].match(code, end).end()
            elif found["open"]:
                depth += 1
            elif found["close"]:
                depth = max(0, depth - 1)
            elif found["end"]:
                fresh = depth == 0
        line += code.count("\n", position, end)
        position = end


def _line_end(code: str, position: int) -> int:
    end = code.find("\n", position)
    return len(code) if end < 0 else end
