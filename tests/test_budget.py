"""Byte budgets of the kernels, held to the sizes of tensors."""

import dataclasses

import pytest
import torch

import kvq_lib as kvq
from kvq_lib.kernels import budget
from kvq_lib.storage import Aid, empty

HEADS, KV_HEADS, DIM = 32, 8, 128


MIXED = kvq.Mixed(channels=(16, 32, 80))


def made(name: str) -> kvq.Scheme:
    """A named scheme; a mixed one with widths for 128 channels in its second layer."""
    recipe = kvq.scheme(name)
    if name != "mixed":
        return recipe
    other = kvq.Mixed(channels=(0, 128, 0))
    layers = (other, recipe.values), (MIXED, recipe.values)
    return dataclasses.replace(recipe, layers=layers)


@pytest.mark.parametrize("name", list(kvq.SCHEMES))
@pytest.mark.parametrize("page_size", [16, 64])
def test_decode_reads_what_the_pools_hold(name, page_size):
    length, layer = 10 * page_size + 5, 1 if name == "mixed" else 0
    recipe = made(name)
    law = recipe.law(page_size)
    # The query stands on page 10; its own page holds 5 tokens, other hot ones are full.
    hot = page_size * (sum(map(len, law.hot(10))) - 1) + 5
    pools = torch.empty(2, KV_HEADS, hot, DIM, dtype=torch.float16).nbytes
    if recipe.seals:
        lead = (KV_HEADS, len(law.cold(10)))
        pools += sum(
            empty(side, lead, page_size, DIM, aids=aids(side)).nbytes
            for side in recipe.sides(layer)
        )
    read, written = budget.decode(
        [length], HEADS, KV_HEADS, DIM, recipe, page_size, layer=layer
    )
    small = 2 * HEADS * DIM + KV_HEADS * 4 * (11 + 2)
    assert read == pools + small
    assert written == 2 * HEADS * DIM


def aids(side) -> list[Aid]:
    """Static scales, clips and shares, for every run of a side."""
    ones = torch.ones(KV_HEADS, 1, 1, 1)
    return [
        Aid(ones.half(), ones, torch.zeros(KV_HEADS, n, n)) for _, n in side.runs(DIM)
    ]


def test_decode_of_a_batch_is_the_sum_of_its_sequences():
    one = [budget.decode([n], 8, 2, 64, "int4", 16) for n in (1, 16, 17, 200)]
    batch = budget.decode([1, 16, 17, 200], 8, 2, 64, "int4", 16)
    assert batch == tuple(map(sum, zip(*one, strict=True)))


@pytest.mark.parametrize(
    "side",
    [
        kvq.Spec("int4", "channel", False),
        kvq.Spec("fp8", "page"),
        kvq.Spec("fp4", "block"),
        kvq.Spec("int8", "static"),
        MIXED,
    ],
    ids=str,
)
def test_seal_writes_the_bytes_of_a_cold_page(side):
    _, written = budget.seal(3, KV_HEADS, 16, DIM, side)
    assert written == empty(side, (KV_HEADS, 3), 16, DIM, aids=aids(side)).nbytes


def test_feedback_reads_the_page_again_and_writes_its_codes_again():
    plain, fed = (kvq.Spec("int4", "token", False, a) for a in ((), ("feedback",)))
    pool = empty(fed, (KV_HEADS, 3), 16, DIM, aids=aids(fed))
    read, written = budget.seal(3, KV_HEADS, 16, DIM, plain)
    scales, shares = pool.scale.nbytes + pool.zero.nbytes, pool.aid.feedback.nbytes
    assert budget.seal(3, KV_HEADS, 16, DIM, fed) == (
        2 * read + scales + shares,
        written + pool.codes.nbytes,
    )


def test_append_turn_and_merge_count_their_tensors():
    assert budget.append(5, 2, 64, new=4) == (5 * 2 * 64 * 8 + 160, 5 * 2 * 64 * 4)
    partial = 3 * 8 * 4 * (64 + 2) * 4
    assert budget.turn(5, 2, 64) == (5 * 2 * 64 * 2, 5 * 2 * 64 * 4)
    assert budget.merge(3, 8, 64, splits=4) == (partial, 3 * 8 * 64 * 2)


def test_extend_of_one_query_reads_as_decode_does():
    for name in kvq.SCHEMES:
        recipe = made(name)
        layer = 1 if name == "mixed" else 0
        read, _ = budget.decode([200], 8, 2, 128, recipe, 16, layer=layer)
        tables = 2 * 4 * (13 + 2)
        again = 8 * 128 * 2 if recipe.seals else 0
        moved = budget.extend(199, 1, 8, 2, 128, recipe, 16, queries=64, layer=layer)
        assert moved[0] == read - tables + again


def test_predictions_approach_the_byte_bound_from_below():
    for row in budget.predictions("H200"):
        recipe = kvq.scheme(row["scheme"])
        cold = len(recipe.law(16).cold(row["length"] // 16 - 1)) * 16 / row["length"]
        bits = 16 - cold * (16 - (recipe.bits_per_element(16, DIM) or 16))
        assert row["predicted speed-up"] <= 16 / bits + 1e-9
        if row["length"] == 32768:
            assert row["predicted speed-up"] >= 0.98 * 16 / bits
    assert {row["gpu"] for row in budget.predictions("T4")} == {"T4"}
