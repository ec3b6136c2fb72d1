"""From a folder to grades: the command line, shards, lateness, merging."""

import json
import os
import threading
import time

import pytest
from homework_course import HALF, RIGHT, ROOT, Course, document
from hostile import GIVEN, key, notebook

from kvq_lib import cli
from kvq_lib.course.homework import grade, late, merge, pipe
from kvq_lib.course.homework.journal import Journal
from kvq_lib.course.homework.levels import choose
from kvq_lib.course.homework.sandbox import Limits
from kvq_lib.errors import InvalidArgument, KVQError

DUE = "2026-03-01T23:59+01:00"


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path)


@pytest.fixture
def graded(monkeypatch):
    """Files that are really graded; others are taken from an earlier run."""
    names, real = [], grade.Grader._graded

    def note(self, entry):
        names.append(entry.student)
        return real(self, entry)

    monkeypatch.setattr(grade.Grader, "_graded", note)
    return names


# -- the command ---------------------------------------------------------------------


def test_a_class_is_graded(course, graded):
    course.hand_in(ann=RIGHT, bob=HALF, cyd="no notebook")
    (course.folder / "class.csv").write_text("name,student\nA,ann\nB,bob\nD,dan\n")
    options = ["--class", course.folder / "class.csv"]
    options += ["--feedback", course.folder / "feedback"]
    text, status = course.grade(*options)
    assert status == 1
    table = course.table()
    got = {name: (row["status"], row["total"]) for name, row in table.items()}
    assert got == {
        "ann": ("ok", "5"),
        "bob": ("ok", "3"),
        "cyd": ("unreadable", "0"),
        "dan": ("missing", "0"),
    }
    assert table["ann"]["sandbox"] == "bwrap" and table["ann"]["file"] == "ann.ipynb"
    assert table["cyd"]["notes"].startswith("not in the class list; not JSON")
    assert "4 students: 1 missing, 2 ok, 1 unreadable" in text
    assert "  cyd: unreadable" in text
    assert "50%  q1: square" in text and "100%  q2: means" in text
    assert "percent of the points (median 80)" in text
    feedback = course.folder / "feedback"
    assert sorted(path.name for path in feedback.iterdir()) == [
        "ann.md",
        "bob.md",
        "cyd.md",
    ]
    said = (feedback / "bob.md").read_text()
    assert said.startswith("# Squares\n") and "**3 of 5 points**" in said
    assert "| q1: square | 0 of 2 | a value was wrong |" in said
    assert "| q2: means \\| running | 3 of 3 | full marks |" in said
    said = (feedback / "cyd.md").read_text()
    assert "could not be read" in said
    assert "Why: not JSON, or cut off (line 1, column 1)." in said
    assert not (course.folder / "grades.json.part").exists()

    # A second run grades what has changed and nothing else.
    graded.clear()
    course.hand_in(bob=RIGHT)
    course.grade(*options)
    assert sorted(graded) == ["bob", "cyd"] and course.table()["bob"]["total"] == "5"
    graded.clear()
    course.grade(*options, "--restart")
    assert sorted(graded) == ["ann", "bob", "cyd"]
    graded.clear()
    course.grade(*options, "--memory", "1GiB")
    assert sorted(graded) == ["ann", "bob", "cyd"]


def test_accents_are_the_same_however_they_are_written(course):
    one, two = "Zoe\u0308", "Zo\u00eb"
    course.hand_in(**{one: "no notebook"})
    (course.folder / "class.csv").write_text(f"student\n{one}\n")
    course.grade("--class", course.folder / "class.csv")
    assert [(n, row["status"]) for n, row in course.table().items()] == [
        (two, "unreadable")
    ]


def test_a_stopped_run_goes_on(course, graded, monkeypatch, capsys):
    course.hand_in(ann=RIGHT, bob=RIGHT, cyd=RIGHT)
    real = grade.Grader._graded

    def stop(self, entry):
        if entry.student == "cyd":
            raise KeyboardInterrupt
        return real(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(grade.Grader, "_graded", stop)
        assert course.grade("--jobs", 1) == ("", 130)
    assert "run it again" in capsys.readouterr().err
    assert not (course.folder / "grades.csv").exists()
    with (course.folder / "grades.json.part").open("a") as file:
        file.write('{"student": "cyd", "fing')  # the computer went off
    graded.clear()
    assert course.grade()[1] == 0
    assert graded == ["cyd"]
    assert {row["total"] for row in course.table().values()} == {"5"}


def test_a_line_that_was_cut_off_costs_no_other(tmp_path):
    path = tmp_path / "grades.json"
    (tmp_path / "grades.json.part").write_text('{"student": "ann"}\n{"student": "bo')
    with Journal(path) as journal:
        journal.keep({"student": "cyd"})
    with Journal(path) as journal:
        assert [row["student"] for row in journal.known()] == ["ann", "cyd"]
        journal.forget()
        assert journal.known() == []


def test_an_interrupt_ends_what_runs(course):
    """Ctrl-C does not wait for the time of a cell to pass."""
    course.hand_in(ann=json.dumps(notebook([GIVEN, "time.sleep(600)"])))
    timer = threading.Timer(3, pipe.interrupted.set)
    timer.start()
    began = time.monotonic()
    entries = grade.find(course.submissions, "hw90").entries
    grader = grade.Grader(key(), choose("bwrap", ROOT), Limits(seconds=200))
    try:
        with pytest.raises(pipe.Interrupted):
            grade.grade(entries, grader)
    finally:
        timer.cancel()
        pipe.interrupted.clear()
    assert time.monotonic() - began < 100


def test_two_runs_do_not_write_one_file(course):
    course.hand_in(ann=RIGHT)
    with Journal(course.folder / "grades.json"):
        with pytest.raises(InvalidArgument, match="another run"):
            course.grade()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--jobs", "0"], "--jobs must be 1"),
        (["--time", "0"], "--time must be"),
        (["--time", "nan"], "--time must be"),
        (["--memory", "1MiB"], "--memory must be"),
        (["--memory", "much"], "memory"),
        (["--late", "10%/day"], "--late needs --due"),
        (["--due", "2026-03-01"], "no time zone"),
        (["--key", "nothing.json"], "no key"),
        (["--times", "nothing.csv", "--due", DUE], "nothing.csv"),
        (["--times", "times.csv"], "--times needs --due"),
    ],
)
def test_bad_usage_is_told(course, options, message):
    with pytest.raises(KVQError, match=message):
        course.grade(*options)


@pytest.mark.parametrize(
    "change", [{"title": "other"}, {"hash": 1}, {"format": 2}, {"homework": "hw91"}]
)
def test_a_key_that_was_changed_is_refused(course, change):
    course.key.write_text(json.dumps(key() | change))
    with pytest.raises(InvalidArgument, match=r"hw90\.json"):
        course.grade()


@pytest.mark.parametrize("name", ["hw2", "hw99", "hw99_words"])
def test_a_homework_that_is_not_there_is_told_with_those_that_are(course, name):
    arguments = ["grade", name, course.submissions, "--root", ROOT]
    with pytest.raises(InvalidArgument, match=r"there are hw02, hw03, .*hw10"):
        course.run(*arguments, *course.outputs("x"))


def test_a_folder_without_submissions_is_told(course, capsys):
    (course.submissions / "essay.pdf").write_text("x")
    text, status = course.grade()
    assert (status, course.table()) == (0, {}) and "0 students: none" in text
    assert "holds no submissions" in capsys.readouterr().err
    course.hand_in(ann="no notebook")
    assert "hw90: 1 student: 1 unreadable" in course.grade()[0]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("wrong", ["--job=2", "--ou"])
def test_a_wrong_option_names_the_command_whose_help_says_more(course, capsys, wrong):
    arguments = ["homework", "grade", "hw90", course.submissions, wrong]
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, [*arguments, *course.outputs("x")])))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("kvq homework grade: error: ") and wrong in said
    assert said.endswith("(see --help)\n") and said.count("\n") == 1


def test_the_weakest_sandbox_is_refused_with_reasons(course, capsys):
    assert course.grade("--sandbox", "limits") == ("", 2)
    said = capsys.readouterr().err
    assert "stay open" in said and "--allow-weak" in said and said.count("\n") > 2
    course.hand_in(ann=RIGHT)
    assert course.grade("--sandbox", "limits", "--allow-weak")[1] == 0
    assert course.table()["ann"]["sandbox"] == "limits"


def test_a_key_of_another_homework_is_refused(course):
    arguments = ["grade", "hw91", course.submissions, "--key", course.key]
    with pytest.raises(InvalidArgument, match="is the key of hw90"):
        course.run(*arguments, *course.outputs("x"))
    for arguments in (["../hw90", course.submissions], ["hw90", course.key]):
        with pytest.raises(InvalidArgument, match=r"is no (homework|folder)"):
            course.run("grade", *arguments, *course.outputs("x"))


def test_files_of_the_instructor_are_no_submissions(course):
    course.submissions.rmdir()
    course.submissions = course.folder
    (course.folder / "ann.ipynb").write_text(RIGHT)
    (course.folder / "class.csv").write_text("student\nann\n")
    for _ in range(2):  # the second time, there are grades, too
        text, status = course.grade("--class", course.folder / "class.csv")
        assert status == 0 and list(course.table()) == ["ann"]
        assert "skipped" not in text


# -- shards and merging --------------------------------------------------------------


def test_shards_together_are_the_whole(course, capsys):
    names = [f"s{n}" for n in range(12)]
    course.hand_in(**dict.fromkeys(names, "no notebook"))
    course.hand_in(s3=HALF)
    (course.folder / "class.csv").write_text(
        "student\n" + "\n".join([*names, "x", "y"])
    )
    options = ["--class", course.folder / "class.csv"]
    course.grade(*options, name="whole")
    for part in (1, 2, 3):
        course.grade(*options, "--shard", f"{part}/3", name=f"part{part}")
    sizes = [len(course.table(f"part{part}")) for part in (1, 2, 3)]
    assert sum(sizes) == 14 and max(sizes) < 12
    text, status = course.merge("part3", "part1", "part2")
    assert course.table("all") == course.table("whole")
    assert status == 1 and "2 students without a submission: x, y" in (
        capsys.readouterr().err
    )
    assert "14 students" in text
    course.merge("part1", "part3")
    assert "shards are missing: 2/3" in capsys.readouterr().err


def test_shards_do_not_depend_on_others():
    names = [f"student {n}" for n in range(300)]
    for count in (1, 2, 7):
        of = [
            [i for i in range(1, count + 1) if grade.in_shard(name, (i, count))]
            for name in names
        ]
        assert all(len(found) == 1 for found in of)
    # These never change, or a class that is half graded would be graded twice.
    first = [name for name in "abcdef" if grade.in_shard(name, (1, 2))]
    assert first == list("abcef")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"key": "other"}, "a and b: the keys differ"),
        ({"limits": {"seconds": 1}}, "limits differ"),
        ({"late": {}}, "lateness differ"),
        ({"homework": "hw91"}, "not the same homework"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    parts = [("a", document()), ("b", document(**change))]
    with pytest.raises(InvalidArgument, match=message):
        merge.merge(parts)


def test_students_who_are_there_twice_are_told():
    one = document(("ann", 3, "f"), ("bob", 4, "g"))
    two = document(("ann", 5, "h"), ("bob", 4, "g"), sandbox="unshare")
    merged, problems = merge.merge([("a", one), ("b", two)])
    assert [row["final"] for row in merged["rows"]] == [3, 4]
    assert problems == [
        "ann: two grades; the one of the file given first counts, not that of b",
        "bob: there twice, with the same grade",
        "graded in different sandboxes: bwrap, unshare",
    ]


def test_files_that_hold_no_grades_are_refused(tmp_path):
    for text in ("", "[]", "{}", '{"format": 2, "rows": [], "key": ""}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InvalidArgument, match=r"x\.json"):
            merge.load(tmp_path / "x.json")
    with pytest.raises(InvalidArgument, match="No such file"):
        merge.load(tmp_path / "y.json")


# -- lateness ------------------------------------------------------------------------


def test_late_submissions_lose_points_exactly(course):
    course.hand_in(ann=RIGHT, bob=RIGHT, cyd=RIGHT, dan=RIGHT)
    (course.folder / "times.csv").write_text(
        "student,time\nann,2026-03-01T23:59+01:00\nbob,2026-03-02T00:00+01:00\n"
        "cyd,2026-03-09 12:00 Europe/Berlin\n"
    )
    rule = ["--due", DUE, "--late", "3.3%/day, at most 20%"]
    text, _ = course.grade(*rule, "--times", course.folder / "times.csv")
    totals = {name: row["total"] for name, row in course.table().items()}
    assert totals == {"ann": "5", "bob": "4.835", "cyd": "4", "dan": "5"}
    notes = {name: row["notes"] for name, row in course.table().items()}
    assert notes["ann"] == ""
    assert notes["bob"] == "60 seconds late, 3.3% lost, 5 points before it".replace(
        "60 seconds", "1.0 minutes"
    )
    assert notes["dan"] == "no time is known: counted as in time"
    assert "dan: ok: no time is known" in text

    # Without a list, the times of the files count; nothing is graded again.
    os.utime(course.submissions / "ann.ipynb", (0, 0))
    at = late.moment(DUE, "").timestamp() + 86401
    os.utime(course.submissions / "bob.ipynb", (at, at))
    course.grade(*rule, "--feedback", course.folder / "feedback")
    assert [course.table()[name]["total"] for name in ("ann", "bob")] == ["5", "4.67"]
    said = (course.folder / "feedback" / "bob.md").read_text()
    assert "**4.67 of 5 points**" in said
    assert "Handed in 1.0 days late: 6.6% of 5 points lost." in said
