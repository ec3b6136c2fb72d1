"""What the grader reads: values, magics, marks and metadata."""

import json
import time
from pathlib import Path

import pytest
from hostile import key, notebook

from kvq_lib.course.homework.compare import same
from kvq_lib.course.homework.magics import neutral
from kvq_lib.course.homework.score import asks_for, load
from kvq_lib.course.homework.submission import _homework, read

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "got, expected, rtol, atol, agree",
    [
        (1, 1.0, 0, 0, True),
        (1, True, 0, 0, False),
        (True, 1, 0, 0, False),
        (True, True, 0, 0, True),
        ("1", 1, 0, 0, False),
        (None, 0, 0, 0, False),
        (None, None, 0, 0, True),
        (1.0099, 1, 0.01, 0, True),
        (1.0101, 1, 0.01, 0, False),
        (-1.01, 1, 0.01, 0, False),
        (0.001, 0, 0.01, 0, False),
        (0.001, 0, 0, 0.001, True),
        (2**60 + 1, 2**60, 0, 0, False),
        (2**60 + 1, float(2**60), 0, 0, False),
        (10**400, 1.0, 1e-6, 0, False),
        (10**400, 10**400 + 1, 1e-6, 0, False),
        (float("nan"), 1.0, 1e9, 1e9, False),
        (float("nan"), float("nan"), 0, 0, True),
        (float("inf"), 1e308, 1, 1, False),
        (float("inf"), float("inf"), 0, 0, True),
        (float("-inf"), float("inf"), 1, 1, False),
        ([1, [2]], [1, [2.0]], 0, 0, True),
        ([1, 2], [1], 0, 0, False),
        ([], [1], 0, 0, False),
        ({"a": 1}, {"a": 1.0}, 0, 0, True),
        ({"a": 1, "b": 2}, {"a": 1}, 0, 0, False),
        ([1], {"0": 1}, 0, 0, False),
        ({"a": 1}, ["a"], 0, 0, False),
    ],
)
def test_values_are_compared(got, expected, rtol, atol, agree):
    assert same(got, expected, rtol, atol) is agree


def test_deep_values_are_compared_without_recursion():
    deep, other = 1, 2
    for _ in range(10**4):
        deep, other = [deep], [other]
    assert same(deep, deep) and not same(deep, other)
    while isinstance(deep, list):  # Python itself takes them apart by recursion
        deep = deep.pop()


@pytest.mark.parametrize(
    "code, expected, taken",
    [
        ("x = 1\ny = x % 2", None, 0),
        ("%time x = 1\ny", "pass  # a magic\ny", 1),
        ("if x:\n    !ls (", "if x:\n    pass  # a magic", 1),
        ("x = (a\n% b)", None, 0),
        ("x = a \\\n% b", None, 0),
        ("x = '''\n%time\n'''\n%who", "x = '''\n%time\n'''\npass  # a magic", 1),
        ("x = 'it''s' # '''\n%who", "x = 'it''s' # '''\npass  # a magic", 1),
        ('x = "a\\"["\n!ls', 'x = "a\\"["\npass  # a magic', 1),
        ("!echo it's (\nx = 1\n!b", "pass  # a magic\nx = 1\npass  # a magic", 2),
        ("!a \\\n b\nx", "pass  # a magic\n\nx", 1),
        ("files = !ls", "pass  # a magic", 1),
        ("x = %timeit -o f()", "pass  # a magic", 1),
        ("x != y", None, 0),
        ("square?", "pass  # a magic", 1),
        ("?square", "pass  # a magic", 1),
        ("'what?'", None, 0),
        ("\n%%time\nx = 1", "\n# a cell magic stood here\nx = 1", 1),
        ("%%bash\nls", "# %%bash\n# ls", 1),
        ("", "", 0),
        ("\r\n%time\r\nx", "\npass  # a magic\nx", 1),
    ],
)
def test_magics_are_taken_out(code, expected, taken):
    assert neutral(code) == (code if expected is None else expected, taken)


@pytest.mark.parametrize("text", [" " * 10**6, "a" * 10**6, "%" * 10**6, "'" * 10**6])
def test_long_lines_take_no_time(text):
    began = time.process_time()
    neutral(text)
    neutral(text + "\n!")
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "source, role, questions",
    [
        ("# @answer q1", "answer", ("q1",)),
        ("#@Answer  Q2\nx", "answer", ("q2",)),
        ("%%time\n# @answer q1", "answer", ("q1",)),
        ("x = 1\n    # @check q3 please", "check", ("q3",)),
        ("# @check q1\n# @answer q1", "answer", ("q1",)),
        ("# @answer q1\n# @answer q2\n# @answer q1", "answer", ("q1", "q2")),
        ("x = '# @answer q1'", "given", ()),
        ("# @answered q1", "given", ()),
        ("# @answer 1", "given", ()),
    ],
)
def test_marks_say_what_a_cell_is(tmp_path, source, role, questions):
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps(notebook([source])))
    (cell,) = read(path).cells
    assert (cell.role, cell.questions, cell.number) == (role, questions, 2)


def test_marks_come_before_metadata(tmp_path):
    made = notebook(["# @answer q1", "x = 1"])
    for cell in made["cells"]:
        cell["metadata"] = {"kvq": {"role": "check", "question": "q2"}}
    (tmp_path / "x.ipynb").write_text(json.dumps(made))
    one, two = read(tmp_path / "x.ipynb").cells
    assert (one.role, one.questions) == ("answer", ("q1",))
    assert (two.role, two.questions) == ("check", ("q2",))


@pytest.mark.parametrize(
    "code, own",
    [
        ("# @answer q1\ndef square(x): return 1", True),
        ("# @answer q1\n%%time\nasync def square(x): return 1", True),
        ("# @answer q1\nclass square: pass", True),
        ("# @answer q2\ndef square(x): return 1", False),
        ("# @check q1\ndef square(x): return 1", False),
        ("# @answer q1\ndef squares(x): return 1", False),
        ("# @answer q1\nsquare(3)", False),
        ("def square(x): return 1", False),
    ],
)
def test_answers_to_this_homework_are_told_from_others(tmp_path, code, own):
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps(notebook([code])))
    assert asks_for(key(), read(path).cells) is own


@pytest.mark.parametrize("path", sorted((ROOT / "exercises").glob("*.ipynb")))
def test_exercises_are_of_their_homework_and_of_no_other(path):
    """Also where editors dropped the metadata: the title says it."""
    made = json.loads(path.read_text())
    found = read(path)
    keys = [load(at) for at in sorted((ROOT / "solutions" / "keys").glob("*.json"))]
    assert [k["homework"] for k in keys if asks_for(k, found.cells)] == [found.homework]
    assert path.name.startswith(found.homework)
    titled = _homework({**made, "metadata": {}})
    assert titled == found.homework
