"""The run stage `evaluate`, and `evaluate` of a run as it is: its newest checkpoint, finished or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedCheckpoint, DamagedFile, DataError, UserError
from ropewalk.base.events import EventLog
from ropewalk.base.files import committed_file, locked
from ropewalk.base.metric import upgrade_results
from ropewalk.base.progress import Progress, Silent
from ropewalk.checkpoint.format import identity, list_checkpoints, read_checkpoint_manifest
from ropewalk.config.plugins import digest
from ropewalk.config.ranks import ranks
from ropewalk.config.read import Resolved
from ropewalk.config.renames import old_names
from ropewalk.config.resolved import FILE as CONFIG
from ropewalk.config.resolved import load_resolved
from ropewalk.config.write import plain
from ropewalk.evaluate.config import TASK_FILE, TASKS
from ropewalk.evaluate.results import BESIDE, RESULTS, SAMPLES, read_whole
from ropewalk.store.sealed import checksum_of
from ropewalk.train.failures import meet

from .continue_run import Continuation
from .plan_recipe import plan_stage
from .preflight import check_inputs
from .prepare_stage import is_prepared, prepare_stage
from .recipe import Recipe
from .report_stage import report_stage
from .run_dir import open_run
from .run_or_recipe import Given, narrowed
from .run_processes import assist, evaluate_run, leave_world
from .run_stages import OpenRun, Result, read_record
from .train_stage import is_trained, train_stage

USED = ("evaluate", "plan", "parallel")
"""Tables that evaluation reads."""
DATA_FILES = ("code_problems", "dialogues", "judge_sheet")
"""Settings that name a file of questions or scores."""
MOST_LISTED = 4
"""Settings named in messages."""


def measure_run(meant: Given, *, progress: Progress | None = None, processes: int | None = None) -> Result:
    """Evaluates the newest checkpoint of a run without training; settings that evaluation does not read are the run's.

    Under a launcher with several processes all must call, as for `advance`.
    """
    folder, place, say = meant.folder, ranks(), progress or Silent()
    with meet(folder, place) as rendezvous:
        if place.world > 1 and processes not in (None, place.world):
            raise UserError(f"{place.launcher} started {place.world} processes; leave out --nproc")
        if place.rank > 0:
            return assist(folder, rendezvous)
        with locked(folder), EventLog(folder) as events:
            checkpoints = list_checkpoints(folder / "checkpoints")
            if not checkpoints:
                raise DataError(f"{folder}: no checkpoint yet; `ropewalk run {folder}` trains")
            resolved, others = narrowed(folder, meant.resolved, keys=USED)
            before = (folder / CONFIG).read_bytes() if (folder / CONFIG).is_file() else None
            open_run(folder, Continuation(resolved=resolved), events)
            if others:
                more = f" and {len(others) - MOST_LISTED} more" if len(others) > MOST_LISTED else ""
                say.say(f"evaluating with the run's own settings ({', '.join(others[:MOST_LISTED])}{more})")
            run = OpenRun(
                folder=folder,
                recipe=resolved.value,
                events=events,
                progress=say,
                rendezvous=rendezvous,
                processes=place.world if place.world > 1 else processes,
                until="evaluate",
            )
            try:
                result = _measure_as_it_is(run)
            except UserError:
                _put_back(folder, before, events)
                raise
            rendezvous.announce("nothing")
            leave_world(place)
        if is_trained(folder):  # not while the folder is held: the page would say that the run goes on
            result = {**result, "report": report_stage(run)["report"]}
        return result


def _put_back(folder: Path, config: bytes | None, events: EventLog) -> None:
    """Gives the run its settings back, which are those of its results: the new ones measured nothing."""
    if config is not None and (folder / CONFIG).read_bytes() != config:
        with committed_file(folder / CONFIG) as file:
            file.write(config)
        events.write("warning", message="the evaluation was refused; the settings are those before it")


def _measure_as_it_is(run: OpenRun) -> Result:
    record = read_record(run.folder, "prepare")
    if not (record and record.result and is_prepared(run, record.result)):
        check_inputs(Resolved(run.recipe, {}))
        prepare_stage(run)
    plan_stage(run)
    if is_trained(run.folder):
        return evaluate_stage(run)
    step = read_checkpoint_manifest(list_checkpoints(run.folder / "checkpoints")[-1]).step
    run.progress.say(f"{run.folder}: training stands at step {step}, which is measured")
    return _evaluate_newest(run)


def evaluate_stage(run: OpenRun) -> Result:
    """Evaluates the newest checkpoint; if it is damaged, retrains it from an older one."""
    try:
        return _evaluate_newest(run)
    except DamagedCheckpoint:
        if run.has_trained:
            raise  # damaged right after it was written: the disk cannot be trusted
        run.progress.say("the newest checkpoint is damaged: training it again from an older one")
        train_stage(run, again=True)
        return _evaluate_newest(run)


def _evaluate_newest(run: OpenRun) -> Result:
    checkpoint = list_checkpoints(run.folder / "checkpoints")[-1]
    inputs: dict[str, Any] = {
        "checkpoint": identity(read_checkpoint_manifest(checkpoint)),
        "settings": old_names(plain(run.recipe.evaluate), "evaluate"),
        "seed": run.recipe.seed,
        **_own_modules(run),
        **_task_files(run),
    }
    return run.stages.do(
        "evaluate", inputs, lambda: evaluate_run(run, checkpoint), whole=lambda result: _is_evaluated(run, result)
    )


def _is_evaluated(run: OpenRun, result: Result) -> bool:
    """Whether results and samples are complete, and the results are those of the stage."""
    beside = [file for key, file in BESIDE.items() if key in result or file == SAMPLES]
    if not all((run.folder / file).exists() for file in (RESULTS, *beside)):
        return False
    try:
        found = read_whole(run.folder)
    except DamagedFile as error:
        run.progress.say(f"{error.fault}; it is measured again")
        return False
    return {**found, "format": None} == {**upgrade_results(result), "format": None}


def _task_files(run: OpenRun) -> dict[str, Any]:
    """Hashes of what tasks read beside the corpus: files and data of tasks written as YAML, files named by settings."""
    settings = run.recipe.evaluate
    found = {key: checksum_of(Path(file)) for key in DATA_FILES if (file := getattr(settings, key))}
    if any(TASKS[name] is TASK_FILE for name in settings.tasks):
        from ropewalk.evaluate.harness.named_tasks import named_digests

        found |= named_digests(settings)
    return {"task_files": found} if found else {}


def _own_modules(run: OpenRun) -> dict[str, Any]:
    """Sources of custom tasks and model components that lie beside the recipe."""
    names = [*run.recipe.evaluate.tasks, *plain(run.recipe.model).values()]
    modules = {name.split(":")[0].split(".")[0] for name in names if isinstance(name, str) and ":" in name}
    plugins = load_resolved(run.folder, Recipe).plugins
    found = {name: digest(Path(plugins[name].folder), name) for name in sorted(modules & plugins.keys())}
    return {"plugins": found} if found else {}
