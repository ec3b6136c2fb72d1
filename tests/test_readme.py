"""The README's figure and table say what the library and the record say."""

import re
from pathlib import Path

import pytest
from PIL import Image

import kvq_lib as kvq
from kvq_lib.bench import provenance
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
    bits = kvq.SCHEMES[name].bits_per_element(16, 128)
    assert stated == ("the model's" if bits is None else f"{bits:.5g}")


def test_the_record_is_complete_and_fresh():
    data = provenance.load("quality")["data"]
    measured = {row["scheme"] for row in data["schemes"]}
    assert measured >= {name for name, s in kvq.SCHEMES.items() if s.seals}
    assert all(
        len(row["nll_change_windows"]) == data["windows"][0] for row in data["schemes"]
    )
