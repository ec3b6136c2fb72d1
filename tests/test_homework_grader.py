"""A batch of every kind of submission, graded at once in bubblewrap."""

import csv
import json
import os
from pathlib import Path

import pytest
from hostile import SECRET, key
from hostile_files import write_all

from kvq_lib.course.homework import grade, levels, merge, outputs, report
from kvq_lib.course.homework.sandbox import Limits, SandboxError

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
#: Short, for what is stopped; what is honest needs a tenth of it.
LIMITS = Limits(1, 90, memory=160 * MIB, disk=32 * MIB, files=2000)


class Batch:
    """All submissions, what they must get, and what came out."""

    def __init__(self, folder: Path):
        self.submissions = folder / "submissions"
        self.submissions.mkdir()
        (folder / "hw90.json").write_text(json.dumps(key()))
        self.expected = write_all(self.submissions)
        try:
            sandbox = levels.choose("bwrap", ROOT, (folder,))
        except SandboxError as error:
            pytest.fail(str(error))
        self.grader = grade.Grader(key(), sandbox, LIMITS)
        found = grade.find(self.submissions, "hw90")
        self.skipped, self.entries = found.skipped, found.entries
        self.rows = grade.grade(self.entries, self.grader, jobs=3)
        report.apply_lateness(self.rows, None)
        self.document = {
            "format": grade.FORMAT,
            "homework": "hw90",
            "title": "Squares",
            "key": key()["hash"],
            "questions": self.grader.questions,
            "limits": {},
            "late": None,
            "sandbox": "bwrap",
            "shard": None,
            "class": None,
            "skipped": self.skipped,
            "rows": self.rows,
        }


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    return Batch(tmp_path_factory.mktemp("batch"))


def row_of(batch: Batch, student: str) -> dict:
    return next(row for row in batch.rows if row["student"] == student)


def test_every_kind_gets_its_grade(batch):
    """The heart of it: status, points of both questions, and a note that says why."""
    assert len(batch.expected) >= 45
    got, want = {}, {}
    for row in batch.rows:
        points = [question["points"] for question in row["questions"]]
        got[row["student"]] = (row["status"], *points)
    for name, kind in batch.expected.items():
        want[name] = (kind.status, kind.q1, kind.q2)
    assert got == want


def test_notes_say_why(batch):
    for name, kind in batch.expected.items():
        said = report.notes(row_of(batch, name))
        assert not kind.note or any(kind.note in note for note in said), (name, said)


def test_every_row_names_its_sandbox(batch):
    for row in batch.rows:
        graded = row["status"] in ("ok", "partial")
        assert row["sandbox"] == ("bwrap" if graded else "")


def test_what_is_no_submission_is_told(batch):
    assert batch.skipped == [
        ("homework.pdf", "not a notebook"),
        ("link to a folder", "a link"),
    ]


def test_nothing_of_a_submission_is_said_to_anyone(batch, tmp_path):
    """Names, messages and outputs of submissions stay in the sandbox."""
    report.write_feedback(batch.document, tmp_path)
    texts = [path.read_text() for path in tmp_path.iterdir()]
    texts += [report.as_csv(batch.document), report.as_json(batch.document)]
    texts.append(report.summary(batch.document))
    assert len(texts) == len(batch.rows) + 3
    for text in texts:
        assert SECRET not in text and "HYPERLINK" not in text


def test_feedback_has_a_fixed_vocabulary(batch, tmp_path):
    report.write_feedback(batch.document, tmp_path)
    words = set(report.WORDS.values()) | {"full marks"}
    seen = set()
    for path in tmp_path.iterdir():
        for line in path.read_text().splitlines():
            if line.startswith("| q"):
                said = line.rstrip(" |").rsplit(" | ", 1)[1]
                seen |= set(said.removeprefix("part of the marks: ").split("; "))
    assert seen <= words
    assert len(seen) >= 9  # and most of it is needed


def test_feedback_says_why_a_file_cannot_be_read(batch):
    said = {
        name: report.feedback(batch.document, row_of(batch, name))
        for name in ("large", "cut off", "web page")
    }
    assert "Why: larger than 32 MiB: clear its outputs and save" in said["large"]
    assert "Why: not JSON, or cut off (line 1, column" in said["cut off"]
    assert said["web page"].endswith("Why: a web page, not a notebook.\n")


def test_another_homework_needs_a_look(batch):
    said = report.summary(batch.document).split("needs a look:")[1]
    assert "  other homework: partial: a notebook of hw91, not of hw90" in said


def test_nothing_is_left_behind(batch):
    """No process that a submission started, no folder of a sandbox."""
    mine = str(os.getpid())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it ended while we looked
        assert pid == mine or SECRET.encode() not in text


def test_the_table_is_safe_in_a_spreadsheet(batch):
    rows = list(csv.DictReader(report.as_csv(batch.document).splitlines()))
    assert len(rows) == len(batch.expected)
    heading = "student,file,status,q1,q1_max,q2,q2_max,total,max,sandbox,notes"
    assert list(rows[0]) == heading.split(",")
    for row in rows:
        for text in row.values():
            assert not text.lstrip().startswith(("=", "+", "-", "@")), row
            assert text.isprintable()
    students = {row["student"]: row for row in rows}
    assert "'=1+1" in students
    half = students["one probe right"]
    assert (half["q1"], half["q1_max"], half["total"], half["max"]) == (
        "0.7",
        "2",
        "3.7",
        "5",
    )


def test_json_comes_back(batch, tmp_path):
    path = tmp_path / "grades.json"
    outputs.write(path, report.as_json(batch.document))
    assert merge.load(path)["rows"] == batch.rows


def test_what_is_graded_is_not_graded_again(batch, monkeypatch):
    """A second run takes the rows as they are: no sandbox is started for them."""
    ran = []

    def run_cells(cells, *rest):
        ran.append(cells)
        raise SandboxError("must not be needed")

    monkeypatch.setattr(grade, "run_cells", run_cells)
    again = grade.grade(batch.entries, batch.grader, jobs=2, known=batch.rows)
    assert not ran
    kept = grade._KEPT
    for old, new in zip(batch.rows, again, strict=True):
        assert {n: old[n] for n in kept} == {n: new[n] for n in kept}
        assert old["status"] == new["status"]


@pytest.mark.parametrize("change", ["file", "key", "limits", "level"])
def test_what_has_changed_is_graded_again(batch, monkeypatch, change, tmp_path):
    entries = [e for e in batch.entries if e.student in ("right", "half right")]
    grader = batch.grader
    if change == "file":
        path = tmp_path / "right.ipynb"
        path.write_text(entries[1].path.read_text() + "\n")
        entries = [entries[0], grade.Entry("right", path, "right.ipynb")]
    elif change == "key":
        changed = {**grader.key, "hash": "other"}
        grader = grade.Grader(changed, grader.sandbox, grader.limits)
    elif change == "limits":
        grader = grade.Grader(grader.key, grader.sandbox, Limits())
    else:
        sandbox = levels.Sandbox("unshare", grader.sandbox.library)
        grader = grade.Grader(grader.key, sandbox, grader.limits)

    def run_cells(*arguments):
        raise SandboxError("asked")

    monkeypatch.setattr(grade, "run_cells", run_cells)
    rows = grade.grade(entries, grader, known=batch.rows)
    asked = {row["student"] for row in rows if row["status"] == "grader-error"}
    assert asked == ({"right"} if change == "file" else {"right", "half right"})


def test_an_error_of_the_grader_hurts_one_row(batch, monkeypatch):
    """Its message stays unsaid: it may quote the submission."""
    real = grade.run_cells

    def run_cells(cells, *rest):
        if any("abs(x)" in cell.code for cell in cells):
            raise ValueError(SECRET)
        return real(cells, *rest)

    monkeypatch.setattr(grade, "run_cells", run_cells)
    names = ("right", "half right", "one probe right")
    entries = [e for e in batch.entries if e.student in names]
    rows = {row["student"]: row for row in grade.grade(entries, batch.grader, jobs=2)}
    assert [rows[name]["status"] for name in names] == ["ok", "grader-error", "ok"]
    assert [rows[name]["total"] for name in names] == [5, 0, 3.7]
    line = run_cells.__code__.co_firstlineno + 2
    note = f"ValueError in test_homework_grader.py:{line}"
    assert rows["half right"]["notes"] == [note]
    assert rows["half right"]["max"] == 5
