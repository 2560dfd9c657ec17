"""What overlaps: an optimizer on the host works while the backward pass goes on, and takes the steps of one on the
device, bit for bit, under every plan of data ranks; gradients of a pipeline are reduced as its stages end."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ropewalk.load.batch import Batch
from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply, local
from ropewalk.parallel.data.replicas import Replicas
from ropewalk.parallel.data.shards import Shards
from ropewalk.parallel.executor import StepHooks
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.placement import whole_placement
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import MODELS, Case, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import batches, gathered

pytestmark = pytest.mark.xdist_group("pool")

SMALL = 2048
"""Bytes of a bucket: some parameters together, a dozen buckets."""
STEPS, BROKEN = 4, 2
"""Steps, and the one of them with a loss that is no number."""
DATA: dict[str, dict[str, Any]] = {
    "one process": {},
    "replicate 2": {"replicate": 2},
    "replicate 2, PowerSGD": {"replicate": 2, "gradient_compression": "powersgd", "powersgd_rank": 2},
    "ZeRO-1": {"shard": 2, "zero": 1},
    "ZeRO-2": {"shard": 2, "zero": 2},
    "ZeRO-3": {"shard": 2, "zero": 3},
    "ZeRO-3, parameters on the host": {"shard": 2, "zero": 3, "offload": ("optimizer", "parameters")},
}


def offloaded(name: str, model: str = "deep", *, optimizer: str = "adamw", **settings: Any) -> Case:
    chosen = {"bucket_bytes": SMALL, "offload": ("optimizer",), **DATA.get(name, {}), **settings}
    return case(name, model, optimizer=optimizer, **chosen)


def broken(batch: Batch) -> Batch:
    return dataclasses.replace(batch, weight=torch.full_like(batch.weight, float("nan")))


def trained(rank: int, each: Case, clip_norm: float) -> tuple[dict[str, np.ndarray], float]:
    """(all weights and moments after some steps, the greatest change by the step that is left out)."""
    mesh = Mesh(each.plan, rank)
    pure = each.plan.precision == "bf16-pure"
    executor = apply(
        each.plan,
        build(each.spec, seed=1, dtype=torch.float32 if pure else torch.float64),
        mesh,
        lambda named, placements: make_optimizer(
            named, Optimizer(kind=each.optimizer), spec=each.spec, placements=placements
        ),
        trained=each.trained,
        clip_norm=clip_norm,
        seed=3,
    )

    def state() -> dict[str, Tensor]:
        found = {f"weight/{name}": part for name, part in local(executor.model_state()).items()}
        if each.plan.zero < 3:  # else they are there when they are used
            with executor._data.whole():  # type: ignore[attr-defined]
                found |= {f"whole/{name}": weight.detach() for name, weight in executor.model.named_parameters()}
        return {name: tensor.clone() for name, tensor in (found | local(executor.optimizer_state())).items()}

    changed = 0.0
    for number, batch in enumerate(batches(each.spec, STEPS)):
        batch = broken(batch) if number == BROKEN else batch
        before = state()
        result = executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=1e-2)
        assert bool(result.skipped) == (number == BROKEN)
        if number == BROKEN:
            after = state()
            kept = [name for name in before if not name.startswith("compression/")]
            changed = max(float((after[name] - before[name]).abs().max()) for name in kept if before[name].numel())
    weights = {f"weight/{name}": array for name, array in gathered(executor.model_state()).items()}
    return weights | gathered(executor.optimizer_state()), changed


def assert_same_as_on_device(each: Case, clip_norm: float) -> None:
    there = dataclasses.replace(each, plan=dataclasses.replace(each.plan, offload=()))
    world = each.plan.world
    expected = POOL.run(trained, there, clip_norm, world=world)
    for (mine, changed), (theirs, _) in zip(POOL.run(trained, each, clip_norm, world=world), expected, strict=True):
        assert changed == 0.0, "a step that is left out changes nothing"
        assert mine.keys() == theirs.keys()
        for name, array in theirs.items():
            assert np.array_equal(mine[name], array), name


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("name", DATA)
def test_the_host_takes_the_steps_of_the_device(name: str, clip_norm: float) -> None:
    """Four microbatches a rank or more, dropout, a step that is left out."""
    assert_same_as_on_device(offloaded(name, "rich"), clip_norm)


@pytest.mark.parametrize(
    "each",
    [
        offloaded("one process", "adapters"),
        offloaded("ZeRO-1", "adapters"),
        offloaded("one process", microbatch_size=8),
        offloaded("one process", "rich", optimizer="muon"),
        offloaded("ZeRO-1", "rich", optimizer="muon"),
        offloaded("one process", "rich", precision="bf16-pure"),
        offloaded("replicate 2", "rich", exact=True),
        offloaded("tensor 2", "rich", tensor=2, sequence=True),
        offloaded("pipeline 2", "deep", pipeline=2),
    ],
    ids=lambda each: f"{each.name}, {each.model}, {each.optimizer}",
)
def test_what_is_not_final_is_waited_for(each: Case) -> None:
    """Adapters, sums over the tensor axis and over the ends of a pipeline, optimizers that ask other ranks."""
    assert_same_as_on_device(each, 0.0)


def recorded(rank: int, plan: Plan, clip_norm: float) -> list[str]:
    """What happens in a step of two microbatches, in order: `change` is announced, an `update` begins, the `backward`
    pass comes to the first block. The last one waits there until an update has begun, if one is to begin."""
    spec, mesh = MODELS["deep"], Mesh(plan, rank)
    events: list[str] = []
    began, made = threading.Event(), []

    def make(named: dict[str, nn.Parameter], placements: Mapping[str, Any]) -> torch.optim.Optimizer:
        made.append(make_optimizer(named, Optimizer(), spec=spec, placements=placements))
        return made[0]

    def update(*_: Any) -> None:
        events.append("update")
        began.set()

    def backward(_: Tensor) -> None:
        if events and not clip_norm:
            assert began.wait(60), "no update begins during the last backward pass"
        events.append("backward")

    points = StepHooks(before_change=[lambda: events.append("change")])
    executor = apply(plan, build(spec, seed=1), mesh, make, clip_norm=clip_norm, hooks=points)
    made[0].register_step_pre_hook(update)
    executor.model.blocks["0"].attention.qkv.weight.register_post_accumulate_grad_hook(backward)  # type: ignore[union-attr]
    batch = batches(spec, 1)[0]
    executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=1e-2)
    return events


@pytest.mark.parametrize("name", [name for name in DATA if name != "replicate 2, PowerSGD"])
def test_updates_begin_during_the_last_backward_pass(name: str) -> None:
    plan = offloaded(name).plan
    plan = dataclasses.replace(plan, microbatch_size=8 // plan.world // 2)
    for events in POOL.run(recorded, plan, 0.0, world=plan.world):
        assert events[:3] == ["backward", "change", "update"]
        assert events.count("change") == 1
        assert "backward" in events[3:]


@pytest.mark.parametrize("name", ["one process", "ZeRO-2"])
def test_updates_with_a_clipped_gradient_begin_after_it(name: str) -> None:
    plan = offloaded(name).plan
    plan = dataclasses.replace(plan, microbatch_size=8 // plan.world // 2)
    for events in POOL.run(recorded, plan, 0.5, world=plan.world):
        assert events[:4] == ["backward", "backward", "change", "update"]
        assert set(events[4:]) == {"update"}


def test_gradients_that_others_change_are_waited_for() -> None:
    spec, found = MODELS["deep"], []
    for offload in ((), ("optimizer",)):
        plan = offloaded("one process", offload=offload).plan
        points = StepHooks(on_gradients=[lambda gradients: gradients["norm.weight"].mul_(3)])
        executor = apply(
            plan,
            build(spec, seed=1, dtype=torch.float64),
            None,
            lambda named, placements: make_optimizer(named, Optimizer(), spec=spec, placements=placements),
            hooks=points,
        )
        for batch in batches(spec, 2):
            executor.step(batch, lr=1e-2)
        found.append(local(executor.optimizer_state()))
    for name, moment in found[0].items():
        assert torch.equal(moment, found[1][name]), name


@contextlib.contextmanager
def collectives(events: list[str]) -> Iterator[None]:
    """In the block `events` gets the kind of each collective that torch.distributed is given, and of its end; losses
    and norms, of a number or two, are left out."""
    kinds = {
        "all_reduce": ("all_reduce",),
        "all_gather": ("all_gather_single", "all_gather_into_tensor"),
        "reduce_scatter": ("all_to_all_single",),  # as gloo does it
    }
    counts = dict.fromkeys(kinds, 0)

    class Watched:
        def __init__(self, name: str, work: Any) -> None:
            self._name, self._work = name, work

        def wait(self) -> None:
            self._work.wait()
            events.append(f"{self._name} waited for")

    def watching(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, **options: Any) -> Any:
            if tensors[0].numel() <= 4:
                return original(*tensors, **options)
            name = f"{kind} {counts[kind]}"
            counts[kind] += 1
            events.append(f"{name} begins")
            return Watched(name, original(*tensors, **options))

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, names in kinds.items():
            name = next(name for name in names if hasattr(dist, name))
            patch.setattr(dist, name, watching(kind, getattr(dist, name)))
        yield


def reductions(events: list[str]) -> int:
    return sum(event.endswith("begins") and "reduce" in event for event in events)


def two_stages(rank: int, kinds: list[str]) -> list[tuple[list[int], bool]]:
    """Two stages of a pipeline on one rank, two microbatches, the second stage first; the weights of the first stage
    get the gradients of their last microbatch without autograd. For each kind of data ranks, (reductions that have
    begun before any stage ends, when the second has ended, when both have, when the step has), and whether the
    gradients are those of all ranks and microbatches."""
    return [_two_stages(rank, kind) for kind in kinds]


def _two_stages(rank: int, kind: str) -> tuple[list[int], bool]:
    zero = int(kind[-1]) if kind[-1].isdigit() else 0
    mesh = Mesh(case("", **({"shard": 2, "zero": zero} if zero else {"replicate": 2})).plan, rank)
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 6).double() for name in ("first", "second")})
    weights = dict(model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    placements = {name: whole_placement(weight.shape) for name, weight in weights.items()}
    size = 6 * 7 * 8  # a bucket for each stage
    data: Replicas | Shards
    if zero:
        data = Shards(
            weights,
            placements,
            mesh.group("shard"),
            mesh.group("replicate"),
            stage=zero,
            bucket_bytes=size,
            trained=weights.keys(),
            modules=dict(model.items()),
            masters=torch.float64,
            narrow={},
            held=True,
        )
    else:
        data = Replicas(
            weights, weights, placements, mesh.group("replicate"), trained=weights.keys(), bucket_bytes=size
        )
    x = torch.randn(2, 2, 3, 6, dtype=torch.float64)  # ranks, microbatches
    events: list[str] = []

    def names(stage: str) -> list[str]:
        return [name for name in weights if name.startswith(stage)]

    def loss(stage: str, microbatch: int) -> Tensor:
        return model[stage](x[rank, microbatch]).square().sum()

    with collectives(events):
        data.begin()
        with data.microbatch(last=False):
            loss("second", 0).backward()
            loss("first", 0).backward()
            seen = [reductions(events)]
            data.last_backward(names("second"))
            loss("second", 1).backward()
            seen.append(reductions(events))
            data.last_backward(names("first"))
            last = torch.autograd.grad(loss("first", 1), [weights[name] for name in names("first")])
            for name, gradient in zip(names("first"), last, strict=True):
                weights[name].grad += gradient  # type: ignore[operator]
            data.complete(names("first"))
            seen.append(reductions(events))
        found = data.finish()
        seen.append(reductions(events))
    for name, weight in before.items():
        before[name] = weight.requires_grad_()
    total = sum(
        torch.nn.functional.linear(x, before[f"{stage}.weight"], before[f"{stage}.bias"]).square().sum()
        for stage in ("first", "second")
    )
    expected = dict(zip(before, torch.autograd.grad(total, list(before.values())), strict=True))  # type: ignore[call-overload]
    return seen, all(torch.allclose(found[name], data.placements[name].take(expected[name])) for name in expected)


def test_gradients_of_a_pipeline_are_reduced_as_its_stages_end() -> None:
    kinds = ["replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    for found in POOL.run(two_stages, kinds, world=2):
        for kind, (seen, right) in zip(kinds, found, strict=True):
            assert seen == [0, 1, 2, 2], kind
            assert right, kind


def sharded(rank: int, plan: Plan) -> tuple[list[str], bool]:
    """(the collectives of two steps and the forward passes of blocks between them, in order, and whether all weights
    are there when the model is scored)."""
    spec, mesh, events = MODELS["deep"], Mesh(plan, rank), list[str]()
    executor = apply(
        plan,
        build(spec, seed=1),
        mesh,
        lambda named, placements: make_optimizer(named, Optimizer(), spec=spec, placements=placements),
    )
    for name, block in executor.model.blocks.items():
        block.register_forward_pre_hook(lambda *_, name=name: events.append(f"block {name}"))
    batch = batches(spec, 1)[0]
    with collectives(events):
        for _ in range(2):
            executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=1e-2)
            events.append("end of step")
        executor.score(batch)
    whole = {name: part.placement.gather(part.local) for name, part in executor.model_state().items()}
    there = plan.zero == 3 or all(torch.equal(w, whole[name]) for name, w in executor.model.named_parameters())
    return events, there


def test_replicas_add_up_a_unit_while_the_next_one_is_reduced() -> None:
    """HSDP: nobody waits for the sum over replicas as soon as it begins."""
    plan = case("", "deep", replicate=2, shard=2, zero=3, microbatch_size=2).plan
    for events, _ in POOL.run(sharded, plan, world=4):
        units = MODELS["deep"].layers + 1
        for unit in range(units - 1):
            begins = events.index(f"all_reduce {unit} begins")
            following = events.index(f"reduce_scatter {unit + 1} begins")
            assert events.index(f"reduce_scatter {unit} waited for") < begins < following
            assert following < events.index(f"all_reduce {unit} waited for")


@pytest.mark.parametrize("zero", [1, 2])
def test_updated_weights_are_gathered_before_their_next_use(zero: int) -> None:
    plan = case("", "deep", shard=2, zero=zero, microbatch_size=4, bucket_bytes=SMALL).plan
    for events, there in POOL.run(sharded, plan, world=2):
        assert there
        ends = [place for place, event in enumerate(events) if event == "end of step"]
        first, second = events[: ends[0]], events[ends[0] : ends[1]]
        assert any("all_gather" in event and "begins" in event for event in first), "the first begin after the update"
        assert not any("all_gather" in event and "waited" in event for event in first), "nobody waits after the update"
        last = second.index("block 3")
        waits = [place for place, event in enumerate(second) if "all_gather" in event and "waited" in event]
        assert waits, "the weights are those of the update"
        assert any(second.index("block 0") < place < last for place in waits), "blocks wait for their own weights only"
        assert max(waits) < last


def compressed(rank: int, plan: Plan) -> list[str]:
    """The all-reduces of a step, and when the backward pass comes to its last weight."""
    spec, mesh, events = MODELS["deep"], Mesh(plan, rank), list[str]()
    executor = apply(
        plan,
        build(spec, seed=1),
        mesh,
        lambda named, placements: make_optimizer(named, Optimizer(), spec=spec, placements=placements),
    )
    weight = executor.model.embedding.weight  # type: ignore[union-attr]
    weight.register_post_accumulate_grad_hook(lambda _: events.append("end of backward"))
    with collectives(events):
        executor.step(batches(spec, 1)[0].strided(mesh.data.rank, mesh.data.size), lr=1e-2)
    return events


def test_both_messages_of_powersgd_travel_during_the_backward_pass() -> None:
    """Of every bucket but those that the embedding, the last weight, completes."""
    shapes = MODELS["deep"].shapes()
    settings = {"replicate": 2, "gradient_compression": "powersgd", "powersgd_rank": 1, "microbatch_size": 4}
    plan = case("", "deep", bucket_bytes=0, **settings).plan  # a bucket for each parameter
    low = sum(len(shape) == 2 for shape in shapes.values())
    for events in POOL.run(compressed, plan, world=2):
        ends = events.index("end of backward")
        assert reductions(events) == len(shapes) + low
        assert len(shapes) + low - reductions(events[:ends]) <= 4


def backward_order(rank: int, plans: dict[str, Plan]) -> dict[str, list[str]]:
    """For each plan, the collectives of a step and the gradients of weights, as they come."""
    spec, found = MODELS["deep"], {}
    for kind, plan in plans.items():
        mesh, events = Mesh(plan, rank), list[str]()
        executor = apply(
            plan,
            build(spec, seed=1),
            mesh,
            lambda named, placements: make_optimizer(named, Optimizer(), spec=spec, placements=placements),
        )
        for weight in executor.model.parameters():
            weight.register_post_accumulate_grad_hook(lambda _, events=events: events.append("gradient"))
        with collectives(events):
            executor.step(batches(spec, 1)[0].strided(mesh.data.rank, mesh.data.size), lr=1e-2)
        found[kind] = events
    return found


def test_reductions_are_under_way_while_the_backward_pass_goes_on() -> None:
    """Nobody waits for a reduction before more gradients have come, but for those that begin after the last one."""
    data = {"replicas": {"replicate": 2}, **{f"ZeRO-{zero}": {"shard": 2, "zero": zero} for zero in (1, 2, 3)}}
    plans = {k: case("", "deep", bucket_bytes=SMALL, microbatch_size=4, **v).plan for k, v in data.items()}
    for found in POOL.run(backward_order, plans, world=2):
        for kind, events in found.items():
            last = max(place for place, event in enumerate(events) if event == "gradient")
            begun = {event.removesuffix(" begins"): place for place, event in enumerate(events) if "begins" in event}
            begun = {name: place for name, place in begun.items() if "reduce" in name and place < last}
            assert len(begun) >= 3, kind
            for name, place in begun.items():
                meanwhile = events[place : events.index(f"{name} waited for")]
                assert "gradient" in meanwhile, f"{kind}: {name} is waited for at once"
