"""The kernels on this machine's GPU, beside PyTorch's own attention; `make gpu`.

    python -m kvq_lib.bench.gpu                 # test the kernels, then measure
    python -m kvq_lib.bench.gpu --skip-tests    # measure only

The book's environment is not needed: any python3 with torch, triton and tqdm (which
`import kvq_lib` loads) can measure; the tests also need pytest and hypothesis, and run
in parallel where pytest-xdist is there.

Writes `book/results/NAME.json`, NAME after the GPU. What is timed, and how, is in
`gpu_work`.
"""

import argparse
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kvq_lib.bench import provenance
from kvq_lib.bench.gpu_work import (
    Case,
    Machine,
    Plan,
    copy_row,
    decode_row,
    here,
    other_rows,
    sdpa_rows,
)

ROOT = provenance.PACKAGE.parent
SECONDS = 420  # after which no new case begins
WORKERS = 6

#: What a reader's GPU measures within a minute or so.
SMALL = Plan((8192,), (8,), (16,), chunk=0, sealed=0, copied=2**28)

#: (quantity of a row, scheme or None for all, page size or None for all, what it should
#: reach), at the longest context and largest batch. Of several rows the worst counts.
GOALS = (
    ("beside_sdpa", "native", None, 0.95),
    ("speedup", "int8", None, 1.8),
    ("speedup", "int4", None, 3.0),
    ("speedup", "int4-kivi", 64, 2.9),
    ("speedup", "int4-kivi", 16, 2.5),
    ("copy_share", None, None, 0.80),
)
MEANING = {
    "beside_sdpa": "speed over PyTorch's best attention",
    "speedup": "speed over our own 16 bits",
    "copy_share": "bandwidth over that of a copy",
}


def measure(
    plan: Plan,
    machine: Machine,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: None,
) -> dict:
    """Check and time everything in a plan.

    Args:
        seconds: after them nothing new begins, and what is missing is listed.
        say: gets a line for each thing measured.

    Returns:
        What a record holds: the plan's shape, rows of the copy, of PyTorch's attention,
        of `decode` and of the other kernels, what was skipped and why, and what was
        wrong. Nothing wrong was timed.
    """
    began, wrong, skipped = clock(), [], []
    rows = {"sdpa": [], "decode": [], "other": []}
    copy = copy_row(plan, machine)
    say(f"copy: {copy['gb_per_s']:.0f} GB/s")

    def attempt(kind: str, what: str, work: Callable[[], Iterator[dict]]) -> None:
        if clock() - began > seconds:
            skipped.append({"what": what, "why": "no time was left"})
            return
        try:
            for row in work():
                rows[kind].append(row)
                say(f"{clock() - began:4.0f} s  {kind}: {shown(row)}")
        except (MemoryError, torch.OutOfMemoryError) as problem:
            skipped.append({"what": what, "why": str(problem).splitlines()[0]})
        except ArithmeticError as problem:
            wrong.append(str(problem))
            say(f"WRONG: {problem}")

    seen = set()
    for case in plan.cases():
        setting = (case.length, case.batch)
        if setting not in seen:
            seen.add(setting)
            name = f"PyTorch's attention, {case.length} tokens, batch {case.batch}"
            attempt("sdpa", name, lambda s=setting: sdpa_rows(plan, *s, machine))
        attempt("decode", str(case), lambda c=case: [decode_row(plan, c, machine)])
    for size in plan.page_sizes:
        for name in plan.schemes:
            what = f"the other kernels, {name}, pages of {size}"
            args = (plan, name, size, machine)
            attempt("other", what, lambda a=args: other_rows(*a))
    shape = {"heads": plan.heads, "kv_heads": plan.kv_heads, "dim": plan.dim}
    found = {"shape": shape, "dtype": "float16", "copy": copy, **rows}
    compare(found, plan)
    lists = {"skipped": skipped, "wrong": wrong, "seconds": clock() - began}
    return found | {"goals": goals(found["decode"])} | lists


def shown(row: dict) -> str:
    """A row in short: what it is, and its time."""
    words = [
        f"{key} {row[key]}"
        for key in ("kernel", "backend", "form", "scheme", "length", "batch")
        if key in row
    ]
    words += [f"page {row['page_size']}"] if "page_size" in row else []
    if "unavailable" in row:
        return ", ".join([*words, row["unavailable"]])
    return ", ".join([*words, f"{row['microseconds']:.1f} µs"])


def compare(found: dict, plan: Plan) -> None:
    """Add to rows of `decode` what they give beside a copy, PyTorch and our 16 bits.

    `copy_share`: bandwidth over the copy's. `beside_sdpa`: speed over the fastest of
    PyTorch's. `speedup` and `predicted_speedup`, by bytes alone: over "native" with the
    same length, batch and page size. None where the other was not measured.
    """
    best, native = {}, {}
    for row in found["sdpa"]:
        setting, time_ = (row["length"], row["batch"]), row.get("microseconds")
        if time_ is not None:
            best[setting] = min(time_, best.get(setting, time_))
    for row in found["decode"]:
        if row["scheme"] == "native":
            native[row["length"], row["batch"], row["page_size"]] = row
    for row in found["decode"]:
        setting = (row["length"], row["batch"])
        time_, fastest = row["microseconds"], best.get(setting)
        ours = native.get((*setting, row["page_size"]))
        row["copy_share"] = row["gb_per_s"] / found["copy"]["gb_per_s"]
        row["beside_sdpa"] = fastest and fastest / time_
        row["speedup"] = ours and ours["microseconds"] / time_
        case = Case(*setting, row["page_size"], row["scheme"])
        plain = Case(*setting, row["page_size"], "native")
        row["predicted_speedup"] = plain.moved(plan) / case.moved(plan)


def largest(rows: list[dict]) -> list[dict]:
    """Rows of the longest context, and of the largest batch there."""
    place = max(((r["length"], r["batch"]) for r in rows), default=None)
    return [r for r in rows if (r["length"], r["batch"]) == place]


def goals(rows: list[dict]) -> list[dict]:
    """What was hoped for, and what was reached; see GOALS."""
    rows, found = largest(rows), []
    place = (rows[0]["length"], rows[0]["batch"]) if rows else None
    for quantity, name, size, wanted in GOALS:
        values = [
            row[quantity]
            for row in rows
            if name in (None, row["scheme"]) and size in (None, row["page_size"])
        ]
        reached = None if not values or None in values else min(values)
        found.append(
            {
                "quantity": quantity,
                "scheme": name,
                "page_size": size,
                "at": place,
                "wanted": wanted,
                "reached": reached,
                "met": reached is not None and reached >= wanted,
            }
        )
    return found


def table(found: dict, largest_only: bool = False) -> str:
    """Rows of `decode`, of all settings or only of the largest one, and the goals."""
    lines = [
        "tokens batch page scheme         MiB       µs   GB/s  of copy"
        "  × 16 bit predicted × PyTorch   error"
    ]
    for r in largest(found["decode"]) if largest_only else found["decode"]:
        compared = [
            "       —" if r[key] is None else f"{r[key]:8.2f}"
            for key in ("speedup", "predicted_speedup", "beside_sdpa")
        ]
        lines.append(
            f"{r['length']:6} {r['batch']:5} {r['page_size']:4} {r['scheme']:10}"
            f"{r['bytes'] / 2**20:8.1f} {r['microseconds']:8.1f} {r['gb_per_s']:6.0f}"
            f" {r['copy_share']:8.0%}  {'  '.join(compared)}  {r['error']:.0e}"
        )
    for goal in found["goals"]:
        what = MEANING[goal["quantity"]]
        name, size = goal["scheme"] or "every scheme", goal["page_size"]
        pages = f"pages of {size}" if size else "every page size"
        got = "not measured" if goal["reached"] is None else f"{goal['reached']:.2f}"
        sign = "met" if goal["met"] else "NOT MET"
        line = f"{sign:8} {what}, {name}, {pages}: {got}"
        lines.append(f"{line}, wanted {goal['wanted']}")
    lines += [f"skipped  {s['what']}: {s['why']}" for s in found["skipped"]]
    lines += [f"WRONG    {problem}" for problem in found["wrong"]]
    return "\n".join(lines)


# -- records ---------------------------------------------------------------------------


def slug(name: str) -> str:
    """The file name of a GPU: "NVIDIA H200" is h200, "Tesla T4" is t4."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(word for word in words if word not in ("nvidia", "tesla"))


def kernels_hash(folder: Path = provenance.PACKAGE / "kernels") -> str:
    """SHA-256 over the code of the kernels, which `library_hash` leaves out."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        code = provenance.code_hash(path.read_text(encoding="utf-8"))
        digest.update(f"{path.name} {code}\n".encode())
    return digest.hexdigest()


def said(*command: str) -> str | None:
    """What a program prints in the repository; None where it cannot."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def origin(gpu: str, commit: str | None = None) -> dict:
    """What a record of a GPU says beyond what every record does."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    changed = said("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "gpu": gpu,
        "driver": said(*query),
        "cuda": torch.version.cuda,
        "commit": commit or said("git", "rev-parse", "HEAD"),
        "uncommitted_changes": None if changed is None else bool(changed),
        "kernels": kernels_hash(),
    }


def record(found: dict, gpu: str, commit: str | None = None) -> dict:
    """A measurement as a record of kind "gpu"."""
    return provenance.record(
        "gpu",
        origin(gpu, commit) | found,
        model="none: one layer of attention on random keys and values",
        text="none",
    )


def records(results: Path = provenance.RESULTS) -> list[dict]:
    """All records of kind "gpu", each with `current`: whether library and kernels are
    still those that were measured. Unlike `provenance.load` it returns old ones, too:
    nobody can measure again without the GPU. Say so where they are shown."""
    found = []
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["kind"] == "gpu":
            library = content["library"] == provenance.library_hash()
            kernels = content["data"]["kernels"] == kernels_hash()
            found.append(content | {"current": library and kernels})
    return found


# -- the command -----------------------------------------------------------------------


def tests_command() -> list[str]:
    """How the kernels' tests are run.

    Raises:
        SystemExit: what they need is not installed.
    """
    missing = [m for m in ("pytest", "hypothesis") if not importlib.util.find_spec(m)]
    if missing:
        raise SystemExit(
            f"The kernels' tests need {' and '.join(missing)}: install them, "
            "or give --skip-tests to measure only."
        )
    files = sorted(str(path) for path in (ROOT / "tests").glob("test_kernels_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", *files]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(WORKERS), "--dist", "worksteal"]
    return command


def main(arguments: list[str] | None = None) -> None:
    """Test, measure, print, and write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m kvq_lib.bench.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    parser.add_argument("--small", action="store_true", help="a minute; not recorded")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of measuring")
    parser.add_argument("--commit", help="where this is no git checkout")
    parser.add_argument("--results", type=Path, default=provenance.RESULTS)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit(
            "No CUDA device here: `make gpu` measures the kernels on an NVIDIA GPU, "
            "with a PyTorch that was built for CUDA."
        )
    if not given.skip_tests and subprocess.run(tests_command(), cwd=ROOT).returncode:
        raise SystemExit("The kernels' tests failed on this GPU; nothing was measured.")
    gpu = torch.cuda.get_device_name(0)
    plan = SMALL if given.small else Plan()
    found = measure(plan, here(), given.seconds, say=lambda s: print(s, flush=True))
    print(f"\n{gpu}\n{table(found)}")
    if found["wrong"]:
        raise SystemExit("A kernel gave wrong numbers; nothing was recorded.")
    if not given.small:
        path = given.results / f"{slug(gpu)}.json"
        print(provenance.save(path, record(found, gpu, given.commit)))


if __name__ == "__main__":
    main()
