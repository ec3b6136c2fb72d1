"""Verdicts: what a chapter found about a claim, for readers and for the claims ledger.

A verdict is an executed cell.  Its ruling is computed from what the chapter measured,
so it could have come out differently.  The cell's output carries the verdict twice: as
a box to read, and as data in the output's metadata (key `kvq_claim`), from where
`collect` gathers the verdicts of an executed notebook.
"""

import html
import json
import math
import numbers
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import InvalidArgument

#: The three rulings, each with a sign that does not rely on colour, and a colour.
RULINGS = {
    "holds": ("✓", "#00694D"),
    "holds with conditions": ("◐", "#855800"),
    "false": ("✗", "#A83A00"),
}

#: Where the data of a verdict sit in the metadata of a cell's output.
METADATA_KEY = "kvq_claim"

_CLAIM_ID = re.compile(r"C\d\d|M\d")


def verdict(claim_id: str, claim: str, ruling: str, measured: Mapping) -> None:
    """Show a verdict and attach it, as data, to the output of the cell.

    Args:
        claim_id: the ledger's id: "C01", "M1".
        claim: what was claimed, in our own words.
        ruling: "holds", "holds with conditions" or "false", computed from `measured`.
        measured: what the ruling rests on: a label with its unit for each number or
            short text.

    Raises:
        InvalidArgument: an unknown ruling, a malformed id, an empty claim, or no
            usable measurement (none at all, NaN, an empty text, no number anywhere).
    """
    data = _checked(claim_id, claim, ruling, measured)
    try:
        from IPython.display import display
    except ModuleNotFoundError:
        print(_text(data))
        return
    display(
        {"text/html": _html(data), "text/plain": _text(data)},
        raw=True,
        # Notebooks are saved with sorted keys, so the order is kept beside them.
        metadata={METADATA_KEY: data | {"order": list(data["measured"])}},
    )


def collect(notebook: "Mapping | str | Path") -> Iterator[dict]:
    """The verdicts of an executed notebook, in order, each as a dictionary with
    `id`, `claim`, `ruling`, `measured` and the cell's `execution_count`.

    Args:
        notebook: a path, or the notebook as nbformat or JSON gives it.

    Raises:
        InvalidArgument: the notebook states one id twice.
    """
    if isinstance(notebook, str | Path):
        notebook = json.loads(Path(notebook).read_text(encoding="utf-8"))
    seen = set()
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            found = output.get("metadata", {}).get(METADATA_KEY)
            if found is None:
                continue
            if found["id"] in seen:
                raise InvalidArgument(f"two verdicts on {found['id']} in one notebook")
            seen.add(found["id"])
            yield _read(found, cell)


def _read(data: Mapping, cell: Mapping) -> dict:
    """A verdict as it was passed to `verdict`, from the data that were saved."""
    found = {key: value for key, value in data.items() if key != "order"}
    measured = found["measured"]
    found["measured"] = {label: measured[label] for label in data["order"]}
    found["execution_count"] = cell.get("execution_count")
    return found


def anchor(claim_id: str) -> str:
    """The id of a verdict's box in the page that shows it."""
    return f"claim-{claim_id}"


def show(value: float | str) -> str:
    """A measured value as readers see it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _checked(claim_id, claim, ruling, measured) -> dict:
    if not isinstance(claim_id, str) or not _CLAIM_ID.fullmatch(claim_id):
        raise InvalidArgument(f'a claim id is like "C01" or "M1", got {claim_id!r}')
    if not isinstance(claim, str) or not claim.strip():
        raise InvalidArgument(f"{claim_id}: the claim is empty")
    if ruling not in RULINGS:
        raise InvalidArgument(
            f"{claim_id}: a ruling is one of {', '.join(map(repr, RULINGS))}; "
            f"got {ruling!r}"
        )
    if not isinstance(measured, Mapping) or not measured:
        raise InvalidArgument(
            f"{claim_id}: a verdict rests on measurements: pass a dictionary that is "
            "not empty"
        )
    plain = {str(label): _plain(claim_id, label, v) for label, v in measured.items()}
    if not any(re.search(r"\d", str(value)) for value in plain.values()):
        raise InvalidArgument(f"{claim_id}: no number among the measurements")
    return {"id": claim_id, "claim": claim, "ruling": ruling, "measured": plain}


def _plain(claim_id, label, value):
    """A measured value as JSON can hold it: a finite number or a text."""
    if hasattr(value, "item") and getattr(value, "size", None) != 0:
        value = value.item() if _is_scalar(value) else value
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise InvalidArgument(
        f"{claim_id}: {label!r} is neither a finite number nor a text: {value!r}"
    )


def _is_scalar(value) -> bool:
    shape = getattr(value, "shape", None)
    return shape is not None and math.prod(shape) == 1


def _text(data: dict) -> str:
    sign, _ = RULINGS[data["ruling"]]
    lines = [f"{data['id']} {sign} {data['ruling']}", f"  Claim: {data['claim']}"]
    lines += [f"  {label}: {show(value)}" for label, value in data["measured"].items()]
    return "\n".join(lines)


def _html(data: dict) -> str:
    sign, color = RULINGS[data["ruling"]]
    rows = "".join(
        f'<li style="margin:.15em 0">{html.escape(label)}: '
        f"<strong>{html.escape(show(value))}</strong></li>"
        for label, value in data["measured"].items()
    )
    return (
        f'<div id="{anchor(data["id"])}" role="note" style="border:1px solid {color};'
        f"border-left:.5em solid {color};border-radius:.3em;padding:.6em 1em;"
        f'margin:.8em 0"><div><strong>{data["id"]}</strong> '
        f'<span style="display:inline-block;background:{color};color:#fff;'
        f'border-radius:.3em;padding:0 .5em;margin-left:.4em">{sign} {data["ruling"]}'
        f"</span></div>"
        f'<div style="margin:.4em 0"><em>Claim.</em> {html.escape(data["claim"])}'
        f'</div><div><em>Measured.</em></div><ul style="margin:.2em 0 0;'
        f'padding-left:1.4em">{rows}</ul></div>'
    )
