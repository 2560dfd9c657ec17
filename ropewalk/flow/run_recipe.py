"""From raw files to a report: the stages of a run in order."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.blame import traceback_in
from ropewalk.base.errors import DamagedCheckpoint, DamagedFile, DataError, MissingPackage, RunConflict, UserError
from ropewalk.base.events import EventLog, events_path, read_events
from ropewalk.base.files import locked, read_json
from ropewalk.base.metric import upgrade_results
from ropewalk.base.progress import Progress, Silent
from ropewalk.base.rendezvous import Rendezvous
from ropewalk.base.seal import write_sealed
from ropewalk.checkpoint.format import identity, list_checkpoints, read_checkpoint_manifest
from ropewalk.config.ranks import Ranks, ranks
from ropewalk.config.read import Resolved
from ropewalk.config.renames import old_names, old_plan
from ropewalk.config.resolved import FILE as CONFIG
from ropewalk.config.write import plain
from ropewalk.evaluate.config import BUILT_IN
from ropewalk.evaluate.results import BESIDE, RESULTS, SAMPLES, read_results, read_whole
from ropewalk.launch.team import Team, train_together
from ropewalk.launch.worker import command
from ropewalk.monitor.report.run_report import write_report
from ropewalk.plan.plan import FILE as PLAN
from ropewalk.plan.plan import Planned, load_plan, save_plan
from ropewalk.prepare.pipeline import Prepared, finished, plan_inputs, prepare
from ropewalk.prepare.severe import addressed
from ropewalk.store.manifest import FILE as MANIFEST
from ropewalk.store.manifest import Manifest, read_manifest
from ropewalk.train.failures import meet
from ropewalk.train.phase_spec import PhaseSpec, phases_of
from ropewalk.train.settings import VERDICT, training_seed

from .continue_run import continuation
from .external_corpus import adopt, check_mixtures, plan_adoption
from .external_corpus import finished as finished_adoption
from .plan_recipe import check_plan, needs_torch, plan_recipe
from .recipe import Recipe
from .recipe_name import recipe_words
from .run_dir import check_contents, check_inputs, check_trainable, open_run, set_aside
from .run_or_recipe import Given, given, narrowed
from .run_stages import Result, Stages, read_record
from .start_from.base_model import identity_of, kept
from .start_from.start_from import RUNS
from .summary import prepared_result, removal_line, removals, summarize, trained_figures
from .writable import check_outputs

Stage = Literal["prepare", "plan", "train", "evaluate", "report"]
STAGES: tuple[Stage, ...] = ("prepare", "plan", "train", "evaluate", "report")
PROFILES_ONE = "--profile looks at one process; leave it out, or train with one"


USED_BY_PREPARE = ("seed", "prepare", "load.corpus", "load.tokenizer")
"""The settings of that verb, by key or table: whatever the others say, it is not refused for them."""


def advance(
    what: Given | Resolved[Recipe],
    *,
    runs: Path = RUNS,
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
    processes, all must call: the first does everything and the others train and evaluate with it.
    """
    meant = what if isinstance(what, Given) else given(what, runs=runs)
    resolved, folder, prepared = meant.resolved, meant.folder, meant.prepared
    place = ranks()
    with traceback_in(folder), meet(folder, place) as rendezvous:
        meant.check_inputs()
        if place.world > 1 and (begin_training or processes not in (None, place.world)):
            raise UserError(f"{place.launcher} started {place.world} processes; leave out --nproc and --detach")
        if profile_steps and (processes or 1) > 1:
            raise UserError(PROFILES_ONE)
        if place.rank > 0:
            return assist(folder, rendezvous)
        for remark in [] if prepared else check_contents(resolved):
            (progress or Silent()).say(str(remark))
        processes = place.world if place.world > 1 else processes
        if until != "prepare":
            check_trainable(resolved)
            check_plan(resolved, processes=processes)
        check_outputs(resolved, run=folder)
        if new:
            _refuse_if_running(folder)
            set_aside(folder)
        with locked(folder), EventLog(folder) as events:
            had_config = (folder / CONFIG).exists()
            if until == "prepare" and had_config and list_checkpoints(folder / "checkpoints"):
                resolved, _ = narrowed(folder, resolved, keys=USED_BY_PREPARE)
            found = continuation(folder, resolved)
            open_run(folder, found, events)
            if found.message:
                (progress or Silent()).say(found.message)
            flow = Flow(
                *(folder, found.resolved.value, events, progress or Silent()),
                prepared=prepared,
                profile_steps=profile_steps,
                processes=processes,
                rendezvous=rendezvous,
                recipe_words=recipe_words(resolved),
            )
            try:
                with kept(phase.start_from for phase in flow.phases):
                    result = flow.run(until)
            except RunConflict:
                if not had_config:
                    (folder / CONFIG).unlink()  # a run that is refused stays as it was
                raise
            if verify:
                result = flow.verify()
            rendezvous.announce("nothing")
            leave_world(place)
            if begin_training:
                flow.begin_training()
            return {**result, "profile": flow.profile} if profile_steps else result


def is_trained(folder: Path) -> bool:
    """Whether the run in `folder` has been trained to its last step."""
    if not (folder / "stages" / "train.json").exists():
        return False
    record = read_record(folder, "train")
    return bool(record and record.result and _ends_with(folder, record.result["step"]))


class Flow:
    """One pass over the stages of a run whose directory is open and locked."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        events: EventLog,
        progress: Progress,
        *,
        prepared: Path | None,
        profile_steps: int,
        processes: int | None,
        rendezvous: Rendezvous,
        recipe_words: str = "",
    ) -> None:
        self._recipe_words = recipe_words
        self._folder, self._recipe, self._progress = folder, recipe, progress
        self._processes, self._rendezvous = processes, rendezvous
        self._data = prepared
        """Data that need not be looked for among raw files."""
        self._profile_steps = profile_steps
        self.profile: Result | None = None
        """The table of the profiled steps."""
        self._events = events
        self._stages = Stages(folder, events)
        self._has_trained = False
        self._until: Stage = "report"

    @property
    def phases(self) -> tuple[PhaseSpec, ...]:
        """The phases of the run."""
        return phases_of(self._recipe.train, sequence_length=self._recipe.load.sequence_length)

    def run(self, until: Stage) -> Result:
        self._until = until
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

    def evaluate(self) -> Result:
        """Measures the newest checkpoint as it is."""
        record = read_record(self._folder, "prepare")
        if not (record and record.result and self._is_prepared(record.result, thorough=finished)):
            check_inputs(Resolved(self._recipe, {}))
            self._prepare()
        self._plan()
        if is_trained(self._folder):
            return self._evaluate()
        step = read_checkpoint_manifest(list_checkpoints(self._folder / "checkpoints")[-1]).step
        self._progress.say(f"{self._folder}: training stands at step {step}, which is measured")
        return self._evaluate_newest()

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
        if self._data and (self._until != "prepare" or finished(self._data)):
            return self._reuse(self._data)
        if self._recipe.load.corpus:
            return self._adopt()
        recipe = self._recipe
        inputs = plan_inputs(recipe.prepare, seed=recipe.seed)
        self._refuse_other_data(inputs.hash)

        def work() -> Result:
            words = self._recipe_words
            made = prepare(recipe.prepare, seed=recipe.seed, progress=self._progress, inputs=inputs, recipe=words)
            warnings = [addressed(line, words) for line in made.manifest.warnings]
            for line in warnings if made.reused else ():
                self._progress.say(line)
            self._progress.say(removal_line(removals(made.manifest)))
            return {**prepared_result(made), "warnings": [*inputs.passed_over, *warnings]}

        return self._stages.do(
            "prepare",
            {"hash": inputs.hash, "folder": recipe.prepare.folder},
            work,
            whole=lambda result: self._is_prepared(result, thorough=finished),
        )

    def _reuse(self, folder: Path) -> Result:
        """The data of the run that was given, whatever has become of the raw files."""
        record = read_record(self._folder, "prepare")
        if record and record.result and record.result["folder"] == str(folder):
            self._events.write("stage_skipped", stage="prepare")
            return record.result
        made = Prepared(folder=folder, manifest=read_manifest(folder), reused=True)
        inputs = {"hash": made.manifest.recipe_hash, "folder": self._recipe.prepare.folder}
        return self._stages.do("prepare", inputs, lambda: prepared_result(made))

    def _is_prepared(self, result: Result, *, thorough: Callable[[Path], Manifest | None]) -> bool:
        """Whether the manifest that a stage made is still there and is the same; where the stage is all that was asked
        for, everything beside it too."""
        folder = Path(result["folder"])
        try:
            manifest = thorough(folder) if self._until == "prepare" else read_manifest(folder)
        except DamagedFile:
            return False  # preparing again tells, and makes it anew
        except DataError:
            if (folder / MANIFEST).exists():
                raise
            return False
        return manifest is not None and manifest.recipe_hash == result["hash"]

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
            whole=lambda result: self._is_prepared(result, thorough=finished_adoption),
        )

    def _refuse_other_data(self, data: str) -> None:
        """Before they are prepared: a run that has trained keeps the record of what it was trained on."""
        record = read_record(self._folder, "prepare")
        known = record.result["hash"] if record and record.result else data
        if known != data and list_checkpoints(self._folder / "checkpoints"):
            raise RunConflict(
                f"{self._folder}: the files that this run was trained on have changed, are more or fewer, or are "
                "prepared otherwise by this version, says its stages/prepare.json; put them back, give the recipe "
                "another `name`, or start anew with --new (the old run is kept beside it)"
            )

    def _plan(self) -> Result:
        planned = plan_recipe(self._recipe, vocabulary=self._prepared("vocabulary"), processes=self._processes)
        inputs = {"planned": old_plan(dataclasses.asdict(planned))}

        def work() -> Result:
            save_plan(self._folder, planned)
            return {
                "parameters": planned.phases[-1].spec.parameters(),
                "memory_bytes": planned.fullest.memory.total,
                "flops": planned.flops,
            }

        return self._stages.do("plan", inputs, work, whole=lambda _: self._is_planned(planned))

    def _is_planned(self, planned: Planned) -> bool:
        """Whether `plan.json` is whole and says what is planned now, but for layers that a pipeline has moved."""
        if not (self._folder / PLAN).exists():
            return False
        try:
            found = load_plan(self._folder)
        except DamagedFile as error:
            self._progress.say(f"{error.fault}; it is made anew")
            return False
        same = _without_split(found) == _without_split(planned)
        if not same:
            self._progress.say(f"{self._folder / PLAN}: it is another plan than that of this run; it is made anew")
        return same

    def _training_inputs(self) -> dict[str, Any]:
        """All that decides the weights."""
        recipe = self._recipe
        cosmetic = {
            "faults",
            "log_every_steps",
            "layer_stats_every_steps",
            "validate_every_steps",
            "validation_sequences",
        }
        cosmetic |= {"timeline_steps"}
        train = plain(recipe.train)
        return {
            "data": self._prepared("hash"),
            "seed": training_seed(recipe.train, recipe.seed),
            "sequence_length": recipe.load.sequence_length,
            "model": old_names(plain(recipe.model), "model"),
            "train": old_names({key: value for key, value in train.items() if key not in {"seed", *cosmetic}}, "train"),
        }

    def _train(self, *, again: bool = False) -> Result:
        """`again`: even though the run is trained."""

        def work() -> Result:
            self._has_trained = True
            if not list_checkpoints(checkpoints):
                self._note_bases()
            wanted = planned_processes(self._folder)
            if wanted > 1 and ranks().world == 1:
                return self._train_in_a_team(wanted)
            self._rendezvous.announce("train")
            loop = needs_torch("ropewalk.train.loop", "training")
            if self._profile_steps:
                return self._train_profiled(loop)
            several = ranks().world > 1
            return dict(loop.train(self._folder, progress=self._progress, rendezvous=self._rendezvous, stays=several))

        checkpoints = self._folder / "checkpoints"
        if list_checkpoints(checkpoints):
            self._tell_changed_bases()
        result = self._stages.do(
            "train",
            self._training_inputs(),
            work,
            whole=lambda result: not again and _ends_with(self._folder, result["step"]),
            precious=bool(list_checkpoints(checkpoints)),
        )
        if self._profile_steps and self.profile is None:
            raise UserError(
                f"{self._folder}: this run is trained, no step is left to profile; start anew with --new (the old run "
                "is kept beside it), or give the recipe another `name`"
            )
        return result

    def _train_profiled(self, loop: Any) -> Result:
        """Trains with the profiler hook; one process."""
        hooks = needs_torch("ropewalk.train.hooks.profiler", "training")
        profiler = hooks.Profiler(self._folder, steps=self._profile_steps, progress=self._progress)
        with contextlib.closing(profiler):
            figures = loop.train(self._folder, progress=self._progress, hooks=[profiler])
        self.profile = profiler.table
        return dict(figures)

    def _note_bases(self) -> None:
        """Writes down what training is about to start from."""
        for place in self._starts():
            self._events.write("base", place=place, identity=identity_of(place))

    def _tell_changed_bases(self) -> None:
        """Says which bases have changed since this run started from them; it needs them no more."""
        noted = {e["place"]: e["identity"] for e in read_events(events_path(self._folder)) if e["kind"] == "base"}
        for place in self._starts():
            now = identity_of(place)
            if now and noted.get(place, now) != now:
                self._progress.say(
                    f"warning: {place} has changed since this run started from it; the run keeps what it has, --new "
                    "starts anew from what is there now"
                )

    def _starts(self) -> list[str]:
        return [phase.start_from for phase in self.phases if phase.start_from]

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
                raise  # the disk is not to be trusted
            self._progress.say("the newest checkpoint is damaged: training it again from an older one")
            self._train(again=True)
            return self._evaluate_newest()

    def _evaluate_newest(self) -> Result:
        path = list_checkpoints(self._folder / "checkpoints")[-1]
        checkpoint = identity(read_checkpoint_manifest(path))
        inputs = {
            "checkpoint": checkpoint,
            "settings": old_names(_without_default_tasks(plain(self._recipe.evaluate)), "evaluate"),
            "seed": self._recipe.seed,
        }

        def work() -> Result:
            if planned_processes(self._folder) > 1:
                return self._evaluate_together()
            module = needs_torch("ropewalk.evaluate.from_checkpoint", "evaluation")
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

        return self._stages.do("evaluate", inputs, work, whole=self._is_evaluated)

    def _is_evaluated(self, result: Result) -> bool:
        """Whether results and samples are whole, and the results are those of the stage."""
        beside = [file for key, file in BESIDE.items() if key in result or file == SAMPLES]
        if not all((self._folder / file).exists() for file in (RESULTS, *beside)):
            return False
        try:
            found = read_whole(self._folder)
        except DamagedFile as error:
            self._progress.say(f"{error.fault}; it is measured again")
            return False
        return {**found, "format": None} == {**upgrade_results(result), "format": None}

    def _evaluate_together(self) -> Result:
        """Evaluation by all processes of the plan: those of the launch, or a team of this machine."""
        if ranks().world > 1:
            self._rendezvous.announce("evaluate")
            module = needs_torch("ropewalk.evaluate.sharded_model", "evaluation")
            return dict(module.evaluate_run(self._folder, progress=self._progress))
        if importlib.util.find_spec("torch") is None:
            raise MissingPackage("torch", "evaluation", "train")
        (self._folder / RESULTS).unlink(missing_ok=True)
        team = Team(
            processes=planned_processes(self._folder),
            max_restarts=0,
            worker=[*command(self._folder), "--evaluate"],
        )
        train_together(self._folder, team, progress=self._progress)
        return dict(read_results(self._folder))

    def _report(self) -> Result:
        """Not a skipped stage: it is cheap, and shows the run as it is now."""
        summary = summarize(self._folder, self._recipe)
        write_sealed(self._folder / "summary.json", summary)
        path = write_report(self._folder)
        return {**summary, "report": str(path)}

    def _prepared(self, key: str) -> Any:
        record = read_record(self._folder, "prepare")
        assert record is not None, "prepare comes first"
        assert record.result is not None, "prepare comes first"
        return record.result[key]


def _ends_with(folder: Path, step: int) -> bool:
    """Whether the newest checkpoint of the run in `folder` is that of `step`."""
    found = list_checkpoints(folder / "checkpoints")
    try:
        return bool(found) and read_checkpoint_manifest(found[-1]).step == step
    except DamagedCheckpoint:
        return False  # training goes on from an older one, and says so


def assist(folder: Path, rendezvous: Rendezvous) -> Result:
    """What a process does that is not the first of its world: it trains, verifies and evaluates when the first one
    does. The result of training is the first one's; the verdict is everybody's."""
    verdict: Result = {}
    while (what := rendezvous.wait()) != "nothing":
        if what == "train":
            needs_torch("ropewalk.train.loop", "training").train(folder, rendezvous=rendezvous, stays=True)
        elif what == "verify":
            verdict = dict(needs_torch("ropewalk.train.verify", "verification").verify(folder))
        elif what == "evaluate":
            module = needs_torch("ropewalk.evaluate.sharded_model", "evaluation")
            # The first one says what to do about a damaged checkpoint, which all have found.
            with contextlib.suppress(DamagedCheckpoint):
                module.evaluate_run(folder)
    leave_world(ranks())
    return verdict


def leave_world(place: Ranks) -> None:
    """Ends the membership of a process that a launcher started together with others. All of them must call."""
    mesh = sys.modules.get("ropewalk.parallel.mesh")  # whoever joined has imported it
    if place.world > 1 and mesh:
        mesh.leave()


def team_of(recipe: Recipe, processes: int) -> Team:
    """So many workers, as the recipe's `train.faults` has them treated."""
    faults = recipe.train.faults
    return Team(processes=processes, max_restarts=faults.max_restarts, grace_s=faults.grace_s)


def planned_processes(folder: Path) -> int:
    """How many processes the plan of a run is for."""
    return load_plan(folder).phases[0].plan.world


def _without_default_tasks(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs that were evaluated before there were tasks stay evaluated."""
    tasks = settings["tasks"]
    return {key: value for key, value in settings.items() if key != "tasks" or list(tasks) != list(BUILT_IN)}


def _without_split(planned: Planned) -> Planned:
    """The plans without the layers of pipeline stages, which `parallel.resplit` moves while a run trains."""
    phases = (dataclasses.replace(phase, plan=dataclasses.replace(phase.plan, stages=())) for phase in planned.phases)
    return dataclasses.replace(planned, phases=tuple(phases))


def _refuse_if_running(folder: Path) -> None:
    if folder.exists():
        try:
            with locked(folder):
                pass
        except RunConflict as error:
            raise RunConflict(f"{error}; --new would move a running run") from None
