"""Ranks that hold parts of the parameters take the step of one process that holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ropewalk.model.decoder import build
from ropewalk.model.sharding import splits
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.placement import Placement, chunk_sizes, whole_placement
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim import rule
from ropewalk.train.optim.optimizers import make_optimizer
from ropewalk.train.optim.table import OPTIMIZERS, is_hidden
from tests.parallel.pool import POOL
from tests.tiny import small_spec

pytestmark = pytest.mark.xdist_group("pool")

# Two layers with biases, fused matrices and learned positions: every kind of parameter.
SPEC = small_spec(position="learned", norm="layer", bias=True, kv_heads=2, tie_embeddings=False, vocabulary=200)
STEPS = 3

Parameters = dict[str, nn.Parameter]
Shapes = dict[str, tuple[int, ...]]


def by_rows(mesh: Mesh, shapes: Shapes) -> dict[str, Placement]:
    """As ZeRO cuts."""
    group = mesh.group("shard")
    return {
        n: whole_placement(shape).further(0, chunk_sizes(shape[0], group.size), group) for n, shape in shapes.items()
    }


def by_columns(mesh: Mesh, shapes: Shapes) -> dict[str, Placement]:
    """Matrices only; vectors are whole."""
    group = mesh.group("shard")
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    return {
        n: whole_placement(shape).further(1, chunk_sizes(shape[1], group.size), group) for n, shape in matrices.items()
    }


def lopsided(mesh: Mesh, shapes: Shapes) -> dict[str, Placement]:
    """Uneven rows; the last rank has nothing of every other parameter, the first nothing of the others."""
    group = mesh.group("shard")
    placements = {}
    for number, (name, (rows, *others)) in enumerate(shapes.items()):
        sizes = {2: [rows, 0], 4: [rows - rows // 3 - 1, 1, rows // 3, 0]}[group.size]
        placements[name] = whole_placement((rows, *others)).further(0, sizes[::-1] if number % 2 else sizes, group)
    return placements


def twice(mesh: Mesh, shapes: Shapes) -> dict[str, Placement]:
    """By the tensor axis as the model declares, then by the shard axis along rows."""
    tensor, shard = mesh.group("tensor"), mesh.group("shard")
    placements = {}
    for name, shape in shapes.items():
        placement, dim = whole_placement(shape), splits(SPEC)[name].dimension
        if dim is not None:
            placement = placement.further(dim, chunk_sizes(shape[dim], tensor.size), tensor)
        placements[name] = placement.further(0, chunk_sizes(placement.local_shape[0], shard.size), shard)
    return placements


def mixed(mesh: Mesh, shapes: Shapes) -> dict[str, Placement]:
    """Of four parameters one is whole, one cut by the tensor axis, one by the shard axis, one by both."""
    choices: Any = ((), ("tensor",), ("shard",), ("tensor", "shard"))
    placements = {}
    for number, (name, shape) in enumerate(shapes.items()):
        placement = whole_placement(shape)
        for axis in choices[number % 4]:
            group = mesh.group(axis)
            placement = placement.further(0, chunk_sizes(placement.local_shape[0], group.size), group)
        placements[name] = placement
    return placements


LAYOUTS: dict[str, tuple[Callable[[Mesh, Shapes], dict[str, Placement]], dict[str, int]]] = {
    "rows of 2": (by_rows, {"shard": 2}),
    "rows of 4": (by_rows, {"shard": 4}),
    "columns of 2": (by_columns, {"shard": 2}),
    "columns of 4": (by_columns, {"shard": 4}),
    "lopsided of 2": (lopsided, {"shard": 2}),
    "lopsided of 4": (lopsided, {"shard": 4}),
    "tensor 2 then shard 2": (twice, {"shard": 2, "tensor": 2}),
    "mixed of 2 by 2": (mixed, {"shard": 2, "tensor": 2}),
}


def mesh_of(rank: int, degrees: dict[str, int]) -> Mesh:
    plan = Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=1, zero=1, **degrees)
    return Mesh(plan, rank)


def whole_parameters() -> Parameters:
    return dict(build(SPEC, seed=0, dtype=torch.float64).named_parameters())


def gradients() -> Iterator[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    shapes = {name: p.shape for name, p in whole_parameters().items()}
    for number in range(STEPS):
        scale = 10.0 ** (number - 1)
        yield {n: torch.randn(s, generator=draw, dtype=torch.float64) * scale for n, s in shapes.items()}


def step(optimizer: torch.optim.Optimizer, named: Parameters, grads: dict[str, Tensor], *, inf: float = 0.0) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * group.get("lr_ratio", 1.0)
    for name, parameter in named.items():
        parameter.grad = grads[name]
    vars(optimizer).update(found_inf=torch.tensor(inf), grad_scale=None)
    optimizer.step()


def trained(kind: str, placements: dict[str, Placement]) -> tuple[Parameters, torch.optim.Optimizer]:
    """This rank's parts after some steps."""
    everything = {name: whole_placement(p.shape) for name, p in whole_parameters().items()} | placements
    named = {n: nn.Parameter(everything[n].take(p.detach()).clone()) for n, p in whole_parameters().items()}
    optimizer = make_optimizer(named, Optimizer(kind=kind), spec=SPEC, placements=placements)
    for grads in gradients():
        step(optimizer, named, {name: everything[name].take(grad).clone() for name, grad in grads.items()})
    return named, optimizer


def differences(rank: int, kind: str, layout: str) -> dict[str, float]:
    """The greatest difference from one process in each weight and each moment."""
    make_cuts, degrees = LAYOUTS[layout]
    whole, reference = trained(kind, {})
    placements = make_cuts(mesh_of(rank, degrees), {name: tuple(p.shape) for name, p in whole.items()})
    parts, optimizer = trained(kind, placements)
    found = {}
    for name, placement in ({name: whole_placement(p.shape) for name, p in whole.items()} | placements).items():
        found[name] = _difference(parts[name], placement.take(whole[name]))
        for moment, expected in reference.state[whole[name]].items():
            got = optimizer.state[parts[name]][moment]
            found[f"{moment}/{name}"] = _difference(got, _take(placement, expected))
    return found


def _take(placement: Placement, moment: Tensor) -> Tensor:
    """A moment has one number along a dimension where the rule keeps no more."""
    for slicing in placement.shards if moment.dim() else ():
        if moment.shape[slicing.dim] > 1 or placement.shape[slicing.dim] == 1:
            moment = moment.narrow(slicing.dim, slicing.begin, slicing.size)
    return moment


def _difference(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float((got - expected).detach().abs().max()) if got.numel() else 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parts_take_the_step_of_the_whole(kind: str, layout: str) -> None:
    world = 2 if layout.endswith("of 2") else 4
    for found in POOL.run(differences, kind, layout, world=world):
        # Moments are as large as squared gradients, up to 1e3.
        assert max(value for name, value in found.items() if "/" not in name) <= 1e-12
        assert max(found.values()) <= 1e-10


def unchanged_after_inf(rank: int, kind: str) -> bool:
    whole = whole_parameters()
    placements = by_rows(mesh_of(rank, {"shard": 2}), {name: tuple(p.shape) for name, p in whole.items()})
    named, optimizer = trained(kind, placements)

    def bits() -> list[bytes]:
        tensors = [*named.values(), *(t for state in optimizer.state.values() for t in state.values())]
        return [tensor.detach().numpy().tobytes() for tensor in tensors]

    before = bits()
    step(optimizer, named, {name: torch.full_like(p, float("nan")) for name, p in named.items()}, inf=1.0)
    return before == bits()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_bad_gradient_changes_no_bit_of_a_part(kind: str) -> None:
    assert all(POOL.run(unchanged_after_inf, kind, world=2))


def sent_in_one_step(rank: int, kind: str, layout: str, room: int | None) -> dict[tuple[str, str], Any]:
    make_cuts, degrees = LAYOUTS[layout]
    mesh = mesh_of(rank, degrees)
    placements = make_cuts(mesh, {name: tuple(p.shape) for name, p in whole_parameters().items()})
    named = {name: nn.Parameter(placements[name].take(p.detach()).clone()) for name, p in whole_parameters().items()}
    optimizer = make_optimizer(named, Optimizer(kind=kind), spec=SPEC, placements=placements)
    before, rule.TOGETHER_NUMEL = rule.TOGETHER_NUMEL, room or rule.TOGETHER_NUMEL
    step(optimizer, named, {name: torch.ones_like(p) for name, p in named.items()})
    rule.TOGETHER_NUMEL = before
    return {key: (sent.calls, sent.bytes) for key, sent in mesh.traffic.take().items()}


def test_adamw_sends_nothing() -> None:
    assert POOL.run(sent_in_one_step, "adamw", "rows of 2", None, world=2) == [{}, {}]


def test_all_norms_of_lamb_travel_in_one_message_a_group() -> None:
    matrices = sum(len(shape) == 2 for shape in SPEC.shapes().values())
    for sent in POOL.run(sent_in_one_step, "lamb", "tensor 2 then shard 2", None, world=4):
        # Two float64 norms a matrix; an all-reduce over 2 ranks sends as much as it sums. Not all are cut by tensor.
        assert sent["shard", "all_reduce"] == (1, matrices * 2 * 8)
        assert sent["tensor", "all_reduce"][0] == 1


def test_adafactor_asks_three_times() -> None:
    for sent in POOL.run(sent_in_one_step, "adafactor", "rows of 2", None, world=2):
        assert sent["shard", "all_reduce"][0] == 3


def test_muon_sends_each_part_to_its_owner_and_back() -> None:
    matrices = {n: s for n, s in SPEC.shapes().items() if is_hidden(n, s)}
    numbers = sum(rows * columns for rows, columns in matrices.values())
    for sent in POOL.run(sent_in_one_step, "muon", "rows of 2", None, world=2):
        # Two layers on two ranks: each owns one of every shape. Half of the half at hand goes out, twice.
        assert sent == {("shard", "all_to_all"): (2, 2 * numbers / 2 / 2 * 8)}


def test_little_room_means_more_rounds_on_all_ranks_alike() -> None:
    few, many = (POOL.run(sent_in_one_step, "lamb", "lopsided of 4", room, world=4) for room in (None, 2000))
    assert {sent["shard", "all_reduce"][0] for sent in few} == {1}
    assert len({sent["shard", "all_reduce"] for sent in many}) == 1
    assert many[0]["shard", "all_reduce"][0] > 1
    assert many[0]["shard", "all_reduce"][1] == few[0]["shard", "all_reduce"][1]
