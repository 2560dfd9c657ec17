"""Rows that are dealt by their cost: the batch stays the same, loss and gradients do, the work is even."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.load.batch import Batch
from ropewalk.model.attend import additive_mask
from ropewalk.model.spec import Spec
from ropewalk.parallel.comm import alone
from ropewalk.parallel.data.sequence_balance import SequenceBalancer
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.plan import Plan
from tests.parallel.plans import Case, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import Proof, wrong
from tests.tiny import random_batch, small_spec

pytestmark = pytest.mark.xdist_group("pool")

PROOF = Proof()
LENGTH, RANKS, EACH = 256, 4, 8


def skewed(spec: Spec, *, rows: int) -> Batch:
    """Rows of documents of lognormal length, of which the last is cut; positions begin anew with each."""
    draw = np.random.default_rng(0)
    batch = random_batch(spec, rows=rows)
    documents, positions = torch.zeros(rows, spec.sequence_length, dtype=torch.int32), batch.positions.clone()
    for row in range(rows):
        begin, number = 0, 0
        while begin < spec.sequence_length:
            end = begin + 1 + int(draw.lognormal(3, 1.5))
            documents[row, begin:end], positions[row, begin:] = number, torch.arange(spec.sequence_length - begin)
            begin, number = end, number + 1
    weight = torch.from_numpy(draw.random((rows, spec.sequence_length), np.float32))
    return Batch(batch.tokens, batch.targets, weight, positions, documents)


def plan_of(**degrees: Any) -> Plan:
    rows = RANKS * EACH
    return Plan(device="cpu", precision="fp32", batch_size=rows, microbatch_size=1, balance=True, **degrees)


def dealt(rank: int, plan: Plan, spec: Spec) -> tuple[list[np.ndarray], list[int], dict[tuple[str, str], int]]:
    """What a rank computes of the batch, the numbers of these rows, and the calls of collectives that it took."""
    mesh = Mesh(plan, rank)
    mine = skewed(spec, rows=plan.batch_size).strided(mesh.data.rank, mesh.data.size)
    batch, numbers = SequenceBalancer(mesh.sequences, spec)(mine)
    calls = {key: sent.calls for key, sent in mesh.traffic.take().items()}
    return [tensor.numpy() for tensor in astuple(batch)], numbers.tolist(), calls


def visible_pairs(spec: Spec, documents_BT: torch.Tensor) -> torch.Tensor:
    """Pairs that attention does not mask, counted one by one in its own mask."""
    places = torch.arange(spec.sequence_length)
    mask = additive_mask(spec, places, places, heads=range(1), dtype=torch.float32, documents_BT=documents_BT)
    return (mask == 0).expand(len(documents_BT), -1, -1, -1)[:, 0].sum((1, 2))


@pytest.mark.parametrize("degrees", [{"replicate": 4}, {"replicate": 2, "shard": 2, "zero": 3}], ids=str)
def test_work_is_even_within_5_percent_and_the_batch_is_the_same(degrees: dict[str, int]) -> None:
    spec = small_spec(sequence_length=LENGTH, documents="separate")
    whole = skewed(spec, rows=RANKS * EACH)
    pairs = visible_pairs(spec, whole.documents)
    found = POOL.run(dealt, plan_of(**degrees), spec, world=RANKS)
    work = [int(pairs[numbers].sum()) for _, numbers, _ in found]
    before = [int(pairs[rank::RANKS].sum()) for rank in range(RANKS)]
    assert max(work) / (sum(work) / RANKS) <= 1.05
    assert max(before) / (sum(before) / RANKS) > 1.05, "the lengths are not skewed"
    assert sorted(number for _, numbers, _ in found for number in numbers) == list(range(RANKS * EACH))
    for arrays, numbers, _ in found:
        assert len(numbers) == EACH
        for array, tensor in zip(arrays, astuple(whole), strict=True):
            assert array.dtype == tensor.numpy().dtype
            assert array.tobytes() == tensor[numbers].contiguous().numpy().tobytes()


def test_two_collectives_deal_a_batch_and_none_where_rows_cost_the_same() -> None:
    spec = small_spec(sequence_length=LENGTH, documents="separate")
    for _, _, calls in POOL.run(dealt, plan_of(replicate=2), spec, world=2):
        assert calls == {("sequences", "all_gather"): 1, ("sequences", "all_to_all"): 1}
    spec = small_spec(sequence_length=LENGTH, documents="ignore")
    for rank, (_, numbers, calls) in enumerate(POOL.run(dealt, plan_of(replicate=2), spec, world=2)):
        assert numbers == list(range(rank, RANKS * EACH, 2))
        assert calls == {}


@pytest.mark.parametrize("window", [None, 20])
def test_cost_of_a_row_counts_the_pairs_that_attention_does_not_mask(window: int | None) -> None:
    spec = small_spec(sequence_length=64, documents="separate", window=window)
    batch = skewed(spec, rows=12)
    pairs = visible_pairs(spec, batch.documents)
    costs = SequenceBalancer(alone(), spec).costs(batch)
    between = (costs - costs[0]) // (12 * spec.layers * spec.heads * spec.head_size)
    assert torch.equal(between, pairs - pairs[0])


# `rich` separates documents and drops: masks are drawn by the number of a row in the global batch.
@pytest.mark.parametrize(
    "balanced",
    [
        case("replicate 2", "rich", replicate=2, microbatch_size=2, balance=True),
        case("ZeRO-3 over 2", "rich", shard=2, zero=3, balance=True),
        case("replicate 2 x ZeRO-1 over 2", "rich", replicate=2, shard=2, zero=1, balance=True),
        case("replicate 2 x ring 2", "rich", replicate=2, context=2, balance=True),
        case("replicate 2 x tensor 2", "rich", replicate=2, tensor=2, sequence=True, balance=True),
        case("replicate 2 x pipeline 2", "rich", replicate=2, pipeline=2, balance=True),
    ],
    ids=lambda each: each.name,
)
def test_balanced_plan_is_equal_to_one_device(balanced: Case) -> None:
    found = PROOF.differences(balanced)
    assert not wrong(found), found
