"""Generation under every plan draws the tokens that one device draws, and no rank goes its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ropewalk.evaluate.decode import batching
from ropewalk.evaluate.generate import generate, stream
from ropewalk.evaluate.task import Sampling
from ropewalk.model.slot_cache import ALIGNMENT, SlotPositions
from ropewalk.model.spec import Spec
from ropewalk.parallel import decoding
from ropewalk.parallel.apply import apply
from ropewalk.parallel.decoding import RankDecoding
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.inference_plan import inference
from ropewalk.plan.plan import Plan
from tests.evaluate.tiny import vivid
from tests.parallel.plans import MODELS, Case, case
from tests.parallel.pool import POOL
from tests.tiny import small_spec

pytestmark = pytest.mark.xdist_group("pool")

PROMPTS = [[5, 9, 2], [7, 7, 1], [3], [8, 1, 4, 4, 60], [2] * 15, [7, 7, 1], [7, 7, 9, 9]]
SEEDS = [11, 12, 13, 14, 15, 16, 17]
SAMPLINGS = [
    Sampling(12),
    Sampling(12, temperature=0.8, top_k=7),
    Sampling(12, temperature=2.0, top_p=0.9, min_p=0.001, repetition_penalty=1.3),
]
"""One prompt outgrows the model's 16 positions: its cache begins anew in the middle."""

PLANS = [
    case("ZeRO-3 over 2", shard=2, zero=3),
    case("tensor 2", "alibi", tensor=2),
    case("tensor 2 with sequence", "rich", tensor=2, sequence=True),
    case("pipeline 2, interleaved", "rich", pipeline=2, schedule="interleaved", chunks=2),
    case("ring 2", context=2),
    case("pipeline 2 x tensor 2", "post", pipeline=2, tensor=2),
]
SLOW = [
    case("ZeRO-3 over 2 x tensor 2", "rich", shard=2, zero=3, tensor=2),
    case("pipeline 2 x ZeRO-3 over 2", "deep", pipeline=2, shard=2, zero=3),
    case("ZeRO-1 over 2", "alibi", shard=2, zero=1),
    case("ulysses 2", "alibi", context=2, context_method="ulysses"),
    case("zero-bubble 2", "deep", pipeline=2, schedule="zero-bubble"),
    case("adapters on tensor 2", "adapters", tensor=2),
]


def completed(rank: int, plan: Plan, spec: Spec, broken: bool = False) -> list[list[list[int]]]:
    """A rank's job: the completions at every temperature; `broken`: with logits that differ a little on each rank."""
    with pytest.MonkeyPatch.context() as patch:
        if broken:
            patch.setattr(RankDecoding, "_pass", noisy(RankDecoding._pass, rank))
        # Prompts wait for slots, and copy the beginnings that they share.
        patch.setattr(decoding, "SLOTS", {"cpu": 3})
        patch.setattr(batching, "LEAST_SHARED", 1)
        executor = apply(inference(plan, length=spec.sequence_length), vivid(spec), Mesh(plan, rank), None)
        found = [generate(executor, PROMPTS, sampling, seeds=SEEDS, end=None) for sampling in SAMPLINGS]
        assert list(stream(executor, PROMPTS[0], SAMPLINGS[1], seed=SEEDS[0], end=None)) == found[1][0]
        return found


def noisy(sound: Callable[..., Any], rank: int) -> Callable[..., Any]:
    def run(it: RankDecoding, *new: Any) -> torch.Tensor:
        found = sound(it, *new)
        return found + rank * torch.linspace(0, 100, found.shape[1])

    return run


def on_one_device(spec: Spec) -> list[list[list[int]]]:
    return [generate(vivid(spec), PROMPTS, sampling, seeds=SEEDS, end=None) for sampling in SAMPLINGS]


@pytest.mark.parametrize(
    "plan_case",
    [*PLANS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)],
    ids=lambda each: each.name,
)
def test_every_rank_of_a_plan_draws_the_tokens_of_one_device(plan_case: Case) -> None:
    expected = on_one_device(plan_case.spec)
    assert len({token for completion in expected[1] for token in completion}) > 5, "the model says one thing only"
    for found in POOL.run(completed, plan_case.plan, plan_case.spec, world=plan_case.plan.world):
        assert found == expected


def test_one_rank_chooses_for_all() -> None:
    """Ranks whose logits differ, as roundings on GPUs may make them, still go on with the same tokens."""
    plan = case("", replicate=2).plan
    first, second = POOL.run(completed, plan, MODELS["plain"], True, world=2)
    assert first == second == on_one_device(MODELS["plain"])


def cached_bytes(rank: int, plan: Plan, spec: Spec) -> int:
    executor = apply(inference(plan, length=spec.sequence_length), vivid(spec), Mesh(plan, rank), None)
    with torch.no_grad(), executor.decoding(sequences=1, room=10) as opened:
        opened.logits(torch.tensor([[1, 2, 3]]), SlotPositions(slice(0, 1), torch.tensor([[0, 1, 2]]), 3))
        assert isinstance(opened, RankDecoding)
        return sum(cache.bytes for cache in opened._caches.values())


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"pipeline": 2}])
def test_tensor_and_pipeline_ranks_share_the_cache(axes: dict[str, int]) -> None:
    spec = small_spec(sequence_length=16)
    whole = 2 * spec.layers * spec.kv_heads * ALIGNMENT * spec.head_size * 8
    assert POOL.run(cached_bytes, case("", **axes).plan, spec, world=2) == [whole // 2] * 2
