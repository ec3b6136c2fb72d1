"""The book's helpers: figures look alike, verdicts rest on measurements."""

import json
import subprocess
import sys

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from hypothesis import given
from hypothesis import strategies as st

import kvq_lib as kvq
from kvq_lib.course import claims, figures
from kvq_lib.errors import InvalidArgument

GOOD = {
    "claim_id": "C01",
    "claim": "The formula gives the size.",
    "ruling": "holds",
    "measured": {"ratio": 1.0},
}


@pytest.fixture
def axes():
    figures.style()
    fig, ax = plt.subplots()
    yield ax
    plt.close(fig)


def executed(code: str) -> dict:
    """A notebook with one cell, executed."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cell = nbformat.v4.new_code_cell(code)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=120).execute()
    return notebook


# Verdicts


@pytest.mark.parametrize(
    "change",
    [
        {"ruling": "true"},
        {"ruling": "Holds"},
        {"ruling": None},
        {"claim_id": "C1"},
        {"claim_id": "c01"},
        {"claim_id": 1},
        {"claim": "  "},
        {"measured": {}},
        {"measured": None},
        {"measured": "1.0"},
        {"measured": {"ratio": float("nan")}},
        {"measured": {"ratio": float("inf")}},
        {"measured": {"ratio": ""}},
        {"measured": {"ratio": None}},
        {"measured": {"ratio": [1, 2]}},
        {"measured": {"ratio": np.ones(3)}},
        {"measured": {"seen": "no number at all"}},
    ],
    ids=repr,
)
def test_verdict_refuses(change):
    with pytest.raises(InvalidArgument):
        claims.verdict(**(GOOD | change))


def test_unknown_ruling_names_the_known_ones():
    with pytest.raises(InvalidArgument, match=r"holds with conditions.*'maybe'"):
        claims.verdict(**(GOOD | {"ruling": "maybe"}))


@pytest.mark.parametrize("ruling", claims.RULINGS)
def test_verdict_text_and_html_say_everything(ruling, capsys):
    measured = {"error < bound": 0.25, "models": "2 of 6", "bytes": 1024}
    data = claims._checked("M1", "A & B", ruling, measured)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    for shown in (claims._text(data), claims._html(data)):
        for part in ("M1", ruling, "0.25", "2 of 6", "1024"):
            assert part in shown
    assert "error &lt; bound" in claims._html(data)
    assert "A &amp; B" in claims._html(data)


def test_scalars_of_numpy_and_torch_become_numbers():
    torch = pytest.importorskip("torch")
    measured = {
        "numpy": np.float32(0.5),
        "torch": torch.tensor(0.25),
        "one": torch.tensor([2.0]),
        "count": np.int64(3),
    }
    data = claims._checked("C01", "x", "holds", measured)
    assert data["measured"] == {"numpy": 0.5, "torch": 0.25, "one": 2.0, "count": 3}


def test_collect_reads_verdicts_of_an_executed_notebook(tmp_path):
    notebook = executed(
        "from kvq_lib.course.claims import verdict\n"
        "verdict('C02', 'about 256 MB', 'false', {'GiB': 1.0})\n"
        "verdict('C03', 'several GB', 'holds', {'tokens': 32768, 'GB': 4})\n"
        "print('not a verdict')"
    )
    found = list(claims.collect(notebook))
    assert [f["id"] for f in found] == ["C02", "C03"]
    assert found[0]["ruling"] == "false"
    assert list(found[1]["measured"].items()) == [("tokens", 32768), ("GB", 4)]
    assert found[0]["execution_count"] == 1
    saved = tmp_path / "chapter.ipynb"
    saved.write_text(json.dumps(notebook, sort_keys=True))
    assert list(claims.collect(saved)) == found
    shown = notebook.cells[0].outputs[0]["data"]
    assert set(shown) == {"text/html", "text/plain"}
    assert f'id="{claims.anchor("C02")}"' in shown["text/html"]


def test_collect_refuses_two_verdicts_on_one_claim():
    data = claims._checked("C02", "x", "holds", {"ratio": 1.0}) | {"order": ["ratio"]}
    output = {"metadata": {claims.METADATA_KEY: data}}
    with pytest.raises(InvalidArgument, match="C02"):
        list(claims.collect({"cells": [{"outputs": [output, output]}]}))


# Figures


def test_every_scheme_has_a_look_of_its_own():
    assert set(kvq.SCHEMES) <= set(figures.SCHEMES)
    looks = figures.SCHEMES.values()
    for field in ("color", "marker", "hatch"):
        values = [getattr(look, field) for look in looks]
        assert len(set(values)) == len(values), field


def test_series_differ_without_colour():
    assert len({look.marker for look in figures.SERIES}) == len(figures.SERIES)
    assert len({look.hatch for look in figures.SERIES}) == len(figures.SERIES)


def test_unknown_look_is_refused():
    with pytest.raises(InvalidArgument, match="int5"):
        figures.line("int5")


def test_looks_fit_matplotlib(axes):
    for name in (*figures.SCHEMES, *range(len(figures.SERIES))):
        axes.plot([0, 1], [1, 2], **figures.line(name))
        axes.bar([0], [1], **figures.bar(name))
    assert figures.points("int4")["linestyle"] == "none"
    axes.figure.canvas.draw()


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**30, "1.00 GiB"),
        (2.5 * 2**40, "2.50 TiB"),
        (2**53, "8192.00 TiB"),
        (0.5, "0.50 B"),
    ],
)
def test_format_bytes(amount, text):
    assert figures.format_bytes(amount) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_format_bytes_keeps_the_amount(amount):
    number, unit = figures.format_bytes(amount).split()
    power = ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    assert float(number) * 1024**power == pytest.approx(amount, rel=0.006)
    assert float(number) < 1024 or unit == "TiB"


def test_format_bytes_refuses_negative_amounts():
    with pytest.raises(InvalidArgument):
        figures.format_bytes(-1)


def test_axes_in_bytes_and_tokens(axes):
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(512, 8192)
    axes.set_ylim(2**10, 2**30)
    figures.bytes_axis(axes.yaxis, step=10)
    figures.tokens_axis(axes.xaxis, [512, 4096])
    axes.figure.canvas.draw()
    assert [t.get_text() for t in axes.get_xticklabels()] == ["512", "4k"]
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels == ["1 KiB", "1 MiB", "1 GiB"]


def test_heatmap_writes_every_number(axes):
    values = [[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]]
    figures.heatmap(axes, values, ["a", "b"], ["x", "y", "z"], "ratio", "{:.1f}")
    assert [t.get_text() for t in axes.texts] == [
        "0.1",
        "0.2",
        "0.3",
        "1.0",
        "2.0",
        "3.0",
    ]


def test_heatmap_refuses_labels_that_do_not_fit(axes):
    with pytest.raises(InvalidArgument, match="2 row labels"):
        figures.heatmap(axes, np.ones((3, 1)), ["a", "b"], ["x"], "ratio")


def test_table_escapes_and_aligns():
    table = figures.Table(["name", "bits"], [("a<b", 4), ("c", 4.25)])
    assert "a&lt;b" in table._repr_html_()
    assert repr(table).splitlines()[2].split() == ["c", "4.25"]
    with pytest.raises(InvalidArgument, match="2"):
        figures.Table(["name", "bits"], [("only one",)])


def test_importing_the_library_and_claims_does_not_import_matplotlib():
    code = (
        "import sys, kvq_lib, kvq_lib.course.claims\n"
        "assert 'matplotlib' not in sys.modules, 'matplotlib was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
