"""`plan draw`: draws a recipe's pipeline schedule without running it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.monitor.schedule_drawing import Drawing, Lane, ScheduleBox, write_drawing
from ropewalk.plan.plan import Plan
from ropewalk.plan.schedules import PIPELINE_SCHEDULES, Shape, make_schedule
from ropewalk.plan.simulate import Simulation, StageTimes, equal_stages_bubble, simulate
from ropewalk.plan.stage_split import Split, split_layers, stage_times

from .plan_recipe import plan_recipe
from .run_or_recipe import RecipeLike, given


def draw_plan(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    schedule: str | None = None,
    ranks: int | None = None,
    chunks: int | None = None,
    microbatches: int | None = None,
) -> dict[str, Any]:
    """Simulates the pipeline of a recipe's last phase and draws it as SVG; returns its path and figures.

    Arguments override the plan. Stage times are proportional to FLOPs; messages take no time.
    """
    meant = given(recipe, overrides)
    meant.check_inputs()
    phase = plan_recipe(meant.resolved.value, vocabulary=meant.vocabulary()).phases[-1]
    kind, shape = _asked(phase.plan, schedule=schedule, ranks=ranks, chunks=chunks, microbatches=microbatches)
    split = phase.plan.stages if len(phase.plan.stages) == shape.stages else split_layers(phase.spec, shape.stages)
    times = stage_times(phase.spec, split)
    mean = _mean(times)
    simulated = simulate(make_schedule(kind, shape), times)
    equal = equal_stages_bubble(kind, shape, mean)
    path = out or Path(f"{meant.resolved.value.name}-{kind}.svg")
    write_drawing(path, _drawing(kind, shape, split, simulated, equal=equal, unit=mean.forward))
    return {
        "drawing": str(path),
        "schedule": kind,
        "ranks": shape.ranks,
        "chunks": shape.chunks,
        "microbatches": shape.microbatches,
        "stages": [list(layers) for layers in split],
        "bubble": simulated.bubble,
        "equal_stages_bubble": equal,
        "idle": [idle / simulated.makespan for idle in simulated.idle],
        "peak_live": list(simulated.peak_live),
    }


def _asked(
    plan: Plan,
    *,
    schedule: str | None,
    ranks: int | None,
    chunks: int | None,
    microbatches: int | None,
) -> tuple[str, Shape]:
    kind, ranks = schedule or plan.schedule, ranks or plan.pipeline
    if ranks == 1:
        raise UserError("this recipe has no pipeline to draw; set `parallel.pipeline`, or try one with --ranks 4")
    if chunks is None:
        # The default of `parallel.chunks`: the plan's own number belongs to the plan's own schedule.
        chunks = plan.chunks if kind == plan.schedule else 1
        chunks = max(2, chunks) if PIPELINE_SCHEDULES[kind].interleaves else chunks
    return kind, Shape(ranks=ranks, chunks=chunks, microbatches=microbatches or plan.microbatches)


def _mean(times: Sequence[StageTimes]) -> StageTimes:
    return StageTimes(
        forward=sum(time.forward for time in times) / len(times),
        input=sum(time.input for time in times) / len(times),
        weight=sum(time.weight for time in times) / len(times),
    )


def _drawing(
    kind: str, shape: Shape, split: Split, simulated: Simulation, *, equal: float | None, unit: float
) -> Drawing:
    """The simulation as plain values, with time in units of `unit`."""
    closed = "" if equal is None else f"; {equal:.1%} in closed form for equal stages"
    stages = f", {shape.chunks} stages each" if shape.chunks > 1 else ""
    lanes = [
        Lane(
            label=f"rank {rank}",
            note=f"waits {simulated.idle[rank] / simulated.makespan:.1%}, holds {simulated.peak_live[rank]}",
            boxes=[
                ScheduleBox(
                    kind=span.action.kind,
                    stage=span.action.stage,
                    microbatch=span.action.microbatch,
                    start=span.start / unit,
                    end=span.end / unit,
                )
                for span in spans
            ],
        )
        for rank, spans in enumerate(simulated.ranks)
    ]
    return Drawing(
        title=f"{kind}: {shape.microbatches} microbatches on {shape.ranks} pipeline ranks{stages}",
        caption=f"bubble {simulated.bubble:.1%} of all ranks' time{closed}",
        unit="forward passes of the mean stage",
        stages=[_stage(number, layers, last=shape.stages - 1) for number, layers in enumerate(split)],
        lanes=lanes,
    )


def _stage(number: int, layers: Sequence[int], *, last: int) -> str:
    named = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
    parts = [*(["embedding"] if number == 0 else []), named, *(["head"] if number == last else [])]
    return f"stage {number}: {', '.join(parts)}"
