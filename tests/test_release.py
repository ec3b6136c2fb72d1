"""What a release carries, and the project's own papers."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from kvq_lib.course.publish import release
from kvq_lib.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[1]

# -- releases --------------------------------------------------------------------------

VERSION = release.version(ROOT)


@pytest.fixture
def built(tmp_path):
    """A repository in which everything was built for version 0.1.0."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    (tmp_path / "CITATION.cff").write_text("version: 0.1.0\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n- Not yet.\n\n"
        "## [0.1.0] - 2026-12-01\n\n### Added\n\n- All of it.\n\n"
        "## [0.0.1] - 2026-01-01\n\n- Old.\n"
    )
    wheel = release.FOLDER / "kvq_lib-0.1.0-py3-none-any.whl"
    for path in (release.PDF, release.DECK, wheel):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path.name)
    return tmp_path


@pytest.mark.parametrize("tag", ["", "v0.1.0"])
def test_a_release_has_three_files_and_notes(built, tag):
    names = [path.name for path in release.gather(built, tag)]
    assert names == [
        "kvq_lib-0.1.0-py3-none-any.whl",
        "kvq-book-0.1.0.pdf",
        "kvq-0.1.0.apkg",
    ]
    folder = built / release.FOLDER
    assert (folder / release.NOTES).read_text() == "### Added\n\n- All of it.\n"
    assert (folder / "kvq-book-0.1.0.pdf").read_text() == "kvq-book.pdf"
    assert (folder / "kvq-0.1.0.apkg").read_text() == "kvq.apkg"
    assert {p.name for p in folder.iterdir()} == {*names, release.NOTES}


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("CITATION.cff", "version: 0.2.0\n", "pyproject.toml has version 0.1.0"),
        ("CHANGELOG.md", "## [Unreleased]\n\n- New.\n", "no section [0.1.0]"),
        ("CHANGELOG.md", "## [0.1.0]\n\n## [0.0.1]\n- x\n", "no section [0.1.0]"),
        (release.PDF, None, "kvq-book.pdf was not built"),
        (release.DECK, None, "kvq.apkg was not built"),
        ("_build/release/kvq_lib-0.1.0-py3-none-any.whl", None, ".whl was not built"),
    ],
)
def test_an_incomplete_release_is_refused(built, file, text, said):
    if text is None:
        (built / file).unlink()
    else:
        (built / file).write_text(text)
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        release.gather(built)


@pytest.mark.parametrize("tag", ["0.1.0", "v0.1.1", "v0.1.0rc1"])
def test_a_tag_of_another_version_is_refused(built, tag):
    with pytest.raises(InvalidArgument, match=re.escape(repr(tag))):
        release.gather(built, tag)


def make(*arguments, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(
        ["make", "--no-print-directory", f"VENV={sys.prefix}", *arguments],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
    )


def test_publishing_passes_the_tag_and_the_files_to_gh(tmp_path):
    """Also a tag that a shell or make would take for a command."""
    told = tmp_path / "told"
    (tmp_path / "gh").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}\n')
    (tmp_path / "gh").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    tag = f"v1$(touch {tmp_path}/made);`touch {tmp_path}/made`"
    done = make("publish", PATH=path, TAG=tag)
    assert done.returncode == 0, done.stderr
    assert told.read_text().splitlines()[:4] == [
        "release",
        "create",
        tag,
        "--verify-tag",
    ]
    assert not (tmp_path / "made").exists()


# -- the project's papers --------------------------------------------------------------


def test_the_citation_names_what_is_cited():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert cited["title"] == config["title"]
    assert {"message", "authors", "version", "license"} <= set(cited)
    footer = config["sphinx"]["config"]["html_theme_options"]["extra_footer"]
    assert f"version {VERSION}" in footer and cited["title"] in footer


def test_the_licences_are_whole():
    code = (ROOT / "LICENSE").read_text(encoding="utf-8")
    text = (ROOT / "LICENSE-TEXT").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in code
    assert "END OF TERMS AND CONDITIONS" in code and len(code) > 11_000
    assert "Attribution 4.0 International" in text and len(text) > 15_000
    for section in range(1, 9):
        assert re.search(rf"Section {section} ", text), section


def test_the_changelog_is_in_order():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings[0] == "[Unreleased]"
    for heading in headings[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= kinds


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_what_contributors_are_told_to_call_is_there():
    targets = set(
        re.findall(
            r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
        )
    )
    called = set(re.findall(r"(?:^|`)make ([a-z-]+)", CONTRIBUTING, re.M))
    assert called and called <= targets


def test_files_that_contributors_are_sent_to_are_there():
    named = set(
        re.findall(
            r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|yml|toml|txt))`", CONTRIBUTING
        )
    )
    named |= set(re.findall(r"\]\(([^)#:]+)\)", CONTRIBUTING))
    assert named
    built = {path for path in named if path.startswith("_build/")}
    assert not {path for path in named - built if not (ROOT / path).exists()}


def test_the_wheel_holds_the_library_and_its_licence_alone(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "kvq_lib",
        source / "kvq_lib",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / file, source / file)
    build = (
        "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-I", "-c", build, str(tmp_path)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    with zipfile.ZipFile(tmp_path / f"kvq_lib-{VERSION}-py3-none-any.whl") as wheel:
        names = wheel.namelist()
        about = f"kvq_lib-{VERSION}.dist-info"
        metadata = wheel.read(f"{about}/METADATA").decode()
        assert (
            wheel.read(f"{about}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        )
    assert "License-Expression: Apache-2.0" in metadata
    assert {name.split("/")[0] for name in names} == {"kvq_lib", about}
    assert "kvq_lib/course/publish/chapter.md" in names
