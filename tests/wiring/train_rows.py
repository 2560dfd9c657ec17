"""`[train]`, and what belongs to no table."""

from __future__ import annotations

from tests.wiring.rows import Given, Row
from tests.wiring.verbs import broken, launched, preempted, resumed, watched

STEP: Given = ('train.schedule.shape="step"', "train.schedule.milestones=[2]")
WSD: Given = ('train.schedule.shape="wsd"', "train.schedule.decay_share=0.75")
ADAPTIVE: Given = (
    *('train.schedule.shape="adaptive"', "train.schedule.min_delta=100", "train.schedule.patience=1"),
    "train.validate_every_steps=1",
)
NOTES: Given = ('train.mixture=[{source="notes", weight=1}, {source="code", weight=1}]',)
SMALL: Given = ('train.mixture=[{source="notes", weight=1}, {source="code", weight=9}]', "train.steps=10")
PHASES: Given = ("train.phases=[{steps=2}, {steps=4}]",)
MUON: Given = ('train.optimizer.kind="muon"',)
ADAFACTOR: Given = ('train.optimizer.kind="adafactor"',)
RAMP: Given = ("train.batch_ramp={from_size=2, over_steps=2}",)
LONGER: Given = ("load.sequence_length=32", "train.length_ramp={from_length=16, over_steps=2}")
STOP: Given = ("train.early_stop={min_delta=100, patience=2}", "train.validate_every_steps=1")
SPIKES: Given = ("train.guard.window_steps=3", "train.guard.spike_sigma=1.5", "train.steps=8")


def of_phase(shape: Given) -> Given:
    """Settings of the schedule of the run as those of the second phase."""
    return (*PHASES, *(text.replace("train.schedule", "train.phases.1.schedule") for text in shape))


GROWING: Given = (*PHASES, f"train.phases.1.{RAMP[0][6:]}")
LENGTHENING: Given = (*PHASES, LONGER[0], f"train.phases.1.{LONGER[1][6:]}")
SCHEDULE = [
    # What must differ is the learning rate by step.
    ("shape", "constant", ()),
    ("peak_lr", "2e-2", ()),
    ("warmup_steps", "3", ()),
    ("restarts", "[2]", ()),
    ("final_lr_ratio", "0.5", ()),
    ("milestones", "[1]", STEP),
    ("milestone_unit", "tokens", STEP),
    ("factor", "0.5", STEP),
    ("decay_share", "0.25", WSD),
    ("decay_form", "linear", WSD),
    ("patience", "2", ADAPTIVE),
    ("min_delta", "0", ADAPTIVE),
]

ROWS = [
    Row("name", "other", "run folder", by=launched),
    Row("seed", "4", "weights"),
    Row("train.seed", "4", "weights"),
    Row("train.start_from", "base/run", "losses", by=resumed),
    Row("train.steps", "3", "logged"),
    Row("train.batch_size", "8", "tokens"),
    Row("train.batch_ramp.from_size", "1", "tokens", RAMP),
    Row("train.batch_ramp.over_steps", "3", "tokens", RAMP),
    Row("train.length_ramp.from_length", "8", "batches", LONGER),
    Row("train.length_ramp.over_steps", "3", "batches", LONGER),
    Row("train.optimizer.kind", "adafactor", "moments names"),
    Row("train.optimizer.beta1", "0.5", "losses"),
    Row("train.optimizer.beta2", "0.5", "losses"),
    Row("train.optimizer.epsilon", "1e-2", "losses"),
    Row("train.optimizer.momentum", "0.5", "losses", MUON),
    Row("train.optimizer.rest_lr_ratio", "3", "losses", MUON),
    Row("train.optimizer.weight_decay", "0.5", "losses"),
    Row("train.optimizer.relative_step", "true", "losses", ADAFACTOR),
    *(Row(f"train.schedule.{name}", value, "lr", given) for name, value, given in SCHEDULE),
    Row("train.mixture.0.source", "code", "batches", ('train.mixture=[{source="notes"}]',)),
    Row("train.mixture.0.weight", "9", "batches", NOTES),
    Row("train.mixture.0.end_weight", "9", "batches", NOTES),
    Row("train.mixture.1.max_epochs", "0.1", "batches", SMALL),
    Row("train.frozen", '["embedding"]', "moments names"),
    Row("train.hooks", '["tests.extend.watch:Watch"]', "losses", ("train.clip_norm=0.1",)),
    Row("train.lora.rank", "2", "moments names", ("train.lora={}",)),
    Row("train.lora.alpha", "64", "losses", ("train.lora={}",)),
    Row("train.lora.targets", "attention", "moments names", ("train.lora={}",)),
    Row("train.phases.0.name", "first", "phases", PHASES),
    Row("train.phases.0.steps", "1", "logged", PHASES),
    Row("train.phases.1.start_from", "base/run", "losses", PHASES, by=resumed),
    Row("train.phases.0.sequence_length", "8", "batches", PHASES),
    Row("train.phases.0.batch_size", "2", "tokens", PHASES),
    Row("train.phases.1.batch_ramp.from_size", "1", "tokens", (*PHASES, f"train.phases.1.{RAMP[0][6:]}")),
    Row("train.phases.1.batch_ramp.over_steps", "3", "tokens", (*PHASES, f"train.phases.1.{RAMP[0][6:]}")),
    Row(
        "train.phases.1.length_ramp.from_length",
        "8",
        "batches",
        (*PHASES, LONGER[0], f"train.phases.1.{LONGER[1][6:]}"),
    ),
    Row(
        "train.phases.1.length_ramp.over_steps", "3", "batches", (*PHASES, LONGER[0], f"train.phases.1.{LONGER[1][6:]}")
    ),
    *(
        Row(f"train.phases.1.schedule.{name}", value, "lr", of_phase(given or ("train.schedule={warmup_steps=1}",)))
        for name, value, given in SCHEDULE
    ),
    Row("train.phases.1.mixture.0.source", "code", "batches", (*PHASES, 'train.phases.1.mixture=[{source="notes"}]')),
    Row("train.phases.1.mixture.0.weight", "9", "batches", (*PHASES, f"train.phases.1.{NOTES[0][6:]}")),
    Row("train.phases.1.mixture.0.end_weight", "9", "batches", (*PHASES, f"train.phases.1.{NOTES[0][6:]}")),
    Row(
        "train.phases.0.mixture.1.max_epochs",
        "0.1",
        "batches",
        ("train.phases=[{steps=10}]", f"train.phases.0.{SMALL[0][6:]}"),
    ),
    Row("train.phases.1.frozen", '["embedding"]', "moments names", PHASES),
    Row("train.phases.1.lora.rank", "2", "moments names", (*PHASES, "train.phases.1.lora={}")),
    Row("train.phases.1.lora.alpha", "64", "losses", (*PHASES, "train.phases.1.lora={}")),
    Row("train.phases.1.lora.targets", "attention", "moments names", (*PHASES, "train.phases.1.lora={}")),
    Row("train.phases.1.moments", "fresh", "losses", PHASES),
    Row("train.early_stop.patience", "1", "logged", STOP),
    Row("train.early_stop.min_delta", "0", "logged", STOP),
    Row("train.guard.not_finite", "stop", "error", by=broken),
    Row("train.guard.spike", "skip", "anomalies", SPIKES, by=broken),
    Row("train.guard.spike_sigma", "1000", "anomalies", SPIKES, by=broken),
    Row("train.guard.window_steps", "50", "anomalies", SPIKES, by=broken),
    Row("train.guard.max_consecutive", "1", "error", by=broken),
    Row("train.faults.hang_s", "7", "limits", by=watched),
    Row("train.faults.hang_steps", "500", "limits", by=watched),
    Row("train.faults.straggler_sigma", "9", "RankWatch(sigma)"),
    Row("train.faults.probe_every_steps", "2", "events"),
    Row("train.faults.grace_s", "600", "grace", by=preempted),
    Row("train.faults.max_restarts", "7", "script", by=launched),
    Row("train.clip_norm", "0.01", "losses"),
    Row("train.precision", "fp16", "loss_scale"),
    Row("train.log_every_steps", "2", "logged"),
    Row("train.layer_stats_every_steps", "1", "events"),
    Row("train.timeline_steps", "1", "files"),
    Row("train.validate_every_steps", "1", "validations"),
    Row("train.validation_sequences", "2", "validations"),
    Row("train.threads", "2", "torch threads"),
]
