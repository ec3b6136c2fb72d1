"""Private probes: a folder of one's own instead of the public ones, and the guide."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from kvq_lib.cli import main
from kvq_lib.course.homework import build

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "tests" / "homework_sample" / "hw99_sample.md"
TEXT = SAMPLE.read_text(encoding="utf-8")
GUIDE = (ROOT / "book" / "homework_instructors.md").read_text()
PRIVATE = """\
```{code-cell} ipython3
---
kvq: {role: hidden, question: q2, name: "secret", points: 3}
---
[pages(n) for n in (77, 177, 277)]
```
"""


@pytest.fixture
def root(tmp_path):
    """A folder with one homework, not built, and its chapter."""
    root = tmp_path / "root"
    (root / build.SOURCES).mkdir(parents=True)
    (root / "book").mkdir()
    (root / "book" / "02_memory_bottleneck.ipynb").touch()
    (root / build.SOURCES / SAMPLE.name).write_text(TEXT, encoding="utf-8")
    return root


@pytest.fixture
def kvq(capsys):
    """Run `kvq homework ...`: exit status, stdout, stderr."""

    def call(*arguments):
        status = main(["homework", *map(str, arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_private_probes_make_a_key_elsewhere(root, kvq, tmp_path):
    hidden, to = tmp_path / "hidden", tmp_path / "to" / "keys"
    hidden.mkdir()
    before = sorted(root.rglob("*"))
    (hidden / "hw99.md").write_text(PRIVATE)
    call = ("build", "--hidden", hidden, "--keys", to, "--root", root)
    assert kvq(*call)[0] == 0
    key = json.loads((to / "hw99.json").read_text())
    assert [p["name"] for q in key["questions"] for p in q["probes"]] == [
        "a real model",
        "a small model",
        "secret",
    ]
    assert key["questions"][1]["probes"][0]["expected"] == [5, 12, 18]
    assert sorted(root.rglob("*")) == before  # nothing public was made
    assert kvq(*call, "--check")[0] == 0
    (hidden / "hw99.md").write_text(PRIVATE.replace("277", "288"))
    assert kvq(*call, "--check")[0] == 1


def test_a_problem_of_a_private_probe_names_its_file(root, kvq, tmp_path):
    (tmp_path / "hw99.md").write_text(PRIVATE.replace("[pages(n) for", "[3 for"))
    status, _, err = kvq(
        "build", "--hidden", tmp_path, "--keys", tmp_path, "--root", root
    )
    assert status == 1 and err.startswith(f"{tmp_path / 'hw99.md'}:5: ")


@pytest.mark.parametrize("command", ["build", "verify"])
def test_a_folder_without_private_probes_is_refused(root, kvq, tmp_path, command):
    other = TEXT.replace("homework: hw99", "homework: hw98")
    (root / build.SOURCES / "hw98_other.md").write_text(other, encoding="utf-8")
    options = ["--root", root]
    if command == "build":
        options += ["--keys", tmp_path / "keys"]

    def said(hidden: str, *names: str) -> str:
        call = (command, *names, "--hidden", tmp_path / hidden, *options)
        status, out, err = kvq(*call)
        assert (status, out) == (2, "") and err.count("\n") == 1
        return err

    assert "nothing is no folder" in said("nothing")
    (tmp_path / "some").mkdir()
    assert "some has no hw98.md and no hw99.md" in said("some")
    (tmp_path / "some" / "hw99.md").write_text(PRIVATE)
    assert "some has no hw98.md" in said("some", "hw98", "hw99")
    sources = build.sources(root)
    assert build.with_private(sources, tmp_path / "some") == sources[1:]


def test_the_guides_private_file_is_one(tmp_path):
    (tmp_path / "hw02.md").write_text(re.search("````md\n(.*?)````", GUIDE, re.S)[1])
    (path,) = build.sources(ROOT, ["hw02"])
    public, private = build.load(path), build.load(path, tmp_path)
    assert len(private.questions[0].probes) == 2
    assert private.questions[0].points == public.questions[0].points
    assert private.questions[1:] == public.questions[1:]


def test_the_guides_loop_takes_tails_off_names(tmp_path):
    tail = "_assignsubmission_file"
    for name in (f"Ann Lee_12{tail}", f"Bo_1 Berg_7{tail}_", f"Ann Lee_9{tail}", "cyd"):
        (tmp_path / "submissions" / name / "inside").mkdir(parents=True)
    loop = re.search(r"for folder in .*?done", GUIDE, re.S)[0]
    subprocess.run(["bash", "-c", loop], cwd=tmp_path, check=True)
    names = sorted(path.name for path in (tmp_path / "submissions").iterdir())
    assert names == ["Ann Lee", f"Ann Lee_9{tail}", "Bo_1 Berg", "cyd"]
    assert len([*tmp_path.rglob("inside")]) == 4
