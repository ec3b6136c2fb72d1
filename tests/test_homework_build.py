"""Building homework: exercises, solutions and keys, the same bytes each time."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from kvq_lib.cli import main
from kvq_lib.course.homework import author, build, keys, new, notebooks, source
from kvq_lib.course.homework.compare import same

SAMPLE = Path(__file__).parent / "homework_sample" / "hw99_sample.md"
TEXT = SAMPLE.read_text(encoding="utf-8")
EXERCISE, SOLUTION = (
    Path("exercises/hw99_sample.ipynb"),
    Path("solutions/hw99_sample.ipynb"),
)
KEY = Path("solutions/keys/hw99.json")


def checkout(root, text=TEXT):
    """A folder with one homework and its chapter."""
    (root / "solutions" / "source").mkdir(parents=True)
    (root / "book").mkdir()
    (root / "book" / "02_memory_bottleneck.ipynb").touch()
    (root / build.SOURCES / SAMPLE.name).write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder in which the sample was built once; nobody changes it."""
    root = checkout(tmp_path_factory.mktemp("built"))
    made = build.build(root)
    assert made.changed == [EXERCISE, SOLUTION, KEY] and not made.problems
    return root


@pytest.fixture
def root(built, tmp_path):
    """A copy of that folder."""
    shutil.copytree(built, tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def homework(tmp_path):
    """The sample, with some of its text replaced."""

    def call(*replaced):
        text = TEXT
        for old, new_text in replaced:
            assert old in text
            text = text.replace(old, new_text, 1)
        path = tmp_path / SAMPLE.name
        path.write_text(text, encoding="utf-8")
        return source.read(path)

    return call


@pytest.fixture
def kvq(capsys):
    """Run `kvq homework ...`: exit status, stdout, stderr."""

    def call(*arguments):
        try:
            status = main(["homework", *map(str, arguments)])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


def cells(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    return notebook, {cell.id: cell for cell in notebook.cells}


# -- exercises -----------------------------------------------------------------------


def test_an_exercise_has_stubs_and_no_outputs(built):
    notebook, named = cells(built / EXERCISE)
    assert [cell.id for cell in notebook.cells] == [
        "intro-text",
        "intro-given",
        "q1-text",
        "q1-answer",
        "q1-check",
        "q2-text",
        "q2-answer",
        "q2-check",
        "q2-text-2",
    ]
    assert named["q1-answer"].source.endswith('\n    raise NotImplementedError("q1")')
    assert "2 * numbers" not in (built / EXERCISE).read_text()
    assert "SOLUTION" not in (built / EXERCISE).read_text()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


def test_products_say_their_points(built):
    for path in (EXERCISE, SOLUTION):
        _, named = cells(built / path)
        assert "*6 points in 2 questions; about 10 minutes.*" in (
            named["intro-text"].source
        )
        assert named["q1-text"].source.startswith(
            "## Question 1: bytes of a cache\n\n*3 points.*\n\nA cache stores"
        )
        assert "points" not in named["q2-text-2"].source


def test_metadata_of_products_tell_roles_alone(built):
    for path in (EXERCISE, SOLUTION):
        notebook, named = cells(built / path)
        assert named["q2-check"].metadata == {
            "kvq": {"role": "check", "question": "q2"}
        }
        assert notebook.metadata == {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
            "kvq": {"homework": "hw99", "chapter": "book/02_memory_bottleneck"},
        }


@pytest.mark.parametrize("path", [EXERCISE, SOLUTION])
def test_products_hold_neither_probes_nor_mutants(built, path):
    text = (built / path).read_text(encoding="utf-8")
    for question in source.read(SAMPLE).questions:
        for graded in (*question.probes, *question.mutants):
            assert graded.name not in text
            assert graded.code.split("\n")[-1].strip() not in text
    assert "hidden" not in text and "mutant" not in text


def test_ids_stay_when_another_question_changes(homework):
    before = notebooks.exercise(homework())
    extra = "```{code-cell} ipython3\nextra = 1\n```\n\n## Question 2: pages"
    after = notebooks.exercise(homework(("## Question 2: pages", extra)))
    assert {cell.id for cell in after.cells} - {cell.id for cell in before.cells} == {
        "q1-given"
    }


# -- solutions -----------------------------------------------------------------------


def test_what_explains_a_solution_is_in_no_exercise(built):
    assert "Sixteen" not in (built / EXERCISE).read_text()
    _, named = cells(built / SOLUTION)
    assert named["q1-explain"].source.startswith("Sixteen bits")


def test_a_solution_was_run(built):
    notebook, named = cells(built / SOLUTION)
    counts = [c.execution_count for c in notebook.cells if c.cell_type == "code"]
    assert counts == [1, 2, 3, 4, 5]
    assert named["q1-check"].outputs == [
        {"name": "stdout", "output_type": "stream", "text": "q1: the check passes.\n"}
    ]
    assert "SOLUTION" not in (built / SOLUTION).read_text()
    assert "execution" not in named["q1-check"].metadata


def run(homework):
    notebook = notebooks.solution(homework)
    notebooks.execute(notebook, homework)
    return notebook


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("object()", "the output holds a memory address: '0x7"),
        ("print('/home/someone/x')", "the output holds a path of this machine"),
        ("import os; print(os.getcwd())", "the output holds a path of this machine"),
        ("import warnings; warnings.warn('old')", "a warning: "),
        ("1 / 0", "the solution fails in this cell: ZeroDivisionError: division by"),
        ("import os; os._exit(1)", "running stopped after this cell: "),
    ],
)
def test_outputs_that_differ_elsewhere_are_refused(homework, code, said):
    broken = homework(("import math", f"import math\n\n{code}"))
    with pytest.raises(source.SourceError) as caught:
        run(broken)
    problem = caught.value.problems[0]
    assert problem.message.startswith(said)
    line = TEXT.split("\n").index("import math") + 1
    assert problem.line == (line if "stopped" not in said else problem.line)


def test_a_cell_that_does_not_end_is_told(homework, monkeypatch):
    monkeypatch.setattr(notebooks, "CELL_SECONDS", 3)
    endless = homework(("import math", "import math\n\nwhile True:\n    pass"))
    with pytest.raises(source.SourceError, match="running stopped after this cell"):
        run(endless)


SLOW = "import time\n\nprint(1, flush=True)\ntime.sleep(0.5)\nprint(2)"


def test_pictures_are_dropped_and_their_text_stays(homework):
    draw = "import matplotlib.pyplot as plt\n\nfig, ax = plt.subplots()\nplt.show()\n"
    notebook = run(homework(("import math", f"import math\n\n{draw}{SLOW}")))
    text = nbformat.writes(notebook)
    assert "image/png" not in text
    picture, printed = notebook.cells[1].outputs
    assert picture.data == {"text/plain": "<Figure size 640x480 with 1 Axes>"}
    assert printed.text == "1\n2\n", "one output, however the kernel sent it"


def test_user_settings_do_not_reach_solutions(homework, tmp_path, monkeypatch):
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "x.py").write_text("import builtins\nbuiltins.own = 1\n")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    look = "import math\n\nimport builtins\n\nprint(hasattr(builtins, 'own'))"
    output = run(homework(("import math", look))).cells[1].outputs
    assert [printed.text for printed in output] == ["False\n"]


# -- keys ----------------------------------------------------------------------------


def test_a_key_holds_probes_and_the_values_of_the_solution(built):
    key = json.loads((built / KEY).read_text())
    assert list(key) == ["format", "hash", "homework", "questions", "title", "torch"]
    assert (key["homework"], key["format"], key["torch"]) == ("hw99", 1, False)
    first, second = key["questions"]
    assert first["probes"][0] == {
        "name": "a real model",
        "points": 2.0,
        "rtol": 1e-6,
        "atol": 0.0,
        "seed": 0,
        "code": "[cache_bytes(32, 8, 128, n) for n in (1, 4096)]",
        # 4 bytes for each pair of numbers: 4 · 32 · 8 · 128 · n
        "expected": [131072, 536870912],
    }
    assert second["title"] == "pages of a sequence"
    assert second["probes"][0]["expected"] == [1, 2, 2, 3, 32]
    assert second["probes"][1]["expected"] == [15 / 16, 0.0, 15 / 48]
    assert key["hash"] == keys.digest(key)


def test_a_key_changes_its_hash_with_anything_in_it(built):
    key = json.loads((built / KEY).read_text())
    digest = keys.digest(key)
    key["questions"][0]["probes"][0]["expected"][0] += 1
    assert keys.digest(key) != digest


GUESSED = [True, None, [], [True, False], {"a": None}, 3, -7, [30] * 9, "x", 0.5]
KEPT = [300, [10, 20], 0.123456, "page 7", {"a": [10, 20]}, [True, 1000], -1e9]


@pytest.mark.parametrize("value", GUESSED)
def test_values_that_are_easy_to_guess_are_refused(value):
    assert keys.weakness(value)


@pytest.mark.parametrize("value", KEPT)
def test_values_that_are_not_are_kept(value):
    assert keys.weakness(value) is None


@pytest.mark.parametrize("value", [float("nan"), [1.5, float("inf")]])
def test_values_that_are_no_numbers_are_refused(value):
    assert "holds infinity or no number" in keys.weakness(value)


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ("bool(cache_bytes(1, 1, 1, 1))", "a small model: the value is a bare True"),
        ("[cache_bytes]", "the probe 'a small model' returned something else than"),
        ("cache_bytes(1)", "the probe 'a small model' raised an error (TypeError)"),
    ],
)
def test_probes_without_a_good_value_are_told_with_their_line(root, probe, said):
    text = TEXT.replace("cache_bytes(30, 3, 64, 1000)", probe)
    (root / build.SOURCES / SAMPLE.name).write_text(text, encoding="utf-8")
    before = (root / KEY).read_bytes()
    made = build.build(root)
    assert [p.line for p in made.problems] == [text.split("\n").index(probe) + 1]
    assert made.problems[0].message.startswith(said)
    assert (root / KEY).read_bytes() == before


def test_a_value_that_agrees_with_the_old_one_is_not_replaced(built):
    key = json.loads((built / KEY).read_text())
    old = json.loads((built / KEY).read_text())
    probe = old["questions"][1]["probes"][1]
    probe["expected"][0] *= 1 + 1e-12
    assert keys.keep_values(key, old, same)["questions"] == old["questions"]
    probe["expected"][0] *= 1 + 1e-6
    kept = keys.keep_values(json.loads((built / KEY).read_text()), old, same)
    assert kept["questions"] != old["questions"]
    assert kept["hash"] == keys.digest(kept)


# -- building again ------------------------------------------------------------------


def test_building_again_gives_the_same_bytes(root):
    for path in (EXERCISE, SOLUTION, KEY):
        (root / path).unlink()
    assert build.build(root).changed == [EXERCISE, SOLUTION, KEY]
    assert build.build(root, check=True).changed == []


def test_a_notebook_that_was_edited_by_hand_is_named_with_its_cell(root):
    build.build(root)
    path = root / EXERCISE
    notebook = json.loads(path.read_text())
    notebook["cells"].insert(2, {"cell_type": "code", "source": ["1 / 0\n", "2"]})
    path.write_text(json.dumps(notebook))
    found = build.build(root, check=True).differences[EXERCISE]
    assert found.startswith("cell 3, line 1: '1 / 0', built: ")
    path.write_text("{")
    said = build.build(root, check=True).differences[EXERCISE]
    assert said.startswith("1 lines, built: ")


@pytest.fixture
def bytes_of(built):
    return {path: (built / path).read_bytes() for path in (EXERCISE, SOLUTION, KEY)}


def test_building_elsewhere_gives_the_same_bytes(tmp_path, bytes_of):
    other = checkout(tmp_path / "another folder")
    build.build(other)
    assert {path: (other / path).read_bytes() for path in bytes_of} == bytes_of


def test_check_names_what_differs_and_writes_nothing(root, kvq, bytes_of):
    status, out, err = kvq("build", "--check", "--root", root)
    assert (status, err) == (0, "")
    assert out == "As their sources make them: 3 files.\n"
    (root / EXERCISE).write_bytes(bytes_of[EXERCISE].replace(b"Count", b"Guess", 1))
    (root / KEY).unlink()
    (root / "exercises" / "hw01_gone.ipynb").write_text("{}")
    (root / "solutions" / "hw01_gone.ipynb").write_text("{}")
    (root / "solutions" / "keys" / "hw01.json").write_text("{}")
    before = sorted(root.rglob("*"))
    status, out, err = kvq("build", "--check", "--root", root)
    assert (status, err) == (1, "")
    assert re.search(
        rf"^differs: {EXERCISE} \(cell \d+, line \d+: 'Guess its", out, re.M
    )
    assert f"differs: {KEY} (missing)" in out and str(SOLUTION) not in out
    assert out.count("stale: ") == 3 and "stale: solutions/keys/hw01.json" in out
    assert sorted(root.rglob("*")) == before
    assert b"Guess" in (root / EXERCISE).read_bytes()


def test_a_homework_with_problems_leaves_the_others_alone(root, kvq):
    broken = root / build.SOURCES / "hw98_broken.md"
    text = TEXT.replace("homework: hw99", "homework: hw98").replace(
        "role: check", "x: 1"
    )
    broken.write_text(text, encoding="utf-8")
    (root / EXERCISE).unlink()
    status, out, err = kvq("build", "--root", root)
    assert status == 1
    assert f"written: {EXERCISE}" in out and "hw98" not in out
    lines = err.splitlines()
    assert len(lines) > 2 and all(line.startswith(f"{broken}:") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("build", "hw07"), "no homework named 'hw07': there are hw99_sample"),
        (("build", "--hidden", "x"), "--hidden and --keys go together"),
        (("build", "--keys", "x"), "--hidden and --keys go together"),
        (("verify", "--jobs", "0"), "--jobs must be 1 or more"),
        (("verify", "hw07"), "no homework named 'hw07'"),
        (("new", "hw99", "--topic", "a", "--chapter", "book/02_memory_bottleneck"),
         "hw99 is there"),
        (("new", "hw1", "--topic", "a", "--chapter", "book/x"), "named like"),
        (("new", "hw98", "--topic", "!", "--chapter", "book/x"), "needs a few words"),
        (("new", "hw98", "--topic", "a", "--chapter", "book/03_x"), "no chapter"),
    ],
)  # fmt: skip
def test_bad_usage_is_said_in_one_line(built, kvq, arguments, said):
    status, out, err = kvq(*arguments, "--root", built)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1


def test_names_choose_what_is_built(root, kvq):
    other = TEXT.replace("homework: hw99", "homework: hw98")
    (root / build.SOURCES / "hw98_other.md").write_text(other, encoding="utf-8")
    for name in ("hw99", "hw99_sample"):
        assert [p.stem for p in build.sources(root, [name])] == ["hw99_sample"]
    assert [p.stem for p in build.sources(root)] == ["hw98_other", "hw99_sample"]
    (root / build.SOURCES / "hw98_twin.md").write_text(other, encoding="utf-8")
    assert "which is it?" in kvq("build", "--root", root)[2]


# -- a new homework, and what it loads -----------------------------------------------


def test_a_template_is_a_homework(tmp_path, kvq):
    root = checkout(tmp_path)
    path = new.new(root, "hw98", "Mean squares", "book/02_memory_bottleneck.ipynb")
    assert path == root / "solutions" / "source" / "hw98_mean_squares.md"
    homework = source.read(path)
    assert homework.title == "Homework 98: Mean squares"
    assert {cell.role for cell in homework.cells} == set(source.OPTIONS)
    assert kvq("build", "hw98", "--root", root)[0] == 0
    assert kvq("verify", "hw98", "--root", root)[0] == 0


def loaded(*commands):
    """The modules that are loaded after some commands."""
    code = f"""
import contextlib, sys
from kvq_lib.cli import main
for command in {commands!r}:
    with contextlib.suppress(SystemExit):
        main(command)
print("loaded:", *sys.modules)
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(found.stdout.split("loaded:")[1].split())


def test_plan_loads_no_notebooks():
    config = str(Path(__file__).parent / "configs" / "llama-3.1-8b.json")
    plan = ["plan", config, "--gpu", "24GiB", "--context", "4096"]
    modules = loaded(plan, ["homework", "build", "--help"])
    heavy = {"nbformat", "jupytext", "nbclient", "jupyter_client", "IPython"}
    assert "kvq_lib.plan" in modules and not heavy & modules


def test_missing_packages_are_said_in_one_line(kvq, monkeypatch, tmp_path):
    from kvq_lib.course.homework import commands

    monkeypatch.setattr(commands, "PACKAGES", ("nbformat", "no_such", "nor_this"))
    status, out, err = kvq("build", "--root", tmp_path)
    assert (status, out) == (2, "")
    assert "no_such, nor_this missing: pip install 'kvq-lib[homework]'" in err


def test_the_checkout_is_found_around_the_current_folder(monkeypatch, tmp_path):
    from kvq_lib.course.homework import commands

    (tmp_path / "kvq_lib").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "book" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "book" / "deep")
    assert commands.find_root() == tmp_path
    assert commands.find_root(tmp_path / "book") == tmp_path / "book"


def test_authors_run_in_the_sandbox_of_the_grader():
    assert author.sandbox().level in ("bwrap", "unshare", "limits")
