"""Compile the kernels for GPUs that are not here, and read what came out.

    python -m kvq_lib.kernels.compile            # the checked-in list of variants
    python -m kvq_lib.kernels.compile --all      # every combination
    python -m kvq_lib.kernels.compile --write    # make the list anew

Each variant goes through the same host code that launches it on a device, with tensors
that have shapes and no storage, down to the machine code of the chip. The report counts
registers, spilled bytes, shared memory and matrix instructions there.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIST = HERE / "variants.txt"
RESULTS = HERE.parents[1] / "_build" / "kernels.json"

TARGETS = (75, 80, 86, 89, 90, 100)
KERNELS = ("append", "turn", "seal-keys", "seal-values", "decode", "merge", "extend")
SCHEMES = (
    "native", "fp16", "fp8", "int8", "int4", "int4-kivi", "int2-kivi", "k8v4",
    "nvfp4", "mixed", "int8-static", "int4-feedback",
)  # fmt: skip
PAGES = (16, 32, 64)
DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 4, 7, 16)
DTYPES = ("float16", "bfloat16", "float32")

#: Names of instructions that multiply matrices.
MATRIX = re.compile(r"HMMA|HGMMA|UTC\w*MMA")

#: Shared memory that one block may use, in KiB (CUDA C++ Programming Guide, table
#: "Technical Specifications per Compute Capability").
SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227}


@dataclass(frozen=True, order=True)
class Variant:
    """One combination of choices."""

    target: int
    kernel: str
    scheme: str
    page_size: int
    dim: int
    group: int
    dtype: str

    @property
    def possible(self) -> bool:
        """Whether such a kernel can be asked for: no GPU of sm_75 has bfloat16,
        `native` seals nothing, and feedback changes only how pages are sealed."""
        if self.target == 75 and self.dtype == "bfloat16":
            return False
        seals = self.kernel.startswith("seal")
        return {"native": not seals, "int4-feedback": seals}.get(self.scheme, True)

    def __str__(self) -> str:
        return " ".join(map(str, asdict(self).values()))


@dataclass(frozen=True)
class Report:
    """What a kernel became; or several, where pages are sealed by more than one.

    Attributes:
        registers: of a thread; the most.
        spilled: bytes of a thread's registers that went to memory; the most.
        shared: bytes of shared memory of a block; the most.
        matrix: matrix instructions, of all together.
        instructions: all of them.
        fp8: whether the PTX of any names an FP8 type.
        fused: whether that of any has products and sums in one instruction, in float32.
    """

    registers: int
    spilled: int
    shared: int
    matrix: int
    instructions: int
    fp8: bool
    fused: bool


def every_variant() -> Iterator[Variant]:
    """The full product of choices, as far as it is possible."""
    choices = product(TARGETS, KERNELS, SCHEMES, PAGES, DIMS, GROUPS, DTYPES)
    return (v for v in (Variant(*c) for c in choices) if v.possible)


def pairs(variant: Variant) -> set[tuple]:
    """All pairs of choices that a variant covers."""
    choices = list(asdict(variant).items())
    return {(a, b) for i, a in enumerate(choices) for b in choices[i + 1 :]}


def short_list() -> list[Variant]:
    """What is served most, and variants that cover every other possible pair of
    choices.

    Greedy: each step takes the variant that covers most of the pairs still missing,
    among those that cover the first missing one. Always gives the same list.
    """
    variants = list(every_variant())
    covers = {v: pairs(v) for v in variants}
    missing = dict.fromkeys(p for v in variants for p in sorted(covers[v], key=str))
    chosen = serving()
    for pair in set().union(*map(pairs, chosen)):
        missing.pop(pair, None)
    while missing:
        first = next(iter(missing))
        best = max(
            (v for v in variants if first in covers[v]),
            key=lambda v: sum(p in missing for p in covers[v]),
        )
        chosen.append(best)
        for pair in covers[best]:
            missing.pop(pair, None)
    return sorted(chosen)


def serving() -> list[Variant]:
    """What is served most: heads of 128 channels, four queries each, in float16, on
    pages of 16; every scheme, on three generations."""
    served = (
        Variant(target, kernel, name, 16, 128, 4, "float16")
        for target in (75, 80, 90)
        for kernel in ("decode", "extend")
        for name in SCHEMES
    )
    return [variant for variant in served if variant.possible]


def listed() -> list[Variant]:
    """The checked-in list."""
    lines = LIST.read_text().splitlines()
    rows = (line.split() for line in lines if line and not line.startswith("#"))
    return [
        Variant(int(t), k, s, int(p), int(d), int(g), x) for t, k, s, p, d, g, x in rows
    ]


# -- from a variant to machine code ----------------------------------------------------


def sides(name: str, dim: int) -> tuple:
    """How a scheme stores keys and values, with the recipes that calibration makes."""
    from ..schemes import SCHEMES as RECIPES
    from ..specs import Mixed, Spec

    if name == "mixed":
        return Mixed(channels=(16, 16, dim - 32)), RECIPES[name].values
    if name == "int4-feedback":
        return (Spec("int4", "token", symmetric=False, aids=("feedback",)),) * 2
    return RECIPES[name].keys, RECIPES[name].values


def launches(variant: Variant) -> list:
    """The launches of a variant, on tensors without storage."""
    import torch

    from ..storage import Aid, empty
    from ..turns import Turn, hadamard_block
    from . import append, decode, extend, seal, turn

    kv_heads, pages, sequences, width = 8, 4096, 32, 512
    size, dim = variant.page_size, variant.dim
    keys, values = sides(variant.scheme, dim)
    dtype = getattr(torch, variant.dtype)

    def tensor(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    def ints(*shape, dtype=torch.int32):
        return tensor(*shape, dtype=dtype)

    def store(side):
        aids = [
            Aid(
                scale=tensor(kv_heads, 1, 1, 1, dtype=torch.float16),
                feedback=tensor(kv_heads, dim, dim, dtype=torch.float32)
                if "feedback" in spec.aids
                else None,
            )
            for spec, _ in side.runs(dim)
        ]
        return empty(side, (kv_heads, pages), size, dim, "meta", aids)

    # As the cache chooses it: float16 for float32 models, unless nothing is sealed.
    half = keys is not None and dtype == torch.float32
    pool = tensor(kv_heads, pages, size, dim, dtype=torch.float16 if half else dtype)
    hot, flags = (pool, pool), ints(kv_heads)
    cold = None if keys is None else (store(keys), store(values))
    q = tensor(sequences, kv_heads * variant.group, dim)
    k = tensor(sequences, kv_heads, dim)
    tables = [ints(sequences, width), ints(sequences, width)]
    if variant.kernel == "append":
        return append.prepare(hot, ints(sequences), ints(sequences), k, k, flags)
    if variant.kernel == "turn":
        each = tensor(kv_heads, dim, dtype=torch.float32)
        order = ints(kv_heads, dim, dtype=torch.int64)
        how = Turn(each, each, hadamard_block(dim), order, each)
        return turn.prepare(q, q, how, kv_heads, flags)
    if variant.kernel.startswith("seal"):
        side = cold[variant.kernel == "seal-values"]
        return seal.prepare(pool, ints(sequences), side, ints(sequences), flags)
    if variant.kernel == "extend":
        read = (*tables, ints(sequences + 1), ints(sequences))
        return extend.prepare(
            q, q, hot, cold, read, (0, 0), flags, 1.0, target=variant.target
        )
    read = (*tables, ints(2, sequences))
    both = decode.prepare(
        q, q, hot, cold, read, flags, 1.0, splits=8, target=variant.target
    )
    return both[:1] if variant.kernel == "decode" else both[1:]


def source(launch):
    """A launch as Triton's compiler takes it: types, constants and alignments, as the
    launcher would see them at run time."""
    from triton.compiler import ASTSource

    constants, alignments = {}, {}

    def describe(value, path, constant):
        if isinstance(value, tuple) and not constant:
            return tuple(describe(x, (*path, i), False) for i, x in enumerate(value))
        if constant or value is None or (type(value) is int and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, int):
            if value % 16 == 0:
                alignments[path] = [["tt.divisibility", 16]]
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        alignments[path] = [["tt.divisibility", 16]]
        return "*" + POINTERS[str(value.dtype).removeprefix("torch.")]

    signature = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        signature[parameter.name] = describe(value, (i,), parameter.is_constexpr)
    return ASTSource(launch.kernel, signature, constants, alignments)


POINTERS = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
}


def compiled_launches(variant: Variant) -> list[tuple]:
    """The launches of a variant, each with what Triton compiled it to."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", variant.target, 32)
    return [
        (one, triton.compile(source(one), target=target, options=one.options))
        for one in launches(variant)
    ]


def compiled_launch(variant: Variant) -> tuple:
    """The only launch of a variant, and what Triton compiled it to."""
    (both,) = compiled_launches(variant)
    return both


def build(variant: Variant) -> Report:
    """Compile a variant, and read its machine code."""
    made = [compiled for _, compiled in compiled_launches(variant)]
    found = [read_cubin(one.asm["cubin"]) for one in made]
    shared = [one.metadata.shared for one in made]
    ptx = "".join(one.asm["ptx"] for one in made)
    return Report(
        **{key: max(x[key] for x in found) for key in ("registers", "spilled")},
        shared=max(shared),
        **{key: sum(x[key] for x in found) for key in ("matrix", "instructions")},
        fp8=re.search(r"e4m3|e5m2", ptx) is not None,
        fused="fma.rn.f32" in ptx,
    )


def read_cubin(cubin: bytes) -> dict[str, int]:
    """Registers, spills and instructions in machine code."""
    said = disassembled(cubin)
    usage = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", said)
    codes = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", said, re.M
    )
    return {
        "registers": int(usage[1]),
        "spilled": int(usage[2]) + int(usage[3]),
        "matrix": sum(MATRIX.match(code) is not None for code in codes),
        "instructions": len(codes),
    }


def disassembled(cubin: bytes) -> str:
    """Resources and instructions of machine code, as `cuobjdump` prints them: Triton
    brings it along."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", "-sass", file.name]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout


def main() -> None:
    """Compile what the command line asks for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--write", action="store_true", help="make the list anew")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = parser.parse_args()
    if given.jobs < 1:
        parser.error("--jobs is at least 1")
    if given.write:
        lines = [
            "# target kernel scheme page_size dim group dtype: all pairs of choices",
            "# and, for decode and extend, the shape that is served most",
        ]
        LIST.write_text("\n".join([*lines, *map(str, short_list())]) + "\n")
        return
    variants = list(every_variant()) if given.all else listed()
    print("registers spilled  shared matrix instructions  variant")
    for variant, report in build_all(variants, given.jobs):
        print(
            f"{report.registers:9} {report.spilled:7} {report.shared:7} "
            f"{report.matrix:6} {report.instructions:12}  {variant}",
            flush=True,
        )


def build_all(variants: list[Variant], jobs: int) -> Iterator[tuple[Variant, Report]]:
    """Compile variants in processes of their own, where the interpreter is off.

    Reports are kept under `_build`, by a hash of the kernels' source and of Triton's
    version, and compiled again only when one of the two changes.
    """
    key, known = fingerprint(), {}
    if RESULTS.exists():
        kept = json.loads(RESULTS.read_text())
        known = kept["reports"] if kept["key"] == key else {}
    missing = [v for v in variants if str(v) not in known]
    spawn = get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, initializer=no_interpreter) as pool:
        for variant, report in zip(missing, pool.map(build, missing), strict=True):
            known[str(variant)] = asdict(report)
    RESULTS.parent.mkdir(exist_ok=True)
    # Whole or not at all: another run may read it meanwhile.
    partial = RESULTS.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"key": key, "reports": known}, indent=0))
    partial.replace(RESULTS)
    for variant in variants:
        yield variant, Report(**known[str(variant)])


def no_interpreter() -> None:
    """In a new process, before it imports triton."""
    os.environ.pop("TRITON_INTERPRET", None)


def fingerprint() -> str:
    """A hash of all that decides what a variant compiles to."""
    import triton

    library = ("specs.py", "storage.py", "schemes.py", "turns.py", "formats.py")
    sources = [*sorted(HERE.glob("*.py")), *(HERE.parent / name for name in library)]
    text = triton.__version__ + "".join(path.read_text() for path in sources)
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()
