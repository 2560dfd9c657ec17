"""The single entry: a plan and a model become an executor."""

from __future__ import annotations

from ropewalk.base.errors import UserError
from ropewalk.model.decoder import Decoder
from ropewalk.plan.plan import Plan

from .executor import Executor, MakeOptimizer, OneDevice, Points


def apply(
    plan: Plan,
    model: Decoder,
    make_optimizer: MakeOptimizer | None,
    *,
    clip_norm: float = 0.0,
    points: Points | None = None,
    seed: int = 0,
) -> Executor:
    """The executor of `plan`. `model` lies on its device; `make_optimizer` gets the parameters as they end up sharded;
    without it the executor only scores. `seed` is that of the run, for dropout."""
    if plan.world != 1:
        raise UserError(f"this version trains on one device; the plan asks for {plan.world}")
    return OneDevice(plan, model, make_optimizer, clip_norm=clip_norm, points=points, seed=seed)
