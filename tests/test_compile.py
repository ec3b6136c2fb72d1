"""The kernels compiled ahead of time, for GPUs that are not here."""

import os
import subprocess
import sys

import pytest

from kvq_lib.kernels import compile as ahead


@pytest.fixture(scope="module")
def reports():
    """Reports of the listed variants, from a process without the interpreter."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "kvq_lib.kernels.compile"],
        env=clean,
        check=True,
        capture_output=True,
        timeout=900,
    )
    return dict(ahead.build_all(ahead.listed(), jobs=1))


def test_the_list_is_short_and_up_to_date():
    assert ahead.listed() == ahead.short_list()
    assert len(ahead.listed()) <= 150
    assert set(ahead.serving()) <= set(ahead.listed())


def test_the_list_covers_every_possible_pair_of_choices():
    possible = set().union(*map(ahead.pairs, ahead.every_variant()))
    covered = set().union(*map(ahead.pairs, ahead.listed()))
    assert covered == possible


def test_every_listed_variant_compiles(reports):
    assert list(reports) == ahead.listed()
    assert all(report.registers > 0 for report in reports.values())


#: Bytes of a thread that spill all the same: two to four registers, and once more.
SPILLS = {
    "75 decode int2-kivi 16 128 4 float16": 8,
    "75 decode int4-kivi 64 256 1 float32": 8,
    "75 extend int2-kivi 16 128 4 float16": 16,
    "80 decode fp16 16 128 4 float16": 8,
    "89 decode fp8 16 96 1 float16": 8,
    "89 extend fp16 64 64 7 float32": 8,
    "90 extend int4-kivi 16 128 4 float16": 8,
    "100 extend int2-kivi 32 128 1 bfloat16": 96,
}


def test_nothing_spills_but_what_is_listed(reports):
    assert {str(v): r.spilled for v, r in reports.items() if r.spilled} == SPILLS


def test_shared_memory_fits_the_chip(reports):
    for variant, report in reports.items():
        assert report.shared <= ahead.SHARED_KIB[variant.target] * 1024, variant


def test_attention_uses_matrix_instructions(reports):
    seen = 0
    for variant, report in reports.items():
        if variant.kernel not in ("decode", "extend"):
            continue
        if variant.target >= 80 and variant.dtype != "float32":
            assert report.matrix > 0, variant
            seen += 1
        else:
            assert report.matrix == 0, variant
    assert seen > 5


def test_no_fp8_type_in_the_code(reports):
    assert not any(r.fp8 for v, r in reports.items() if v.target < 89)


def test_what_must_be_pytorchs_bit_for_bit_fuses_nothing(reports):
    exact = {"turn", "seal-keys", "seal-values"}
    fused = {v.kernel for v, r in reports.items() if r.fused}
    assert not fused & exact and "decode" in fused
