"""The plans of a recipe, and the run stage `plan`."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedFile, MissingPackage, UserError
from ropewalk.config.read import Resolved
from ropewalk.config.renames import old_plan
from ropewalk.config.threads import share_cores
from ropewalk.model.spec import resolve
from ropewalk.model.trainable import trained_names, with_lora
from ropewalk.plan.choose import choose
from ropewalk.plan.machine import Machine, this_machine
from ropewalk.plan.plan import FILE, Planned, load_plan, save_plan
from ropewalk.train.optim.table import OPTIMIZERS
from ropewalk.train.phase_spec import phases_of

from .preflight import located
from .recipe import Recipe
from .run_stages import OpenRun, Result


def plan_recipe(
    recipe: Recipe, *, vocabulary: int, machine: Machine | None = None, processes: int | None = None
) -> Planned:
    """Plans a recipe's phases for a tokenizer of `vocabulary` tokens, on `machine` (None: this one), with `processes`
    processes (None: as `[parallel]` asks)."""
    machine = machine or this_machine()
    plans = []
    for phase in phases_of(recipe.train, sequence_length=recipe.load.sequence_length):
        spec = resolve(recipe.model, vocabulary=vocabulary, sequence_length=phase.sequence_length)
        spec = with_lora(spec, phase.lora)
        plans.append(
            choose(
                spec,
                recipe.plan,
                machine,
                parallel=recipe.parallel,
                processes=processes,
                batch_size=phase.batch_size,
                steps=phase.steps,
                precision=recipe.train.precision,
                optimizer=OPTIMIZERS[recipe.train.optimizer.kind].costs,
                tokens=phase.tokens(phase.steps),
                trained=trained_names(spec, phase.frozen) if phase.frozen or phase.lora else None,
            )
        )
    return Planned(phases=tuple(plans))


def check_plan(resolved: Resolved[Recipe], *, machine: Machine | None = None, processes: int | None = None) -> Planned:
    """The plan for the expected vocabulary; raises ConfigError for an impossible plan before hours of preparing."""
    vocabulary = expected_vocabulary(resolved.value)
    try:
        return plan_recipe(resolved.value, vocabulary=vocabulary, machine=machine, processes=processes)
    except UserError as error:
        raise located(error, resolved) from None


def plan_stage(run: OpenRun) -> Result:
    """Writes `plan.json`, unless it already holds the plan of this recipe on this machine."""
    vocabulary, planned = run.prepared_result("vocabulary"), run.expected_plan
    if planned is None or planned.phases[0].spec.vocabulary != vocabulary:
        planned = plan_recipe(run.recipe, vocabulary=vocabulary, processes=run.processes)

    def work() -> Result:
        save_plan(run.folder, planned)
        return {
            "parameters": planned.phases[-1].spec.parameters(),
            "memory_bytes": planned.fullest.memory.total,
            "flops": planned.flops,
        }

    inputs = {"planned": old_plan(dataclasses.asdict(planned))}
    return run.stages.do("plan", inputs, work, whole=lambda _: _is_planned(run, planned))


def _is_planned(run: OpenRun, planned: Planned) -> bool:
    """Whether `plan.json` is whole and holds `planned`, except for layers that `parallel.resplit` moved."""
    path = run.folder / FILE
    if not path.exists():
        return False
    try:
        found = load_plan(run.folder)
    except DamagedFile as error:
        run.progress.say(f"{error.fault}; it is made anew")
        return False
    same = _without_split(found) == _without_split(planned)
    if not same:
        run.progress.say(f"{path}: it is another plan than that of this run; it is made anew")
    return same


def _without_split(planned: Planned) -> Planned:
    """The plans without the layers of pipeline stages, which `parallel.resplit` moves while a run trains."""
    phases = (dataclasses.replace(phase, plan=dataclasses.replace(phase.plan, stages=())) for phase in planned.phases)
    return dataclasses.replace(planned, phases=tuple(phases))


def expected_vocabulary(recipe: Recipe) -> int:
    """The vocabulary size before anything is prepared: that of the tokenizer file, or `vocab_size`."""
    given = recipe.load.tokenizer if recipe.load.corpus else recipe.prepare.tokenizer.file
    if recipe.load.corpus and not given:
        # Imports numpy, which most recipes do not need here.
        from ropewalk.load.remote import small_files
        from ropewalk.store.foreign.corpora import absolute, read_prepared

        place, origin = absolute(recipe.load.corpus[0].path), small_files(recipe.load.remote)
        return read_prepared(place, origin=origin).tokenizer.vocabulary
    if not given:
        return recipe.prepare.tokenizer.vocab_size
    from ropewalk.prepare.tokenizer import load, vocabulary_size

    return vocabulary_size(load(Path(given)))


def needs_torch(module: str, purpose: str) -> Any:
    """Imports a module that needs torch; raises MissingPackage if torch is not installed."""
    share_cores()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingPackage("torch", purpose, "train") from None
