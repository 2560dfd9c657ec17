"""Settings of training: steps, optimizer, schedule, precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range

OptimizerKind = Literal["adamw", "adafactor", "lamb", "muon"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """How a gradient changes the weights; matrices decay, norms, biases and positions do not."""

    kind: OptimizerKind = "adamw"
    """`adamw` (Loshchilov and Hutter 2019): 8 bytes of state a parameter. `lamb` (You et al. 2020): AdamW with steps in
    proportion to each matrix, for very large batches; 8 bytes. `adafactor` (Shazeer and Stern 2018): almost no state
    (two vectors a matrix). `muon` (Jordan et al. 2024): orthogonal updates of the matrices inside blocks, 4 bytes;
    AdamW for the rest."""
    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    """Decay of the mean of gradients. Not used by adafactor, which keeps no such mean; muon: of the rest only."""
    beta2: Annotated[float, Range(least=0, below=1)] = 0.95
    """Decay of the mean of squared gradients. Not used by adafactor (1 - step^-0.8); muon: of the rest only."""
    epsilon: Annotated[float, Range(above=0)] = 1e-8
    """Added to the root of the second moment. Not used by adafactor; muon: of the rest only."""
    momentum: Annotated[float, Range(least=0, below=1)] = 0.95
    """Decay of the mean of gradients of the matrices inside blocks. Used by muon only."""
    rest_lr_ratio: Annotated[float, Range(above=0)] = 1.0
    """Learning rate of embedding, head, positions, norms and biases, as a multiple of the schedule's. Used by muon
    only, whose updates are scaled to the usual size of AdamW's (Liu et al. 2025), so that 1 is a fair start."""
    weight_decay: Annotated[float, Range(least=0)] = 0.1
    """Decoupled decay, multiplied by the learning rate. Every kind uses it."""


MilestoneUnit = Literal["steps", "tokens", "epochs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up to the peak, then a shape."""

    shape: Literal["cosine", "linear", "step", "wsd", "constant", "adaptive"] = "cosine"
    """After warm-up. `cosine`, `linear`: down to `final_share` at the last step. `step`: times `factor` at each of
    `milestones`. `wsd`: the peak, then down to `final_share` in the last `decay_share` of the run. `constant`: the
    peak. `adaptive`: times `factor` whenever validation has stopped gaining."""
    peak_lr: Annotated[float, Range(above=0)] = 3e-3
    """Learning rate after warm-up."""
    warmup_steps: Annotated[int, Range(least=0)] | None = None
    """Steps of linear warm-up. Not set: a tenth of the steps, at most 100."""
    final_share: Annotated[float, Range(least=0, most=1)] = 0.1
    """Learning rate at the last step, as a share of the peak; for `adaptive` the least share it may fall to. Not used
    by `step` and `constant`."""
    milestones: tuple[Annotated[float, Range(above=0)], ...] = ()
    """Where the rate falls, rising. Used by `step` only."""
    milestone_unit: MilestoneUnit = "steps"
    """What milestones count; an epoch is as many tokens as there are for training. Used by `step` only."""
    factor: Annotated[float, Range(above=0, below=1)] = 0.3
    """What the rate is multiplied by. Used by `step` and `adaptive`."""
    decay_share: Annotated[float, Range(above=0, most=1)] = 0.2
    """Share of all steps in which the rate falls. Used by `wsd` only."""
    decay_form: Literal["1-sqrt", "linear"] = "1-sqrt"
    """How it falls there. Used by `wsd` only."""
    patience: Annotated[int, Range(least=1)] = 3
    """Validations in a row without gain before the rate falls. Used by `adaptive` only."""
    min_gain: Annotated[float, Range(least=0)] = 0.0
    """Nats a token by which a validation must beat the best before to count as gain. Used by `adaptive` only."""

    def check(self) -> Iterator[tuple[str, str]]:
        if self.shape == "step" and not self.milestones:
            yield "milestones", "the schedule `step` falls at milestones and has none; give some, or use `constant`"
        if self.shape != "step" and self.milestones:
            yield "milestones", f"the schedule `{self.shape}` has no milestones; set `shape` to `step` or remove them"
        if list(self.milestones) != sorted(set(self.milestones)):
            yield "milestones", f"{list(self.milestones)} does not rise; put them in order"

    def warmup(self, steps: int) -> int:
        """The steps of warm-up in a run of `steps`."""
        return min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Batches -> weights."""

    start_from: str = ""
    """A checkpoint, or a run directory for its newest, whose weights training starts from: a model trained before,
    grown by `ropewalk model grow` or taken over by `ropewalk model import`. Its shapes and its tokenizer must be
    those of this recipe (`prepare.tokenizer.file` names the latter). Empty: `model.init` decides."""
    steps: Annotated[int, Range(least=1)] = 400
    """Optimizer steps."""
    batch_rows: Annotated[int, Range(least=1)] = 16
    """Rows of `load.sequence_length` tokens in one optimizer step, over all devices."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """The optimizer."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate by step."""
    clip_norm: Annotated[float, Range(least=0)] = 1.0
    """Largest gradient norm; longer gradients are scaled down to it. 0 switches clipping off."""
    precision: Literal["auto", "fp32", "bf16", "bf16-pure", "fp16"] = "auto"
    """`bf16`: matrix products in bfloat16, weights, sums and optimizer in float32. `fp32`: everything in float32.
    `bf16-pure`: also the model's weights and the stream between blocks in bfloat16, with float32 weights for the
    optimizer. `fp16`: products in float16 with dynamic loss scaling, for GPUs without bfloat16; slow on a CPU. `auto`:
    bf16 where the device has it in hardware."""
    log_every_steps: Annotated[int, Range(least=1), CONTINUES] = 10
    """Steps between metric lines."""
    validate_every_steps: Annotated[int, Range(least=0), CONTINUES] = 100
    """Steps between measurements of the validation loss; 0 measures at the end only."""
    validate_rows: Annotated[int, Range(least=1), CONTINUES] = 64
    """Rows of held-out tokens in each of these measurements."""
    threads: Annotated[int, Range(least=0)] = 0
    """CPU threads of the training process; 0 takes one a core. The same number gives the same bits."""

    def check(self) -> Iterator[tuple[str, str]]:
        schedule = self.schedule
        warmup = schedule.warmup(self.steps)
        if warmup > self.steps:
            yield (
                "schedule.warmup_steps",
                f"{warmup} steps of warm-up are more than the {self.steps} steps of the run; "
                "lower it or raise `train.steps`",
            )
        elif schedule.shape == "wsd" and warmup + schedule.decay_share * self.steps > self.steps:
            yield (
                "schedule.decay_share",
                f"{warmup} steps of warm-up and a decay of {schedule.decay_share:.0%} of the run "
                f"overlap in {self.steps} steps; lower one of them",
            )
        if schedule.shape == "adaptive" and not self.validate_every_steps:
            yield "validate_every_steps", "the schedule `adaptive` needs validations; set the steps between them"
