"""One step of training, whatever the devices: the interface that the loop is written on.

`step` and `score` are called by all ranks. Nothing in them waits for the device: results are tensors on it, read by the
loop only when it logs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model.decoder import Decoder
from ropewalk.model.spec import Spec

from .comm import Group
from .kernels.kernel_choice import Contest
from .kernels.matmul_tuning import Tuning
from .placement import Choose, LocalShard, Placement

Named = Mapping[str, Tensor]
MakeOptimizer = Callable[[dict[str, torch.nn.Parameter], Mapping[str, Placement]], torch.optim.Optimizer]
"""Gets what this rank updates of each parameter, and which part of it that is."""


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
    """What went wrong, a code of parallel/anomaly_guard.py; 0 for a sound step."""
    loss_scale: Tensor | None = None
    """What the loss was multiplied by for the backward pass; only in fp16."""
    sequence_losses: Tensor | None = None
    """Mean loss of each row of the global batch, on every rank; NaN where nothing counts. Only of a run that draws its
    rows by importance."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How the model does on a batch, B T each."""

    log_probabilities: Tensor
    first_choice: Tensor


@dataclass(slots=True)
class Points:
    """Named moments of a step at which others may look or act; those about gradients receive them by name."""

    on_gradients: list[Callable[[Named], None]] = field(default_factory=list)
    """All gradients of the global batch are there, not yet clipped; they may be changed in place. An optimizer on the
    host waits for those who look at gradients, here or before the update, where it would begin sooner by itself."""
    before_update: list[Callable[[Named], None]] = field(default_factory=list)
    """The update follows. Gradients are clipped, unless the update does that too: of an optimizer on the host, and of
    gradients narrower than the weights."""
    before_change: list[Callable[[], None]] = field(default_factory=list)
    """Weights and moments are about to change, for the first time in this step: with the update, or during the backward
    pass where an optimizer on the host begins then."""
    before_tuning: list[Callable[[], None]] = field(default_factory=list)
    """An executor is made, and kernels for its matmuls are about to be measured. On ranks that measure (`decide`)."""
    after_tuning: list[Callable[[Tuning], None]] = field(default_factory=list)
    """Some kernels were measured then, or left out for want of time."""


class Decoding(Protocol):
    """Forward passes over new tokens alone, with a key-value cache: what generation asks of a model.

    Shapes: B rows, T tokens, V vocabulary.
    """

    spec: Spec
    device: torch.device

    @property
    def seen(self) -> int:
        """Tokens of each row that the cache holds."""

    def restart(self) -> None:
        """Empties the cache."""

    def logits(self, new_BT: Tensor) -> Tensor | None:
        """Logits B V of the token after `new_BT`, which the cache holds afterwards; None on ranks that choose no token.
        All ranks must call, with the same tokens."""

    def share(self, token_B: Tensor | None, *, rows: int) -> Tensor:
        """The tokens chosen from these logits, on every rank; None on ranks that chose none. All ranks must call: ranks
        that chose by themselves could differ by a rounding and would then wait for each other forever."""


class Executor(Protocol):
    """A model and its optimizer under a plan."""

    model: Decoder
    """What this rank has of it; with several stages a rank, its first."""
    points: Points
    replicas: Group
    """The ranks that hold the same parts of everything."""
    device: torch.device
    contests: Sequence[Contest]
    """Which kernels were tried for this plan, and how long they took."""

    def step(self, batch: Batch, *, lr: float) -> StepResult:
        """All microbatches, reduction, guard, clipping and update with learning rate `lr`. All ranks must call."""

    def score(self, batch: Batch) -> Scores:
        """Log-probabilities of the targets. All ranks must call."""

    def decoding(self, *, room: int) -> AbstractContextManager[Decoding]:
        """Generation of rows of at most `room` tokens, in the block. All ranks must call."""

    def digest(self, batch: Batch) -> int:
        """A number that any flipped bit changes in the loss and gradients of the batch's first microbatch. Waits for
        the device; weights, gradients and optimizer stay as they are."""

    def model_state(self) -> dict[str, LocalShard]:
        """This rank's parts of the parameters by name, trained or not, as the optimizer sees them: float32 in every
        precision."""

    def optimizer_state(self) -> dict[str, LocalShard]:
        """The optimizer's tensors as `moment/parameter`; also `guard/...`, in fp16 `loss_scale/...`."""

    def stage_seconds(self) -> dict[int, float]:
        """Seconds in which each stage of this rank computed since the last call, by its number in the whole; empty
        without a pipeline."""

    def lengths(self, parts: Named) -> list[Tensor]:
        """The Euclidean lengths of whole tensors of which every rank brings its parts, by the names of parameters. All
        ranks must call."""

    def wants(self) -> Choose:
        """Which part of each tensor of a state this rank needs to go on from it."""

    def load_state(
        self, model: Mapping[str, Tensor | LocalShard], optimizer: Mapping[str, Tensor | LocalShard]
    ) -> None:
        """Takes over a state: whole tensors, or of each the part that this rank `wants`."""


def guards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` leaves weights, moments and counters as they are when its `found_inf` is 1, decided on the
    device: the contract between torch's GradScaler and its fused optimizers, which ours declare too."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def communicates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update of `optimizer` asks other ranks, so that all must make it at the same moment. Ours declare it;
    torch's know of no ranks."""
    return getattr(optimizer, "communicates", False)


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
