"""Auxiliary losses that layers report: every plan adds them to the loss and to the gradients as one process does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk.model.components import MODELS as KINDS
from ropewalk.model.decoder import Decoder
from ropewalk.model.modules import Block
from ropewalk.model.protocol import ForwardPass, Losses, build_model
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import StepHooks
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.placement import LocalShard
from tests.parallel.plans import MODELS, Case, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import RATE, Arrays, _optimizer, batches, gathered

pytestmark = pytest.mark.xdist_group("pool")


class Reporting(Decoder):
    """A decoder whose blocks report the size of what they compute, each with a coefficient of its own."""

    def run(self, inputs: tuple[Tensor, ...], forward: ForwardPass) -> tuple[Tensor, ...]:
        plain = self.run_block

        def reporting(block: Block, x: Tensor, compute: object) -> Tensor:
            def inner(block: Block, x: Tensor) -> Tensor:
                y = compute(block, x)  # type: ignore[operator]
                if forward.losses is not None:
                    size = y.square().mean(-1).sum()
                    forward.losses.add("size", size, layer=block.layer, coefficient=0.1 * (1 + block.layer))
                return y

            return plain(block, x, inner)

        self.run_block = reporting  # type: ignore[assignment]
        try:
            return super().run(inputs, forward)
        finally:
            self.run_block = plain


KIND = dataclasses.replace(KINDS["decoder"], target=Reporting)


def reporting_case(model: str = "rich", **settings: object) -> Case:
    return case("", model, **settings)  # type: ignore[arg-type]


def spec_of(each: Case) -> object:
    return dataclasses.replace(each.spec, kind=f"{__name__}:KIND", dropout=0.0)


def train(rank: int, each: Case) -> tuple[float, float, Arrays]:
    """(loss, norm, whole gradients) of a step."""
    mesh, found = Mesh(each.plan, rank), {}
    spec = spec_of(each)
    hooks = StepHooks(on_gradients=[lambda named: found.update({name: g.clone() for name, g in named.items()})])
    model = build_model(spec, seed=1, dtype=torch.float64)
    executor = apply(each.plan, model, mesh, lambda named, cuts: _optimizer("adamw", spec, named, cuts), hooks=hooks)
    result = executor.step(batches(spec, 1)[0].strided(mesh.data.rank, mesh.data.size), lr=RATE)
    placements = {name: part.placement for name, part in executor.model_state().items()}
    whole = gathered({name: LocalShard(g, placements[name]) for name, g in found.items() if name in placements})
    return float(result.loss), float(result.grad_norm), whole


def by_hand(each: Case) -> tuple[float, float, Arrays]:
    """The same on one process, in one microbatch."""
    spec = spec_of(each)
    model, losses, (batch,) = build_model(spec, seed=1, dtype=torch.float64), Losses(), batches(spec, 1)
    made = ForwardPass(
        tokens_BT=batch.tokens, positions_BT=batch.positions, documents_BT=batch.documents, losses=losses
    )
    main = model.loss(model.run((), made), batch.targets, batch.weight.double())
    extra = losses.total()
    assert extra is not None
    assert extra > 1e-4 * main
    loss = (main + extra) / batch.weight.double().sum()
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), float(np.sqrt(sum((g**2).sum() for g in gradients.values()))), gradients


@pytest.mark.parametrize(
    "settings",
    [
        {"microbatch_size": 4},
        {"recompute": "full"},
        {"replicate": 2},
        {"shard": 2, "zero": 3},
        {"shard": 2, "zero": 3, "recompute": "full"},
        {"pipeline": 2},
        {"model": "deep", "pipeline": 2, "chunks": 2, "schedule": "interleaved"},
        {"pipeline": 2, "schedule": "zero-bubble"},
        {"tensor": 2},
        {"tensor": 2, "sequence": True},
        {"context": 2},
    ],
    ids=str,
)
def test_what_layers_report_is_part_of_the_loss_under_every_plan(settings: dict) -> None:
    each = reporting_case(**settings)
    assert MODELS[each.model] is each.spec
    loss, norm, gradients = by_hand(each)
    found: Arrays = {}
    for own_loss, own_norm, own in POOL.run(train, each, world=each.plan.world):
        assert own_loss == pytest.approx(loss, abs=1e-12)
        assert own_norm == pytest.approx(norm, abs=1e-12)
        found |= own
    assert found.keys() == gradients.keys()
    largest = max(1.0, *(float(np.abs(g).max()) for g in gradients.values()))
    for name, gradient in gradients.items():
        assert np.abs(found[name] - gradient).max() <= 1e-13 * largest, name
