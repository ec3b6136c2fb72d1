"""A course's folder with submissions and a key, and `kvq homework` called on it."""

import argparse
import csv
import json
from pathlib import Path

from hostile import GIVEN, MEANS, SQUARE, answer, key, notebook

from kvq_lib.course.homework import grade, grade_commands

ROOT = Path(__file__).resolve().parents[1]
RIGHT = json.dumps(notebook([GIVEN, SQUARE, MEANS]))
HALF = json.dumps(notebook([GIVEN, answer("return 0"), MEANS]))


class Course:
    """A folder of submissions, a key, and `kvq homework` called on them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.submissions = folder / "submissions"
        self.submissions.mkdir()
        self.key = folder / "hw90.json"
        self.key.write_text(json.dumps(key()))

    def hand_in(self, **files: str) -> None:
        for name, text in files.items():
            (self.submissions / f"{name}.ipynb").write_text(text)

    def grade(self, *options, name: str = "grades") -> tuple[str, int]:
        arguments = ["grade", "hw90", self.submissions, "--key", self.key]
        arguments += ["--root", ROOT, *self.outputs(name), *options]
        return self.run(*arguments)

    def merge(self, *parts: str, name: str = "all") -> tuple[str, int]:
        files = [self.folder / f"{part}.json" for part in parts]
        return self.run("merge", *files, *self.outputs(name))

    def run(self, *arguments) -> tuple[str, int]:
        parser = argparse.ArgumentParser()
        grade_commands.add(parser.add_subparsers())
        options = parser.parse_args(list(map(str, arguments)))
        return options.run(options)

    def outputs(self, name: str) -> list:
        csv_file, json_file = (
            self.folder / f"{name}.{kind}" for kind in ("csv", "json")
        )
        return ["--out", csv_file, "--json", json_file]

    def table(self, name: str = "grades") -> dict[str, dict]:
        with (self.folder / f"{name}.csv").open(newline="") as file:
            return {row["student"]: row for row in csv.DictReader(file)}


def document(*rows: tuple, **changes) -> dict:
    """A small document: (student, points, fingerprint) a row."""
    questions = grade.blank_questions(key())
    made = []
    for student, points, fingerprint in rows:
        row = grade.missing(questions, student)
        row |= {
            "status": "ok",
            "file": "x",
            "final": points,
            "fingerprint": fingerprint,
        }
        made.append(row)
    found = {"format": 1, "homework": "hw90", "title": "t", "key": "k", "limits": {}}
    found |= {"questions": questions, "late": None, "sandbox": "bwrap", "shard": None}
    return found | {"class": None, "skipped": [], "rows": made} | changes
