"""One step of training, whatever the devices: the interface that the loop is written on, and its form for one device.

`step` and `score` are called by all ranks. Nothing in them waits for the device: results are tensors on it, read by the
loop only when it logs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model.attend import attend_for
from ropewalk.model.decoder import Decoder
from ropewalk.model.dropout import Dropout, dropout_key
from ropewalk.model.loss import token_losses, token_scores
from ropewalk.plan.plan import Plan

from .comm import sum_over_ranks
from .guard import SpikeRule, Watch
from .labels import label
from .precision import LossScale, Masters, autocast

Named = Mapping[str, Tensor]
MakeOptimizer = Callable[[dict[str, torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did; device tensors of one number each."""

    loss: Tensor
    """Weighted mean over the global batch, before the update."""
    grad_norm: Tensor
    """Length of the whole gradient before clipping."""
    skipped: Tensor
    """1 when the update was left out and the weights stayed as they were, else 0."""
    anomaly: Tensor
    """What went wrong, a code of parallel/guard.py; 0 for a sound step."""
    loss_scale: Tensor | None = None
    """What the loss was multiplied by for the backward pass; only in fp16."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How the model does on a batch, B T each."""

    log_probabilities: Tensor
    first_choice: Tensor


@dataclass(slots=True)
class Points:
    """Named moments of a step at which others may look or act; each callback receives the gradients by name."""

    on_gradients: list[Callable[[Named], None]] = field(default_factory=list)
    """All gradients of the global batch are there, not yet clipped."""
    before_update: list[Callable[[Named], None]] = field(default_factory=list)
    """Gradients are clipped; the update follows."""


class Executor(Protocol):
    """A model and its optimizer under a plan."""

    model: Decoder
    """What this rank has of it."""
    points: Points

    def step(self, batch: Batch, *, lr: float) -> StepResult:
        """All microbatches, reduction, guard, clipping and update with learning rate `lr`. All ranks must call."""

    def score(self, batch: Batch) -> Scores:
        """Log-probabilities of the targets. All ranks must call."""

    def digest(self, batch: Batch) -> int:
        """A number that any flipped bit changes in the loss and gradients of the batch's first microbatch. Waits for
        the device; weights, gradients and optimizer stay as they are."""

    def model_state(self) -> dict[str, Tensor]:
        """The parameters by name, trained or not, as the optimizer sees them: float32 in every precision."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors as `moment/parameter`; also `guard/...`, in fp16 `loss_scale/...`."""

    def load_state(self, model: Named, optimizer: Named) -> None:
        """Takes over what the two functions above gave."""


class OneDevice:
    """The executor of a plan with one process; without `make_optimizer` it can only score."""

    def __init__(
        self,
        plan: Plan,
        model: Decoder,
        make_optimizer: MakeOptimizer | None,
        *,
        trained: Collection[str] | None = None,
        clip_norm: float = 0.0,
        spike: SpikeRule | None = None,
        points: Points | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self._seed = seed
        self.points = points or Points()
        self._plan = plan
        self._clip_norm = clip_norm
        self._device = model.head_weight.device
        # Without an optimizer the weights stay as they are: scores of a checkpoint are those of what it holds.
        self._masters = Masters(model) if make_optimizer and plan.precision == "bf16-pure" else None
        self._loss_scale = LossScale(self._device) if plan.precision == "fp16" else None
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained is None or name in trained)
        self._parameters = self._masters.parameters if self._masters else dict(model.named_parameters())
        self._trained = {n: p for n, p in self._parameters.items() if trained is None or n in trained}
        self._watch = Watch(spike, self._device)
        self._optimizer = make_optimizer(self._trained) if make_optimizer else None
        assert self._optimizer is None or guards(self._optimizer), "this optimizer would follow a broken gradient"

    def step(self, batch: Batch, *, lr: float) -> StepResult:
        # Copied before anything is computed from it: a number made on the host would have to be waited for.
        with label("copy"):
            batch = batch.to(self._device)
        total = sum_over_ranks(batch.weight.sum(), self._plan.world)
        total = torch.where(total > 0, total, 1)  # a batch in which nothing counts has loss 0, not 0 / 0
        parts = []
        size = self._plan.microbatch_rows_of(batch.tokens.shape[1])
        rows = torch.arange(len(batch), device=self._device).split(size)
        for microbatch, rows_B in zip(batch.split(size), rows, strict=True):
            part = self._weighted_loss(microbatch, dropout=self._dropout(rows_B)) / total
            with label("backward"):
                (part * self._loss_scale.value if self._loss_scale else part).backward()
            parts.append(part.detach())
        loss = sum_over_ranks(torch.stack(parts).sum(), self._plan.world)
        gradients = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        with label("clip and guard"):
            if self._loss_scale:
                self._loss_scale.divide(list(gradients.values()))
            _announce(self.points.on_gradients, gradients)
            norm = torch.nn.utils.get_total_norm(list(gradients.values()))
            self._clip(gradients.values(), norm)
            _announce(self.points.before_update, gradients)
            scale = self._loss_scale.value if self._loss_scale else None
            anomaly, skipped = self._watch.judge(loss, norm, scale)
        with label("update"):
            self._update(skipped, overflowed=~torch.isfinite(norm), lr=lr)
        return StepResult(loss, norm, skipped, anomaly, scale)

    @torch.no_grad()
    def score(self, batch: Batch) -> Scores:
        log_probabilities, first = [], []
        for microbatch in batch.split(self._plan.microbatch_rows_of(batch.tokens.shape[1])):
            there = microbatch.to(self._device)
            with autocast(self._plan.precision, self._device):
                hidden = self._hidden(there)
                score, choice = token_scores(hidden.flatten(0, 1), self.model.head_weight, there.targets.flatten())
            log_probabilities.append(score.view(there.targets.shape))
            first.append(choice.view(there.targets.shape))
        return Scores(torch.cat(log_probabilities), torch.cat(first))

    def digest(self, batch: Batch) -> int:
        size = self._plan.microbatch_rows_of(batch.tokens.shape[1])
        first = next(iter(batch.split(size))).to(self._device)
        loss = self._weighted_loss(first, dropout=self._dropout(torch.arange(len(first), device=self._device)))
        weights = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        return bit_sum([loss.detach(), *(gradient for gradient in gradients if gradient is not None)])

    def model_state(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        moments = {
            f"{moment}/{name}": tensor
            for name, parameter in self._trained.items()
            for moment, tensor in self._need_optimizer().state[parameter].items()
        }
        others = {"guard": self._watch.state, "loss_scale": self._loss_scale.state if self._loss_scale else {}}
        return moments | {f"{kind}/{name}": tensor for kind, state in others.items() for name, tensor in state.items()}

    @torch.no_grad()
    def load_state(self, model: Named, optimizer: Named) -> None:
        assert model.keys() == self._parameters.keys(), "the state is of another model"
        for name, parameter in self._parameters.items():
            assert parameter.shape == model[name].shape, name
            parameter.copy_(model[name])
        for key, tensor in optimizer.items():
            kind, name = key.split("/", 1)
            if kind == "guard":
                # A run may have been saved under another rule for spikes.
                if name in self._watch.state:
                    self._watch.state[name] = tensor.to(self._device, copy=True)
                continue
            if kind == "loss_scale":
                assert self._loss_scale, "the state is of another precision"
                self._loss_scale.state[name] = tensor.to(self._device, copy=True)
                continue
            # `step` counts live where the optimizer keeps them; moments live with their parameter.
            device = self._device if tensor.dim() or self._device.type == "cuda" else torch.device("cpu")
            self._need_optimizer().state[self._trained[name]][kind] = tensor.to(device, copy=True)
        if self._masters:
            self._masters.publish()

    def _weighted_loss(self, batch: Batch, *, dropout: Dropout | None) -> Tensor:
        with autocast(self._plan.precision, self._device):
            with label("forward"):
                hidden = self._hidden(batch, dropout=dropout)
            with label("loss"):
                losses = token_losses(hidden.flatten(0, 1), self.model.head_weight, batch.targets.flatten())
        return (losses * batch.weight.flatten().to(losses.dtype)).sum()

    def _hidden(self, batch: Batch, *, dropout: Dropout | None = None) -> Tensor:
        attend = attend_for(self.model.spec, documents_BT=batch.documents)
        return self.model(batch.tokens, positions_BT=batch.positions, attend=attend, dropout=dropout)

    def _dropout(self, rows_B: Tensor) -> Dropout | None:
        """The masks of these rows of the step at hand. The step is the optimizer's own count of updates, which every
        checkpoint holds already: masks go on after a kill, and are drawn again after a skipped update."""
        rate = self.model.spec.dropout
        if not rate:
            return None
        counts = (state["step"] for state in self._need_optimizer().state.values())
        step = torch.as_tensor(next(counts, 0), device=self._device)
        return Dropout(rate, dropout_key(self._seed, step), rows_B)

    def _clip(self, gradients: Iterable[Tensor], norm: Tensor) -> None:
        if self._clip_norm:
            scale = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(list(gradients), scale)

    def _update(self, skipped: Tensor, *, overflowed: Tensor, lr: float) -> None:
        """The guarded update: where `skipped` is 1 nothing changes, decided on the device."""
        optimizer = self._need_optimizer()
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        vars(optimizer).update(found_inf=skipped, grad_scale=None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self._masters:
            self._masters.publish()
        if self._loss_scale:
            self._loss_scale.update(overflowed.float())

    def _need_optimizer(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "an executor made without an optimizer only scores"
        return self._optimizer


def guards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` leaves weights, moments and counters as they are when its `found_inf` is 1, decided on the
    device: the contract between torch's GradScaler and its fused optimizers, which ours declare too."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def bit_sum(tensors: Iterable[Tensor]) -> int:
    """The bits of all numbers read as integers, times the place of their tensor, and added up: exact in any order, and
    changed by any one flipped bit. Stays on the device until the end."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        tensor.detach().contiguous().reshape(-1).view(kinds[tensor.element_size()]).sum(dtype=torch.int64)
        * (2 * place + 1)
        for place, tensor in enumerate(tensors)
    ]
    return int(torch.stack(sums).sum())


def _announce(callbacks: list[Callable[[Named], None]], gradients: Named) -> None:
    for callback in callbacks:
        callback(gradients)
