"""Verifying homework: who is right gets everything, who is wrong does not."""

import json
import re
from pathlib import Path

import pytest

from kvq_lib.cli import main
from kvq_lib.course.homework import build, keys, source, verify

SAMPLE = Path(__file__).parent / "homework_sample" / "hw99_sample.md"
TEXT = SAMPLE.read_text(encoding="utf-8")
KEY = Path("solutions/keys/hw99.json")


@pytest.fixture
def root(tmp_path):
    """Write the sample, with some of its text replaced, and its key; their folder."""

    def call(*replaced):
        text = TEXT
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new, 1)
        path = tmp_path / build.SOURCES / SAMPLE.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        key = build.key(source.read(path), tmp_path / KEY)
        (tmp_path / KEY).parent.mkdir(exist_ok=True)
        (tmp_path / KEY).write_bytes(key)
        return tmp_path

    return call


@pytest.fixture
def found(root):
    """What verifying the changed sample finds."""

    def call(*replaced, **options):
        folder = root(*replaced)
        homework = source.read(folder / build.SOURCES / SAMPLE.name)
        return verify.verify(homework, folder, **options)

    return call


@pytest.fixture
def failures(found):
    """What verifying the changed sample says: (line's text, message) each."""

    def call(*replaced):
        verified = found(*replaced)
        lines = verified.homework.path.read_text(encoding="utf-8").splitlines()
        return [(lines[p.line - 1], p.message) for p in verified.failures]

    return call


def test_the_sample_holds(found):
    verified = found(jobs=2)
    assert verified.failures == []
    points = {
        row.name: [float(score.points) for score in row.scores.values()]
        for row in verified.rows
    }
    assert points == {
        "solution": [3, 3],
        "blank": [0, 0],
        "values forgotten": [0, 3],
        "one layer only": [0, 3],
        "rounds down": [3, 0],
        "always one page more": [3, 0],
    }
    caught = [row.name for row in verified.rows if row.caught]
    assert caught == ["values forgotten", "rounds down", "always one page more"]


def test_the_table_shows_points_and_what_checks_see(found):
    lines = verify.table(found()).splitlines()
    rows = {line[:24].strip(): line[24:].split() for line in lines[:-1]}
    assert rows["hw99_sample, full marks"] == ["3", "3"]
    assert rows["solution"] == ["3", "3", "passes"]
    assert rows["blank"] == ["0", "0", "fails"]
    assert rows["q1: one layer only"] == ["0", "3", "passes"]
    assert rows["q2: rounds down"] == ["3", "0", "catches", "it"]
    assert re.match(r"The visible checks catch 3 of 4 mutants .* 6 runs", lines[-1])


COUNTS = "[pages(n) for n in (1, 31, 32, 33, 500)]"
WASTE = "[waste(n) for n in (1, 32, 33)]"
SMALL = "cache_bytes(30, 3, 64, 1000)"
Q2 = "## Question 2: pages of a sequence"


def test_a_mutant_that_keeps_its_points_is_named(failures):
    full = "[pages(n) for n in (160, 320, 640)]", "[waste(n) + n for n in (160, 320)]"
    said = failures((COUNTS, full[0]), (WASTE, full[1]))
    assert said == [
        (
            "# @answer q2",
            "the mutant 'rounds down' of q2 gets 3 of 3 points in q2: no probe sees it",
        )
    ]


def test_a_mutant_that_loses_some_points_is_enough(failures):
    assert failures((COUNTS, "[pages(n) for n in (160, 320, 640)]")) == []


def test_a_mutant_that_only_crashes_is_named(failures):
    crash = "    return max(1, tokens // PAGE)", "    return tokens // 0"
    said = failures(crash)
    assert [message for _, message in said] == [
        "the mutant 'rounds down' of q2 loses points only by failures (raised): "
        "it must return a wrong value"
    ]


SPREAD = COUNTS, "[pages(n) + cache_bytes(2, 1, 1, n) for n in (1, 31, 500)]"


def test_a_mutant_that_costs_another_question_is_named(failures):
    said = [message for _, message in failures(SPREAD)]
    assert said == [
        f"the mutant {name!r} of q1 gets 1.5 of 3 points in q2: keep its error out of "
        "there, or say `also: [q2]`"
        for name in ("values forgotten", "one layer only")
    ]


def test_also_allows_it_to_the_mutant_that_says_so(failures):
    also = '"values forgotten"}', '"values forgotten", also: [q2]}'
    said = [message for _, message in failures(SPREAD, also)]
    assert len(said) == 1 and "'one layer only'" in said[0]


def test_points_without_an_answer_are_named(failures):
    said = failures((SMALL, "[math.sqrt(n) for n in (2, 3)]"))
    heading = "## Question 1: bytes of a cache"
    assert (heading, "the blank exercise gets 1 of 3 points in q1") in said


def test_a_check_that_a_blank_exercise_passes_is_named(failures):
    empty = re.sub(r"assert \w+\(.*\n", "", TEXT)
    start = empty.index("# @check q2")
    check = empty[start : empty.index("```", start)]
    old = TEXT[TEXT.index("# @check q2") :]
    old = old[: old.index("```")]
    new = check.replace("PAGE == 16", "PAGE")
    assert failures((old, new)) == [(Q2, "the blank exercise passes the check of q2")]


def test_a_check_that_the_solution_fails_is_named(failures):
    assert failures(("pages(17) == 2", "pages(17) == 3")) == [
        (Q2, "the solution fails the check of q2")
    ]


def test_an_answer_that_cannot_run_without_its_solution_is_named(failures):
    end = "    ### END SOLUTION\n```\n\n+++"
    call = end, end.replace("```", "\n\n_ = cache_bytes(1, 1, 1, 1)\n```")
    assert failures(call) == [
        ("# @answer q1", "blank: this cell was left as it was (NotImplementedError)")
    ]


def test_checks_change_nothing_for_what_comes_after(failures):
    shadow = "# @check q1\n", "# @check q1\npages = 3\n"
    used = (
        "def pages(tokens: int) -> int:",
        "def pages(tokens: int, x: int = 0) -> int:",
    )
    assert failures(shadow, used) == []
    math = "# @check q1\n", "# @check q1\nmath.ceil = None\n"
    assert failures(math), "but what they spoil elsewhere is seen"


def changed(folder, change, hashed=True):
    key = json.loads((folder / KEY).read_text())
    change(key)
    if hashed:
        key["hash"] = keys.digest(key)
    (folder / KEY).write_bytes(keys.write(key))


def test_a_solution_that_the_key_does_not_take_is_named(root):
    folder = root()

    def other(key):
        key["questions"][1]["probes"][1]["expected"][0] += 1e-3

    changed(folder, other)
    homework = source.read(folder / build.SOURCES / SAMPLE.name)
    said = [p.message for p in verify.verify(homework, folder).failures]
    assert said[0] == "the solution gets 1.5 of 3 points in q2: wrong"


def probe(**values):
    return lambda key: key["questions"][0]["probes"][0].update(values)


@pytest.mark.parametrize(
    ("change", "hashed", "said"),
    [
        (None, False, "no key: "),
        (lambda key: key["questions"][0].update(title="x"), False, "was changed after"),
        (lambda key: key.update(format=2), True, "build"),
        (lambda key: key["questions"][0]["probes"].pop(), True, "holds other probes"),
        (lambda key: key["questions"].reverse(), True, "holds other probes"),
        (probe(code="[cache_bytes(1, 1, 1, 77)]"), True, "holds other probes"),
        (probe(rtol=0.5), True, "holds other probes"),
        (probe(seed=1), True, "holds other probes"),
    ],
)
def test_a_key_that_does_not_fit_is_named_and_nothing_runs(root, change, hashed, said):
    folder = root()
    if change is None:
        (folder / KEY).unlink()
    else:
        changed(folder, change, hashed)
    homework = source.read(folder / build.SOURCES / SAMPLE.name)
    verified = verify.verify(homework, folder)
    assert verified.rows == [] and len(verified.failures) == 1
    assert verified.failures[0].path == folder / KEY
    message = verified.failures[0].message
    assert said in message and "run `kvq homework build hw99` first" in message


def test_the_command_names_failures_and_returns_1(root, capsys):
    folder = root(("pages(17) == 2", "pages(17) == 3"))
    assert main(["homework", "verify", "--root", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert "hw99_sample, full marks" in out
    assert re.fullmatch(r"\S+hw99_sample.md:\d+: the solution fails .* q2\n", err)
    folder = root()
    assert main(["homework", "verify", "hw99", "--jobs=2", "--root", str(folder)]) == 0
    assert capsys.readouterr().err == "", "no bar without a terminal"


def test_a_source_with_problems_fails_and_the_others_are_verified(root, capsys):
    folder = root()
    broken = folder / build.SOURCES / "hw98_broken.md"
    broken.write_text(TEXT, encoding="utf-8")
    assert main(["homework", "verify", "--root", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert "hw99_sample, full marks" in out
    assert err.startswith(f"{broken}:1: the file must be named hw99_topic.md")


PRIVATE = """\
```{code-cell} ipython3
---
kvq: {role: hidden, question: q2, name: "secret", points: 3}
---
[pages(n) for n in (160, 320, 480)]
```
"""


def test_private_probes_are_verified_without_their_key(root, capsys, tmp_path):
    folder, hidden = root(), tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "hw99.md").write_text(PRIVATE)
    call = ["homework", "verify", "--hidden", str(hidden), "--root", str(folder)]
    assert main(call) == 1
    assert "'rounds down' of q2 gets 3 of 3" in capsys.readouterr().err
    (hidden / "hw99.md").write_text(PRIVATE.replace("160", "170"))
    assert main(call) == 0
