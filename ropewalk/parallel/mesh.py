"""The only maker of process groups. One device has none; the mesh of a plan with more is made here."""

from __future__ import annotations

import torch

from ropewalk.base.errors import UserError
from ropewalk.config.ranks import Ranks
from ropewalk.plan.plan import Plan


def pick_device(plan: Plan, ranks: Ranks) -> torch.device:
    """The device of this process under `plan`; refuses a world that the plan was not made for."""
    if ranks.world != plan.world:
        raise UserError(
            f"{ranks.world} processes were started, but the plan is for {plan.world}; start the worker without a "
            "launcher"
        )
    if plan.device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("the plan wants a GPU, but torch sees none; set `plan.device=cpu` or install a CUDA build")
        return torch.device("cuda", ranks.local_rank)
    return torch.device("cpu")
