"""`kvq homework grade` and `kvq homework merge`: parsers, and what they print."""

import argparse
import dataclasses
import os
import re
import sys
from pathlib import Path

from ...errors import InvalidArgument

_GRADE = """\
Grade a folder of submissions: NAME.ipynb, or a folder NAME with one notebook. Cells run
in order in a sandbox, visible checks and outputs are not read, and the key's probes are
asked where each question's check stands. Their values are compared here, outside the
sandbox, against values that never enter it.

What is graded already is not graded again: --json holds it, and a list beside it what
an interrupted run had done. Each row depends on the file, the key, the limits, the
sandbox and the library.
"""

_GRADE_MORE = """\
sandboxes, the strongest first:
  bwrap    bubblewrap: own processes, network and files
  unshare  the same by unshare and chroot; needs root
  limits   resource limits alone: files of this machine and detached children stay
           open, so that it wants --allow-weak

status of a row: ok; partial (some cell could not be run to its end, a question has no
answer cell, or it is another homework's notebook); unreadable; missing (in --class
alone); grader-error.

examples:
  kvq homework grade hw02 submissions/ --out grades.csv --json grades.json --jobs 4
  kvq homework grade hw02 submissions/ --out grades.csv --json grades.json \\
      --feedback feedback/ --class class.csv --due "2026-03-01 23:59 Europe/Berlin" \\
      --late "10%/day, at most 50%, 15 min grace"
  kvq homework grade hw02 submissions/ --out a.csv --json a.json --shard 1/2

exit status: 0 graded; 1 graded, but a file is unreadable or the grader failed at one;
2 bad usage, or no sandbox; 130 interrupted: run it again to go on.
"""

_MERGE = """\
Make one list of the JSON files that parts of a class, or shards, were graded into. All
must come from the same key and limits. Students who are missing or there twice are
told.

exit status: 0 merged; 1 merged, but something needs a look; 2 bad usage, or parts that
cannot be one list.
"""


def add(commands) -> None:
    """Add `grade` and `merge` to the parsers below `kvq homework`."""
    _add_grade(commands)
    _add_merge(commands)


def parser_of(commands, name: str, run, brief: str, text: str, more: str = ""):
    """The parser of a command below `kvq homework`, whose text keeps its lines."""
    parser = commands.add_parser(
        name,
        help=brief,
        description=text,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    known = parser.parse_known_args

    def all_known(*arguments):
        """What it does not know would else be told by `kvq`, which names no command."""
        options, unknown = known(*arguments)
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    parser.parse_known_args = all_known
    return parser


def _add_grade(commands) -> None:
    brief = "grade a folder of submissions"
    parser = parser_of(commands, "grade", run_grade, brief, _GRADE, _GRADE_MORE)
    add = parser.add_argument
    add("homework", metavar="NAME", help="such as hw02")
    add("submissions", type=Path, metavar="SUBMISSIONS", help="the folder")
    _add_outputs(parser)
    add("--jobs", type=int, metavar="N", help="at once (default: one a core)")
    add("--shard", type=_shard, metavar="i/n", help="grade one of n parts of the class")
    add("--key", type=Path, metavar="FILE", help="default: solutions/keys/NAME.json")
    add("--due", metavar="TIME", help="with a zone: 2026-03-01T23:59+01:00, or ... Z")
    add("--late", metavar="RULE", help="such as '10%%/day, at most 50%%'")
    add(
        "--times",
        type=Path,
        metavar="CSV",
        help="columns student and time (default: the times of the files)",
    )
    add(
        "--class",
        dest="students",
        type=Path,
        metavar="CSV",
        help="column student: who handed in nothing gets a row, too",
    )
    add(
        "--sandbox",
        choices=("auto", "bwrap", "unshare", "limits"),
        default="auto",
        help="default: the strongest that works here",
    )
    add("--allow-weak", action="store_true", help="level limits is strong enough")
    add(
        "--time",
        type=float,
        metavar="SECONDS",
        help="of one cell or one probe (default: 20); 15 times that for everything",
    )
    add(
        "--memory",
        metavar="AMOUNT",
        help="of all processes of a submission together (default: 2GiB)",
    )
    add("--restart", action="store_true", help="grade again what is graded already")
    add("--root", type=Path, metavar="DIR", help="the checkout (default: found)")


def _add_outputs(parser) -> None:
    add = parser.add_argument
    add("--out", required=True, type=Path, metavar="CSV", help="grades, a row each")
    add("--json", required=True, type=Path, metavar="JSON", help="all that is known")
    add("--feedback", type=Path, metavar="DIR", help="a file for each student")
    add(
        "--feedback-detail",
        choices=("words", "points"),
        default="words",
        help="what went wrong, too (default), or points alone, which tell less of "
        "private probes",
    )


def _add_merge(commands) -> None:
    parser = parser_of(commands, "merge", run_merge, "join graded parts", _MERGE)
    add = parser.add_argument
    add("parts", nargs="+", type=Path, metavar="PART.json", help="of `grade --json`")
    _add_outputs(parser)


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no part such as 2/3")
    return int(found[1]), int(found[2])


# -- grade ---------------------------------------------------------------------------


def run_grade(options) -> tuple[str, int]:
    """Grade, write the files; the summary and the exit status.

    Raises:
        KVQError: bad usage, or no library for the sandbox.
    """
    from . import grade, late, outputs, report, score
    from .journal import Journal
    from .levels import choose
    from .library import find_root
    from .sandbox import SandboxError

    if not re.fullmatch(r"hw\d+(_\w+)?", options.homework):
        raise InvalidArgument(f"{options.homework[:40]!r} is no homework such as hw02")
    homework = options.homework.split("_")[0]
    if not options.submissions.is_dir():
        raise InvalidArgument(f"{options.submissions} is no folder")
    limits = _limits(options)
    root = find_root(options.root)
    path = options.key or root / "solutions" / "keys" / f"{homework}.json"
    journal = Journal(options.json)
    inputs = [p for p in (path, options.times, options.students) if p]
    files = {**_files(options), "the list of what is done,": journal.path}
    outputs.check(files, options.feedback, inputs, options.submissions)
    policy = late.policy(options.due, options.late)
    if options.times and policy is None:
        raise InvalidArgument("--times needs --due: late after what?")
    times = late.times(options.times) if options.times else None
    students = late.students(options.students) if options.students else None
    if options.key is None and not path.exists():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("hw*.json")))
        raise InvalidArgument(f"no homework {homework!r}: there are {there or 'none'}")
    key = score.load(path)
    if key["homework"] != homework:
        raise InvalidArgument(f"{path} is the key of {key['homework']}")

    ours = [p for p in (*inputs, *files.values(), options.feedback) if p]
    found = grade.find(options.submissions, homework, ours)
    if not found.entries:
        print(f"{options.submissions} holds no submissions", file=sys.stderr)
    entries = [e for e in found.entries if grade.in_shard(e.student, options.shard)]
    hidden = (options.submissions, *(p.parent for p in ours))
    try:
        sandbox = choose(options.sandbox, root, hidden, options.allow_weak)
    except SandboxError as error:  # with advice of several lines
        print(f"kvq homework grade: error: {error}", file=sys.stderr)
        return "", 2
    grader = grade.Grader(key, sandbox, limits)
    with journal:
        try:
            rows = _rows(options, entries, grader, journal)
        except KeyboardInterrupt:
            print("Interrupted: run it again to go on.", file=sys.stderr)
            return "", 130
        report.apply_lateness(rows, policy, times)
        _compare_class(rows, students, grader.questions, options.shard)
        document = {
            "format": grade.FORMAT,
            "homework": homework,
            "title": key["title"],
            "key": key["hash"],
            "questions": grader.questions,
            "limits": dataclasses.asdict(limits),
            "late": policy.said() if policy else None,
            "sandbox": sandbox.level,
            "shard": list(options.shard) if options.shard else None,
            "class": students,
            "skipped": [list(pair) for pair in found.skipped],
            "rows": sorted(rows, key=lambda row: row["student"]),
        }
        _write(options, document)
        journal.remove()
    bad = any(row["status"] in ("unreadable", "grader-error") for row in rows)
    return report.summary(document), int(bad)


def _compare_class(rows: list[dict], students, questions, shard) -> None:
    """Rows for who handed in nothing; a note for who is not in the class."""
    from . import grade

    if students is None:
        return
    for row in rows:
        if row["student"] not in students:
            row["about"].append("not in the class list")
    there = {row["student"] for row in rows}
    for student in students:
        if student not in there and grade.in_shard(student, shard):
            rows.append(grade.missing(questions, student))


def _limits(options):
    from ...gpus import amount
    from .sandbox import Limits

    if options.jobs is not None and options.jobs < 1:
        raise InvalidArgument(f"--jobs must be 1 or more, got {options.jobs}")
    limits = Limits()
    if options.time is not None:
        if not 0.1 <= options.time <= 3600:
            raise InvalidArgument(f"--time must be 0.1 to 3600, got {options.time}")
        seconds, total = options.time, 15 * options.time
        limits = dataclasses.replace(limits, seconds=seconds, total_seconds=total)
    if options.memory is not None:
        memory = amount("--memory", options.memory)
        if memory < 64 * 2**20:
            raise InvalidArgument("--memory must be 64MiB or more: Python needs some")
        limits = dataclasses.replace(limits, memory=memory)
    return limits


def _rows(options, entries, grader, journal) -> list[dict]:
    """Grade, with a bar, keeping what is done."""
    import tqdm

    from . import grade

    if options.restart:
        journal.forget()
    known = [] if options.restart else journal.known()
    jobs = options.jobs or os.cpu_count() or 1
    with tqdm.tqdm(total=len(entries), desc="grade", leave=False, disable=None) as bar:

        def keep(row: dict) -> None:
            journal.keep(row)
            bar.update()

        return grade.grade(entries, grader, jobs, known, keep)


def _files(options) -> dict[str, Path]:
    return {"--out": options.out, "--json": options.json}


def _write(options, document: dict) -> None:
    from . import outputs, report

    outputs.write(options.json, report.as_json(document))
    outputs.write(options.out, report.as_csv(document))
    if options.feedback:
        report.write_feedback(document, options.feedback, options.feedback_detail)


# -- merge ---------------------------------------------------------------------------


def run_merge(options) -> tuple[str, int]:
    """Merge, write the files; the summary and the exit status.

    Raises:
        InvalidArgument: parts that cannot be one list.
    """
    from . import merge, outputs, report

    outputs.check(_files(options), options.feedback, options.parts)
    parts = [(str(path), merge.load(path)) for path in options.parts]
    document, problems = merge.merge(parts)
    _write(options, document)
    for problem in problems:
        print(problem, file=sys.stderr)
    return report.summary(document), int(bool(problems))
