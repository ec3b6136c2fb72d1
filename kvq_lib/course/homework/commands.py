"""`kvq homework ...`: the parsers and what they print.

Nothing heavy is imported before a command runs: `kvq plan` needs no notebooks.
"""

import argparse
import functools
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from ...errors import InvalidArgument
from . import grade_commands, library
from .words import count

PACKAGES = ("nbformat", "nbclient", "jupytext", "ipykernel", "yaml")

_HOMEWORK = """\
Graded homework: one source for exercise, solution and grading key, and a grader that
runs what students hand in inside a sandbox.

  solutions/source/hw02_topic.md   the source, a MyST notebook: the only file to edit
  exercises/hw02_topic.ipynb       what students get: stubs and checks
  solutions/hw02_topic.ipynb       the answers, run
  solutions/keys/hw02.json         probes and their values: what the grader asks
"""

_BUILD = """\
Make exercises, executed solutions and keys from their sources. Building twice gives the
same bytes. Every problem of every source is told, with its line.

The code cells of a source say their role:

  kvq: {role: given}
      shown as it is; the default
  kvq: {role: answer, question: q1}
      begins with `# @answer q1`; students get a stub for what lies between
      `### BEGIN SOLUTION` and `### END SOLUTION`
  kvq: {role: check, question: q1}
      begins with `# @check q1`: asserts with messages, then one print of a fixed text
  kvq: {role: hidden, question: q1, name: "words", points: 1, rtol: 1e-6, atol: 0}
      a probe: ends with an expression of plain data; takes a seed, too
  kvq: {role: mutant, question: q1, name: "words", also: [q2], replaces: 1}
      a wrong answer: it must lose points in q1, and in none but q2 besides; of several
      answer cells it replaces the first

Markdown that only the solution shows begins with a line
  +++ {"kvq": {"role": "explain", "question": "q1"}}

`kvq homework new` writes a source to begin with.
"""

_BUILD_MORE = """\
examples:
  kvq homework build                  all of them
  kvq homework build hw02 --check     is what is committed what the source makes?
  kvq homework build hw02 --hidden ~/private --keys ~/private/keys
      the probes of ~/private/hw02.md instead of the public ones, and only the key

Pictures are left out of solutions, because their bytes change with versions of other
packages. Outputs with addresses, paths or warnings are refused.

exit status: 0 done; 1 a source has problems, or, with --check, a file differs, lacks or
is made by no source; 2 bad usage.
"""

_VERIFY = """\
Prove the keys: the author's solution scores full marks in every question, the blank
exercise scores nothing, and every mutant loses points in its question and, unless it
says `also`, in no other. Each is run as the grader runs a submission, and the visible
checks as a student runs them.

exit status: 0 all holds; 1 something does not, and is named; 2 bad usage.
"""

_NEW = """\
Write a source with one question, which builds and verifies as it is and shows every
role a cell can have. Change it, add questions, build it.
"""


def add(commands) -> None:
    """Add `homework` and all below it to the parser of `kvq`."""
    parser = commands.add_parser(
        "homework",
        help="write, build, verify and grade homework",
        description=_HOMEWORK,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    below = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="homework_command", required=True
    )
    _add_build(below)
    _add_verify(below)
    _add_new(below)
    grade_commands.add(below)


def _parser(commands, name: str, run, brief: str, text: str, more: str = ""):
    run = functools.partial(_run, run)
    parser = grade_commands.parser_of(commands, name, run, brief, text, more)
    parser.add_argument(
        "--root",
        type=Path,
        metavar="DIR",
        help="the checkout (default: the one around the current folder)",
    )
    return parser


def _add_build(commands) -> None:
    brief = "make exercises, solutions and keys"
    parser = _parser(commands, "build", _build, brief, _BUILD, _BUILD_MORE)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="hw02 or hw02_topic (default: all)")
    add("--check", action="store_true", help="write nothing; say which files differ")
    add("--hidden", type=Path, metavar="DIR", help="private probes: DIR/hw02.md")
    add("--keys", type=Path, metavar="DIR", help="where their keys go: DIR/hw02.json")


def _add_verify(commands) -> None:
    parser = _parser(commands, "verify", _verify, "prove the keys", _VERIFY)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="hw02 or hw02_topic (default: all)")
    add("--jobs", type=int, default=1, metavar="N", help="runs at once (default: 1)")
    add("--hidden", type=Path, metavar="DIR", help="private probes: DIR/hw02.md")


def _add_new(commands) -> None:
    parser = _parser(commands, "new", _new, "write a first source", _NEW)
    add = parser.add_argument
    add("homework", metavar="NAME", help="such as hw11")
    add("--topic", required=True, metavar="WORDS", help="its title")
    add(
        "--chapter",
        required=True,
        metavar="PAGE",
        help="the chapter it goes with, such as book/02_memory_bottleneck",
    )


def _run(command, options) -> tuple[str, int]:
    """A command's answer and exit status; what is wrong goes to stderr, a line each."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidArgument(
            f"{', '.join(missing)} missing: pip install 'kvq-lib[homework]'"
        )
    from .source import SourceError

    try:
        return command(options, find_root(options.root))
    except SourceError as error:
        _complain(error.problems)
        return "", 1


def find_root(given: Path | None = None) -> Path:
    """Where sources are built: any folder as given, else the checkout.

    Raises:
        InvalidArgument: no such folder.
        LibraryError: no checkout.
    """
    if given is None:
        return library.find_root()
    if not given.is_dir():
        raise InvalidArgument(f"--root {given} is no folder")
    return given.resolve()


def _progress(sources: Iterable, what: str):
    """A bar on stderr, where that is a terminal."""
    import tqdm

    return tqdm.tqdm(sources, desc=what, leave=False, disable=None)


def _complain(lines: Iterable) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _build(options, root: Path) -> tuple[str, int]:
    from . import build

    made = build.build(
        root,
        options.names,
        check=options.check,
        hidden=options.hidden,
        keys_to=options.keys,
        progress=functools.partial(_progress, what="build"),
    )
    _complain(made.problems)
    lines = [
        f"{'differs' if options.check else 'written'}: {path}"
        + (f" ({made.differences[path]})" if options.check else "")
        for path in made.changed
    ]
    lines += [f"stale: {path}: no source makes it, remove it" for path in made.stale]
    lines.append(f"As their sources make them: {count(len(made.same), 'file')}.")
    wrong = made.problems or made.stale or (options.check and made.changed)
    return "\n".join(lines), int(bool(wrong))


def _verify(options, root: Path) -> tuple[str, int]:
    from . import build, verify
    from .source import SourceError

    if options.jobs < 1:
        raise InvalidArgument(f"--jobs must be 1 or more, got {options.jobs}")
    tables, failures = [], []
    homeworks = []
    sources = build.sources(root, options.names)
    if options.hidden is not None:
        sources = build.with_private(sources, options.hidden, options.names)
    for path in sources:
        try:
            homeworks.append(build.load(path, options.hidden))
        except SourceError as error:
            failures += error.problems
    runs = sum(len(verify.notebooks_of(homework)) for homework in homeworks)
    private = options.hidden is not None
    with _progress(range(runs), "verify") as bar:
        for homework in homeworks:
            found = verify.verify(homework, root, options.jobs, private, bar.update)
            tables.append(verify.table(found))
            failures += found.failures
    _complain(failures)
    return "\n\n".join(tables), int(bool(failures))


def _new(options, root: Path) -> tuple[str, int]:
    from . import new

    path = new.new(root, options.homework, options.topic, options.chapter)
    name = options.homework
    return f"{path}\nnext: kvq homework build {name}; kvq homework verify {name}", 0
