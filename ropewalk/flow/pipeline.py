"""From raw files to a report: the stages of a run in order."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any, Literal

from ropewalk import __version__
from ropewalk.base.errors import DamagedCheckpoint, DataError, MissingPackage, RunConflict, UserError
from ropewalk.base.events import EventLog, events_path, read_events, steps
from ropewalk.base.files import locked, read_json, write_json
from ropewalk.base.progress import Progress, Silent
from ropewalk.base.rendezvous import Rendezvous
from ropewalk.checkpoint.format import identity, list_checkpoints, read_checkpoint_manifest, resolve_checkpoint
from ropewalk.checkpoint.instead import advising
from ropewalk.config.ranks import ranks
from ropewalk.config.read import Resolved
from ropewalk.config.threads import share_cores
from ropewalk.config.write import plain
from ropewalk.launch.local import command
from ropewalk.launch.team import Team, train_together
from ropewalk.model.frozen import trained_names
from ropewalk.model.layouts import CONFIG as HUGGING_FACE
from ropewalk.model.lora import with_lora
from ropewalk.model.spec import resolve
from ropewalk.monitor.report import write_report
from ropewalk.plan.choose import choose
from ropewalk.plan.machine import Machine, this_machine
from ropewalk.plan.plan import Planned, load_plan, save_plan
from ropewalk.prepare.pipeline import Prepared, plan_inputs, prepare
from ropewalk.store.foreign.corpora import absolute, read_prepared
from ropewalk.store.manifest import FILE as MANIFEST
from ropewalk.store.manifest import Manifest, read_manifest
from ropewalk.store.origin import Origin
from ropewalk.train.failures import meet
from ropewalk.train.phases import phases_of
from ropewalk.train.settings import VERDICT, training_seed

from .adopt import adopt, check_mixtures, plan_adoption
from .opening import check_inputs, located, open_run, set_aside
from .recipe import Recipe
from .stages import Result, Stages, fingerprint, read_record

Stage = Literal["prepare", "plan", "train", "evaluate", "report"]
STAGES: tuple[Stage, ...] = ("prepare", "plan", "train", "evaluate", "report")
PROFILES_ONE = "--profile looks at one process; leave it out, or train with one"


def advance(
    resolved: Resolved[Recipe],
    *,
    runs: Path,
    until: Stage = "report",
    new: bool = False,
    progress: Progress | None = None,
    begin_training: bool = False,
    profile_steps: int = 0,
    processes: int | None = None,
    verify: bool = False,
) -> Result:
    """Takes the recipe's run as far as stage `until`, from wherever it stands; the result of that stage.

    Killed at any instant, the same call continues. `new` sets an existing run aside first; `begin_training` leaves
    the run as a worker started by hand expects it; `profile_steps` steps of training are profiled, and the result has
    their table; `verify` compares the plan with one device after that stage, and gives the verdict. `processes` train,
    on this machine; None: as many as `[parallel]` asks for. Where a launcher (torchrun, srun, mpirun) started several
    processes, all must call: the first does everything and the others train with it.
    """
    folder = runs / resolved.value.name
    place = ranks()
    with meet(folder, place) as rendezvous:
        check_inputs(resolved)
        if place.world > 1 and (begin_training or processes not in (None, place.world)):
            raise UserError(f"{place.launcher} started {place.world} processes; leave out --nproc and --detach")
        if profile_steps and (processes or 1) > 1:
            raise UserError(PROFILES_ONE)
        if place.rank > 0:
            return _assist(folder, rendezvous)
        processes = place.world if place.world > 1 else processes
        if until != "prepare":
            check_plan(resolved, processes=processes)
        if new:
            _refuse_if_running(folder)
            set_aside(folder)
        with locked(folder), EventLog(folder) as events:
            open_run(folder, resolved, events)
            flow = Flow(
                *(folder, resolved.value, events, progress or Silent()),
                profile_steps=profile_steps,
                processes=processes,
                rendezvous=rendezvous,
            )
            result = flow.run(until)
            if verify:
                result = flow.verify()
            rendezvous.announce("nothing")
            if begin_training:
                flow.begin_training()
            return {**result, "profile": flow.profile} if profile_steps else result


class Flow:
    """One pass over the stages of a run whose directory is open and locked."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        events: EventLog,
        progress: Progress,
        *,
        profile_steps: int,
        processes: int | None,
        rendezvous: Rendezvous,
    ) -> None:
        self._folder, self._recipe, self._progress = folder, recipe, progress
        self._processes, self._rendezvous = processes, rendezvous
        self._profile_steps = profile_steps
        self.profile: Result | None = None
        """The table of the profiled steps."""
        self._events = events
        self._stages = Stages(folder, events)
        self._has_trained = False

    def run(self, until: Stage) -> Result:
        start = time.perf_counter()
        work = {
            "prepare": self._prepare,
            "plan": self._plan,
            "train": self._train,
            "evaluate": self._evaluate,
            "report": self._report,
        }
        result: Result = {}
        for stage in STAGES[: STAGES.index(until) + 1]:
            if stage == "report":
                self._events.write("run_finished", seconds=time.perf_counter() - start)
            result = work[stage]()
        return result

    def begin_training(self) -> None:
        """Notes that training has begun, for a worker that will do it elsewhere."""
        self._stages.begin("train", self._training_inputs())

    def verify(self) -> Result:
        """Whether the plan computes what one device does; the run stays as it is."""
        processes = planned_processes(self._folder)
        if processes == 1 or ranks().world > 1:
            self._rendezvous.announce("verify")
            module = needs_torch("ropewalk.train.verify", "verification")
            return dict(module.verify(self._folder, progress=self._progress))
        (self._folder / VERDICT).unlink(missing_ok=True)
        team = Team(processes=processes, max_restarts=0, worker=[*command(self._folder), "--verify"])
        train_together(self._folder, team, progress=self._progress)
        return dict(read_json(self._folder / VERDICT, what="verdict"))

    def _prepare(self) -> Result:
        if self._recipe.load.corpus:
            return self._adopt()
        recipe = self._recipe
        inputs = plan_inputs(recipe.prepare, seed=recipe.seed)
        self._refuse_other_data(inputs.hash)

        def work() -> Result:
            made = prepare(recipe.prepare, seed=recipe.seed, progress=self._progress, inputs=inputs)
            for line in made.manifest.warnings if made.reused else ():
                self._progress.say(line)
            self._progress.say(removal_line(removals(made.manifest)))
            result = prepared_result(made)
            return {**result, "warnings": [*inputs.passed_over, *result["warnings"]]}

        return self._stages.do(
            "prepare",
            {"hash": inputs.hash, "folder": recipe.prepare.folder},
            work,
            whole=lambda result: (Path(result["folder"]) / MANIFEST).exists(),
        )

    def _adopt(self) -> Result:
        """`prepare` of a recipe that trains on existing corpora: a manifest that refers to them."""
        recipe = self._recipe
        adoption = plan_adoption(recipe.load)
        self._refuse_other_data(adoption.hash)
        mixtures = {"train.mixture": recipe.train.mixture}
        mixtures |= {f"train.phases.{i}.mixture": phase.mixture for i, phase in enumerate(recipe.train.phases)}

        def work() -> Result:
            root = Path(recipe.prepare.folder)
            made = adopt(recipe.load, root=root, adoption=adoption, progress=self._progress)
            check_mixtures(made.manifest, mixtures)
            return prepared_result(made)

        return self._stages.do(
            "prepare",
            {"hash": adoption.place, "folder": recipe.prepare.folder},
            work,
            whole=lambda result: (Path(result["folder"]) / MANIFEST).exists(),
        )

    def _refuse_other_data(self, data: str) -> None:
        """Before they are prepared: a run that has trained keeps the record of what it was trained on."""
        record = read_record(self._folder, "prepare")
        known = record.result["hash"] if record and record.result else data
        if known != data and list_checkpoints(self._folder / "checkpoints"):
            raise RunConflict(
                f"{self._folder}: the files that this run was trained on have changed, are more or fewer, or are "
                "prepared otherwise by this version; put them back, give the recipe another `name`, or start anew with "
                "--new (the old run is kept beside it)"
            )

    def _plan(self) -> Result:
        planned = plan_recipe(self._recipe, vocabulary=self._prepared("vocabulary"), processes=self._processes)
        inputs = {"planned": dataclasses.asdict(planned)}

        def work() -> Result:
            save_plan(self._folder, planned)
            return {
                "parameters": planned.phases[-1].spec.parameters(),
                "memory_bytes": planned.fullest.memory.total,
                "flops": planned.flops,
            }

        return self._stages.do("plan", inputs, work, whole=lambda _: (self._folder / "plan.json").exists())

    def _training_inputs(self) -> dict[str, Any]:
        """All that decides the weights."""
        recipe = self._recipe
        cosmetic = {"faults", "log_every_steps", "layers_every_steps", "validate_every_steps", "validate_rows"}
        cosmetic |= {"timeline_steps"}
        phases = phases_of(recipe.train, sequence_length=recipe.load.sequence_length)
        return {
            "data": self._prepared("hash"),
            "seed": training_seed(recipe.train, recipe.seed),
            "sequence_length": recipe.load.sequence_length,
            "model": plain(recipe.model),
            "train": {key: value for key, value in plain(recipe.train).items() if key not in {"seed", *cosmetic}},
            "start": [_identity(phase.start_from) for phase in phases],
        }

    def _train(self, *, again: bool = False) -> Result:
        """`again`: even though the run is trained."""

        def work() -> Result:
            self._has_trained = True
            wanted = planned_processes(self._folder)
            if wanted > 1 and ranks().world == 1:
                return self._train_in_a_team(wanted)
            self._rendezvous.announce("train")
            if self._profile_steps:
                module = needs_torch("ropewalk.train.profile", "training")
                made = module.train_profiled(self._folder, steps=self._profile_steps, progress=self._progress)
                self.profile = made.table
                return dict(made.figures)
            loop = needs_torch("ropewalk.train.loop", "training")
            figures = loop.train(self._folder, progress=self._progress, rendezvous=self._rendezvous)
            self._rendezvous.leave()  # the other ranks end here; what follows is done without them
            return dict(figures)

        checkpoints = self._folder / "checkpoints"
        result = self._stages.do(
            "train",
            self._training_inputs(),
            work,
            whole=lambda result: not again and self._is_trained(result["step"]),
            precious=bool(list_checkpoints(checkpoints)),
        )
        if self._profile_steps and self.profile is None:
            raise UserError(
                f"{self._folder}: this run is trained, no step is left to profile; start anew with --new (the old run "
                "is kept beside it), or give the recipe another `name`"
            )
        return result

    def _train_in_a_team(self, processes: int) -> Result:
        """Training by several processes of this machine."""
        if self._profile_steps:
            raise UserError(PROFILES_ONE)
        if importlib.util.find_spec("torch") is None:
            raise MissingPackage("torch", "training", "train")
        train_together(self._folder, team_of(self._recipe, processes), progress=self._progress)
        return trained_figures(self._folder)

    def _evaluate(self) -> Result:
        try:
            return self._evaluate_newest()
        except DamagedCheckpoint:
            if self._has_trained:
                raise  # whoever trained with this process has left, and the disk is not to be trusted
            self._progress.say("the newest checkpoint is damaged: training it again from an older one")
            self._train(again=True)
            return self._evaluate_newest()

    def _evaluate_newest(self) -> Result:
        path = list_checkpoints(self._folder / "checkpoints")[-1]
        checkpoint = identity(read_checkpoint_manifest(path))
        inputs = {"checkpoint": checkpoint, "settings": plain(self._recipe.evaluate), "seed": self._recipe.seed}

        def work() -> Result:
            module = needs_torch("ropewalk.evaluate.checkpoint", "evaluation")
            return dict(
                module.evaluate_checkpoint(
                    path,
                    run=self._folder,
                    data=Path(self._prepared("folder")),
                    settings=self._recipe.evaluate,
                    seed=self._recipe.seed,
                    progress=self._progress,
                )
            )

        files = (self._folder / "evaluation" / "results.json", self._folder / "samples.jsonl")
        return self._stages.do("evaluate", inputs, work, whole=lambda _: all(file.exists() for file in files))

    def _report(self) -> Result:
        """Not a skipped stage: it is cheap, and shows the run as it is now."""
        summary = summarize(self._folder, self._recipe)
        write_json(self._folder / "summary.json", summary)
        path = write_report(self._folder)
        return {**summary, "report": str(path)}

    def _prepared(self, key: str) -> Any:
        record = read_record(self._folder, "prepare")
        assert record is not None, "prepare comes first"
        assert record.result is not None, "prepare comes first"
        return record.result[key]

    def _is_trained(self, step: int) -> bool:
        found = list_checkpoints(self._folder / "checkpoints")
        try:
            return bool(found) and read_checkpoint_manifest(found[-1]).step == step
        except DataError:
            return False  # training goes on from an older one, and says so


def _assist(folder: Path, rendezvous: Rendezvous) -> Result:
    """What a process does that is not the first of its world: it trains or verifies when the first one does. The result
    of training is the first one's; the verdict is everybody's."""
    what = rendezvous.wait()
    if what == "train":
        needs_torch("ropewalk.train.loop", "training").train(folder, rendezvous=rendezvous)
    elif what == "verify":
        return dict(needs_torch("ropewalk.train.verify", "verification").verify(folder))
    return {}


def team_of(recipe: Recipe, processes: int) -> Team:
    """So many workers, as the recipe's `train.faults` has them treated."""
    faults = recipe.train.faults
    return Team(processes=processes, max_restarts=faults.max_restarts, grace_s=faults.grace_s)


def planned_processes(folder: Path) -> int:
    """How many processes the plan of a run is for."""
    return load_plan(folder).phases[0].plan.world


def trained_figures(folder: Path) -> Result:
    """The last figures of a training, from its diary."""
    events = list(read_events(events_path(folder)))
    trained, validated = steps(events), steps(events, "validation")
    result: Result = {"step": trained[-1]["step"], "tokens": trained[-1]["tokens"], "train_loss": trained[-1]["loss"]}
    return result | ({"validation_loss": validated[-1]["loss"]} if validated else {})


def prepared_result(made: Prepared) -> Result:
    """What the stage `prepare` tells the others."""
    return {
        "folder": str(made.folder),
        **removals(made.manifest),
        "warnings": list(made.manifest.warnings),
        "hash": made.manifest.recipe_hash,
        "train_tokens": made.manifest.tokens("train"),
        "validation_tokens": made.manifest.tokens("validation"),
        "vocabulary": made.manifest.tokenizer.vocabulary,
    }


def removals(manifest: Manifest) -> Result:
    """Documents read, kept and removed by rule, over all sources."""
    removed: dict[str, int] = {}
    for step in (step for source in manifest.sources for step in source.steps):
        for rule, count in step.removed.items():
            removed[rule] = removed.get(rule, 0) + count
    read = sum(source.steps[0].documents_in for source in manifest.sources if source.steps)
    return {"documents": read, "kept": read - sum(removed.values()), "removed": removed}


def removal_line(counts: Result) -> str:
    """The same in one line."""
    rules = ", ".join(f"{rule} {count}" for rule, count in sorted(counts["removed"].items(), key=lambda item: -item[1]))
    return f"kept {counts['kept']} of {counts['documents']} documents" + (
        f"; removed by rule: {rules}" if rules else ""
    )


def plan_recipe(
    recipe: Recipe, *, vocabulary: int, machine: Machine | None = None, processes: int | None = None
) -> Planned:
    """The plans of a recipe's phases on this machine (or another) for a tokenizer of `vocabulary` tokens and so many
    `processes` (None: as many as `[parallel]` asks for)."""
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
                batch_rows=phase.batch_rows,
                steps=phase.steps,
                precision=recipe.train.precision,
                optimizer=recipe.train.optimizer.kind,
                tokens=phase.tokens(phase.steps),
                trained=trained_names(spec, phase.frozen) if phase.frozen or phase.lora else None,
            )
        )
    return Planned(phases=tuple(plans))


def check_plan(resolved: Resolved[Recipe], *, machine: Machine | None = None, processes: int | None = None) -> None:
    """Raises ConfigError for what `plan_recipe` cannot plan: before hours of preparing, rather than after."""
    vocabulary = expected_vocabulary(resolved.value)
    try:
        plan_recipe(resolved.value, vocabulary=vocabulary, machine=machine, processes=processes)
    except UserError as error:
        raise located(error, resolved) from None


def expected_vocabulary(recipe: Recipe) -> int:
    """The tokenizer's size before anything is prepared: the file's, or what is asked for."""
    given = recipe.load.tokenizer if recipe.load.corpus else recipe.prepare.tokenizer.file
    if recipe.load.corpus and not given:
        return read_prepared(absolute(recipe.load.corpus[0].path), origin=Origin()).tokenizer.vocabulary
    if not given:
        return recipe.prepare.tokenizer.vocabulary
    from ropewalk.prepare.tokenizer import load, vocabulary_size

    return vocabulary_size(load(Path(given)))


def summarize(folder: Path, recipe: Recipe) -> Result:
    """`summary.json`: the run in one object (docs/formats.md)."""
    records = {stage: read_record(folder, stage) for stage in STAGES[:-1]}
    seconds = {stage: record.seconds for stage, record in records.items() if record}
    trained = (records["train"] and records["train"].result) or {}
    planned = (records["plan"] and records["plan"].result) or {}
    results = read_json(folder / "evaluation" / "results.json", what="evaluation")
    events = list(read_events(events_path(folder)))
    paces = sorted(event["tokens_per_s"] for event in steps(events))
    started = [event for event in events if event["kind"] == "train_started"]
    return {
        "format": 1,
        "name": recipe.name,
        "version": __version__,
        "seed": recipe.seed,
        "train_seed": training_seed(recipe.train, recipe.seed),
        "device": started[-1]["device"] if started else None,
        "machine": str(this_machine()),
        "parameters": planned.get("parameters"),
        "steps": trained.get("step"),
        "tokens": trained.get("tokens"),
        "train_tokens_prepared": read_manifest(Path(_result(records["prepare"])["folder"])).tokens("train"),
        "seconds": {**seconds, "total": round(sum(seconds.values()), 3)},
        "train_loss": trained.get("train_loss"),
        "validation_loss": trained.get("validation_loss"),
        "tokens_per_s": paces[len(paces) // 2] if paces else None,
        **{key: value for key, value in results.items() if key not in ("format", "step", "tokens")},
        "evaluated_tokens": results["tokens"],
    }


def _identity(checkpoint: str) -> str | None:
    """The checksum of the checkpoint or directory that training starts from, None for a fresh model."""
    if not checkpoint:
        return None
    if (Path(checkpoint) / HUGGING_FACE).is_file():
        # Gigabytes need not be read to tell that they are the same files.
        files = sorted(Path(checkpoint).glob("*.safetensors"))
        return fingerprint([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    path = resolve_checkpoint(Path(checkpoint))
    with advising(path):
        return identity(read_checkpoint_manifest(path))


def _result(record: Any) -> Result:
    return dict(record.result) if record and record.result else {}


def needs_torch(module: str, purpose: str) -> Any:
    """A module that needs torch, imported when it is needed."""
    share_cores()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingPackage("torch", purpose, "train") from None


def _refuse_if_running(folder: Path) -> None:
    if folder.exists():
        try:
            with locked(folder):
                pass
        except RunConflict as error:
            raise RunConflict(f"{error}; --new would move a running run") from None
