"""`Rule` is the pure update of one parameter; `Guarded` applies it to all and skips steps with non-finite gradients.

Parameters of equal shape are updated together on the device, by a rule in plain PyTorch or its kernel (`InPlace`).
Rules are written for whole tensors; sharded.py answers their requests about sharded parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ropewalk.parallel.placement import Placement, whole_placement

from .sharded import Asking, run_together

Parameters = dict[str, nn.Parameter]
Placements = Mapping[str, Placement]
"""This rank's shard of each parameter, by name; missing names are whole."""
Group = dict[str, Any]


def decay_groups(parameters: Parameters, weight_decay: float, **shared: Any) -> list[Group]:
    """`parameters` as torch parameter groups with and without weight decay; each group also has the fields `shared`.

    Matrices decay. Norms, biases and positions do not: decaying a scale towards zero has no meaning.
    """
    decayed = [p for name, p in parameters.items() if decays(name, p)]
    kept = [p for name, p in parameters.items() if not decays(name, p)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [{**group, **shared} for group in groups if group["params"]]


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies."""
    return parameter.dim() >= 2 and name != "positions.weight"


def by_parameter(parameters: Parameters, placements: Placements) -> dict[nn.Parameter, Placement]:
    """The placements of sharded parameters."""
    return {parameter: placements[name] for name, parameter in parameters.items() if name in placements}


class InPlace(Protocol):
    """A kernel for a rule, which updates in place without allocating new moments."""

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
        """One step of weights with gradients; `states` hold their moments and the counter `step`. The kernel divides
        gradients by `grad_scale`."""


def fits(weight: Tensor, placement: Placement) -> bool:
    """Whether a kernel supports this shard of a parameter."""
    alone = all(slicing.dim == 0 for slicing in placement.shards)
    return weight.is_cuda and weight.dtype == torch.float32 and weight.is_contiguous() and alone and weight.numel() > 0


Moments = dict[str, Tensor]
"""The state of one parameter by checkpoint name: with the shape of this rank's shard, or with size 1 in dimensions
that the rule reduces."""

Update = Asking[tuple[Tensor, Moments]]
"""An update in progress, which may yield requests about whole parameters (sharded.py)."""


class Rule(Protocol):
    """One update of N parameters of one shape, stacked along the first dimension of all tensors.

    Must not read a tensor on the host: that would synchronize with the GPU.
    """

    def begin(self, weight: Tensor) -> Moments:
        """The moments of one parameter before its first step."""

    def update(
        self, weight: Tensor, gradient: Tensor, moments: Moments, *, step: Tensor, lr: float, decay: float
    ) -> Update:
        """Returns the new weights and new moments without changing the old ones.

        `step` counts from 1, in float64, with as many dimensions as the weights; `decay` is the decoupled weight decay.
        """


TOGETHER_NUMEL = 1 << 26
"""Maximum numbers in one round of sharded parameters, updated together to save messages: about 0.8 GB of new moments
and directions in float32."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Parameters of equal shape, placement and parameter group."""

    weights: list[Tensor]
    placement: Placement
    group: Group


class Guarded(torch.optim.Optimizer):
    """Applies `group["rule"]` to the parameters of each group, or `group["in_place"]` if the kernel supports them.

    Small parameters of equal shape are stacked, up to half the size of the largest, because launch overhead dominates
    their time. Cost: updating 124 M parameters takes 8 ms with LAMB, 7 with Adafactor and 23 with Muon (36 to 148 ms
    unstacked); torch's fused AdamW takes 1.1 (H200, torch 2.11).
    """

    # The contract between torch's GradScaler and fused optimizers, which the executor relies on: if `found_inf` is 1,
    # `step` leaves weights, moments and counters unchanged, decided on the device; gradients are divided by
    # `grad_scale`.
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, groups: list[Group], placements: Mapping[Any, Placement] | None = None) -> None:
        super().__init__(groups, {"lr": 0.0})
        self._placements = placements or {}
        self.communicates = any(not placement.is_whole for placement in self._placements.values())
        """Whether an update may use collectives (see parallel/executor.py)."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.rounds = all(
            hasattr(p, "rounded") and self._has_kernel(p, group) for group in self.param_groups for p in group["params"]
        )
        """Whether updates also write the low-precision copies `rounded` of parameters (parallel/precision.py)."""
        self._stack_numel = max(_numel(self._placement(p)) for p in parameters) // 2

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self._step_in_place(group)
        for batches in self._rounds():
            updates = [self._begin(batch) for batch in batches]
            for batch, (weight, new) in zip(batches, run_together(updates), strict=True):
                self._end(batch, weight, new)

    def _step_in_place(self, group: Group) -> None:
        """Updates the parameters that a kernel supports."""
        weights = [p for p in group["params"] if p.grad is not None and self._has_kernel(p, group)]
        if weights:
            kernel: InPlace = group["in_place"]
            states = [self._state_of(weight, group["rule"]) for weight in weights]
            kernel.update(
                weights,
                states,
                lr=group["lr"],
                decay=group["weight_decay"],
                found_inf=self.found_inf,
                grad_scale=self.grad_scale,
            )

    def _has_kernel(self, parameter: Tensor, group: Group) -> bool:
        return "in_place" in group and fits(parameter, self._placement(parameter))

    def _state_of(self, weight: Tensor, rule: Rule) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state.update(step=torch.zeros((), device=weight.device), **rule.begin(weight))
        return state

    def _rounds(self) -> Iterator[list[_Batch]]:
        """Batches to update together: whole parameters one by one, sharded ones up to `TOGETHER_NUMEL`."""
        together: list[_Batch] = []
        room = TOGETHER_NUMEL
        for batch in self._batches():
            if batch.placement.is_whole:
                yield [batch]
                continue
            size = len(batch.weights) * _numel(batch.placement)
            if together and size > room:
                yield together
                together, room = [], TOGETHER_NUMEL
            together.append(batch)
            room -= size
        if together:
            yield together

    def _batches(self) -> Iterator[_Batch]:
        """Parameters with a gradient and without a kernel, stacked by shape and placement. Ranks that share parameters
        must have gradients for the same ones."""
        for group in self.param_groups:
            alike: dict[object, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None and not self._has_kernel(parameter, group):
                    placement = self._placement(parameter)
                    alike.setdefault((placement.shape, placement.shards), []).append(parameter)
            for parameters in alike.values():
                placement = self._placement(parameters[0])
                size = max(1, self._stack_numel // _numel(placement))
                for start in range(0, len(parameters), size):
                    yield _Batch(parameters[start : start + size], placement, group)

    def _begin(self, batch: _Batch) -> tuple[Update, Placement]:
        rule: Rule = batch.group["rule"]
        states = [self._state_of(weight, rule) for weight in batch.weights]
        gradient = _stack([weight.grad for weight in batch.weights if weight.grad is not None])
        gradient = gradient.to(batch.weights[0].dtype)  # it may be narrower (parallel/precision.py)
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        moments = {name: _stack([state[name] for state in states]) for name in states[0]}
        step = (moments.pop("step") + 1).double().view(-1, *[1] * len(batch.placement.shape))
        lr, decay = batch.group["lr"], batch.group["weight_decay"]
        return rule.update(_stack(batch.weights), gradient, moments, step=step, lr=lr, decay=decay), batch.placement

    def _end(self, batch: _Batch, weight: Tensor, new: Moments) -> None:
        states = [self.state[weight] for weight in batch.weights]
        self._commit(batch.weights, weight)
        for name, tensor in new.items():
            self._commit([state[name] for state in states], tensor)
        self._commit([state["step"] for state in states], _stack([state["step"] for state in states]) + 1)

    def _placement(self, parameter: Tensor) -> Placement:
        return self._placements.get(parameter) or whole_placement(parameter.shape)

    def _commit(self, old: list[Tensor], new: Tensor) -> None:
        if self.found_inf is not None:
            # `where` instead of a product with 0: 0 times nan is nan.
            new = torch.where(self.found_inf.bool(), _stack(old), new)
        torch._foreach_copy_(old, list(new.unbind(0)))


def _stack(tensors: list[Tensor]) -> Tensor:
    """Stacks tensors along a new first dimension; a single one is not copied."""
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def _numel(placement: Placement) -> int:
    """Numbers per shard, rounded down if uneven: identical on all ranks."""
    return max(1, math.prod(placement.shape) // math.prod(slicing.group.size for slicing in placement.shards))
