"""Where a recorded measurement came from, and whether the code behind it still stands.

A record holds the measured data with the date, the machine, the versions, the model,
the text and a hash of the library's code.  `load` refuses a record whose hash is not
the current one: a chapter never draws numbers that its library would no longer give.
"""

import ast
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
RESULTS = PACKAGE.parent / "book" / "results"

# The modules that decide what a measurement gives.
MODULES = (
    "checks.py",
    "formats.py",
    "specs.py",
    "storage.py",
    "quantize.py",
    "turns.py",
    "schemes.py",
    "memory.py",
    "pages.py",
    "cache.py",
    "attention.py",
    "weights.py",
    "model.py",
    "kernels/__init__.py",
    "kernels/reference.py",
    "bench/quality.py",
)
# What a kind of record depends on beyond them.
FURTHER = {
    "compensation": (
        "calibrate.py",
        "allocate.py",
        "fit.py",
        "search.py",
        "course/planted.py",
        "bench/compensate.py",
    ),
    "serving": (
        "swap.py",
        "serving.py",
        "admission.py",
        "engine.py",
        "bench/serve.py",
    ),
}
# Kinds that measure another program: the library's code has no part in them.  Which
# version of that program it was, their data say.
ALONE = {
    "vllm-cpu": (
        "bench/engine_client.py",
        "bench/engine_server.py",
        "bench/real_engine.py",
    )
}
# Code that no record was measured with, but which gives the same numbers: its hash, and
# that of the module as it was measured.  Measuring again empties this table.
SAME = {
    # weights.py reads the packaged model with transformers 5.15, too.  What it writes
    # is the same to the bit: a test compares it.
    "57e4029f152262b2a5fb1c65adda930dba41cdf0e0cafa57ddfdf0109ec3d9e9": (
        "2c7c12976e968253f04f1018af784e9b823df2b0367348bc2e2114cd3b5cd681"
    ),
}
DISTRIBUTIONS = (
    "torch",
    "transformers",
    "numpy",
    "triton",
    "accelerate",
    "gguf",
    "optimum-quanto",
)
# Fields of syntax nodes that say nothing about what the code does.
IGNORED_FIELDS = {"ctx", "kind", "type_comment", "type_ignores"}


class StaleRecord(RuntimeError):
    """A record was measured with library code that has changed since."""


class MissingRecord(FileNotFoundError):
    """A record was never measured, or the book's folder is not there."""


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _joined_literals(parts: list[ast.expr]) -> Iterator[ast.expr]:
    literal = ""
    for part in parts:
        if isinstance(part, ast.Constant):
            literal += part.value
            continue
        if literal:
            yield ast.Constant(literal)
        literal = ""
        yield part
    if literal:
        yield ast.Constant(literal)


def _code(node: Any) -> Iterator[str]:
    """Yield a syntax tree as text, the same text under every supported Python.

    `ast.dump` will not do: it prints fields that newer versions added, and 3.13 leaves
    out empty ones.  Here empty fields are left out under every version.
    """
    if isinstance(node, list):
        yield "["
        for item in node:
            yield from _code(item)
        yield "]"
    elif isinstance(node, ast.JoinedStr):
        # Where a literal part of an f-string is cut into pieces depends on the version.
        yield "(JoinedStr values="
        yield from _code(list(_joined_literals(node.values)))
        yield ")"
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                value = value[1:] if value and _is_docstring(value[0]) else value
            if name in IGNORED_FIELDS or value is None or value == []:
                continue
            yield f" {name}="
            yield from _code(value)
        # A constant None is a value, not an absent field.
        if isinstance(node, ast.Constant) and node.value is None:
            yield " value=None"
        yield ")"
    else:
        yield f"{type(node).__name__}:{node!r}"


def code_hash(source: str) -> str:
    """SHA-256 of what code does: comments, docstrings and layout do not count."""
    return hashlib.sha256("".join(_code(ast.parse(source))).encode()).hexdigest()


def modules(kind: str = "") -> tuple[str, ...]:
    """The modules that a kind of record depends on, as paths below the package."""
    return ALONE.get(kind) or (*MODULES, *FURTHER.get(kind, ()))


def library_hash(kind: str = "", package: Path = PACKAGE) -> str:
    """SHA-256 over the code of all modules that a kind of record depends on."""
    digest = hashlib.sha256()
    for module in modules(kind):
        source = (package / module).read_text(encoding="utf-8")
        code = code_hash(source)
        digest.update(f"{module} {SAME.get(code, code)}\n".encode())
    return digest.hexdigest()


# The code that this process runs; the files may change while it measures.
_HASH_AT_IMPORT = {kind: library_hash(kind) for kind in ("", *FURTHER, *ALONE)}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    # torch only when a measurement asks: reading a record does not need it.
    import torch

    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(0)
    return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"


def machine() -> dict[str, Any]:
    """The hardware and system of this machine; nothing that identifies its owner."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_gib": round(memory / 2**30, 1),
        "os": f"{platform.system()} {platform.machine()}",
        "gpu": _gpu(),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None where one is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def record(
    kind: str,
    data: Any,
    *,
    model: str,
    text: str,
    content: str | bytes | None = None,
) -> dict[str, Any]:
    """A measurement with its origin, ready for `save`.

    `data` is anything JSON can hold.  `model` and `text` describe in words what was
    measured and what it read.  `content` is that text itself, of which the record
    keeps the SHA-256; None where nothing was read.
    """
    if isinstance(content, str):
        content = content.encode()
    library = library_hash(kind)
    if library != _HASH_AT_IMPORT.get(kind, _HASH_AT_IMPORT[""]):
        raise StaleRecord(
            "the library's code changed while this was measured: measure again"
        )
    return {
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "library": library,
        "model": model,
        "text": {
            "description": text,
            "sha256": None if content is None else hashlib.sha256(content).hexdigest(),
        },
        "data": data,
    }


def save(path: str | Path, record: dict[str, Any]) -> Path:
    """Write a record as JSON, whole or not at all; return its path."""
    path = Path(path)
    # Refuses NaN and infinity, which JSON does not have, before anything is written.
    content = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def load(name: str, results: Path = RESULTS) -> dict[str, Any]:
    """Read `book/results/NAME.json`.

    Raises MissingRecord if there is none and StaleRecord if the library's code is not
    the one that was measured.
    """
    path = results / f"{name}.json"
    command = "make engine" if name in ALONE else "make measure"
    if not path.exists():
        known = sorted(file.stem for file in results.glob("*.json"))
        raise MissingRecord(
            f"no record {name!r} in book/results, only {known}: "
            f"run `{command}` in a checkout of the book"
        )
    found = json.loads(path.read_text(encoding="utf-8"))
    current = library_hash(name)
    if found["library"] != current:
        raise StaleRecord(
            f"the record {name!r} of {found['date']} was measured with other library "
            f"code ({found['library'][:12]}, now {current[:12]}): run `{command}`"
        )
    return found
