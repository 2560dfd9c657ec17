"""Anomaly detection on the device, without host synchronization: non-finite losses or gradients, loss spikes."""

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
"""Codes of `Watch.judge`; 0 is a normal step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeRule:
    """A loss spikes if it is more than `sigma` standard deviations above the mean of about `window_steps` losses."""

    sigma: float
    window_steps: int
    skips: bool
    """Whether to skip the update of a spike."""


class Watch:
    """Classifies steps as normal or anomalous; without a spike rule, by finiteness alone.

    Tracks exponential moving mean and variance of the loss, excluding anomalies, so that one spike does not hide the
    next. Both are checkpointed: a resumed run judges as an uninterrupted one.
    """

    def __init__(self, rule: SpikeRule | None, device: torch.device) -> None:
        self._rule = rule
        names = ("mean", "variance", "count") if rule else ()
        self.state = {name: torch.zeros((), device=device) for name in names}

    def judge(self, loss: Tensor, norm: Tensor, loss_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (code, skipped) for a step's loss and gradient norm: its anomaly, and 1 if the update is skipped."""
        finite_loss, finite = torch.isfinite(loss), torch.isfinite(norm)
        # With a scale above 1, a gradient overflow only means that the scale is too large.
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
        # The minimum variance keeps rounding noise on constant losses from counting as a spike.
        limit = mean + rule.sigma * variance.clamp(min=1e-12).sqrt()
        return (seen >= rule.window_steps) & (loss > limit)

    def _remember(self, loss: Tensor, sound: Tensor, rule: SpikeRule) -> None:
        count = self.state["count"] + 1
        # A plain mean until the window is full, an exponential one afterwards (Welford's form of both).
        rate = torch.clamp(1 / count, min=1 / rule.window_steps)
        away = loss - self.state["mean"]
        new = {
            "mean": self.state["mean"] + rate * away,
            "variance": (1 - rate) * (self.state["variance"] + rate * away * away),
            "count": count,
        }
        self.state = {name: torch.where(sound, new[name], old) for name, old in self.state.items()}
