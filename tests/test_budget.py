"""Byte budgets of the kernels, held to the sizes of tensors."""

import pytest
import torch

import kvq_lib as kvq
from kvq_lib.kernels import budget
from kvq_lib.quantize import empty

HEADS, KV_HEADS, DIM = 32, 8, 128


@pytest.mark.parametrize("name", list(kvq.SCHEMES))
@pytest.mark.parametrize("page_size", [16, 64])
def test_decode_reads_what_the_pools_hold(name, page_size):
    length = 10 * page_size + 5
    recipe = kvq.scheme(name)
    pools = torch.empty(2, KV_HEADS, 5, DIM, dtype=torch.float16).nbytes
    if recipe.seals:
        pools += sum(
            empty(spec, (KV_HEADS, 10), page_size, DIM).nbytes
            for spec in (recipe.keys, recipe.values)
        )
    else:
        pools *= length // 5
    read, written = budget.decode([length], HEADS, KV_HEADS, DIM, name, page_size)
    small = 2 * HEADS * DIM + KV_HEADS * 4 * (11 + 2)
    assert read == pools + small
    assert written == 2 * HEADS * DIM


def test_decode_of_a_batch_is_the_sum_of_its_sequences():
    one = [budget.decode([n], 8, 2, 64, "int4", 16) for n in (1, 16, 17, 200)]
    batch = budget.decode([1, 16, 17, 200], 8, 2, 64, "int4", 16)
    assert batch == tuple(map(sum, zip(*one, strict=True)))


def test_seal_writes_the_bytes_of_a_cold_page():
    for spec in (kvq.Spec("int4", "channel", False), kvq.Spec("fp8", "page")):
        _, written = budget.seal(3, KV_HEADS, 16, DIM, spec)
        assert written == empty(spec, (KV_HEADS, 3), 16, DIM).nbytes


def test_append_and_merge_count_their_tensors():
    assert budget.append(5, 2, 64, new=4) == (5 * 2 * 64 * 8 + 160, 5 * 2 * 64 * 4)
    partial = 3 * 8 * 4 * (64 + 2) * 4
    assert budget.merge(3, 8, 64, splits=4) == (partial, 3 * 8 * 64 * 2)


def test_extend_of_one_query_reads_as_decode_does():
    for name in kvq.SCHEMES:
        read, _ = budget.decode([200], 8, 2, 64, name, 16)
        tables = 2 * 4 * (13 + 2)
        again = 8 * 64 * 2 if kvq.scheme(name).seals else 0
        assert budget.extend(199, 1, 8, 2, 64, name, 16, queries=64)[0] == (
            read - tables + again
        )


def test_predictions_approach_the_byte_bound_from_below():
    for row in budget.predictions("H200"):
        bits = kvq.scheme(row["scheme"]).bits_per_element(16, DIM) or 16
        assert row["predicted speed-up"] <= 16 / bits + 1e-9
        if row["length"] == 32768:
            assert row["predicted speed-up"] >= 0.98 * 16 / bits
    assert {row["gpu"] for row in budget.predictions("T4")} == {"T4"}
