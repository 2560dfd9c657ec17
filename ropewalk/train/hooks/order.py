"""The hooks of every run, in the order in which each moment calls them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .anomaly import AnomalyGuard
from .checkpointing import Checkpointing
from .corruption import CorruptionProbe
from .data_stalls import DataStalls
from .hook import Hook
from .layer_stats import LayerStats
from .live_evaluation import LiveEvaluation
from .metrics import Meter, Metrics, RankWatch
from .pipeline_balance import PipelineBalance
from .timeline import Timeline
from .validation import Validation
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..training_run import TrainingRun


def ordered_hooks(run: TrainingRun, users: Iterable[Hook]) -> list[Hook]:
    """Ropewalk's own hooks and the user's. `train --profile` adds its Profiler to the user's. The order matters:

    - the meter pauses before the watchdog: waiting for queued steps of the device may be a hang, saving is not
    - the guard checks a step before it is logged, validated or saved; the user's `after_step` runs before those too
    - a step is logged, validated and evaluated, then saved: early stopping replaces the weights that the last save
      writes
    - the timeline ends a step after all other hooks
    """
    settings, meter = run.settings.train, Meter(run.device, peak_flops=run.peak_flops, traffic=run.mesh.traffic)
    plan, control = run.settings.planned.phases[0].plan, run.mesh.control
    ranks = RankWatch(control, events=run.events, sigma=settings.faults.straggler_sigma)
    say = run.say if run.leads else None
    return [
        Metrics(meter, ranks, every_steps=settings.log_every_steps),
        Watchdog(run.folder, settings.faults, rank=run.place.rank),
        AnomalyGuard(settings.guard, meter),
        DataStalls(run.stalls, adapt=run.settings.load.autotune),
        LayerStats(settings.layer_stats_every_steps, scaled_loss=plan.precision == "fp16"),
        *users,
        CorruptionProbe(settings.faults.probe_every_steps),
        Validation(settings.validate_every_steps),
        LiveEvaluation(run.settings),
        Checkpointing(run.checkpointer),
        PipelineBalance(run.folder, run.settings.planned, control, events=run.events, say=say),
        Timeline(settings.timeline_steps),
    ]
