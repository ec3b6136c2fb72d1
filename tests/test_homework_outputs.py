"""Files that grading writes: their names, and what they must not be."""

import pytest
from homework_course import RIGHT, ROOT, Course, document

from kvq_lib import cli
from kvq_lib.course.homework import grade, levels, outputs, report
from kvq_lib.errors import InvalidArgument


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path)


# -- names of feedback ---------------------------------------------------------------


def test_names_of_any_length_have_feedback(course):
    """Of 252 bytes, and with the same beginning: cut by bytes, and still apart."""
    names = ["\u5b57" * 82, "\u5b57" * 81 + "\u6587", "x" * 249, "x" * 248 + "y"]
    course.hand_in(**dict.fromkeys(names, "no notebook"))
    folder = course.folder / "feedback"
    assert course.grade("--feedback", folder)[1] == 1
    made = [path.name for path in folder.iterdir()]
    assert len(made) == 4
    assert all(name.endswith(".md") and len(name.encode()) < 230 for name in made)
    assert all(name.startswith(("\u5b57" * 66, "x" * 200)) for name in made)


@pytest.mark.parametrize(
    "students",
    [
        ["ann", "Ann", "ANN", "ann_"],
        ["a/b", "a\\b", "a_b"],
        [".x", "x", "..", "/"],
        ["x" * 300, "x" * 301, "X" * 300, "x" * 200],
        ["ok", "\ud800", "?"],
    ],
)
def test_each_student_has_a_file_alone(tmp_path, students):
    found = document(*((name, n, "") for n, name in enumerate(students)))
    assert report.write_feedback(found, tmp_path) == len(students)
    texts = [path.read_text() for path in tmp_path.iterdir()]
    points = sorted(text.split("**")[1] for text in texts)
    assert points == sorted(f"{n} of 5 points" for n in range(len(students)))
    folded = {path.name.casefold() for path in tmp_path.iterdir()}
    assert len(folded) == len(students)
    again = document(*((name, 0, "") for name in students))
    report.write_feedback(again, tmp_path)  # the same names the next time
    assert len(list(tmp_path.iterdir())) == len(students)


def test_feedback_of_points_alone_says_no_word(course):
    found = document(("ann", 3, "f"))
    found["rows"][0]["questions"][0]["failures"] = ["time"]
    (course.folder / "part.json").write_text(report.as_json(found))
    said = []
    for detail in ((), ("--feedback-detail", "points")):
        folder = course.folder / f"feedback{len(detail)}"
        options = [*course.outputs("all"), "--feedback", folder, *detail]
        course.run("merge", course.folder / "part.json", *options)
        said.append((folder / "ann.md").read_text().splitlines())
    assert said[0][-2] == "| q1: square | 0 of 2 | your code ran out of time |"
    assert said[1][-4:-1] == [
        "| Question | Points |",
        "|---|---|",
        "| q1: square | 0 of 2 |",
    ]


# -- what they must not be -----------------------------------------------------------


@pytest.fixture
def nothing_runs(monkeypatch):
    def run_cells(*arguments):
        raise AssertionError("a submission has run")

    monkeypatch.setattr(grade, "run_cells", run_cells)
    monkeypatch.setattr(levels, "choose", run_cells)


def options_of(course, changes: dict) -> list:
    """Options with paths below the course's folder; None leaves one out."""
    chosen = {"--out": "grades.csv", "--json": "grades.json", **changes}
    return [
        part
        for name, path in chosen.items()
        if path is not None
        for part in (name, course.folder / path)
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"--out": "class.csv/grades.csv"}, "--out .* cannot be written: Not a dir"),
        ({"--out": "x" * 256}, "--out .* cannot be written: File name too long"),
        ({"--json": "x" * 255}, "what is done, .* cannot be written: File name too"),
        ({"--out": "/proc/nothing/grades.csv"}, "--out .* cannot be written"),
        ({"--out": "submissions"}, "--out .* is a submission"),
        ({"--out": "folder"}, "folder is there and is no file"),
        ({"--out": "/dev/null"}, "null is there and is no file"),
        ({"--json": "folder"}, "folder is there and is no file"),
        ({"--json": "/proc/grades.json"}, "--json .* cannot be written"),
        ({"--feedback": "class.csv"}, "class.csv is there and is no folder"),
        ({"--feedback": "class.csv/x"}, "--feedback .* cannot be written"),
        ({"--feedback": "/proc/x"}, "--feedback .* cannot be written"),
        # Equal ones.
        ({"--out": "grades.json"}, "--json .* is --out, too"),
        ({"--out": "folder/../grades.json"}, "--json .* is --out, too"),
        ({"--out": "grades.json.part"}, "what is done, .* is --out, too"),
        ({"--feedback": "grades.csv"}, "--feedback .* is --out, too"),
        # Inputs.
        ({"--out": "class.csv", "--class": "class.csv"}, "--out .* is read, too"),
        ({"--out": "link.csv", "--class": "class.csv"}, "--out .* is read, too"),
        ({"--json": "times.csv", "--times": "times.csv"}, "--json .* is read, too"),
        ({"--json": "hw90.json"}, "--json .* is read, too"),
        ({"--feedback": "hw90.json"}, "--feedback .* is read, too"),
        # Submissions.
        ({"--out": "submissions/ann.ipynb"}, "--out .* is a submission"),
        ({"--json": "submissions/new.ipynb"}, "--json .* is a submission"),
        ({"--json": "submissions/bob/notes.txt"}, "--json .* is a submission"),
        ({"--feedback": "submissions/bob"}, "--feedback .* is a submission"),
        ({"--feedback": "submissions"}, "--feedback .* is a submission"),
    ],
)
def test_outputs_are_refused_before_anything_runs(
    course, nothing_runs, changes, message
):
    course.hand_in(ann=RIGHT)
    (course.submissions / "bob").mkdir()
    (course.submissions / "bob" / "mine.ipynb").write_text(RIGHT)
    (course.folder / "folder").mkdir()
    (course.folder / "class.csv").write_text("student\nann\n")
    (course.folder / "times.csv").write_text("student,time\nann,2026-03-01T00:00Z\n")
    (course.folder / "link.csv").symlink_to("class.csv")
    before = {p: p.read_bytes() for p in course.folder.rglob("*") if p.is_file()}
    arguments = ["grade", "hw90", course.submissions, "--root", ROOT]
    with pytest.raises(InvalidArgument, match=message):
        course.run(*arguments, "--key", course.key, *options_of(course, changes))
    after = {p: p.read_bytes() for p in course.folder.rglob("*") if p.is_file()}
    assert after == before


def test_the_command_line_says_it_in_one_line(course, capsys):
    options = options_of(course, {"--out": "submissions", "--key": "hw90.json"})
    arguments = ["homework", "grade", "hw90", course.submissions, *options]
    assert cli.main(list(map(str, arguments))) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvq homework: error: --out ") and said.count("\n") == 1


def test_a_merge_overwrites_none_of_its_parts(course):
    text = report.as_json(document(("ann", 3, "f")))
    (course.folder / "part.json").write_text(text)
    for output in ("--out", "--json"):
        options = options_of(course, {output: "part.json"})
        with pytest.raises(InvalidArgument, match=f"{output} .* is read, too"):
            course.run("merge", course.folder / "part.json", *options)
    assert (course.folder / "part.json").read_text() == text
    options = options_of(course, {"--out": "new/folder/all.csv"})
    course.run("merge", course.folder / "part.json", *options)
    assert (course.folder / "new" / "folder" / "all.csv").exists()


def test_a_file_that_cannot_be_written_in_the_end_is_told(course):
    """Someone has put a folder there since."""
    (course.folder / "grades.csv" / "x").mkdir(parents=True)
    with pytest.raises(InvalidArgument, match=r"grades.csv cannot be written: "):
        outputs.write(course.folder / "grades.csv", "text")
