"""How many bytes each kernel must move, and what speed that predicts.

A decode step reads the whole cache once and computes little with it. So its time is at
least bytes / bandwidth, and a cache of fewer bytes is at best that much faster. What
this module gives are predictions from data sheets, not measurements.
"""

from collections.abc import Iterable

from ..schemes import SCHEMES, Law, Scheme, scheme
from ..specs import Side

#: Memory bandwidth in GB/s, from NVIDIA's data sheets "L4 Tensor Core GPU" (2023),
#: "A100 Tensor Core GPU" (80GB SXM, 2021), "H100 Tensor Core GPU" (SXM, 2023) and "H200
#: Tensor Core GPU" (SXM, 2024), and from its product page of the T4 ("320+").
BANDWIDTH = {
    "T4": 320,
    "L4": 300,
    "A100-80GB-SXM": 2039,
    "H100-SXM": 3350,
    "H200": 4800,
}

#: Compute capability times ten.
CAPABILITY = {"T4": 75, "L4": 89, "A100-80GB-SXM": 80, "H100-SXM": 90, "H200": 90}

#: Multiprocessors, and their highest clock in GHz, from the same data sheets and from
#: NVIDIA's white papers on Turing, Ampere, Ada and Hopper. The clock of the last two is
#: what their peak of 67 TFLOPS in float32 implies.
PROCESSORS = {
    "T4": (40, 1.59),
    "L4": (58, 2.04),
    "A100-80GB-SXM": (108, 1.41),
    "H100-SXM": (132, 1.98),
    "H200": (132, 1.98),
}
ISSUED = 4  # warp instructions that a multiprocessor starts in a cycle, all generations

INDEX = 4  # bytes of a page id, a count or a position


def append(
    tokens: int, kv_heads: int, dim: int, new: int = 2, hot: int = 2
) -> tuple[int, int]:
    """Bytes (read, written) by `append`.

    Args:
        new, hot: bytes of an element of the new keys and values, and of hot pages.
    """
    numbers = 2 * tokens * kv_heads * dim
    # The page and the slot, int64 as the cache gives them, once a kv head.
    return numbers * new + 2 * 8 * tokens * kv_heads, numbers * hot


def turn(
    tokens: int, heads: int, dim: int, x: int = 2, out: int = 4
) -> tuple[int, int]:
    """Bytes (read, written) by `turn`; `x` and `out` bytes an element. What it knows of
    the channels comes from the cache of the chip and is not counted."""
    numbers = tokens * heads * dim
    return numbers * x, numbers * out


def seal(
    pages: int, kv_heads: int, page_size: int, dim: int, side: Side, hot: int = 2
) -> tuple[int, int]:
    """Bytes (read, written) by `seal` for one side; `hot` bytes an element.

    A second pass over a page comes from the cache of the chip and is not counted; but
    where errors are fed back, a second kernel reads the page and its scales again, and
    for each kv head the shares, and writes the codes again.
    """
    read = written = 0
    for spec, width in side.runs(dim):
        each, stored = pages * kv_heads, spec.nbytes(page_size, width)
        page = page_size * width * hot + 2 * 8
        read += each * page
        written += each * stored
        if "feedback" in spec.aids:
            codes = page_size * spec.fmt.packed_width(width)
            read += each * (page + stored - codes) + kv_heads * width * width * 4
            written += each * codes
    return read, written


def decode(
    lengths: Iterable[int],
    heads: int,
    kv_heads: int,
    dim: int,
    name: "str | Scheme",
    page_size: int,
    hot: int = 2,
    splits: int = 1,
    layer: int = 0,
) -> tuple[int, int]:
    """Bytes (read, written) by `decode` for sequences of `lengths` tokens, the query's
    own token included; q and output have `hot` bytes an element. `layer` counts where
    a scheme stores layers differently. Static scales are not counted.
    """
    recipe = scheme(name)
    law, read, written = recipe.law(page_size), 0, 0
    for length in lengths:
        cold_pages, hot_tokens = pages_read(law, length)
        read += kv_heads * cold_pages * recipe.page_nbytes(page_size, dim, layer)
        read += kv_heads * hot_tokens * 2 * dim * hot
        entries = cold_pages + -(-hot_tokens // page_size)
        read += kv_heads * INDEX * (entries + 2 * splits)
        read += splits * heads * dim * hot
        if splits == 1:
            written += heads * dim * hot
        else:
            written += heads * splits * (dim + 2) * 4
    return read, written


def pages_read(law: Law, length: int) -> tuple[int, int]:
    """Cold pages and hot tokens that the last of `length` tokens reads."""
    own = (length - 1) // law.page_size
    cold = len(law.cold(own))
    return cold, length - cold * law.page_size


def merge(
    sequences: int, heads: int, dim: int, splits: int, out: int = 2
) -> tuple[int, int]:
    """Bytes (read, written) by `merge`; `out` bytes an element of the output."""
    rows = sequences * heads
    return rows * splits * (dim + 2) * 4, rows * dim * out


def extend(
    start: int,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    name: "str | Scheme",
    page_size: int,
    queries: int,
    hot: int = 2,
    layer: int = 0,
) -> tuple[int, int]:
    """Bytes (read, written) by `extend` for one sequence of `length` new tokens from
    position `start` on, in tiles of `queries` tokens; tables are not counted.
    """
    recipe = scheme(name)
    law, read = recipe.law(page_size), 0
    for first in range(start, start + length, queries):
        last = min(first + queries, start + length) - 1
        cold = len(law.cold(last // page_size))
        sinks, window = law.hot(last // page_size)
        oldest = law.hot(first // page_size)[1].start
        pages = len(sinks) + max(0, window.stop - oldest)
        tokens = pages * page_size - (page_size - 1 - last % page_size)
        read += kv_heads * cold * recipe.page_nbytes(page_size, dim, layer)
        read += kv_heads * tokens * 2 * dim * hot
    passes = 2 if recipe.seals else 1
    return read + passes * length * heads * dim * hot, length * heads * dim * hot


def seconds(moved: tuple[int, int], gpu: str) -> float:
    """The least time for bytes (read, written) on a GPU of `BANDWIDTH`."""
    return sum(moved) / (BANDWIDTH[gpu] * 1e9)


def issue_seconds(warp_instructions: float, gpu: str) -> float:
    """The least time to issue some instructions, each for a warp, on all of a GPU of
    `PROCESSORS`. Real kernels stall and issue more slowly."""
    processors, clock = PROCESSORS[gpu]
    return warp_instructions / (processors * ISSUED * clock * 1e9)


def predictions(
    gpu: str,
    lengths: Iterable[int] = (2048, 8192, 32768),
    batches: Iterable[int] = (1, 8, 32),
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    page_size: int = 16,
) -> list[dict]:
    """Predicted decode steps of one layer: one row for each scheme, length and batch.

    Returns:
        Dicts of gpu, scheme, length, batch, MiB moved, microseconds at the full
        bandwidth, and speed-up over `native`. Roofline predictions, nothing measured.
    """
    rows = []
    for length in lengths:
        for batch in batches:
            base = None
            for name in SCHEMES:
                if name == "mixed":
                    continue  # its widths depend on the model
                moved = decode([length] * batch, heads, kv_heads, dim, name, page_size)
                time = seconds(moved, gpu)
                base = base or time  # `native` comes first
                rows.append(
                    {
                        "gpu": gpu,
                        "scheme": name,
                        "length": length,
                        "batch": batch,
                        "MiB": sum(moved) / 2**20,
                        "predicted microseconds": time * 1e6,
                        "predicted speed-up": base / time,
                    }
                )
    return rows


def main() -> None:
    """Print the predictions for every GPU of the table."""
    print("Predicted from data sheets, one layer, 32 query and 8 kv heads of 128.")
    print("gpu            scheme     tokens batch       MiB        µs  speed-up")
    for gpu in BANDWIDTH:
        for row in predictions(gpu):
            print(
                f"{gpu:14} {row['scheme']:10} {row['length']:6} {row['batch']:5} "
                f"{row['MiB']:9.2f} {row['predicted microseconds']:9.1f} "
                f"{row['predicted speed-up']:8.2f}×"
            )


if __name__ == "__main__":
    main()
