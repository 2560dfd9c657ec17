"""`profile`: where a recipe's training step spends its time, and each op class's distance from the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.base.progress import Progress, Silent, counted
from ropewalk.plan.recompute_planner import foreseen_again
from ropewalk.train.optim.table import OPTIMIZERS
from ropewalk.train.settings import training_seed

from .plan_recipe import needs_torch, plan_recipe
from .run_or_recipe import RecipeLike, given
from .training_bench import FORMAT, device_summary, step_figures


def profile(
    recipe: RecipeLike, overrides: Sequence[str] = (), *, steps: int = 12, progress: Progress | None = None
) -> dict[str, Any]:
    """Profiles steps of the recipe's first phase on random tokens, as planned for one process on this machine.

    Prepares no data and leaves runs of the recipe alone; the model has fresh weights.
    """
    meant = given(recipe, overrides)
    settings = meant.resolved.value
    planned = plan_recipe(settings, vocabulary=meant.vocabulary()).phases[0]
    plan, spec = planned.plan, planned.spec
    if plan.world > 1:
        raise UserError(
            f"profile supports a single process, but `[parallel]` asks for {plan.world}; set its degrees to 1, or "
            "record what each rank waits for with `ropewalk train --timeline`"
        )
    if plan.devices > 1:
        # The profiler does not see the threads that drive the devices: all work would count as `other`.
        raise UserError(
            f"profile supports a single device, but `parallel.devices` asks for {plan.devices}; set it to 1"
        )
    batch = f"{counted(plan.batch_size, 'sequence')} of {counted(spec.sequence_length, 'token')}"
    (progress or Silent()).say(f"{batch}, {plan.precision}")
    module = needs_torch("ropewalk.train.measure.step_benchmark", "a profile")
    seed = training_seed(settings.train, settings.seed)
    measured = module.measure_phase(planned, settings.train, seed=seed, steps=steps)
    device = device_summary(measured)
    figures = step_figures(
        spec,
        measured,
        rows=plan.batch_size,
        precision=plan.precision,
        device=device,
        optimizer=OPTIMIZERS[settings.train.optimizer.kind].state_bytes,
        trained=planned.trained,
    )
    return {
        "format": FORMAT,
        "recipe": settings.name,
        "sequence_length": spec.sequence_length,
        "batch_size": plan.batch_size,
        "microbatch_size": plan.microbatch_size,
        "precision": plan.precision,
        "recompute": plan.recompute,
        "blocks_again": len(foreseen_again(plan, spec, trained=planned.trained)),
        "activations": plan.saved_activations,
        "offload": list(plan.offload),
        "optimizer": settings.train.optimizer.kind,
        "compile": plan.compile,
        "parameters": spec.parameters(),
        **device,
        **figures,
    }
