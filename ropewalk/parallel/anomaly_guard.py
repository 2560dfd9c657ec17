"""Whether a step went wrong, decided on the device: no step waits for the host to look."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOSS, GRADIENT, SPIKE, OVERFLOW = 1, 2, 3, 4
ANOMALIES = {
    LOSS: "loss not finite",
    GRADIENT: "gradient not finite",
    SPIKE: "loss spike",
    OVERFLOW: "overflow in fp16",
}
"""What the codes of `Watch.judge` mean; 0 is a sound step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeRule:
    """When a loss is a spike: more than `sigma` standard deviations above the mean of about `window_steps` losses."""

    sigma: float
    window_steps: int
    skips: bool
    """Whether the update of such a step is left out."""


class Watch:
    """Tells sound steps from broken ones; without a rule for spikes it looks at finiteness alone.

    Mean and variance of the loss are exponential ones; a loss that is no anomaly enters them, so that one spike does
    not hide the next. They are part of a checkpoint: a run that continues judges as if it had not stopped.
    """

    def __init__(self, rule: SpikeRule | None, device: torch.device) -> None:
        self._rule = rule
        names = ("mean", "variance", "count") if rule else ()
        self.state = {name: torch.zeros((), device=device) for name in names}

    def judge(self, loss: Tensor, norm: Tensor, loss_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """(code, skipped) of a step with this loss and length of gradient: its anomaly, and 1 where the update is to be
        left out."""
        finite_loss, finite = torch.isfinite(loss), torch.isfinite(norm)
        # With a scale above 1 a gradient that overflows says that the scale is too large, nothing else.
        broken = GRADIENT if loss_scale is None else torch.where(loss_scale > 1, OVERFLOW, GRADIENT)
        code = torch.where(finite, 0, broken)
        code = torch.where(finite_loss, code, LOSS)
        skipped = code > 0
        if self._rule:
            spike = ~skipped & self._is_spike(loss, self._rule)
            self._remember(loss, ~skipped & ~spike, self._rule)
            code = torch.where(spike, SPIKE, code)
            skipped = skipped | spike if self._rule.skips else skipped
        return code, skipped.float()

    def _is_spike(self, loss: Tensor, rule: SpikeRule) -> Tensor:
        seen, mean, variance = self.state["count"], self.state["mean"], self.state["variance"]
        # A variance of zero (equal losses) makes nothing a spike but a real jump.
        limit = mean + rule.sigma * variance.clamp(min=1e-12).sqrt()
        return (seen >= rule.window_steps) & (loss > limit)

    def _remember(self, loss: Tensor, sound: Tensor, rule: SpikeRule) -> None:
        count = self.state["count"] + 1
        # A plain mean at first, an exponential one when the memory is full (Welford's form of both).
        rate = torch.clamp(1 / count, min=1 / rule.window_steps)
        away = loss - self.state["mean"]
        new = {
            "mean": self.state["mean"] + rate * away,
            "variance": (1 - rate) * (self.state["variance"] + rate * away * away),
            "count": count,
        }
        self.state = {name: torch.where(sound, new[name], old) for name, old in self.state.items()}
