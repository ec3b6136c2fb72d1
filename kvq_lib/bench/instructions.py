"""How many instructions the loop of a kernel has, from its machine code.

    python -m kvq_lib.bench.instructions        # decode, for four GPU generations

A kernel waits for memory only if its instructions are fewer than the GPU can issue in
the meantime. The machine code is there without the GPU: compiled ahead of time, as in
`kernels.compile`. What follows from it is a prediction: no stall is counted.
"""

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from kvq_lib.kernels import budget
from kvq_lib.kernels import compile as ahead

LINE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.M
)


@dataclass(frozen=True)
class Loop:
    """The longest loop of a kernel.

    Attributes:
        instructions: in one round, of one warp.
        matrix: those of them that multiply matrices.
        tokens: that one round reads, for one kv head.
        warps: of a program.
        kv_heads: programs that a token takes.
    """

    instructions: int
    matrix: int
    tokens: int
    warps: int
    kv_heads: int

    @property
    def per_token(self) -> float:
        """Warp instructions that a token of the context costs in one layer."""
        return self.instructions * self.warps * self.kv_heads / self.tokens


def longest_loop(sass: str) -> list[str]:
    """Instructions, by name, of the longest stretch that a branch jumps back over.

    Args:
        sass: what `cuobjdump -sass` prints.

    Raises:
        ValueError: there is no loop.
    """
    lines = [(int(a, 16), name, rest) for a, name, rest in LINE.findall(sass)]
    places = {address: i for i, (address, _, _) in enumerate(lines)}
    loops = [[]]
    for i, (address, name, rest) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)", rest)
        if name.startswith("BRA") and target and int(target[1], 16) < address:
            start = places.get(int(target[1], 16))
            if start is not None:
                loops.append([name for _, name, _ in lines[start : i + 1]])
    found = max(loops, key=len)
    if not found:
        raise ValueError("no loop in this machine code")
    return found


def read(variant: ahead.Variant) -> Loop:
    """Compile a variant of `decode`, and look at the loop over its pages: over cold
    ones, where the scheme seals."""
    launch, compiled = ahead.compiled_launch(variant)
    loop = longest_loop(ahead.disassembled(compiled.asm["cubin"]))
    sealed = launch.arguments["KEYS"] is not None
    return Loop(
        instructions=len(loop),
        matrix=sum(ahead.MATRIX.match(name) is not None for name in loop),
        tokens=launch.arguments["COLD_TILE" if sealed else "HOT_TILE"],
        warps=launch.warps,
        kv_heads=launch.grid[1],
    )


def decode_loops(
    targets, schemes, page_size: int = 16, dim: int = 128, group: int = 4, jobs: int = 2
) -> dict[tuple[int, str], Loop]:
    """The loops of `decode` for all targets and schemes, in float16.

    Compiled in processes of their own, where Triton's interpreter is off. Triton keeps
    what it has compiled: a second time is quick.
    """
    keys = [(target, name) for target in targets for name in schemes]
    variants = [
        ahead.Variant(target, "decode", name, page_size, dim, group, "float16")
        for target, name in keys
    ]
    spawn = get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, initializer=ahead.no_interpreter) as pool:
        return dict(zip(keys, pool.map(read, variants), strict=True))


def main() -> None:
    """Print instructions and bytes of a token, as times on each GPU."""
    schemes = ("native", "fp16", "fp8", "int8", "int4", "int4-kivi", "int2-kivi")
    loops = decode_loops(sorted(set(budget.CAPABILITY.values())), schemes)
    print("Predicted from machine code and data sheets: ns for a token of one layer")
    print("gpu            scheme     instructions  tile warps  issue  bytes")
    for gpu, target in budget.CAPABILITY.items():
        for name in schemes:
            loop = loops[target, name]
            moved = budget.decode([32768], 32, loop.kv_heads, 128, name, 16)
            issue = budget.issue_seconds(loop.per_token, gpu)
            print(
                f"{gpu:14} {name:10} {loop.instructions:12} {loop.tokens:5} "
                f"{loop.warps:5} {issue * 1e9:6.2f} "
                f"{budget.seconds(moved, gpu) / 32768 * 1e9:6.2f}"
            )


if __name__ == "__main__":
    main()
