"""Every plan of the table is equal to one device, in float64; and the comparison notices when it is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from torch import Tensor

from ropewalk.parallel import executor, microbatch
from ropewalk.parallel.comm import Group, Pending
from ropewalk.parallel.context import context_attention as context
from ropewalk.parallel.data.replicas import Replicas
from ropewalk.parallel.data.shard_group import ShardGroup
from tests.parallel.plans import CASES, MODELS, SLOW, Case
from tests.parallel.pool import POOL
from tests.parallel.worlds import Outcome, Proof, compare, train, wrong

pytestmark = pytest.mark.xdist_group("pool")

PROOF = Proof()
PAGE = Path(__file__).parents[2] / "docs" / "equality.md"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_plan_is_equal_to_one_device(name: str) -> None:
    """Loss, norm, gradients, weights, moments, scores; and what a plan before it left loads with the same bits."""
    found = PROOF.differences(CASES[name])
    assert not wrong(found), found


def test_page_lists_every_plan() -> None:
    lines = PAGE.read_text().splitlines()
    listed = {tuple(cell.strip() for cell in line.split("|")[1:5]) for line in lines if line.startswith("| ")}
    assert {(c.name, str(c.plan.world), c.model, c.optimizer) for c in CASES.values()} <= listed


def test_table_is_as_wide_as_it_claims() -> None:
    plans = [case.plan for case in CASES.values()]
    assert len(CASES) >= 45
    assert max(plan.world for plan in plans) == 8
    axes = [(p.pipeline, p.replicate, p.shard, p.context, p.tensor) for p in plans]
    for wide in (2, 3):
        assert sum(sum(degree > 1 for degree in degrees) == wide for degrees in axes) >= 10
    for kind in ("adafactor", "lamb", "muon"):
        assert sum(case.optimizer == kind for case in CASES.values()) >= 5
    assert {case.model for case in CASES.values()} == set(MODELS)


def test_quick_plans_have_every_setting_and_every_pair_of_axes_and_each_optimizer_three() -> None:
    quick = [case for name, case in CASES.items() if name not in SLOW]
    assert set(CASES) >= SLOW
    assert mechanisms(quick) == mechanisms(CASES.values())
    for kind in ("adafactor", "lamb", "muon"):
        assert sum(case.optimizer == kind for case in quick) >= 3


def mechanisms(cases: Iterable[Case]) -> set[object]:
    """What the plans use: values of settings alone and together with each axis, pairs of axes, models, optimizers."""
    found: set[object] = set()
    for case in cases:
        plan = case.plan
        degrees = {axis: getattr(plan, axis) for axis in ("pipeline", "replicate", "shard", "context", "tensor")}
        axes = [axis for axis, degree in degrees.items() if degree > 1]
        settings = ("zero", "sequence", "context_method", "schedule", "recompute", "offload", "partition_activations")
        found |= {(name, getattr(plan, name)) for name in (*settings, "bucket_bytes")}
        found |= {(axis, name, getattr(plan, name)) for axis in axes for name in ("zero", "schedule", "recompute")}
        found |= {*itertools.combinations(axes, 2), plan.world, case.model, case.optimizer}
        found |= {(axis, case.optimizer) for axis in axes if axis != "context"}
    return found


# Faults. Each breaks one thing in the processes of one run, by the smallest change that a wrong line of code would be.


def dropped_sum() -> None:
    """Gradients of the replicas are not added up."""
    _replace(Group, "start_all_reduce", lambda group, x, operation="sum": Pending((), x), group="replicate+context")


def scaled_sum() -> None:
    """Sums are too large by a billionth."""
    sound = Group.start_all_reduce

    def start(group: Group, x: Tensor, operation: str = "sum") -> Pending:
        pending = sound(group, x, operation=operation)  # type: ignore[arg-type]
        return Pending([pending], x, finish=lambda: x.mul_(1 + 1e-9)) if x.is_floating_point() else pending

    _replace(Group, "start_all_reduce", start, group="replicate+context")


def mean_of_means() -> None:
    """Every rank divides by the weights of its own rows, as if all ranks had as many."""
    _replace(
        Group, "start_all_reduce", lambda group, x, operation="sum": Pending((), x * 2), group="replicate+shard+context"
    )


def missing_partial_sum() -> None:
    """Norms that met a part of the places keep their part of the gradient."""
    _set(executor, "sum_partial", lambda gradients, group: None)


def lost_row_sum() -> None:
    """Partial sums after a row matrix are not added up."""
    _replace(Group, "all_reduce", lambda group, x, operation="sum": x, group="tensor")


def wrong_place() -> None:
    """The ring takes its neighbour's places for its own."""
    sound = context.positions_of

    def places(length: int, group: Group, kind: str) -> Tensor:
        there = Group(group.name, group.ranks, group.ranks[group.rank - 1], None)
        return sound(length, there, kind)  # type: ignore[arg-type]

    _set(microbatch, "positions_of", places)


def reversed_ring() -> None:
    """Keys and values go round the wrong way: with two ranks that is the same way, with four it is not."""
    sound = Group.start_shift

    def shift(group: Group, tensors: list[Tensor]) -> Pending:
        there = Group(group.name, group.ranks[::-1], group.ranks[group.rank], group._handle, group.traffic)
        return sound(there, tensors)

    _set(Group, "start_shift", shift)


def forgotten_bucket() -> None:
    """The bucket that is ready last never travels."""
    sound = Replicas._start

    def start(replicas: Replicas, bucket: object) -> None:
        if bucket is not replicas._buckets[-1]:
            sound(replicas, bucket)  # type: ignore[arg-type]

    _set(Replicas, "_start", start)


def stale_gather() -> None:
    """Updated rows of the first bucket do not reach the others."""
    sound = ShardGroup.finish_gather

    def finish(unit: ShardGroup) -> None:
        if "embedding.weight" in unit.parameters and unit._gathering is not None:
            unit._gathering.wait()
            unit._gathering = None
        sound(unit)

    _set(ShardGroup, "finish_gather", finish)


def forgotten_copy() -> None:
    """The two ends of a pipeline do not add up the gradients of the matrix that they share."""
    _set(executor.Executor, "_sum_tied", lambda executor, gradients: None)


def norm_counted_twice() -> None:
    """What several ranks hold alike enters the norm once for each."""
    _set(executor.Executor, "_copies", lambda executor, name: 1)


FAULTS: dict[Callable[[], None], str] = {
    dropped_sum: "replicate 2",
    scaled_sum: "replicate 2",
    mean_of_means: "ZeRO-3 over 2",
    missing_partial_sum: "tensor 2 with sequence",
    lost_row_sum: "tensor 2",
    wrong_place: "ring 2",
    reversed_ring: "ring 4",
    forgotten_bucket: "replicate 2, small buckets",
    stale_gather: "ZeRO-1 over 2",
    forgotten_copy: "pipeline 2, 1F1B",
    norm_counted_twice: "tensor 2",
}
"""The plan under which each is looked for."""

_UNDO: list[tuple[object, str, object]] = []


def train_with_fault(number: int, case: Case, fault: str) -> Outcome:
    """As `train`, in a process where something is wrong."""
    {each.__name__: each for each in FAULTS}[fault]()
    try:
        return train(number, case)
    finally:
        while _UNDO:
            setattr(*_UNDO.pop())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_noticed(fault: Callable[[], None]) -> None:
    case = CASES[FAULTS[fault]]
    ranks = POOL.run(train_with_fault, case, fault.__name__, world=case.plan.world)
    assert wrong(compare(ranks, PROOF.reference(case)))


def _set(owner: object, name: str, value: object) -> None:
    _UNDO.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _replace(owner: type, name: str, instead: Callable[..., object], *, group: str) -> None:
    """`instead` of a method, for groups of one name."""
    sound = getattr(owner, name)

    def method(self: Group, *arguments: object, **named: object) -> object:
        return (instead if self.name == group else sound)(self, *arguments, **named)

    _set(owner, name, method)
