"""Sources to exercises, executed solutions and keys; the same bytes each time.

    exercises/hw02_memory.ipynb      stubs and checks, no outputs
    solutions/hw02_memory.ipynb      answers, run, with outputs and without pictures
    solutions/keys/hw02.json         probes, with the values of the author's solution

A key that is there keeps its values where the new ones agree with them within the
probes' tolerance: another processor may give another last digit.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import InvalidArgument
from . import author, keys, notebooks
from .compare import same
from .source import Homework, Problem, SourceError, read, with_hidden

SOURCES = Path("solutions/source")
EXERCISES = Path("exercises")
SOLUTIONS = Path("solutions")
KEYS = Path("solutions/keys")


@dataclass
class Made:
    """What a build did, in paths below the repository's root.

    Attributes:
        changed: files that were written; with `check`, those that differ or lack.
        same: files that were as they should be.
        stale: files that no source makes.
        problems: of sources that made nothing.
        differences: the first line that differs in each file of `changed`.
    """

    changed: list[Path] = field(default_factory=list)
    same: list[Path] = field(default_factory=list)
    stale: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    differences: dict[Path, str] = field(default_factory=dict)


def sources(root: Path, names: Sequence[str] = ()) -> list[Path]:
    """The sources named "hw02" or "hw02_memory"; all of them if none is named.

    Raises:
        InvalidArgument: a name without a source, or no source at all.
    """
    found = sorted((root / SOURCES).glob("hw*.md"))
    if not found:
        raise InvalidArgument(f"no homework: {root / SOURCES} holds no hwNN_topic.md")
    for one, next_one in itertools.pairwise(found):
        if one.stem.split("_")[0] == next_one.stem.split("_")[0]:
            raise InvalidArgument(f"{one.name} and {next_one.name}: which is it?")
    chosen = []
    for name in names:
        fitting = [p for p in found if name in (p.stem, p.stem.split("_")[0])]
        if not fitting:
            there = ", ".join(path.stem for path in found)
            raise InvalidArgument(f"no homework named {name!r}: there are {there}")
        chosen += [path for path in fitting if path not in chosen]
    return chosen or found


def with_private(
    paths: Sequence[Path], hidden: Path, names: Sequence[str] = ()
) -> list[Path]:
    """The sources for which a folder holds private probes.

    Args:
        names: what was asked for by name: each of `paths` must then have some.

    Raises:
        InvalidArgument: there is no such folder, or it lacks what was asked for.
    """
    if not hidden.is_dir():
        raise InvalidArgument(f"--hidden {hidden} is no folder")
    files = {path: f"{path.stem.split('_')[0]}.md" for path in paths}
    found = [path for path in paths if (hidden / files[path]).is_file()]
    lacking = [files[path] for path in paths if path not in found]
    if lacking and (names or not found):
        raise InvalidArgument(f"--hidden {hidden} has no {' and no '.join(lacking)}")
    return found


def load(path: Path, hidden: Path | None = None) -> Homework:
    """A homework, with the probes of a private folder if that has some for it.

    Raises:
        SourceError: a problem of the source or of the private file.
    """
    homework = read(path)
    private = hidden / f"{homework.id}.md" if hidden else None
    return with_hidden(homework, private) if private and private.exists() else homework


def products(homework: Homework) -> dict[Path, bytes]:
    """Exercise and executed solution, by their path below the root.

    Raises:
        SourceError: the solution fails, warns, or prints what would differ elsewhere.
    """
    solution = notebooks.solution(homework)
    notebooks.execute(solution, homework)
    return {
        EXERCISES / f"{homework.name}.ipynb": notebooks.write(
            notebooks.exercise(homework)
        ),
        SOLUTIONS / f"{homework.name}.ipynb": notebooks.write(solution),
    }


def key(homework: Homework, old: Path) -> bytes:
    """The key, with values that the file `old` holds already where they agree.

    Raises:
        SourceError: a probe fails, or its value is easy to guess.
    """
    values, problems = author.values(homework), []
    for probe in author.all_probes(homework):
        if why := keys.weakness(values[probe.question, probe.name]):
            problems.append(Problem(probe.path, probe.line, f"{probe.name}: {why}"))
    if problems:
        raise SourceError(problems)
    made = keys.make(homework, values)
    try:
        before = json.loads(old.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or one that must be made anew
        before = {}
    return keys.write(keys.keep_values(made, before, same))


def build(
    root: Path,
    names: Sequence[str] = (),
    check: bool = False,
    hidden: Path | None = None,
    keys_to: Path | None = None,
    progress=iter,
) -> Made:
    """Build the homeworks named, or all of them.

    Args:
        root: of the repository.
        check: write nothing; tell what a build would write.
        hidden: a folder of private probes; then keys alone are made, into `keys_to`.
        progress: wraps the list of sources, such as `tqdm.tqdm`.

    Raises:
        InvalidArgument: a name without a source or, with private probes, without
            some, or one of the two folders alone.
    """
    if (hidden is None) != (keys_to is None):
        raise InvalidArgument("--hidden and --keys go together: read here, write there")
    made = Made()
    chosen = sources(root, names)
    if hidden is not None:
        chosen = with_private(chosen, hidden, names)
    for path in progress(chosen):
        try:
            if hidden is not None and keys_to is not None:
                homework = load(path, hidden)
                at = keys_to / f"{homework.id}.json"
                _write(made, at, at, key(homework, at), check)
            else:
                _build_public(made, root, load(path), check)
        except SourceError as error:
            made.problems += error.problems
    if hidden is None:
        made.stale = stale(root)
    return made


def _build_public(made: Made, root: Path, homework: Homework, check: bool) -> None:
    files = products(homework)
    at = KEYS / f"{homework.id}.json"
    files[at] = key(homework, root / at)
    for name, data in files.items():
        _write(made, root / name, name, data, check)


def _write(made: Made, path: Path, name: Path, data: bytes, check: bool) -> None:
    old = path.read_bytes() if path.exists() else None
    if old == data:
        made.same.append(name)
        return
    made.changed.append(name)
    made.differences[name] = "missing" if old is None else _difference(old, data)
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _difference(old: bytes, new: bytes) -> str:
    """The first line that two texts do not share; of notebooks, in which cell it is."""
    where, texts = "", [text.decode(errors="replace") for text in (old, new)]
    try:
        pair = [json.loads(text)["cells"] for text in texts]
    except (ValueError, KeyError, TypeError):
        pair = ([], [])  # no notebooks
    for number, cells in enumerate(itertools.zip_longest(*pair, fillvalue={}), 1):
        if cells[0] != cells[1]:
            where = f"cell {number}, "
            texts = ["".join(cell.get("source", "")) for cell in cells]
            break
    before, after = (text.splitlines() for text in texts)
    for number, (a, b) in enumerate(zip(before, after, strict=False), 1):
        if a != b:
            said = f"line {number}: {a.strip()[:80]!r}, built: {b.strip()[:80]!r}"
            return where + said
    return f"{where}{len(before)} lines, built: {len(after)}"


def stale(root: Path) -> list[Path]:
    """Products that no source makes any more."""
    names = {path.stem for path in (root / SOURCES).glob("hw*.md")}
    ids = {name.split("_")[0] for name in names}
    found = [
        *(p for p in (root / EXERCISES).glob("*.ipynb") if p.stem not in names),
        *(p for p in (root / SOLUTIONS).glob("*.ipynb") if p.stem not in names),
        *(p for p in (root / KEYS).glob("*.json") if p.stem not in ids),
    ]
    return sorted(path.relative_to(root) for path in found)
