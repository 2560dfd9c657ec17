"""Adam as single GPU kernels: in place, every number is read and written once.

If `found_inf` is 1, they change nothing; the decision is made on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .adamw import Adam


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAdam:
    """Torch's fused kernel, or ours for gradients narrower than the weights, which torch's rejects."""

    adam: Adam

    def update(
        self,
        weights: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        lr: float,
        decay: float,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        gradients = [_gradient(weight) for weight in weights]
        if any(gradient.dtype != weight.dtype for gradient, weight in zip(gradients, weights, strict=True)):
            # Imported here, because Triton comes with torch's GPU builds only.
            from ..kernels.adamw import update_

            given = {"found_inf": found_inf, "grad_scale": grad_scale}
            _update_each(update_, weights, states, adam=self.adam, lr=lr, decay=decay, **given)
            return
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            list(weights),
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=lr,
            beta1=self.adam.beta1,
            beta2=self.adam.beta2,
            weight_decay=decay,
            eps=self.adam.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAdam8:
    """The kernel of train/kernels/adamw_8bit.py; reference: `Adam8`."""

    adam: Adam

    def update(
        self,
        weights: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        lr: float,
        decay: float,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        from ..kernels.adamw_8bit import update_

        given = {"found_inf": found_inf, "grad_scale": grad_scale}
        _update_each(update_, weights, states, adam=self.adam, lr=lr, decay=decay, **given)


def _update_each(
    update_: Callable[..., None],
    weights: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    *,
    adam: Adam,
    lr: float,
    decay: float,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
) -> None:
    """Launches our kernel once per weight."""
    place = weights[0].device
    left_out = torch.zeros((), device=place) if found_inf is None else found_inf
    scale = torch.ones((), device=place) if grad_scale is None else grad_scale
    for weight, state, starts_2 in zip(weights, states, _starts(states, adam), strict=True):
        rounded = getattr(weight, "rounded", None)
        given = (weight, _gradient(weight), state, starts_2, left_out, scale)
        update_(*given, adam=adam, lr=lr, decay=decay, rounded=rounded)
    _count(states, left_out)


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _starts(states: Sequence[dict[str, Tensor]], adam: Adam) -> tuple[Tensor, ...]:
    """Both bias corrections of Adam for the next step of each parameter."""
    count = (torch.stack([state["step"] for state in states]) + 1).double()
    return torch.stack([1 - adam.beta1**count, 1 - adam.beta2**count], dim=1).float().unbind(0)


def _count(states: Sequence[dict[str, Tensor]], left_out: Tensor) -> None:
    # A list of tensors: passing one tensor as a number would synchronize with the host.
    torch._foreach_add_([state["step"] for state in states], [1 - left_out] * len(states))
