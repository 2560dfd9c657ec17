"""The single entry: a plan and a model become an executor."""

from __future__ import annotations

from collections.abc import Collection

from ropewalk.base.errors import UserError
from ropewalk.model.decoder import Decoder
from ropewalk.plan.plan import Plan

from .executor import Executor, MakeOptimizer, OneDevice, Points
from .guard import SpikeRule


def apply(
    plan: Plan,
    model: Decoder,
    make_optimizer: MakeOptimizer | None,
    *,
    trained: Collection[str] | None = None,
    clip_norm: float = 0.0,
    spike: SpikeRule | None = None,
    points: Points | None = None,
    seed: int = 0,
) -> Executor:
    """The executor of `plan`. `model` lies on its device; `make_optimizer` gets the parameters named by `trained` (all
    without) as they end up sharded; without it the executor only scores. `spike` says which losses are anomalies;
    `seed` is that of the phase, for dropout."""
    if plan.world != 1:
        raise UserError(f"this version trains on one device; the plan asks for {plan.world}")
    return OneDevice(
        plan, model, make_optimizer, trained=trained, clip_norm=clip_norm, spike=spike, points=points, seed=seed
    )
