"""The command line: `kvq plan`, `kvq quiz` and `kvq homework`.

Answers go to stdout and the exit status is 0. What cannot be answered is said in one
line on stderr, and the status is 2.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

from .attention import CHUNK
from .course.homework import commands as homework
from .errors import InvalidArgument, KVQError
from .gpus import MEMORY_GB
from .plan import WEIGHT_BITS, Plan, plan
from .schemes import SCHEMES, scheme

GIB, MIB, KIB = 2**30, 2**20, 2**10

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}

_PLAN = """\
How many sequences of a model fit on a GPU, and where its memory goes, for each way to
store the cache of keys and values. Nothing but the model's config is read; no weights
are loaded, no GPU is needed.

  max batch = floor((usable - weights - reserve - chunk) / (sequence + step))

usable    memory of one GPU times --utilization
weights   every parameter, mixtures of experts in full, divided by --tensor-parallel
reserve   what you set aside for activations, states of linear layers and the rest
chunk     hot (unquantized) pages of one chunk of prefill, once for the whole batch;
          at most a quarter of what is left beside one sequence
sequence  a sequence of --context tokens, pages rounded up, its hot pages included
step      the hot page that each sequence fills while it decodes, where full pages are
          quantized
"""

_EXAMPLES = f"""\
examples:
  kvq plan ./Llama-3.1-8B --gpu H100-SXM --context 8192
  kvq plan config.json --gpu 24GiB --context 4096 --scheme int8 --scheme int4
  kvq plan config.json --gpu A100-80GB-SXM --tensor-parallel 4 --context 32768 \\
      --reserve 4GiB --weight-dtype 4.5 --json

amounts: GiB, MiB, KiB count in 1,024s; GB, MB, KB in 1,000s; no unit means bytes.
schemes: {", ".join(SCHEMES)}
GPUs: {", ".join(MEMORY_GB)}
Their memory is what data sheets say, in GB; what a driver reports is more exact.

exit status: 0 answered, also when nothing fits; 2 bad usage, or a model or scheme that
cannot be counted.
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{_line(f'{self.prog}: error: {message}')} (see --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = _Parser(
        prog="kvq",
        description="Paged, quantized key-value caches: tools.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    _add_plan(commands)
    _add_quiz(commands)
    homework.add(commands)
    options = parser.parse_args(argv)
    status = 0
    try:
        answer = options.run(options)
        if isinstance(answer, tuple):  # of a command with a status of its own
            answer, status = answer
        if answer:
            print(answer)
        if sys.stdout is not None:  # it may be closed from the beginning
            sys.stdout.flush()
    except KVQError as error:
        print(_line(f"kvq {options.command}: error: {error}"), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _line(message: str) -> str:
    """One line, whatever another library put into its message."""
    line = " ".join(message.split())
    return line if len(line) <= 1000 else f"{line[:997]}..."


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number") from None


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number") from None


def _weight_dtype(text: str) -> "str | float":
    return text if text in WEIGHT_BITS else _real(text)


def _add_plan(commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="how many sequences fit, and where the memory goes",
        description=_PLAN,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help="a config.json, a folder with one, or a Hugging Face id")
    add("--gpu", required=True, help="a GPU of the list below, or its memory")
    add(
        "--context",
        required=True,
        type=_number,
        metavar="TOKENS",
        help="prompt and answer of each sequence together",
    )
    add(
        "--scheme",
        action="append",
        metavar="NAME",
        help="how the cache is stored; may be repeated (default: all that go)",
    )
    add(
        "--recent",
        type=_number,
        metavar="TOKENS",
        help="the latest tokens that stay unquantized (default: the scheme's own)",
    )
    add(
        "--sinks",
        type=_number,
        metavar="TOKENS",
        help="the first tokens that stay unquantized (default: the scheme's own)",
    )
    add("--page-size", type=_number, default=16, metavar="TOKENS", help="default: 16")
    add(
        "--tensor-parallel",
        type=_number,
        default=1,
        metavar="GPUS",
        help="GPUs that share the model; all sizes printed are of one (default: 1)",
    )
    add(
        "--weights",
        metavar="AMOUNT",
        help="all weights together (default: the model's parameters are counted)",
    )
    add(
        "--weight-dtype",
        type=_weight_dtype,
        metavar="DTYPE",
        help=f"{', '.join(WEIGHT_BITS)}, or bits per weight (default: the config's)",
    )
    add(
        "--dtype",
        choices=tuple(_DTYPES),
        help="of unquantized pages (default: the config's, in 16 bits)",
    )
    add(
        "--reserve",
        default="0",
        metavar="AMOUNT",
        help="set aside on each GPU for activations and the rest (default: 0)",
    )
    add(
        "--utilization",
        type=_real,
        default=0.9,
        metavar="FRACTION",
        help="of the memory that may be used (default: 0.9)",
    )
    add(
        "--chunk",
        type=_number,
        default=CHUNK,
        metavar="TOKENS",
        help=f"tokens of one step of prefill (default: {CHUNK})",
    )
    add("--json", action="store_true", help="print JSON: exact bytes, stable names")
    parser.set_defaults(run=_run_plan)


def _run_plan(options) -> str:
    """The answer of `kvq plan`, as it is printed."""
    found = plan(
        options.model,
        options.gpu,
        options.context,
        _schemes(options),
        tensor_parallel=options.tensor_parallel,
        page_size=options.page_size,
        weights=options.weights,
        weight_dtype=options.weight_dtype,
        dtype=_DTYPES.get(options.dtype),
        reserve=options.reserve,
        utilization=options.utilization,
        chunk=options.chunk,
    )
    if options.json:
        return json.dumps(found.to_dict(), indent=2, allow_nan=False)
    return _text(found)


def _schemes(options) -> list | None:
    """The schemes asked for, with their windows changed; None for all of them."""
    windows = options.recent, options.sinks
    changed = any(tokens is not None for tokens in windows)
    if not options.scheme:
        if changed:
            raise InvalidArgument("--recent and --sinks change a --scheme; give one")
        return None
    found = [scheme(name, *windows) for name in dict.fromkeys(options.scheme)]
    for recipe in found:
        if changed and not recipe.seals:
            raise InvalidArgument(
                f"{recipe.name} seals no page: --recent and --sinks change nothing"
            )
    return found


# -- quiz ----------------------------------------------------------------------------


def _add_quiz(commands) -> None:
    parser = commands.add_parser(
        "quiz",
        help="a mock interview in the terminal",
        description="Asks questions of the book's bank. Ctrl-C ends it with a score.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    several = {"type": lambda text: text.split(","), "action": "extend", "default": []}
    add("--topic", **several, help="topics, such as memory,paging (default: all)")
    add("--level", **several, help="easy, mid or hard, or two of them (default: all)")
    add("--kind", **several, help="single, multiple, numeric, open (default: all)")
    add("--minutes", type=_real, default=0, help="a time limit (default: none)")
    add("--number", type=_number, default=10, help="of questions (default: 10)")
    add("--seed", type=_number, help="the same seed asks the same questions")
    add("--report", action="store_true", help="say what the bank holds, ask nothing")
    parser.set_defaults(run=_run_quiz)


def _run_quiz(options) -> str:
    from .course.questions import terminal  # `kvq plan` needs none of what it loads

    return terminal.run(
        options.topic,
        options.level,
        options.kind,
        options.number,
        options.minutes,
        options.seed,
        options.report,
    )


# -- text ----------------------------------------------------------------------------


def _text(found: Plan) -> str:
    """A plan as aligned tables."""
    head = [f"{found.model}: {'; '.join(found.layers)}", "", *_memory(found), ""]
    skipped = [f"- {name} was left out: {why}" for name, why in found.skipped]
    notes = [f"- {note}" for note in found.notes]
    return "\n".join([*head, *_table(found), "", *skipped, *notes])


def _memory(found: Plan) -> list[str]:
    """What is the same for every scheme, a line each."""
    of = f"of each of {found.tensor_parallel} GPUs" if found.tensor_parallel > 1 else ""
    weights = "as given"
    if found.parameters is not None:
        weights = f"{found.parameters:,} parameters of {found.weight_bits:g} bits"
    if found.tensor_parallel > 1:
        weights += f", divided by {found.tensor_parallel}"
    free = found.usable_bytes - found.weight_bytes - found.reserve_bytes
    rows = [
        ("memory", found.memory_bytes, f"{found.memory_bytes / 1e9:.2f} GB {of}"),
        ("usable", found.usable_bytes, f"{found.utilization:g} of it"),
        ("weights", found.weight_bytes, weights),
        ("reserve", found.reserve_bytes, "activations and the rest"),
        ("for the cache", free, "" if free > 0 else "nothing is left for a cache"),
    ]
    return [f"{a:14}{b / GIB:10.2f} GiB  {c}".rstrip() for a, b, c in rows]


def _table(found: Plan) -> list[str]:
    """A row for each scheme."""
    windows = any(
        row.bytes_per_token_at_context != row.bytes_per_token for row in found.schemes
    )
    titles = ["scheme", "bits", "B/token", "sequence MiB", "step KiB", "chunk MiB"]
    titles += ["max batch", "cache GiB", "left GiB"]
    rows = [
        [
            row.scheme,
            f"{row.bits_per_element:.3f}",
            f"{row.bytes_per_token:,.0f}",
            f"{row.sequence_bytes / MIB:,.2f}",
            f"{row.step_bytes / KIB:,.1f}",
            f"{row.chunk_bytes / MIB:,.2f}",
            f"{row.max_batch:,}",
            f"{row.cache_bytes / GIB:,.2f}",
            f"{row.left_bytes / GIB:,.2f}",
        ]
        for row in found.schemes
    ]
    if windows:
        titles.insert(3, "at context")
        for line, row in zip(rows, found.schemes, strict=True):
            line.insert(3, f"{row.bytes_per_token_at_context:,.0f}")
    tokens = f"{found.context:,} token{'s' if found.context > 1 else ''}"
    title = f"sequences of {tokens} in pages of {found.page_size}"
    return [f"{title}, prefill by {found.chunk}", "", *_aligned([titles, *rows])]


def _aligned(rows: list[list[str]]) -> list[str]:
    """Columns of equal width: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
