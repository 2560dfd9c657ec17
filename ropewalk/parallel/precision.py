"""Mixed precision: autocast dtypes, float32 master weights, fp16 loss scaling."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor, nn

from ropewalk.plan.forecast import Precision

PRODUCTS: dict[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "bf16-pure": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp16": torch.float16,
}
"""The dtype of matmuls; float32 otherwise. For fp8, that of matmuls outside blocks."""


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager:
    """In the context, matmuls use the dtype of `precision`; norms, softmax and loss stay in float32."""
    if precision in PRODUCTS:
        return torch.autocast(device.type, PRODUCTS[precision])
    return contextlib.nullcontext()


class Masters:
    """float32 master weights for the optimizer, beside the model's bfloat16 weights.

    An update is often smaller than half the distance between two bfloat16 numbers (0.4 %) and would be rounded away.
    Gradients accumulate in float32 too: each microbatch's bfloat16 gradient is added as soon as it is complete. With
    `one_microbatch` there is nothing to accumulate, and the optimizer reads the bfloat16 gradients directly: half the
    memory, and one copy less. A master then holds its weight as `rounded`, which a fused update kernel may write too.
    """

    def __init__(self, model: nn.Module, *, one_microbatch: bool = False) -> None:
        self._weights = dict(model.named_parameters())
        self.parameters = {name: nn.Parameter(weight.detach().clone()) for name, weight in self._weights.items()}
        model.to(torch.bfloat16)
        if one_microbatch:
            for name, parameter in self.parameters.items():
                parameter.grad_dtype = torch.bfloat16
                parameter.rounded = self._weights[name].detach()  # type: ignore[attr-defined]
        for name, weight in self._weights.items():
            weight.register_post_accumulate_grad_hook(functools.partial(_hand_over, self.parameters[name]))

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters into the model's weights."""
        torch._foreach_copy_(list(self._weights.values()), list(self.parameters.values()))


def _hand_over(master: nn.Parameter, weight: Tensor) -> None:
    if weight.grad is None:
        return  # deferred by a zero-bubble schedule
    if master.grad is None:
        master.grad = weight.grad.to(master.grad_dtype)
    else:
        master.grad += weight.grad
    weight.grad = None


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2), decided on the device.

    float16 has no numbers below 6e-8: the loss is multiplied by a large power of two before the backward pass, the
    gradients divided by it after. On overflow the update is skipped and the scale halved; after `grow_after`
    consecutive good steps it is doubled.
    """

    # Start and interval of torch's GradScaler, which synchronizes with the host each step.
    def __init__(self, device: torch.device, *, start: float = 2.0**16, grow_after: int = 2000) -> None:
        self._grow_after = grow_after
        self.state = {
            "value": torch.tensor(start, device=device),
            "good_steps": torch.zeros((), dtype=torch.int64, device=device),
        }
        """Checkpointed state."""

    @property
    def value(self) -> Tensor:
        return self.state["value"]

    def divide(self, gradients: list[Tensor]) -> None:
        """Unscales the gradients, in place."""
        torch._foreach_mul_(gradients, 1 / self.value)

    def update(self, skipped: Tensor) -> None:
        """Updates the scale: `skipped` is 1 if this step's gradients were not finite, else 0."""
        good = (self.state["good_steps"] + 1) * (1 - skipped).long()
        grows = good >= self._grow_after
        value = torch.where(skipped.bool(), self.value / 2, torch.where(grows, self.value * 2, self.value))
        # Below 1 the scale is not the cause: the gradients themselves overflow.
        self.state = {"value": value.clamp(min=1.0), "good_steps": torch.where(grows, 0, good)}
