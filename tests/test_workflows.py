"""GitHub's workflows: they call make, may do little, and upload what make writes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvq_lib.course.homework.sandbox import APPARMOR
from kvq_lib.course.publish import release

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "workflows"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
ACTIONLINT = Path(sys.executable).with_name("actionlint")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


def read(path):
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    found["on"] = found.pop(True)  # YAML 1.1 takes `on` for a truth value
    return found


WORKFLOWS = {path.stem: read(path) for path in sorted(FOLDER.glob("*.yml"))}
JOBS = {
    f"{name}-{job}": body
    for name, workflow in WORKFLOWS.items()
    for job, body in workflow["jobs"].items()
}
STEPS = [(job, step) for job, body in JOBS.items() for step in body["steps"]]
every_job = pytest.mark.parametrize("job", JOBS)

#: Who may do more than read, and what for.
MAY = {
    "site-deploy": {"pages": "write", "id-token": "write"},
    "release-publish": {"contents": "write"},
}
#: What jobs hand on, and who writes it.
WRITTEN = {
    "_build/html": "book",
    "_build/outside_links.txt": "links",
    release.FOLDER.as_posix(): "release",
}


def test_each_purpose_has_its_workflow():
    assert set(WORKFLOWS) == {"test", "site", "weekly", "colab", "links", "release"}


@pytest.mark.parametrize(
    ("name", "events"),
    [
        ("test", {"push", "pull_request"}),
        ("site", {"push", "workflow_dispatch"}),
        ("weekly", {"schedule", "workflow_dispatch"}),
        ("colab", {"schedule", "workflow_dispatch"}),
        ("links", {"schedule", "workflow_dispatch"}),
        ("release", {"push"}),
    ],
)
def test_workflows_start_when_they_should(name, events):
    assert set(WORKFLOWS[name]["on"]) == events


def test_only_a_tag_makes_a_release_and_only_main_the_site():
    assert WORKFLOWS["release"]["on"]["push"] == {"tags": ["v*"]}
    assert WORKFLOWS["site"]["on"]["push"] == {"branches": ["main"]}


def commands():
    return [(job, step["run"]) for job, step in STEPS if "run" in step]


@pytest.mark.parametrize(("job", "command"), commands())
def test_a_step_only_calls_make(job, command):
    """And so no text from outside, a branch's name or a title, gets into a shell."""
    assert re.fullmatch(r"make( [a-z-]+)+", command), job
    assert set(command.split()[1:]) <= TARGETS


def test_each_workflow_makes_what_it_is_for():
    made = {name: set() for name in WORKFLOWS}
    for job, command in commands():
        made[job.split("-")[0]] |= set(command.split()[1:])
    assert made == {
        "test": {"packages", "test"},
        "site": {"book"},
        "weekly": {"packages", "clean", "book", "test"},
        "colab": {"colab-check"},
        "links": {"book", "links"},
        "release": {"release-check", "packages", "test", "release", "publish"},
    }


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_only_read(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    assert WORKFLOWS[name]["concurrency"]["group"].startswith(name)


@every_job
def test_a_job_may_no_more_than_it_must(job):
    assert JOBS[job].get("permissions") == MAY.get(job)
    assert 0 < JOBS[job]["timeout-minutes"] <= 150
    assert JOBS[job]["runs-on"] == "ubuntu-24.04"


def test_the_jobs_that_may_write_run_nothing_of_the_repository_s_code():
    """A build runs packages of many authors; a token that writes stays away from it."""
    for job in MAY:
        run = [step["run"] for step in JOBS[job]["steps"] if "run" in step]
        assert run in ([], ["make publish"])
    recipe = re.search(r"^publish:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)[1]
    assert "$(PY)" not in recipe and "gh release create" in recipe


def test_actions_are_github_s_own_each_at_one_version():
    versions = {}
    for job, step in STEPS:
        if "uses" in step:
            named = re.fullmatch(r"(actions/[a-z-]+)@(v\d+)", step["uses"])
            assert named, job
            versions.setdefault(named[1], set()).add(named[2])
    assert versions and all(len(found) == 1 for found in versions.values())


def test_the_token_is_not_left_in_the_checkout():
    for job, step in STEPS:
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False, job


def test_only_pip_s_downloads_are_kept_and_never_in_the_weekly_run():
    """A cache of executed chapters could show what a commit no longer gives."""
    kept = set()
    for job, step in STEPS:
        used = step.get("uses", "")
        assert not used.startswith("actions/cache"), job
        if "cache" in step.get("with", {}):
            assert step["with"]["cache"] == "pip", job
            for lock in step["with"]["cache-dependency-path"].split():
                assert (ROOT / lock).exists(), lock
            kept.add(job.split("-")[0])
    assert "weekly" not in kept and "test" in kept


def test_what_is_uploaded_is_what_make_writes():
    for job, step in STEPS:
        if re.match(r"actions/(up|down)load", step.get("uses", "")):
            path = step["with"]["path"]
            assert path in WRITTEN, job
            if "/upload" in step["uses"]:
                made = [s["run"] for s in JOBS[job]["steps"] if "run" in s]
                assert WRITTEN[path] in " ".join(made).split()
    assert "-w _build/release" in MAKEFILE


def lint(*paths):
    return subprocess.run(
        [ACTIONLINT, "-shellcheck=", "-pyflakes=", "-no-color", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_actionlint_finds_nothing():
    done = lint(*sorted(FOLDER.glob("*.yml")))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("test", "ubuntu-24.04", "ubuntu-24.4", "label"),
        ("test", "cache-dependency-path", "cache-path", "not defined in action"),
        ("release", "needs: build", "needs: built", "does not exist"),
        ("release", "github.ref_name }}", "github.ref_nam }}", "ref_nam"),
        ("site", "contents: read", "content: read", "permission scope"),
    ],
)
def test_actionlint_finds_what_is_broken(tmp_path, name, old, new, said):
    text = (FOLDER / f"{name}.yml").read_text(encoding="utf-8")
    broken = tmp_path / "broken.yml"
    broken.write_text(text.replace(old, new, 1))
    done = lint(broken)
    assert done.returncode == 1 and said in done.stdout


def test_every_version_of_python_that_the_readme_promises_is_tested():
    tested = JOBS["test-test"]["strategy"]["matrix"]["python"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Python {}, {} or {}".format(*tested) in readme


def test_the_machine_is_made_ready_by_one_script():
    script = (ROOT / ".ci" / "packages").read_text(encoding="utf-8")
    for caller in (MAKEFILE, (ROOT / ".ci" / "run").read_text(encoding="utf-8")):
        assert "bash .ci/packages" in caller and "apt-get" not in caller
    # Ubuntu's block is lifted as the grader says it must be.
    profile = [line[4:] for line in APPARMOR.splitlines() if line.startswith("    ")]
    assert "\n".join(profile) in script
