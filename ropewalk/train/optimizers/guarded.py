"""An optimizer of ours: a rule, pure and written for one parameter, applied to all; a bad gradient changes no bit."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .groups import Group

Moments = dict[str, Tensor]
"""What a rule remembers of one parameter, by the names under which checkpoints keep it."""


class Rule(Protocol):
    """One update of one parameter. Reads no tensor on the host: on a GPU that would wait for the device."""

    def begin(self, weight: Tensor) -> Moments:
        """The moments before the first step."""

    def update(
        self, weight: Tensor, gradient: Tensor, moments: Moments, *, step: Tensor, lr: float, decay: float
    ) -> tuple[Tensor, Moments]:
        """The new weight and the new moments; the old ones stay as they are.

        `step` counts from 1, one float64 number on the device; `decay` is the decoupled weight decay.
        """


class Guarded(torch.optim.Optimizer):
    """Applies `group["rule"]` to each parameter of a group, one at a time.

    Price: about ten small kernels a parameter where torch's fused AdamW needs one for all, and one pass more over
    weight and moments for the guard.
    """

    # The contract between torch's GradScaler and its fused optimizers, which the executor relies on: `step` leaves
    # weights, moments and counters as they are when `found_inf` is 1, and decides so on the device.
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert self.grad_scale is None, "gradients come unscaled"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: Group) -> None:
        rule: Rule = group["rule"]
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state.update(rule.begin(weight))
        step = state["step"] + 1
        moments = {name: tensor for name, tensor in state.items() if name != "step"}
        updated, new = rule.update(
            weight, gradient, moments, step=step.double(), lr=group["lr"], decay=group["weight_decay"]
        )
        self._commit(weight, updated)
        for name, tensor in {**new, "step": step}.items():
            self._commit(state[name], tensor)

    def _commit(self, old: Tensor, new: Tensor) -> None:
        # A choice rather than a product with 0: 0 times nan is nan.
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf.bool(), old, new))
