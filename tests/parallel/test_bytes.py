"""What a rank holds and sends, counted while it trains, against the formulas of the papers.

ZeRO (Rajbhandari et al. 2020, sections 5 and 7): of n ranks each holds 1/n of the optimizer's state, then of gradients,
then of parameters; stages 1 and 2 send what plain data parallelism sends, stage 3 one and a half times as much. Numbers
here are exact, with the rows that are missing for an even share counted where they are padded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ropewalk.model.decoder import build
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor, StepHooks
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.forecast import memory
from ropewalk.plan.memory_per_rank import of_rank
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel import worlds
from tests.parallel.plans import Case, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import start
from tests.tiny import random_batch, small_spec

pytestmark = pytest.mark.xdist_group("pool")

# 61 tokens and vectors of 16: most parameters have rows that 8 ranks do not share evenly.
SPEC = small_spec(sequence_length=16, bias=True, kv_heads=2)
SHAPES = SPEC.shapes()
ADAPTED = dataclasses.replace(SPEC, lora_rank=3)
"""The same with adapters, which alone are trained."""
NUMBER = 4
"""Bytes of a float32."""
STEP = 4
"""Bytes of torch's count of steps, one a parameter."""

Sent = dict[tuple[str, str], tuple[int, float]]
"""Calls and bytes by group and kind."""


def part(name: str, ranks: int, rank: int) -> int:
    """Numbers of a parameter that a rank holds."""
    rows, *rest = ADAPTED.shapes()[name]
    share = -(-rows // ranks)
    return max(0, min(share, rows - rank * share)) * (rest[0] if rest else 1)


def padded(names: Iterable[str], ranks: int) -> int:
    """Numbers that travel for one rank's parts of these parameters, or that it gets of their sum."""
    return sum(part(name, ranks, 0) for name in names)


WHOLE = padded(SHAPES, 1)


def units_of(executor: Executor) -> list[Any]:
    return [unit for each in executor._data.each for unit in getattr(each, "_units", {}).values()]


def measured(rank: int, plan: Plan, spec: Spec = SPEC) -> tuple[dict[str, int], Sent]:
    """(bytes held, what was sent) in the second step under `plan`."""
    mesh = Mesh(plan, rank)
    held: dict[str, int] = {}
    kept: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any, placements: Any) -> torch.optim.Optimizer:
        kept.append(make_optimizer(parameters, Optimizer(), spec=spec, placements=placements))
        return kept[0]

    def at_update(gradients: Mapping[str, Tensor]) -> None:
        held["gradients"] = _bytes([*gradients.values(), *_gradients(executor.model)])

    points = StepHooks(before_update=[at_update])
    executor = apply(plan, build(spec, seed=1), mesh, optimizer, trained=adapters(spec), hooks=points)

    def at_forward(*_: Any) -> None:
        units = units_of(executor)
        parts = [unit.gradient for unit in units if unit.gradient is not None]
        held["gradients between microbatches"] = _bytes([*parts, *_gradients(executor.model)])

    executor.model.register_forward_pre_hook(at_forward)
    batch = random_batch(spec, rows=plan.batch_size).strided(mesh.data.rank, mesh.data.size)
    for _ in range(2):
        mesh.traffic.take()
        executor.step(batch, lr=1e-2)
    sent = {key: (each.calls, each.bytes) for key, each in mesh.traffic.take().items()}
    local = [each.local for each in executor.model_state().values()]
    held["parameters"] = _bytes([*(p.detach() for p in executor.model.parameters()), *local])
    held["optimizer"] = _bytes([tensor for state in kept[0].state.values() for tensor in state.values()])
    return held, sent


def adapters(spec: Spec) -> list[str] | None:
    """The names of what is trained; None: everything."""
    return [name for name in spec.shapes() if ".lora_" in name] if spec.lora_rank else None


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of all storages, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def plan_of(*, microbatches: int = 1, **settings: Any) -> Plan:
    """A row a microbatch, the same number of these on every data rank."""
    ranks = settings.get("replicate", 1) * settings.get("shard", 1)
    return case("", **{"batch_size": ranks * microbatches, **settings}).plan


@functools.cache
def found(ranks: int, zero: int, microbatches: int) -> list[tuple[dict[str, int], Sent]]:
    degrees = {"shard": ranks, "zero": zero} if zero else {"replicate": ranks}
    return POOL.run(measured, plan_of(microbatches=microbatches, **degrees), world=ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_rank_holds_its_share_and_no_more(zero: int, ranks: int) -> None:
    for rank, (held, _) in enumerate(found(ranks, zero, 2)):
        share = sum(part(name, ranks, rank) for name in SHAPES)
        assert held["optimizer"] == 2 * NUMBER * (share if zero else WHOLE) + STEP * len(SHAPES)
        assert held["gradients"] == NUMBER * (padded(SHAPES, ranks) if zero else WHOLE)
        # Stages 0 and 1 add up the microbatches of a step where they are computed.
        between = padded(SHAPES, ranks) if zero >= 2 else WHOLE
        assert held["gradients between microbatches"] == NUMBER * between
        assert held["parameters"] == NUMBER * (share if zero == 3 else WHOLE)


def test_padding_is_less_than_a_row_for_each_rank_and_parameter() -> None:
    for ranks in (2, 4, 8):
        rows = sum(shape[1] if len(shape) > 1 else 1 for shape in SHAPES.values())
        assert WHOLE <= ranks * padded(SHAPES, ranks) < WHOLE + ranks * rows


def data_bytes(sent: Sent) -> dict[str, float]:
    """Bytes of gradients and parameters by kind: the loss, its weight and the norm are a number or two each."""
    return {kind: size for (group, kind), (_, size) in sent.items() if group in ("shard", "replicate+context")}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_stages_1_and_2_send_what_replicas_send(ranks: int) -> None:
    share = (ranks - 1) / ranks * NUMBER
    for _, sent in found(ranks, 0, 1):
        assert data_bytes(sent) == {"all_reduce": 2 * WHOLE * share}
    for zero in (1, 2):
        for _, sent in found(ranks, zero, 1):
            each = ranks * padded(SHAPES, ranks) * share
            assert data_bytes(sent) == {"reduce_scatter": each, "all_gather": each}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_stage_3_sends_half_as_much_again_for_blocks(ranks: int) -> None:
    """Of blocks; what lies outside of them is gathered once and stays for the microbatch."""
    blocks = ranks * padded([name for name in SHAPES if name.startswith("blocks.")], ranks)
    rest = ranks * padded([name for name in SHAPES if not name.startswith("blocks.")], ranks)
    share = (ranks - 1) / ranks * NUMBER
    for _, sent in found(ranks, 3, 1):
        assert data_bytes(sent) == {
            "reduce_scatter": (blocks + rest) * share,
            "all_gather": (2 * blocks + rest) * share,
        }


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_frozen_parameters_travel_for_their_use_alone(zero: int) -> None:
    """Of stages 1 and 2 every rank has them, of stage 3 they are gathered as all others are."""
    shapes, trained, share = ADAPTED.shapes(), adapters(ADAPTED), NUMBER / 2
    assert trained
    blocks = padded([name for name in shapes if name.startswith("blocks.")], 2)
    rest = padded([name for name in shapes if not name.startswith("blocks.")], 2)
    gathered = 2 * blocks + rest if zero == 3 else padded(trained, 2)
    # Buckets of a few parameters: some of frozen ones alone.
    plan = plan_of(shard=2, zero=zero, bucket_bytes=2048)
    for _, sent in POOL.run(measured, plan, ADAPTED, world=2):
        assert data_bytes(sent) == {
            "reduce_scatter": 2 * padded(trained, 2) * share,
            "all_gather": 2 * gathered * share,
        }


@contextlib.contextmanager
def intercepted() -> Iterator[dict[str, float]]:
    """Bytes of the tensors that torch.distributed is given in the block, by kind, times (p - 1) / p for p ranks."""
    given = {"all_gather": 0.0, "reduce_scatter": 0.0}
    # The whole comes first in a gather, second in a reduction, which on gloo is an all-to-all and a sum of our own.
    # torch 2.13 gave the functions other names.
    kinds = {"all_gather": ("all_gather_single", "all_gather_into_tensor", 0)}
    kinds["reduce_scatter"] = ("all_to_all_single", "all_to_all_single", 1)

    def counting(kind: str, whole: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor, group: Any, **options: Any) -> Any:
            ranks = dist.get_world_size(group)
            given[kind] += tensors[whole].nbytes * (ranks - 1) / ranks
            return original(*tensors, group=group, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, (new, old, whole) in kinds.items():
            name = new if hasattr(dist, new) else old
            patch.setattr(dist, name, counting(kind, whole, getattr(dist, name)))
        yield given


def given_bytes(rank: int, plans: list[Plan]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """For each plan, (bytes given to torch.distributed, bytes that our own counter has) in the second step."""
    found = []
    for plan in plans:
        mesh = Mesh(plan, rank)
        executor = apply(
            plan,
            build(SPEC, seed=1),
            mesh,
            lambda parameters, placements: make_optimizer(parameters, Optimizer(), spec=SPEC, placements=placements),
        )
        batch = random_batch(SPEC, rows=plan.batch_size).strided(mesh.data.rank, mesh.data.size)
        executor.step(batch, lr=1e-2)
        mesh.traffic.take()
        with intercepted() as given:
            executor.step(batch, lr=1e-2)
        sent = {key: (each.calls, each.bytes) for key, each in mesh.traffic.take().items()}
        found.append((given, data_bytes(sent)))
    return found


def row_bytes(names: Iterable[str], ranks: int, precision: str) -> int:
    """Of one rank's part of these parameters, gathered together in what the model computes with: matrices of blocks in
    the dtype of products, all else in float32 unless all weights are narrow."""
    narrow = {name: len(SHAPES[name]) == 2 and name.startswith("blocks.") for name in names}
    if precision in ("fp32", "bf16-pure", "fp8"):
        narrow = dict.fromkeys(narrow, precision != "fp32")
    sizes = {name: 2 if narrow[name] else NUMBER for name in narrow}
    size = sum(part(name, ranks, 0) * sizes[name] for name in sizes)
    return -(-size // max(sizes.values())) * max(sizes.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp16", "fp8"])
def test_weights_are_gathered_in_the_dtype_of_products_and_gradients_reduced_in_float32(precision: str) -> None:
    ranks = 2
    blocks = {layer: [n for n in SHAPES if n.startswith(f"blocks.{layer}.")] for layer in range(SPEC.layers)}
    rest = [name for name in SHAPES if not name.startswith("blocks.")]
    of_blocks = sum(row_bytes(names, ranks, precision) for names in blocks.values())
    gathered = {
        1: row_bytes(SHAPES, ranks, precision),
        2: row_bytes(SHAPES, ranks, precision),
        3: 2 * of_blocks + row_bytes(rest, ranks, precision),
    }
    plans = [plan_of(shard=ranks, zero=zero, precision=precision) for zero in gathered]
    for found in POOL.run(given_bytes, plans, world=ranks):
        for zero, (given, counted) in zip(gathered, found, strict=True):
            reduced = (ranks - 1) * NUMBER * padded(SHAPES, ranks)
            assert given == {"all_gather": (ranks - 1) * gathered[zero], "reduce_scatter": reduced}, zero
            assert counted == given, zero


def loaded(rank: int, plan: Plan) -> tuple[Sent, bool]:
    """(what was sent, whether all weights are there) when another state is loaded."""
    mesh = Mesh(plan, rank)
    executor = apply(
        plan,
        build(ADAPTED, seed=1),
        mesh,
        lambda parameters, placements: make_optimizer(parameters, Optimizer(), spec=ADAPTED, placements=placements),
        trained=adapters(ADAPTED),
    )
    mesh.traffic.take()
    other = {name: parameter.detach() for name, parameter in build(ADAPTED, seed=2).named_parameters()}
    executor.load_state(other, {})
    sent = {key: (each.calls, each.bytes) for key, each in mesh.traffic.take().items()}
    return sent, all(torch.equal(weight, other[name]) for name, weight in executor.model.named_parameters())


def test_frozen_parameters_travel_when_they_are_loaded() -> None:
    for sent, arrived in POOL.run(loaded, plan_of(shard=2, zero=1), world=2):
        assert data_bytes(sent) == {"all_gather": 2 * padded(ADAPTED.shapes(), 2) * NUMBER / 2}
        assert arrived


def sums(bucket_bytes: int, *, microbatches: int = 1) -> int:
    plan = plan_of(replicate=2, bucket_bytes=bucket_bytes, microbatches=microbatches)
    (calls,) = {sent["replicate+context", "all_reduce"][0] for _, sent in POOL.run(measured, plan, world=2)}
    return calls


def test_sums_of_a_step_follow_the_fusion_threshold() -> None:
    largest = max(NUMBER * part(name, 1, 0) for name in SHAPES)
    assert sums(0) == len(SHAPES)
    assert sums(NUMBER * WHOLE) == 1
    # A bucket is full when it has reached the threshold, by less than its last parameter beyond it.
    for threshold in (largest, 2 * largest):
        assert NUMBER * WHOLE / (threshold + largest) <= sums(threshold) <= NUMBER * WHOLE / threshold + 1


def test_accumulation_sends_once_a_step() -> None:
    assert sums(NUMBER * WHOLE, microbatches=4) == 1
    for zero, calls in ((1, 1), (2, 2)):
        for _, sent in found(2, zero, 2):
            assert sent["shard", "reduce_scatter"][0] == calls


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"replicate": 2},
        {"shard": 2, "zero": 3},
        {"tensor": 2, "sequence": True},
        {"context": 2},
        {"context": 2, "tensor": 2},
    ],
    ids=str,
)
def test_group_of_one_sends_nothing(settings: dict[str, Any]) -> None:
    plan = plan_of(**settings)
    for _, sent in POOL.run(measured, plan, world=plan.world):
        for group, _ in sent:
            axes = ["pipeline", "replicate", "shard", "context", "tensor"] if group == "world" else group.split("+")
            assert any(getattr(plan, axis) > 1 for axis in axes), f"{group} is a rank alone"


def most_held(rank: int, each: Case) -> tuple[int, int]:
    """The most bytes of weights, and of gradients, that a rank holds at once in a step."""
    mesh = Mesh(each.plan, rank)
    executor, _ = start(each, mesh)
    stages, own = executor._runner.stages.values(), executor._data.parameters.values()
    held = {"weights": 0, "gradients": 0}

    def look(*_: Any) -> None:
        weights = [p for stage in stages for p in stage.parameters()]
        parts = [unit.gradient for unit in units_of(executor)]
        gradients = [p.grad for p in (*weights, *own)] + parts
        held["weights"] = max(held["weights"], _bytes([p.detach() for p in (*weights, *own)]))
        held["gradients"] = max(held["gradients"], _bytes([g for g in gradients if g is not None]))

    for stage in stages:
        for block in stage.blocks.values():
            block.register_forward_pre_hook(look)
            block.register_full_backward_hook(look)
    batch = worlds.batches(each.spec, 1)[0]
    executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=1e-2)
    return held["weights"], held["gradients"]


@pytest.mark.parametrize("settings", [{"zero": 3}, {"zero": 2, "pipeline": 2}, {"zero": 3, "pipeline": 2}], ids=str)
def test_the_forecast_of_a_rank_holds_what_is_gathered_and_what_adds_up(settings: dict[str, Any]) -> None:
    each = case("", "deep", shard=2, **settings)
    forecast = of_rank(memory(each.spec, rows=1, precision="fp32"), each.plan, each.spec)
    ends = NUMBER * each.spec.vocabulary * each.spec.width  # of a pipeline, which are counted as shared
    for weights, gradients in POOL.run(most_held, each, world=each.plan.world):
        # In float64 here.
        assert 0.7 * forecast.weights <= weights / 2 <= forecast.weights + ends
        assert 0.7 * forecast.gradients <= gradients / 2 <= forecast.gradients + ends
