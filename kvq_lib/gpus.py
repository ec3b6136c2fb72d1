"""Memory of common GPUs, and amounts of memory as people write them."""

import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

from .checks import _shown, whole
from .errors import InvalidArgument

#: Memory in GB (10^9 bytes) as the makers write it. A driver often reports more, since
#: makers write GB for what may be GiB: an amount that it reports is the better one.
#: NVIDIA's data sheets "T4 Tensor Core GPU" (2019), "V100 Tensor Core GPU" (2020), "A10
#: Tensor Core GPU" (2021), "A100 Tensor Core GPU" (2021), "L4 Tensor Core GPU" (2023),
#: "L40S" (2023), "H100 Tensor Core GPU" (2023), "H200 Tensor Core GPU" (2024), "RTX
#: A6000" (2021) and "RTX 6000 Ada Generation" (2023); its product pages of the GeForce
#: cards; its "DGX B200 User Guide" (8 GPUs, 1,440 GB together); AMD's data sheets
#: "Instinct MI300X" (2023) and "Instinct MI325X" (2024).
MEMORY_GB: Mapping[str, int] = MappingProxyType(
    {
        "T4": 16,
        "V100-16GB": 16,
        "V100-32GB": 32,
        "A10": 24,
        "A100-40GB": 40,
        "A100-80GB-SXM": 80,
        "A100-80GB-PCIe": 80,
        "L4": 24,
        "L40S": 48,
        "H100-SXM": 80,
        "H100-PCIe": 80,
        "H100-NVL": 94,
        "H200": 141,
        "B200": 180,
        "RTX-3090": 24,
        "RTX-4090": 24,
        "RTX-5090": 32,
        "RTX-A6000": 48,
        "RTX-6000-Ada": 48,
        "MI300X": 192,
        "MI325X": 256,
    }
)

#: Bytes of a unit. GB counts in thousands, GiB in 1,024s: 24 GB are 22.35 GiB.
_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SPELLINGS = {name: size for name, size in _UNITS.items()} | {
    name.lower(): size for name, size in _UNITS.items()
}
_AMOUNT = re.compile(r"\s*(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})\s*([A-Za-z]*)\s*")


def amount(name: str, value: "int | str") -> int:
    """Bytes of an amount of memory, rounded down to a whole byte.

    Args:
        name: for the message.
        value: bytes, or a text such as "24GiB", "24 GB" or "25769803776".

    Raises:
        InvalidArgument: no such amount, or a unit that leaves open which is meant.
    """
    if not isinstance(value, str):
        return whole(name, value, at_least=0)
    found = _AMOUNT.fullmatch(value)
    unit = found[2] or "B" if found else ""
    if unit not in _SPELLINGS:
        raise InvalidArgument(
            f"{name} is an amount such as 24GiB (1,024s), 24GB (1,000s) or plain "
            f"bytes; got {_shown(value)}"
        )
    return whole(name, int(Fraction(found[1]) * _SPELLINGS[unit]), at_least=0)


def gpu_memory(gpu: "int | str") -> int:
    """Bytes of memory of one GPU: a name of `MEMORY_GB`, in any case, or an amount.

    Raises:
        InvalidArgument: neither a known name nor an amount of more than nothing.
    """
    if isinstance(gpu, str):
        for name, gigabytes in MEMORY_GB.items():
            if gpu.strip().lower() == name.lower():
                return gigabytes * 10**9
        if not re.match(r"\s*[\d.]", gpu):
            raise InvalidArgument(
                f"no memory is known for the GPU {_shown(gpu)}; give an amount such as "
                f"24GiB, or one of {', '.join(MEMORY_GB)}"
            )
    memory = amount("gpu", gpu)
    # Who types 24 means no bytes.
    if not memory or (isinstance(gpu, str) and memory < 2**20):
        raise InvalidArgument(
            f"gpu has a memory of {memory} bytes: give a unit, such as 24GiB"
        )
    return memory
