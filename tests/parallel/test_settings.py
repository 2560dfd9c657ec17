"""Settings of a plan change what ranks do: each is seen in a step, from outside of the code that reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import MODELS, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import batches

pytestmark = pytest.mark.xdist_group("pool")

SPEC = MODELS["deep"]


def executor_of(plan: Plan, mesh: Mesh) -> Executor:
    return apply(
        plan,
        build(SPEC, seed=1),
        mesh,
        lambda named, placements: make_optimizer(named, Optimizer(), spec=SPEC, placements=placements),
    )


def step(executor: Executor, mesh: Mesh) -> None:
    executor.step(batches(SPEC, 1)[0].strided(mesh.data.rank, mesh.data.size), lr=1e-2)


class Attentions(TorchDispatchMode):
    """Counts forward passes of attention."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += "attention" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("attention", 2), ("full", 2)])
def test_recompute_computes_attention_again(recompute: str, times: int) -> None:
    plan = case("", "deep", recompute=recompute, microbatch_size=8).plan
    mesh = Mesh(plan)
    executor = executor_of(plan, mesh)
    with Attentions() as seen:
        step(executor, mesh)
    assert seen.count == times * SPEC.layers


def sent_bytes(rank: int, plans: list[Plan]) -> list[dict[str, float]]:
    """For each plan, the bytes that one step sends by `group kind`."""
    found = []
    for plan in plans:
        mesh = Mesh(plan, rank)
        executor = executor_of(plan, mesh)
        mesh.traffic.take()
        step(executor, mesh)
        found.append({" ".join(key): each.bytes for key, each in mesh.traffic.take().items()})
    return found


def test_partitioned_activations_are_gathered_when_they_are_used_again() -> None:
    settings = {"tensor": 2, "sequence": False, "recompute": "full", "microbatch_size": 8}
    plans = [case("", "deep", partition_activations=on, **settings).plan for on in (False, True)]
    inputs = SPEC.layers * 8 * plans[0].sequence_length * SPEC.width * 4 / 2  # each rank sends its half
    for whole, partitioned in POOL.run(sent_bytes, plans, world=2):
        assert partitioned["tensor all_gather"] - whole.get("tensor all_gather", 0) == inputs


def test_gradients_are_sent_as_compression_says() -> None:
    kinds = ("none", "bf16", "fp16", "powersgd")
    plans = [case("", "deep", replicate=2, gradient_compression=kind, powersgd_rank=1).plan for kind in kinds]
    for found in POOL.run(sent_bytes, plans, world=2):
        plain, *compressed, low_rank = (each["replicate+context all_reduce"] for each in found)
        assert compressed == [plain / 2] * 2
        assert low_rank < plain / 4


def order_of(rank: int, plans: list[Plan]) -> list[str]:
    """For each plan, the forward (F) and backward (B) passes of a rank's first block in a step."""
    found = []
    for plan in plans:
        mesh = Mesh(plan, rank)
        executor = executor_of(plan, mesh)
        events: list[str] = []

        def after(_module: Any, _inputs: Any, output: torch.Tensor, events: list[str] = events) -> None:
            events.append("F")
            output.register_hook(lambda _: events.append("B"))

        next(iter(executor.model.blocks.values())).register_forward_hook(after)
        step(executor, mesh)
        found.append("".join(events))
    return found


def test_a_pipeline_runs_the_schedule_of_its_plan() -> None:
    plans = [case("", "deep", pipeline=2, schedule=schedule, microbatch_size=2).plan for schedule in ("gpipe", "1f1b")]
    first, last = POOL.run(order_of, plans, world=2)
    assert first == ["FFFFBBBB", "FFBFBFBB"]
    assert last == ["FFFFBBBB", "FBFBFBFB"]
