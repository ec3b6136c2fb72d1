"""How the book's figures and tables look: one style, one colour and marker a scheme.

    from kvq_lib.course import figures

    figures.style()
    ax.plot(lengths, errors, **figures.line("int4"))
    ax.bar(x, height, **figures.bar("int4"))

Colours are those of Okabe and Ito, which stay apart for colour-blind readers, with a
few more of the same kind.  No figure relies on colour alone: lines differ in marker
and dash, bars in hatching.  Sizes are chosen for pages of 375 to 1280 pixels: a figure
is 5 inches wide and shown 600 pixels wide (cell metadata `mystnb.image.width`), or
as wide as a phone allows, where its letters are still 9 to 10 pixels high.

This is the only module of the library that imports matplotlib.
"""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..errors import InvalidArgument

WIDTH = 5.0  # inches, of every figure


@dataclass(frozen=True)
class Look:
    """How one series is drawn: colour, marker, dash of a line, hatching of a bar."""

    color: str
    marker: str
    linestyle: str | tuple
    hatch: str


#: A scheme looks the same in every chapter.
SCHEMES = {
    "native": Look("#000000", "o", "-", ""),
    "fp16": Look("#767676", "s", "--", ".."),
    "fp8": Look("#CC79A7", "D", "-.", "xx"),
    "int8": Look("#0072B2", "^", "-", "//"),
    "int4": Look("#E69F00", "v", "--", "\\\\"),
    "int4-kivi": Look("#009E73", "P", "-", "++"),
    "int2-kivi": Look("#D55E00", "X", ":", "oo"),
    "k8v4": Look("#56B4E9", "<", "-.", "--"),
    "int4-rotated": Look("#7A5C00", ">", (0, (5, 1)), "||"),
    "mixed": Look("#882255", "h", (0, (3, 1, 1, 1)), "OO"),
    "nvfp4": Look("#8A8A00", "*", (0, (1, 1)), "**"),
    "int8-static": Look("#4B9CD3", "1", (0, (4, 2)), "/."),
    "fp8-static": Look("#A64D79", "2", (0, (2, 2)), "x."),
    "int4-feedback": Look("#005F45", "d", (0, (6, 2, 1, 2)), "+."),
    "int2-feedback": Look("#8C3D00", "p", (0, (2, 1, 1, 1)), "o."),
}

#: For series that are no schemes (models, machines, policies), in this order.
SERIES = (
    Look("#0072B2", "o", "-", ""),
    Look("#E69F00", "s", "--", "//"),
    Look("#009E73", "^", "-.", "\\\\"),
    Look("#D55E00", "D", ":", "xx"),
    Look("#CC79A7", "v", (0, (5, 1)), ".."),
    Look("#56B4E9", "P", (0, (3, 1, 1, 1)), "++"),
    Look("#000000", "X", "-", "||"),
)


def style() -> None:
    """Set matplotlib's defaults for the book.  Call it once, before any figure."""
    mpl.rcParams.update(
        {
            "figure.figsize": (WIDTH, 3.6),
            "figure.dpi": 180,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "font.size": 10.5,
            "axes.titlesize": 11,
            "axes.labelsize": 10.5,
            "xtick.labelsize": 9.5,
            "ytick.labelsize": 9.5,
            "legend.fontsize": 9.5,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#D8D8D8",
            "grid.linewidth": 0.6,
            "lines.linewidth": 1.8,
            "lines.markersize": 5.5,
            "hatch.linewidth": 0.7,
            "image.interpolation": "nearest",
            "axes.formatter.useoffset": False,
        }
    )


def look(name: "str | int") -> Look:
    """The look of a scheme, by name, or of the n-th other series, by number.

    Raises:
        InvalidArgument: a scheme that has no look.
    """
    if isinstance(name, int):
        return SERIES[name % len(SERIES)]
    if name not in SCHEMES:
        raise InvalidArgument(f"no look for {name!r}; known: {', '.join(SCHEMES)}")
    return SCHEMES[name]


def line(name: "str | int") -> dict:
    """Keyword arguments of `Axes.plot` for a scheme or for the n-th other series."""
    found = look(name)
    return {
        "color": found.color,
        "marker": found.marker,
        "linestyle": found.linestyle,
    }


def points(name: "str | int") -> dict:
    """As `line`, without the line: for measured points."""
    return line(name) | {"linestyle": "none"}


def bar(name: "str | int") -> dict:
    """Keyword arguments of `Axes.bar` for a scheme or for the n-th other series."""
    found = look(name)
    return {
        "color": _lighter(found.color),
        "edgecolor": found.color,
        "hatch": found.hatch,
        "linewidth": 1.0,
    }


def _lighter(color: str) -> tuple:
    """A colour mixed with white, so that hatching in the full colour shows on it."""
    rgb = np.array(mpl.colors.to_rgb(color))
    return tuple(rgb + (1 - rgb) * (0.45 if rgb.any() else 0.75))


def format_bytes(amount: float, digits: int = 2) -> str:
    """Bytes in binary units: 1073741824 becomes "1.00 GiB".

    Raises:
        InvalidArgument: a negative amount.
    """
    if amount < 0:
        raise InvalidArgument(f"a number of bytes cannot be negative, got {amount}")
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # Compare what will be printed: 1023.999 KiB is "1.00 MiB", not "1024.00 KiB".
        if round(amount, digits) < 1024 or unit == "TiB":
            whole = unit == "B" and amount == int(amount)
            return f"{amount:.{0 if whole else digits}f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def bytes_axis(axis, step: int = 1) -> None:
    """Turn a logarithmic matplotlib axis (`ax.yaxis`) to powers of two in bytes.

    Set the limits of the axis first.

    Args:
        axis: `ax.xaxis` or `ax.yaxis`.
        step: a tick at every `step`-th power of two.
    """
    low, high = (np.log2(limit) for limit in axis.get_view_interval())
    powers = np.arange(np.ceil(low / step) * step, high + 1e-9, step)
    axis.set_major_locator(FixedLocator(2.0**powers))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: format_bytes(v, digits=0)))


def tokens_axis(axis, ticks: Sequence[int]) -> None:
    """Label an axis with numbers of tokens: 4096 becomes "4k" (k is 1024)."""

    def text(value, _):
        if value >= 1024 and value % 1024 == 0:
            return f"{value / 1024:g}k"
        return f"{value:g}"

    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(text))


def heatmap(
    ax,
    values,
    rows: Sequence[str],
    columns: Sequence[str],
    label: str,
    text: str = "{:.2f}",
    cmap: str = "cividis",
    norm=None,
):
    """Draw a table of numbers as coloured cells with the numbers in them.

    Args:
        ax: matplotlib axes.
        values: [rows, columns].
        rows, columns: labels.
        label: of the colour bar, with units.
        text: format of the number in each cell; "" writes none.
        cmap: cividis grows steadily in lightness and suits colour-blind readers.
        norm: as `imshow`'s.

    Returns:
        The image that `imshow` returned.

    Raises:
        InvalidArgument: labels that do not fit the values.
    """
    values = np.asarray(values, dtype=float)
    if values.shape != (len(rows), len(columns)):
        raise InvalidArgument(
            f"values have shape {values.shape}; there are {len(rows)} row labels and "
            f"{len(columns)} column labels"
        )
    image = ax.imshow(values, aspect="auto", cmap=cmap, norm=norm)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.figure.colorbar(image, ax=ax, label=label)
    for (row, column), value in np.ndenumerate(values):
        if text:
            dark = np.dot(image.cmap(image.norm(value))[:3], (0.3, 0.6, 0.1)) < 0.5
            ax.text(
                column,
                row,
                text.format(value),
                ha="center",
                va="center",
                fontsize=9.5,
                color="white" if dark else "black",
            )
    return image


class Table:
    """A small table, legible in light and dark pages, scrolling on narrow ones.

    Args:
        columns: headings.
        rows: rows of cells, strings or numbers, already rounded as they should be.

    Raises:
        InvalidArgument: a row that does not fit the headings.
    """

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence]):
        self.columns = [str(column) for column in columns]
        self.rows = [[str(cell) for cell in row] for row in rows]
        for row in self.rows:
            if len(row) != len(self.columns):
                raise InvalidArgument(
                    f"a row has {len(row)} cells, the table {len(self.columns)} "
                    f"columns: {row}"
                )

    def __repr__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            )
            for row in lines
        )

    def _repr_html_(self) -> str:
        edge = "padding:.25em .6em;border-bottom:1px solid rgba(128,128,128,.4);"
        whole = "white-space:nowrap;"
        head, body = [], []
        for i, column in enumerate(self.columns):
            side = "left" if i == 0 else "right"
            # A corner without words heads nothing.
            tag, scope = ("th", ' scope="col"') if column else ("td", "")
            head.append(
                f'<{tag}{scope} style="{edge}text-align:{side}">'
                f"{html.escape(column)}</{tag}>"
            )
        for row in self.rows:
            cells = [
                f'<th scope="row" style="{edge}{whole}text-align:left;'
                f'font-weight:normal">{html.escape(row[0])}</th>'
            ]
            cells += [
                f'<td style="{edge}{whole}text-align:right">{html.escape(cell)}</td>'
                for cell in row[1:]
            ]
            body.append(f"<tr>{''.join(cells)}</tr>")
        return (
            '<table style="border-collapse:collapse;margin:.5em 0"><thead><tr>'
            + "".join(head)
            + "</tr></thead><tbody>"
            + "".join(body)
            + "</tbody></table>"
        )
