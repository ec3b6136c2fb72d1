"""Files of every kind that arrive, and the folder with all submissions."""

import dataclasses
import json
import os
from pathlib import Path

from hostile import CHECK, CODE, GIVEN, MEANS, SECRET, SQUARE, Kind, kind, notebook
from hostile_attacks import ATTACKS

_CELLS = (GIVEN, SQUARE, CHECK, MEANS)
_FULL = kind("ok", 2, 3)
_OTHER = [
    GIVEN,
    "# @answer q1\ndef means(xs):\n    return xs",
    "# @answer q2\nclass Cube:\n    square = 1\nsquare = 1",
]


def _unreadable(note: str) -> Kind:
    return Kind("unreadable", 0, 0, (), note)


def _text(**changes) -> str:
    return json.dumps(notebook(_CELLS, **changes))


def _format_3() -> str:
    cells = [
        {"cell_type": "code", "language": "python", "metadata": {}, "input": code}
        for code in _CELLS
    ]
    heading = {"cell_type": "heading", "level": 1, "source": "Squares"}
    sheets = [{"cells": [heading, *cells[:2]]}, {"cells": cells[2:]}]
    return json.dumps({"nbformat": 3, "nbformat_minor": 0, "worksheets": sheets})


def _roles(role: str, question) -> dict:
    """Metadata alone says what the cells are: the marks are gone."""
    made = notebook([GIVEN, SQUARE[13:], "os._exit(1)", MEANS[13:]])
    for cell, name in zip(
        made["cells"][2:], ("answer", "check", "answer"), strict=True
    ):
        cell["metadata"] = {"kvq": {"role": name, "question": "q1"}}
    made["cells"][-1]["metadata"] = {"kvq": {"role": role, "question": question}}
    return made


def _forged() -> dict:
    made = notebook([GIVEN, SQUARE.replace("x * x", "0"), CHECK, MEANS])
    for cell in made["cells"][1:]:
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "5 / 5"}]
        cell["execution_count"] = 1
    return made


def _cell(**changes) -> str:
    made = notebook(_CELLS)
    made["cells"][2] |= changes
    return json.dumps(made)


def _same_ids() -> dict:
    made = notebook(_CELLS)
    for cell in made["cells"]:
        cell["id"] = "same"
    return made


def _other(title: str = "", cells=(), **metadata) -> str:
    """A notebook of another homework, with questions of the same ids."""
    made = notebook(cells or _OTHER, metadata=metadata)
    made["cells"][0]["source"] = ["About\n", title]
    made["cells"].insert(1, {**made["cells"][0], "source": title})
    return json.dumps(made)


#: Name, what it must get, and the content of its file.
FILES = {
    "other homework": (
        kind("partial", 0, 0, note="a notebook of hw91, not of hw90"),
        _other(kvq={"homework": "hw91"}),
    ),
    "other homework by title": (
        kind("partial", 0, 0, note="a notebook of hw03, not of hw90"),
        _other("# Homework 3: Cubes", kvq={"homework": SECRET}),
    ),
    "other notebook": (
        kind("partial", 0, 0, note="no answer defines what hw90 asks for"),
        _other(f"# Homework {SECRET}", kvq=[1]),
    ),
    "other title": (_FULL, _other("# Homework 3: Cubes", (GIVEN, SQUARE, MEANS))),
    "format 3": (_FULL, _format_3()),
    "format 9": (_unreadable("format 9"), _text(nbformat=9)),
    "format 2": (_unreadable("format 2"), _text(nbformat=2)),
    "format of words": (_unreadable("number of its format"), _text(nbformat="4")),
    "format 3 without sheets": (_unreadable("worksheets"), _text(nbformat=3)),
    "no cells": (_unreadable("without cells"), _text(cells={"a": 1})),
    "cells of words": (_unreadable("cell 1 is no cell"), _text(cells=["a"])),
    "cell without text": (_unreadable("cell 3 has no text"), _cell(source=None)),
    "text of numbers": (_unreadable("cell 3 has no text"), _cell(source=[1, 2])),
    "text in lines": (_FULL, _cell(source=SQUARE.splitlines(keepends=True))),
    "windows lines": (_FULL, _cell(source=SQUARE.replace("\n", "\r\n"))),
    "odd metadata": (_FULL, _cell(metadata=["kvq"])),
    "odd roles": (_FULL, _cell(metadata={"kvq": {"role": ["check"], "question": 1}})),
    "lone surrogate": (kind("partial", 0, 3), _cell(source=f"{SQUARE}\nx = '\ud800'")),
    "null byte": (kind("partial", 0, 3), _cell(source=f"{SQUARE}\nx = '\0'")),
    "same ids": (_FULL, json.dumps(_same_ids())),
    "marks stripped": (_FULL, json.dumps(_roles("answer", "q2"))),
    "roles stripped": (_FULL, _text()),
    "role of nothing": (kind("partial", 2, 3), json.dumps(_roles("answer", "../x"))),
    "forged outputs": (kind("ok", 0, 3), json.dumps(_forged())),
    "no code": (kind("partial", 0, 0), json.dumps(notebook(()))),
    "many cells": (_unreadable("cells"), json.dumps(notebook(["1"] * 2001))),
    "much code": (_unreadable("characters of code"), _cell(source="#" * 2**20)),
    "much text": (_FULL, _text(metadata={"x": "y" * 2**22})),
    "not JSON": (_unreadable("not JSON"), "print('hello')"),
    "cut off": (_unreadable("not JSON"), _text()[:-100]),
    "other JSON": (_unreadable("no notebook"), "[1, 2, 3]"),
    "deep JSON": (_unreadable("nested too deeply"), "[" * 10**6),
    "deep metadata": (
        _unreadable("nested too deeply"),
        _text()[:-1] + ',"x":' + "[" * 10**5 + "]" * 10**5 + "}",
    ),
    "long number in JSON": (
        _unreadable("too long"),
        _text()[:-1] + f',"x":{"9" * 5000}}}',
    ),
    "web page": (_unreadable("web page"), "<!DOCTYPE html><html></html>"),
    "archive": (_unreadable("archive"), b"PK\3\4aaaa"),
    "empty": (_unreadable("empty"), ""),
    "zeros": (_unreadable("empty"), bytes(5000)),
    "byte order mark": (_FULL, b"\xef\xbb\xbf" + _text().encode()),
    "UTF-16": (_FULL, _text().encode("utf-16")),
    "Latin-1": (
        _unreadable("UTF-8"),
        _text().replace("# Squares", "# Quadrat für Köpfe").encode("latin-1"),
    ),
    "bytes": (_unreadable(""), bytes(range(256)) * 9),
    "large": (_unreadable("larger than 32 MiB"), _text() + " " * 2**25),
    "=1+1": (_FULL, _text()),
    "+cmd|' :C calc'!A0": (_FULL, _text()),
    '-@SUM(A1), "quoted"; ünï 🙂': (_FULL, _text()),
    " spaces ": (_FULL, _text()),
}


def write_all(folder: Path) -> dict[str, Kind]:
    """Write a submission of every kind; what each student must get."""
    expected = {}
    for name, made in {**CODE, **ATTACKS}.items():
        text = json.dumps(notebook(made.cells))
        (folder / f"{name}.ipynb").write_text(text, encoding="utf-8")
        expected[name] = made
    for name, (made, content) in FILES.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / f"{name}.ipynb").write_bytes(data)
        expected[name] = made
    return expected | _odd_files(folder)


def _odd_files(folder: Path) -> dict[str, Kind]:
    """Links, folders, pipes, and students with several files."""
    good, wrong = _text(), json.dumps(notebook([SQUARE.replace("*", "+"), MEANS]))
    right = folder / "right.ipynb"
    (folder / "link.ipynb").symlink_to(right)
    (folder / "loop.ipynb").symlink_to("loop.ipynb")
    (folder / "link to a folder").symlink_to("/")
    (folder / "dead link.ipynb").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.ipynb")
    (folder / "a folder.ipynb").mkdir()
    (folder / "empty folder").mkdir()
    (folder / "hidden only").mkdir()
    (folder / "hidden only" / ".x.ipynb").write_text(good)
    for name, files in {
        "in a folder": {"any.ipynb": good, "notes.txt": "x"},
        "named after it": {"hw90_squares.ipynb": good, "a.ipynb": wrong},
        "newest": {"old.ipynb": wrong, "new.ipynb": good},
        "link in a folder": {},
    }.items():
        (folder / name).mkdir()
        for file, text in files.items():
            (folder / name / file).write_text(text)
    os.utime(folder / "newest" / "old.ipynb", (10**9, 10**9))
    (folder / "link in a folder" / "x.ipynb").symlink_to(right)
    (folder / "LOUD.IPYNB").write_text(good)
    (folder / ".hidden.ipynb").write_text(wrong)
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / "homework.pdf").write_text("no notebook")
    name = os.fsencode(folder) + b"/not utf8 \xff.ipynb"
    Path(os.fsdecode(name)).write_text(good)
    (folder / "two\nlines.ipynb").write_text(good)
    return {
        "link": _unreadable("a link"),
        "loop": _unreadable("a link"),
        "dead link": _unreadable("a link"),
        "pipe": _unreadable("a pipe"),
        "a folder": _unreadable("folder without a notebook"),
        "empty folder": _unreadable("folder without a notebook"),
        "hidden only": _unreadable("folder without a notebook"),
        "link in a folder": _unreadable("a link"),
        "in a folder": _FULL,
        "named after it": dataclasses.replace(_FULL, note="2 files"),
        "newest": dataclasses.replace(_FULL, note="2 files"),
        "LOUD": _FULL,
        "not utf8 \\xff": _FULL,
        "two\N{REPLACEMENT CHARACTER}lines": _FULL,
    }
