"""Draw the README's figure from the recorded measurements; part of `make measure`.

python -m kvq_lib.course.readme
"""

import hashlib

import matplotlib.pyplot as plt

from ..bench import provenance
from . import figures

FIGURE = provenance.RESULTS.parent / "assets" / "static" / "price-and-damage.png"
SCHEMES = ("fp16", "fp8", "int8", "k8v4", "int4-kivi", "int4", "int2-kivi")


def price_and_damage(ax, rows: dict[str, dict]) -> None:
    """Bits an element against KL divergence, one point a scheme, on matplotlib axes.

    Args:
        ax: the axes.
        rows: measured rows of the record "quality" by scheme name.
    """
    for name in SCHEMES:
        row = rows[name]
        ax.plot(row["bits"], row["kl"], label=name, **figures.points(name))
    ax.set(yscale="log", xlabel="bits per element", ylabel="KL divergence (nats)")
    ax.legend(ncols=2)


def record_hash() -> str:
    """SHA-256 of the record that the figure draws; stored in the figure's metadata."""
    return hashlib.sha256(
        (provenance.RESULTS / "quality.json").read_bytes()
    ).hexdigest()


def main() -> None:
    """Draw and save."""
    record = provenance.load("quality")
    figures.style()
    fig, ax = plt.subplots()
    price_and_damage(ax, {row["scheme"]: row for row in record["data"]["schemes"]})
    ax.set_title("What each scheme costs, and what it does to the model")
    fig.savefig(FIGURE, metadata={"Description": record_hash()})
    print(f"Drawn: {FIGURE}")


if __name__ == "__main__":
    main()
