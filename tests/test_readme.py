"""The README's figure and table say what the library and the record say."""

import re
from pathlib import Path

import pytest
from PIL import Image

import kvq_lib as kvq
from kvq_lib.bench import compensate, provenance
from kvq_lib.course import readme

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_figure_was_drawn_from_the_current_record():
    with Image.open(readme.FIGURE) as figure:
        assert figure.text["Description"] == readme.record_hash()


def test_the_figure_is_in_the_readme_with_a_description():
    path = readme.FIGURE.relative_to(ROOT).as_posix()
    (alt,) = re.findall(rf"!\[(.+)\]\({re.escape(path)}\)", README)
    assert len(alt) > 40


@pytest.mark.parametrize("name", kvq.SCHEMES)
def test_the_table_of_schemes_states_the_library_s_bits(name):
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{name}` ")]
    stated = row.strip("|").split("|")[-1].strip()
    if name == "mixed":
        assert stated == "as budgeted"
        return
    bits = kvq.SCHEMES[name].bits_per_element(16, 128)
    assert stated == ("the model's" if bits is None else f"{bits:.5g}")


def test_the_record_is_complete_and_fresh():
    data = provenance.load("quality")["data"]
    measured = {row["scheme"] for row in data["schemes"]}
    needed = {n for n, s in kvq.SCHEMES.items() if s.seals and not s.calibrated}
    assert measured >= needed
    assert all(
        len(row["nll_change_windows"]) == data["windows"][0] for row in data["schemes"]
    )


def test_the_record_of_compensation_is_complete_and_fresh():
    data = provenance.load("compensation")["data"]
    measured = {row["scheme"] for row in data["schemes"]}
    wanted = [row.scheme.name for row in compensate.rows()]
    assert measured >= set(wanted) and len(set(wanted)) == len(wanted)
    assert {row["scheme"] for row in data["planted"]} == set(compensate.PLANTED)
    chunked = {row["scheme"] for row in data["schemes"] if row["chunk"]}
    assert chunked == set(compensate.PROMISED)


def test_the_presets_keep_what_the_book_promises():
    rows = provenance.load("compensation")["data"]["schemes"]
    promised = {row["scheme"]: row for row in rows if row["chunk"]}
    four, two = promised["int4-feedback"], promised["int2-feedback"]
    assert four["delta"] <= 0.05
    assert four["bits"] <= 4.5 and four["effective_bits"] <= 4.75
    assert promised["int4"]["bits"] == four["bits"]
    assert promised["int4"]["delta"] > 0.4
    assert two["delta"] < 0.8
    assert two["bits"] <= 3.3 and two["recent"] == 128
