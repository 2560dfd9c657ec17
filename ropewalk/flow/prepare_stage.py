"""The run stage `prepare`: raw files to token shards, existing corpora to a manifest, or the data of a given run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ropewalk.base.errors import DamagedFile, DataError, RunConflict
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.prepare.pipeline import Prepared, finished, plan_inputs, prepare
from ropewalk.prepare.severe import addressed
from ropewalk.store.manifest import FILE as MANIFEST
from ropewalk.store.manifest import Manifest, read_manifest

from .external_corpus import adopt, check_mixtures, plan_adoption
from .external_corpus import finished as finished_adoption
from .run_stages import OpenRun, Result, read_record
from .summary import prepared_result, removal_line, removals


def prepare_stage(run: OpenRun) -> Result:
    """Prepares the data of the run, or reuses existing data."""
    if run.prepared and (run.until != "prepare" or finished(run.prepared)):
        return _reuse(run, run.prepared)
    if run.recipe.load.corpus:
        return _adopt(run)
    recipe = run.recipe
    inputs = plan_inputs(recipe.prepare, seed=recipe.seed)
    _refuse_other_data(run, inputs.hash)

    def work() -> Result:
        words = run.recipe_words
        made = prepare(recipe.prepare, seed=recipe.seed, progress=run.progress, inputs=inputs, recipe=words)
        warnings = [addressed(line, words) for line in made.manifest.warnings]
        for line in warnings if made.reused else ():
            run.progress.say(line)
        run.progress.say(removal_line(removals(made.manifest)))
        return {**prepared_result(made), "warnings": [*inputs.passed_over, *warnings]}

    key = {"hash": inputs.hash, "folder": recipe.prepare.folder}
    return run.stages.do("prepare", key, work, whole=lambda result: is_prepared(run, result, thorough=finished))


def is_prepared(run: OpenRun, result: Result, *, thorough: Callable[[Path], Manifest | None] = finished) -> bool:
    """Whether the manifest written by the stage still exists unchanged. If `prepare` is the last requested stage,
    `thorough` also checks all other files."""
    folder = Path(result["folder"])
    try:
        manifest = thorough(folder) if run.until == "prepare" else read_manifest(folder)
    except DamagedFile:
        return False  # preparing again reports the damage and repairs it
    except DataError:
        if (folder / MANIFEST).exists():
            raise
        return False
    return manifest is not None and manifest.recipe_hash == result["hash"]


def _reuse(run: OpenRun, folder: Path) -> Result:
    """The data of a given run; its raw files may be gone."""
    record = read_record(run.folder, "prepare")
    if record and record.result and record.result["folder"] == str(folder):
        run.events.write("stage_skipped", stage="prepare")
        return record.result
    made = Prepared(folder=folder, manifest=read_manifest(folder), reused=True)
    inputs = {"hash": made.manifest.recipe_hash, "folder": run.recipe.prepare.folder}
    return run.stages.do("prepare", inputs, lambda: prepared_result(made))


def _adopt(run: OpenRun) -> Result:
    """Adopts existing corpora with a manifest that refers to them."""
    recipe = run.recipe
    adoption = plan_adoption(recipe.load)
    _refuse_other_data(run, adoption.hash)
    mixtures = {"train.mixture": recipe.train.mixture}
    mixtures |= {f"train.phases.{i}.mixture": phase.mixture for i, phase in enumerate(recipe.train.phases)}

    def work() -> Result:
        root = Path(recipe.prepare.folder)
        made = adopt(recipe.load, root=root, adoption=adoption, progress=run.progress)
        check_mixtures(made.manifest, mixtures)
        return prepared_result(made)

    key = {"hash": adoption.place, "folder": recipe.prepare.folder}
    whole = finished_adoption
    return run.stages.do("prepare", key, work, whole=lambda result: is_prepared(run, result, thorough=whole))


def _refuse_other_data(run: OpenRun, data: str) -> None:
    """Raises RunConflict before different data replaces the record of a run's training data."""
    record = read_record(run.folder, "prepare")
    known = record.result["hash"] if record and record.result else data
    if known != data and list_checkpoints(run.folder / "checkpoints"):
        raise RunConflict(
            f"{run.folder}: the files that this run was trained on have changed, are more or fewer, or are "
            "prepared otherwise by this version, says its stages/prepare.json; put them back, give the recipe "
            "another `name`, or start anew with --new (the old run is kept beside it)"
        )
