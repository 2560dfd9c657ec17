"""What a pipeline holds and when it communicates, measured: tensors alive, and the order in which collectives start."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk.model.protocol import Edge, Edges
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.microbatch import StageWork
from ropewalk.parallel.pipeline import Pipeline, Result, run_forward
from ropewalk.plan.plan import Plan
from ropewalk.plan.schedules import Action, Shape, make_schedule, peak_live
from tests.parallel.curves import losses, plan_of
from tests.parallel.plans import Case, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import RATE, batches, start

pytestmark = pytest.mark.xdist_group("pool")

MESSAGE_BYTES = 64 << 10
EDGE = Edge((MESSAGE_BYTES // 4,))


class Scaling:
    """Stages that multiply their input by a weight; the loss is the mean."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self.weight = torch.full((), 0.5, requires_grad=True)

    def forward(self, action: Action, inputs: tuple[Tensor, ...]) -> Result:
        x = inputs[0] if inputs else self.empty(EDGE).fill_(1.0)
        y = x * self.weight
        return Result((y,)) if action.stage < self._stages - 1 else Result((), y.mean())

    def edges(self, stage: int, microbatch: int) -> Edges:
        return Edges((EDGE,) if stage else (), (EDGE,) if stage < self._stages - 1 else ())

    def empty(self, edge: Edge) -> Tensor:
        return torch.empty(edge.shape)

    def begin_last_backward(self, stage: int) -> None: ...

    def end_last_backward(self, stage: int) -> None: ...


class Alive(TorchDispatchMode):
    """Counts the memory blocks of a message's size that are alive, whoever holds them."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= MESSAGE_BYTES:
                seen = StorageWeakRef(tensor.untyped_storage())
                self._seen[seen.cdata] = seen
        self._seen = {key: seen for key, seen in self._seen.items() if not seen.expired()}
        self.peak = max(self.peak, len(self._seen))
        return out


def most_alive(rank: int, plan: Plan, microbatches: int) -> tuple[int, int]:
    """The most tensors alive at once in a training step, and in forward passes alone."""
    mesh, stages = Mesh(plan, rank), plan.pipeline * plan.chunks
    work = Scaling(stages)
    shape = Shape(ranks=plan.pipeline, microbatches=microbatches, chunks=plan.chunks)
    pipeline = Pipeline(
        itertools.repeat(make_schedule(plan.schedule, shape)), stages=stages, rank=rank, channels=mesh.channels
    )
    with Alive() as trained:
        pipeline.run(work)
    with Alive() as scored, torch.no_grad():
        run_forward(work, microbatches, ranks=plan.pipeline, chunks=plan.chunks, rank=rank, channels=mesh.channels)
    return trained.peak, scored.peak


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("gpipe", 1)])
def test_tensors_alive_in_a_pipeline_are_those_of_its_schedule(schedule: str, chunks: int) -> None:
    """Of each microbatch between its passes an input and an output (no output where that is the loss), and a few more
    for what is being computed, sent and received; not what arrived long ago."""
    plan = case("", "deep", pipeline=2, chunks=chunks, schedule=schedule).plan
    shape = Shape(ranks=2, microbatches=64, chunks=chunks)
    for rank, (trained, scored) in enumerate(POOL.run(most_alive, plan, 64, world=2)):
        live = peak_live(schedule, rank=rank, shape=shape)
        assert trained <= 2 * live + 6, rank
        assert scored <= 7, rank


def first_reduction(rank: int, case: Case) -> tuple[int, int, list[int]]:
    """The places of the first reduction of gradients, and of the last message of the step, among all collectives; how
    many reductions had begun when the last backward pass of each stage ended."""
    mesh = Mesh(case.plan, rank)
    executor, _ = start(case, mesh)
    mesh.traffic.timeline, begun = [], []
    batch, end = batches(case.spec, 1)[0], StageWork.end_last_backward

    def counted(work: StageWork, stage: int) -> None:
        sent = {key: each.calls for key, each in mesh.traffic.sent.items() if key[0] in ("replicate+context", "shard")}
        begun.append(sum(calls for (_, kind), calls in sent.items() if kind in ("all_reduce", "reduce_scatter")))
        end(work, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageWork, "end_last_backward", counted)
        mesh.traffic.take()
        executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=RATE)
    moments = sorted(mesh.traffic.timeline, key=lambda moment: moment.begin)
    kinds = [(moment.group, moment.kind) for moment in moments]
    reduced = [place for place, (group, kind) in enumerate(kinds) if kind in ("all_reduce", "reduce_scatter")]
    reduced = [place for place in reduced if kinds[place][0] in ("replicate+context", "shard")]
    sent = [place for place, kind in enumerate(kinds) if kind == ("pipeline back", "send")]
    return reduced[0], sent[-1] if sent else len(kinds), begun


@pytest.mark.parametrize(
    "plan",
    [
        {"pipeline": 2, "replicate": 2, "bucket_bytes": 4096},
        {"pipeline": 2, "replicate": 2, "chunks": 2, "schedule": "interleaved", "bucket_bytes": 4096},
        {"pipeline": 2, "shard": 2, "zero": 1, "bucket_bytes": 4096},
        {"pipeline": 2, "shard": 2, "zero": 3},
    ],
    ids=str,
)
def test_gradients_are_reduced_during_the_last_backward_pass_of_a_stage(plan: dict) -> None:
    """A stage sends the gradient of its input when its backward pass ends; some of its weights have travelled then."""
    ranks = POOL.run(first_reduction, case("", "deep", **plan), world=4)
    last_stage = ranks[2:]  # of the first stage nothing is sent back
    assert all(reduced < sent for reduced, sent, _ in last_stage), ranks
    assert all(begun[0] > 0 for _, _, begun in ranks), ranks


A = Action
STEPS = [
    # Rank 0 sends microbatch 1 in step 1; rank 1 receives it in step 2, and answers for microbatch 0 in step 1 already.
    [[A("F", 0, 0), A("F", 0, 1)], [A("F", 1, 0), A("B", 1, 0)]],
    [
        [A("B", 0, 0), A("F", 0, 2, 1), A("B", 0, 1), A("B", 0, 2, 1)],
        [A("F", 1, 1), A("B", 1, 1), A("F", 1, 2, 1), A("B", 1, 2, 1)],
    ],
]
"""Two steps of two ranks, an update after each of which changes the weights of later microbatches: version 1."""
INPUTS = [torch.linspace(-1, 1, 6, dtype=torch.float64) + number for number in range(3)]


class Versions:
    """Two stages, each an elementwise weight of which every version stays."""

    def __init__(self, rank: int) -> None:
        self.weights = [torch.linspace(1, 2, 6, dtype=torch.float64) + rank]
        self.weights[0].requires_grad_()

    def forward(self, action: Action, inputs: tuple[Tensor, ...]) -> Result:
        x = inputs[0] if inputs else INPUTS[action.microbatch]
        y = torch.tanh(x * self.weights[action.version])
        return Result((y, x)) if action.stage == 0 else Result((), (y * inputs[1]).sum())

    def edges(self, stage: int, microbatch: int) -> Edges:
        # The second tensor is the input itself, which the other stage uses beside the first.
        both = (Edge((6,)), Edge((6,), has_gradient=False))
        return Edges(both if stage else (), () if stage else both)

    def empty(self, edge: Edge) -> Tensor:
        return torch.empty(edge.shape, dtype=torch.float64)

    def begin_last_backward(self, stage: int) -> None: ...

    def end_last_backward(self, stage: int) -> None: ...

    def update(self) -> None:
        """A step of gradient descent on all gradients so far, whichever weights they are of."""
        gradients = [w.grad for w in self.weights if w.grad is not None]
        new = self.weights[-1].detach() - 0.1 * sum(gradients, torch.zeros(6, dtype=torch.float64))
        for weight in self.weights:
            weight.grad = None
        self.weights.append(new.requires_grad_())


def two_steps(rank: int, plan: Plan) -> tuple[list[list[float]], list[Tensor]]:
    """(losses of each step, versions of this rank's weights)."""
    work, mesh = Versions(rank), Mesh(plan, rank)
    pipeline = Pipeline(iter(STEPS), stages=2, rank=rank, channels=mesh.channels)
    losses = []
    for _ in STEPS:
        losses.append([float(part) for part in pipeline.run(work)])
        work.update()
    return losses, [weight.detach() for weight in work.weights]


def delayed_gradients() -> tuple[list[list[float]], list[list[Tensor]]]:
    """The same on one process: which microbatches' gradients each update takes, and of which weights, written out."""
    stages, losses = [Versions(0), Versions(1)], []
    versions, backward = [0, 0, 1], [[[], [0]], [[0, 1, 2], [1, 2]]]

    def loss_of(microbatch: int) -> Tensor:
        result = stages[0].forward(A("F", 0, microbatch, versions[microbatch]), ())
        loss = stages[1].forward(A("F", 1, microbatch, versions[microbatch]), result.outputs).loss
        assert loss is not None
        return loss

    for step, computed in enumerate([[0], [1, 2]]):
        losses.append([loss_of(microbatch).item() for microbatch in computed])
        for stage, microbatches in zip(stages, backward[step], strict=True):
            for microbatch in microbatches:
                weight = stage.weights[versions[microbatch]]
                (gradient,) = torch.autograd.grad(loss_of(microbatch), weight)
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        for stage in stages:
            stage.update()
    return losses, [[weight.detach() for weight in stage.weights] for stage in stages]


def test_messages_of_a_step_that_are_received_in_the_next_give_delayed_gradients() -> None:
    losses, weights = delayed_gradients()
    for rank, (own, versions) in enumerate(POOL.run(two_steps, case("", "deep", pipeline=2).plan, world=2)):
        assert own == ([[], []] if rank == 0 else losses)
        for found, expected in zip(versions, weights[rank], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def bf16_losses(rank: int, plan: Plan) -> list[float]:
    return losses(rank, plan, 32, 6)[0]


def test_zero_bubble_trains_bfloat16_weights_as_one_device_does() -> None:
    """Weight gradients that are computed later reach the float32 masters."""
    alone = POOL.run(bf16_losses, plan_of({}, device="cpu"), world=1)[0]
    put_off = POOL.run(bf16_losses, plan_of({"pipeline": 2, "schedule": "zero-bubble"}, device="cpu"), world=2)[0]
    assert put_off == pytest.approx(alone, abs=1e-4)
