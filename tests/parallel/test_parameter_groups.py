"""Parameters that are reduced over other ranks than the rest, as experts are: against the same on one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.protocol import ForwardPass
from ropewalk.model.sharding import AxisSplit, Split
from ropewalk.parallel.apply import make_reducers
from ropewalk.parallel.data.reducers import ParameterGroup
from ropewalk.parallel.grad_norm import global_norm
from ropewalk.parallel.mesh import Mesh, SubMesh
from ropewalk.parallel.placement import LocalShard
from ropewalk.parallel.tensor import split_placement
from ropewalk.plan.plan import Plan
from tests.parallel.plans import MODELS, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import Arrays, batches, gathered

pytestmark = pytest.mark.xdist_group("pool")

SPEC = MODELS["plain"]
RANKS = 4
SUBMESH = SubMesh(("replicate", "shard"), {"expert_replicate": 2, "expert": 2})


def is_expert(name: str) -> bool:
    return name.startswith("blocks.1.mlp.")


def model_of(expert: int) -> Decoder:
    """All experts have their own feed-forward network in the last block; the rest is the same."""
    model = build(SPEC, seed=1, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_expert(name):
                parameter.mul_(1 + expert)
    return model


def loss_of(model: Decoder, batch: Batch, total: Tensor) -> Tensor:
    made = ForwardPass(tokens_BT=batch.tokens, positions_BT=batch.positions, documents_BT=batch.documents)
    return model.loss(model.run((), made), batch.targets, batch.weight.double()) / total


def reduced(rank: int, plan: Plan) -> tuple[int, float, Arrays]:
    """(this rank's expert, the norm of the whole gradient, whole gradients of the parameters that this rank has)."""
    mesh = Mesh(plan, rank, submeshes=[SUBMESH])
    expert = mesh.group("expert").rank
    model, (batch,) = model_of(expert), batches(SPEC, 1)
    names = [name for name, _ in model.named_parameters()]
    replicas, shard = mesh.group("replicate", "context"), mesh.group("shard")
    alike = mesh.group("expert_replicate")
    groups = [
        ParameterGroup(frozenset(name for name in names if not is_expert(name)), replicas, shard),
        ParameterGroup(frozenset(filter(is_expert, names)), *((replicas, alike) if plan.zero else (alike, shard))),
    ]
    reducers = make_reducers(plan, {0: model}, mesh, groups, trained=names)
    total, mine = batch.weight.double().sum(), batch.strided(mesh.data.rank, mesh.data.size)
    reducers.begin()
    for number in range(2):
        with reducers.microbatch(last=number == 1):
            loss_of(model, mine.strided(number, 2), total).backward()
    gradients = reducers.finish()
    copies = {name: reducers.replicas_of(name).size for name in gradients}
    _, norm = global_norm(gradients, mesh, copies=copies, loss=torch.zeros((), dtype=torch.float64))
    whole = gathered({name: LocalShard(gradient, reducers.placements[name]) for name, gradient in gradients.items()})
    return expert, float(norm), whole


def by_hand() -> tuple[list[Arrays], float]:
    """The gradients with each expert's own, and the norm of all of them."""
    (batch,), found = batches(SPEC, 1), []
    for expert in range(2):
        model = model_of(expert)
        # Ranks are numbered with the last axis of the sub-mesh innermost: rank r has expert r mod 2.
        loss_of(model, batch.strided(expert, 2), batch.weight.double().sum()).backward()
        found.append({name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None})
    dense = {name: found[0][name] + found[1][name] for name in found[0] if not is_expert(name)}
    squares = sum((g**2).sum() for g in dense.values())
    squares += sum((g**2).sum() for each in found for name, g in each.items() if is_expert(name))
    return [each | dense for each in found], float(np.sqrt(squares))


@pytest.mark.parametrize(
    "settings",
    [
        {"replicate": RANKS},
        {"replicate": RANKS, "bucket_bytes": 4096},
        {"shard": RANKS, "zero": 1},
        {"shard": RANKS, "zero": 2},
        {"shard": RANKS, "zero": 3},
    ],
    ids=str,
)
def test_a_group_of_parameters_is_reduced_over_its_own_ranks(settings: dict) -> None:
    expected, whole_norm = by_hand()
    experts = []
    for expert, norm, gradients in POOL.run(reduced, case("", "plain", **settings).plan, world=RANKS):
        experts.append(expert)
        assert norm == pytest.approx(whole_norm, abs=1e-12)
        assert gradients.keys() == expected[expert].keys()
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, expected[expert][name], rtol=0, atol=1e-13, err_msg=name)
    assert sorted(experts) == [0, 0, 1, 1]


def split_on_two_axes(rank: int, plan: Plan, split: Split) -> tuple[tuple[int, ...], bool]:
    """(the shape of this rank's part, whether the parts of all ranks are the matrix)."""
    mesh = Mesh(plan, rank)
    whole = torch.arange(8 * 6, dtype=torch.float64).view(8, 6)
    placement = split_placement(split, whole.shape, {"tensor": mesh.group("tensor"), "expert": mesh.group("replicate")})
    return placement.local_shape, torch.equal(placement.gather(placement.take(whole).clone()), whole)


@pytest.mark.parametrize(
    ("split", "shape"),
    [
        (Split("column", units=4, before=(AxisSplit("expert", 1),)), (4, 3)),
        (Split("row", units=2, before=(AxisSplit("expert", 0),)), (4, 3)),
        (Split("column", units=4, before=(AxisSplit("expert", 0),)), (2, 6)),
        (Split("replicate", before=(AxisSplit("expert", 0),)), (4, 6)),
    ],
    ids=str,
)
def test_a_matrix_that_two_axes_split_is_gathered_back(split: Split, shape: tuple[int, int]) -> None:
    plan = case("", "plain", replicate=2, tensor=2).plan
    assert POOL.run(split_on_two_axes, plan, split, world=RANKS) == [(shape, True)] * RANKS
