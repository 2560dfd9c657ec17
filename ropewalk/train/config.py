"""Settings of training: phases, optimizer, schedule, precision, guard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ropewalk.config.schema import CONTINUES, EXTENDS, Range, SettingsOf
from ropewalk.model.config import Lora

from .hooks.hook import HOOKS, problem_of
from .lr_schedule import SCHEDULES, MilestoneUnit
from .optim.table import OPTIMIZERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """The optimizer. Weight decay applies to matrices, not to norms, biases and positions."""

    kind: Annotated[str, OPTIMIZERS] = "adamw"
    """The update rule."""
    settings: Annotated[Any, SettingsOf("kind")] = None
    """Settings of a user's own kind."""
    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    """Decay of the mean of gradients; `muon`: outside the matrices of blocks."""
    beta2: Annotated[float, Range(least=0, below=1)] = 0.95
    """Decay of the mean of squared gradients; `muon`: outside the matrices of blocks."""
    epsilon: Annotated[float, Range(above=0)] = 1e-8
    """Added to the root of the second moment; `muon`: outside the matrices of blocks."""
    momentum: Annotated[float, Range(least=0, below=1)] = 0.95
    """Decay of the mean of gradients of the matrices inside blocks."""
    rest_lr_ratio: Annotated[float, Range(above=0)] = 1.0
    """Learning rate of embedding, head, positions, norms and biases, as a multiple of the schedule's. Muon's updates
    are scaled to the usual size of AdamW's (Liu et al. 2025), so that 1 is a fair start."""
    weight_decay: Annotated[float, Range(least=0)] = 0.1
    """Decoupled weight decay, multiplied by the learning rate; of matrices only."""
    relative_step: bool = False
    """Scale a step by max(0.001, RMS of the parameter) and limit the learning rate to 1/sqrt(step) (Shazeer and Stern
    2018, section 8). The paper's rate is a constant 0.01. Off: the learning rate alone."""

    def own_settings(self) -> Any:
        """The settings of the chosen kind alone, as its dataclass."""
        return self.settings if self.settings is not None else OPTIMIZERS[self.kind].settings_in(self)

    def check(self) -> Iterator[tuple[str, str]]:
        if self.relative_step and self.kind != "adafactor":
            yield "relative_step", f"`{self.kind}` has no relative step; set `kind` to `adafactor` or remove it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate: linear warm-up to the peak, then a shape."""

    shape: Annotated[str, SCHEDULES] = "cosine"
    """The learning rate after warm-up."""
    settings: Annotated[Any, SettingsOf("shape")] = None
    """Settings of a user's own shape."""
    peak_lr: Annotated[float, Range(above=0)] = 3e-3
    """Learning rate after warm-up."""
    warmup_steps: Annotated[int, Range(least=0)] | None = None
    """Steps of linear warm-up. Not set: 10 % of the steps, at most 100."""
    restarts: tuple[Annotated[int, Range(least=1)], ...] = ()
    """Steps after which a new cycle begins (warm restarts, Loshchilov and Hutter 2017): warm-up, then `shape` until the
    next restart or the end. Optimizer state and data order are kept. Set by ropewalk when a finished run with a decayed
    schedule continues."""
    final_lr_ratio: Annotated[float, Range(least=0, most=1)] = 0.1
    """Learning rate at the last step as a fraction of the peak; `adaptive`: the smallest fraction."""
    milestones: tuple[Annotated[float, Range(above=0)], ...] = ()
    """Points at which the rate falls, in rising order."""
    milestone_unit: MilestoneUnit = "steps"
    """Unit of the milestones; an epoch is as many tokens as there are for training."""
    factor: Annotated[float, Range(above=0, below=1)] = 0.3
    """Factor of each fall of the rate."""
    decay_share: Annotated[float, Range(above=0, most=1)] = 0.2
    """Share of all steps in which the rate decays."""
    decay_form: Literal["1-sqrt", "linear"] = "1-sqrt"
    """Form of the decay."""
    patience: Annotated[int, Range(least=1)] = 3
    """Consecutive validations without improvement before the rate falls."""
    min_delta: Annotated[float, Range(least=0)] = 0.0
    """Minimum improvement over the best validation loss, in nats per token."""

    def own_settings(self) -> Any:
        """The settings of the chosen shape alone, as its dataclass; None for a user's function."""
        return self.settings if self.settings is not None else SCHEDULES[self.shape].settings_in(self)

    def check(self) -> Iterator[tuple[str, str]]:
        if self.shape == "step" and not self.milestones:
            yield "milestones", "the schedule `step` needs milestones; set some, or use `constant`"
        if self.shape != "step" and self.milestones:
            yield "milestones", f"the schedule `{self.shape}` has no milestones; set `shape` to `step` or remove them"
        for name in ("milestones", "restarts"):
            given = getattr(self, name)
            if list(given) != sorted(set(given)):
                yield name, f"{list(given)} is not in rising order; sort it"

    def warmup(self, steps: int) -> int:
        """The steps of warm-up in a cycle of `steps`."""
        return min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps

    def cycles(self, steps: int) -> tuple[tuple[int, int], ...]:
        """(first step, steps) of each cycle in a phase of `steps`; one without restarts."""
        begins = (0, *(restart for restart in sorted(set(self.restarts)) if restart < steps))
        ends = (*begins[1:], steps)
        return tuple((begin, end - begin) for begin, end in zip(begins, ends, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The weight of a source in a mixture."""

    source: Annotated[str, CONTINUES]
    """Name of a source in the corpus."""
    weight: Annotated[float, Range(least=0), CONTINUES] = 1.0
    """Share of the sequences, before normalisation."""
    end_weight: Annotated[float, Range(least=0), CONTINUES] | None = None
    """Share of the sequences at the end of the phase; shares change linearly. Not set: `weight`."""
    max_epochs: Annotated[float, Range(above=0), CONTINUES] | None = None
    """Maximum number of passes over the source; the others then share its sequences. Not set: no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRamp:
    """Batch size warm-up: small batches gain more per token while the loss falls fast (McCandlish et al. 2018)."""

    from_size: Annotated[int, Range(least=1)]
    """Sequences in the first step; must divide `batch_size`. The batch grows by this number at even intervals."""
    over_steps: Annotated[int, Range(least=1)]
    """First step with the full batch."""

    def rows(self, step: int, batch_size: int) -> int:
        """Sequences in the batch of `step`, counted from 0."""
        rungs = batch_size // self.from_size
        return self.from_size * (1 + (rungs - 1) * min(step, self.over_steps) // self.over_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRamp:
    """Sequence length warm-up by doubling (Press et al. 2021, Li et al. 2022). Each full sequence is cut into short
    ones: no token is lost, and a step holds the same number of tokens."""

    from_length: Annotated[int, Range(least=8)]
    """Tokens per sequence in the first step: the full length halved one or more times."""
    over_steps: Annotated[int, Range(least=1)]
    """First step with full sequences; the shorter lengths before it last equally long."""

    def length(self, step: int, sequence_length: int) -> int:
        """Tokens per sequence in `step`, counted from 0."""
        doublings = (sequence_length // self.from_length).bit_length() - 1
        return self.from_length << (doublings * min(step, self.over_steps) // self.over_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One part of a run. Settings left out are those of `[train]` and `[load]`."""

    name: str = ""
    """Name in reports. Not set: the number of the phase."""
    steps: Annotated[int, Range(least=1), EXTENDS]
    """Optimizer steps."""
    start_from: str = ""
    """As `train.start_from`, at the start of this phase. Empty: continue from the end of the previous phase."""
    sequence_length: Annotated[int, Range(least=8)] | None = None
    """Tokens per sequence; not set: `load.sequence_length`."""
    batch_size: Annotated[int, Range(least=1)] | None = None
    """Sequences in one optimizer step; not set: `train.batch_size`."""
    batch_ramp: BatchRamp | None = None
    """As `train.batch_ramp`, over the first steps of this phase."""
    length_ramp: LengthRamp | None = None
    """As `train.length_ramp`, over the first steps of this phase."""
    schedule: Schedule | None = None
    """Learning rate by step of the phase; a complete table of its own. Not set: `train.schedule`."""
    mixture: Annotated[tuple[Share, ...], CONTINUES] = ()
    """Sources and their shares. Not set: `train.mixture`."""
    frozen: tuple[str, ...] | None = None
    """Parameters that are not trained. Not set: `train.frozen`."""
    lora: Lora | None = None
    """As `train.lora`; when a phase without adapters follows, they are merged into the weights."""
    moments: Literal["keep", "fresh"] = "keep"
    """Whether the optimizer keeps its state of parameters that the previous phase also trained. Always fresh after
    `start_from`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop:
    """Ends a phase when the validation loss stops improving, with the weights of its best validation."""

    patience: Annotated[int, Range(least=1)] = 3
    """Consecutive validations without improvement that end the phase."""
    min_delta: Annotated[float, Range(least=0)] = 0.0
    """Minimum improvement over the best validation loss, in nats per token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Reaction to broken steps. Each one is an event; the weights never follow a broken gradient."""

    not_finite: Literal["skip", "rollback", "stop"] = "skip"
    """Reaction to an infinite or NaN loss or gradient. `skip`: the update is skipped. `rollback`: training returns to
    the newest checkpoint and repeats the steps; when the same step fails again, its batch is skipped. `stop`: the run
    ends with an error. An overflow in fp16 does not count: the loss scale is lowered and the update skipped."""
    spike: Literal["off", "record", "skip", "rollback", "stop"] = "record"
    """Reaction to a loss far above recent ones. `record`: only an event; the others as for `not_finite`."""
    spike_sigma: Annotated[float, Range(above=0)] = 8.0
    """Threshold of a spike: standard deviations above the mean of recent losses."""
    window_steps: Annotated[int, Range(least=2)] = 50
    """Window of the exponential mean of losses, in steps; nothing counts as a spike before that many steps."""
    max_consecutive: Annotated[int, Range(least=1)] = 20
    """Maximum number of consecutive skipped steps, and of consecutive rollbacks to the same step, before the run ends
    with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Handling of machines that hang, slow down, compute wrongly or are preempted."""

    hang_s: Annotated[float, Range(least=0), CONTINUES] = 300.0
    """Seconds without a step after which a process counts as hanging: it writes the stack of each thread and exits with
    status 70, so that a launcher restarts it. At least `hang_steps` times the step time. 0: never."""
    hang_steps: Annotated[float, Range(least=1), CONTINUES] = 20.0
    """Maximum duration of a step, as a multiple of the median step time."""
    straggler_sigma: Annotated[float, Range(above=0), CONTINUES] = 4.0
    """A rank is reported as a straggler when its busy time per step, without waiting for data and other ranks, exceeds
    the others' by this many standard deviations."""
    probe_every_steps: Annotated[int, Range(least=0), CONTINUES] = 0
    """Steps between checks for silent data corruption: a microbatch is computed twice and must give the same bits, as
    must the updates of replicas. Costs two microbatches. 0: never."""
    grace_s: Annotated[float, Range(above=0), CONTINUES] = 30.0
    """Seconds between the request to stop (SIGTERM, or SIGUSR1 from Slurm) and the exit: the state is saved if time
    allows, and the run ends with status 0."""
    max_restarts: Annotated[int, Range(least=0), CONTINUES] = 3
    """Maximum number of restarts of all `--nproc` processes from the newest checkpoint after one of them died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Training."""

    seed: Annotated[int, Range(least=0)] | None = None
    """Seed of initial weights, data order and dropout, for several runs on the same prepared data and hold-out. Not
    set: the recipe's `seed`, which also determines the hold-out."""
    start_from: str = ""
    """A run (its newest checkpoint), a checkpoint or a local Hugging Face directory to start from. It supplies the
    weights and, where the recipe does not set them, `[model]`, `load.sequence_length`, the tokenizer and the chat
    template. Empty: initialize as in `model.init`."""
    steps: Annotated[int, Range(least=1), EXTENDS] | None = None
    """Optimizer steps. Not set: 400, or those of `phases`. A finished run continues with more."""
    batch_size: Annotated[int, Range(least=1)] = 16
    """Sequences of `load.sequence_length` tokens in one optimizer step, over all devices."""
    batch_ramp: BatchRamp | None = None
    """Batch size warm-up."""
    length_ramp: LengthRamp | None = None
    """Sequence length warm-up."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """The optimizer."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate by step."""
    mixture: Annotated[tuple[Share, ...], CONTINUES] = ()
    """Sources and their shares: `mixture = [{source = "code", weight = 2.0}]`. Not set: all sources, by
    `prepare.sources.weight`. May change during a run: the new shares apply from the next step on, and no sequence is
    repeated or lost."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained: names such as `embedding` or `blocks.2`, ranges such as `blocks.0-3`, patterns
    such as `*norm*`."""
    lora: Lora | None = None
    """Trains only low-rank adapters of the matrices inside blocks (Hu et al. 2021)."""
    phases: tuple[Phase, ...] = ()
    """Parts of the run in order, one `[[train.phases]]` table each. None: a single phase with the settings of
    `[train]`."""
    early_stop: EarlyStop | None = None
    """Ends a phase when the validation loss stops improving."""
    guard: Guard = field(default_factory=Guard)
    """Reaction to broken steps."""
    faults: Faults = field(default_factory=Faults)
    """Handling of failing machines."""
    clip_norm: Annotated[float, Range(least=0)] = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it. 0 disables clipping."""
    precision: Literal["auto", "fp32", "bf16", "bf16-pure", "fp16", "fp8"] = "auto"
    """`bf16`: matmuls in bfloat16; weights, sums and optimizer in float32. `fp32`: everything in float32. `bf16-pure`:
    also weights and the residual stream in bfloat16, with float32 master weights. `fp8`: as `bf16-pure`, with matmuls
    of blocks in 8 bits where that is faster, for GPUs from Hopper on. `fp16`: matmuls in float16 with dynamic loss
    scaling, for GPUs without bfloat16; slow on a CPU. `auto`: bf16 where the hardware supports it."""
    hooks: Annotated[tuple[str, ...], HOOKS, CONTINUES] = ()
    """Your own hooks, `hooks = ["watch:Losses"]` for a class `Losses` in `watch.py` beside the recipe
    (docs/guides/python.md)."""
    log_every_steps: Annotated[int, Range(least=1), CONTINUES] = 10
    """Steps between logged metrics."""
    layer_stats_every_steps: Annotated[int, Range(least=0), CONTINUES] = 0
    """Steps between measurements of each layer (gradient, update and activation norms), which name layers that vanish
    or explode. 0: never."""
    timeline_steps: Annotated[int, Range(least=0), CONTINUES] = 0
    """Record a per-rank timeline (https://ui.perfetto.dev) of this many steps, after two warm-up steps, in `timeline/`
    of the run. 0: none."""
    validate_every_steps: Annotated[int, Range(least=0), CONTINUES] = 100
    """Steps between measurements of the validation loss. 0: only at the end of each phase."""
    validation_sequences: Annotated[int, Range(least=1), CONTINUES] = 64
    """Held-out sequences per measurement."""
    threads: Annotated[int, Range(least=0)] = 0
    """CPU threads of the training process; 0: one per core. The same number gives the same bits."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, unless a phase stops early."""
        return sum(phase.steps for phase in self.phases) or self.steps or 400

    def check(self) -> Iterator[tuple[str, str]]:
        for name in self.hooks:
            if problem := problem_of(name):
                yield "hooks", problem
        if self.phases and self.steps is not None:
            yield "steps", "each of the `phases` has its own steps; remove it"
        if not self.phases:
            yield from _check_schedule(self.schedule, self.total_steps, "")
        for index, phase in enumerate(self.phases):
            schedule = phase.schedule or self.schedule
            yield from _check_schedule(schedule, phase.steps, f"phases.{index}." if phase.schedule else "")
            if index and phase.lora and not phase.start_from and self.phases[index - 1].lora not in (None, phase.lora):
                yield (
                    f"phases.{index}.lora",
                    "differs from the adapters of the previous phase; add a phase without adapters between them",
                )
        yield from self._check_ramps()
        mixtures = {"mixture": self.mixture} | {
            f"phases.{i}.mixture": phase.mixture for i, phase in enumerate(self.phases)
        }
        for key, mixture in mixtures.items():
            for kind, weights in _weights(mixture).items():
                if mixture and not any(weights.values()):
                    yield key, f"all weights are 0 at the {kind}; give a source a weight above 0"
        shapes = {phase.schedule.shape for phase in self.phases if phase.schedule} | {self.schedule.shape}
        if not self.validate_every_steps:
            if "adaptive" in shapes:
                yield "validate_every_steps", "the schedule `adaptive` needs validation; set a number of steps above 0"
            if self.early_stop:
                yield "validate_every_steps", "early stopping needs validation; set a number of steps above 0"

    def _check_ramps(self) -> Iterator[tuple[str, str]]:
        """Ramps that do not divide their batch or do not end within their steps. Those of `[train]` apply to the first
        phase, unless it has its own."""
        for index, phase in enumerate(self.phases or (Phase(steps=self.total_steps),)):
            rows, steps = phase.batch_size or self.batch_size, phase.steps
            ramps: dict[str, tuple[BatchRamp | LengthRamp | None, BatchRamp | LengthRamp | None]] = {
                "batch_ramp": (phase.batch_ramp, self.batch_ramp),
                "length_ramp": (phase.length_ramp, self.length_ramp),
            }
            for name, (own, of_run) in ramps.items():
                ramp = own or (None if index else of_run)
                key = f"phases.{index}.{name}" if own else name
                if isinstance(ramp, BatchRamp) and rows % ramp.from_size:
                    text = f"{ramp.from_size} does not divide the full batch of {rows} sequences; choose a divisor"
                    yield f"{key}.from_size", text
                if ramp and ramp.over_steps >= steps:
                    whole = "batch" if isinstance(ramp, BatchRamp) else "length"
                    yield (
                        f"{key}.over_steps",
                        f"the ramp over {ramp.over_steps} steps does not reach the full {whole} within the {steps} "
                        f"steps of the {'phase' if self.phases else 'run'}; lower it or raise the steps",
                    )


def _weights(mixture: tuple[Share, ...]) -> dict[str, dict[str, float]]:
    """The weights of the sources at the beginning and at the end of a phase."""
    begin = {share.source: share.weight for share in mixture}
    end = {share.source: share.weight if share.end_weight is None else share.end_weight for share in mixture}
    return {"beginning": begin, "end": end}


def _check_schedule(schedule: Schedule, steps: int, table: str) -> Iterator[tuple[str, str]]:
    """Problems of the schedule in `table`, for a phase of `steps` steps."""
    what = "phase" if table else "run"
    if schedule.restarts and schedule.restarts[-1] >= steps:
        text = (
            f"a restart at step {schedule.restarts[-1]} lies beyond the {steps} steps of the {what}; "
            "remove it or raise the steps"
        )
        yield f"{table}schedule.restarts", text
    for _, length in schedule.cycles(steps):
        warmup = schedule.warmup(length)
        what = "cycle" if schedule.restarts else what
        if warmup > length:
            yield (
                f"{table}schedule.warmup_steps",
                f"{warmup} warm-up steps exceed the {length} steps of the {what}; lower it or raise the steps",
            )
        elif schedule.shape == "wsd" and warmup + schedule.decay_share * length > length:
            yield (
                f"{table}schedule.decay_share",
                f"{warmup} warm-up steps and a decay over {schedule.decay_share:.0%} of {length} steps overlap; "
                "lower one of them",
            )
