"""Run stages: skipped if their inputs have not changed, continued if interrupted."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from ropewalk.base.errors import DamagedFile, RunConflict
from ropewalk.base.events import Event, EventLog, events_path, read_events
from ropewalk.base.progress import Progress
from ropewalk.base.rendezvous import Rendezvous
from ropewalk.base.seal import write_sealed
from ropewalk.config.stages import FORMAT, read_stage
from ropewalk.plan.plan import Planned
from ropewalk.train.hooks.hook import Hook

from .recipe import Recipe

_log = logging.getLogger(__name__)

Result = dict[str, Any]
RunStage = Literal["prepare", "plan", "train", "evaluate", "report"]
REOPENED = ""
"""The input of a continued stage: its output is kept, and other inputs are no conflict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """`stages/STAGE.json`. An unfinished stage has no result."""

    stage: str
    input: str
    seconds: float
    result: Result | None


class Stages:
    """The records of a run's stages, and their events."""

    def __init__(self, run: Path, events: EventLog) -> None:
        self._run = run
        self._events = events

    def do(
        self,
        stage: str,
        inputs: Any,
        work: Callable[[], Result],
        *,
        whole: Callable[[Result], bool] = lambda result: True,
        precious: bool = False,
    ) -> Result:
        """The result of `stage`: the recorded one if `inputs` have not changed and its files are `whole`, else that of
        `work`.

        New inputs never discard the output of a `precious` stage, finished or not: they raise RunConflict.
        """
        key = fingerprint(inputs)
        record = read_record(self._run, stage)
        if record and record.input == key and record.result is not None and whole(record.result):
            self._events.write("stage_skipped", stage=stage)
            return record.result
        if precious and record and record.input not in (key, REOPENED):
            raise RunConflict(
                f"{self._run}: the inputs of `{stage}` differ from those in stages/{stage}.json "
                "(settings or input files changed); give the recipe another `name`, or start anew with --new (the old "
                "run is kept beside it)"
            )
        earlier = _interrupted_seconds(self._run, stage) if record and record.input in (key, REOPENED) else 0.0
        self.begin(stage, inputs, seconds=earlier)
        start = time.perf_counter()
        result = work()
        seconds = round(earlier + time.perf_counter() - start, 3)
        self._write(StageRecord(stage=stage, input=key, seconds=seconds, result=result))
        self._events.write("stage_finished", stage=stage, seconds=seconds, result=result)
        return result

    def begin(self, stage: str, inputs: Any, *, seconds: float = 0.0) -> None:
        """Records that `stage` has begun with `inputs`, after `seconds` in earlier attempts."""
        self._write(StageRecord(stage=stage, input=fingerprint(inputs), seconds=seconds, result=None))
        self._events.write("stage_started", stage=stage)

    def reopen(self, stage: str) -> None:
        """Lets `stage` continue with other inputs."""
        record = read_record(self._run, stage)
        if record:
            self._write(dataclasses.replace(record, input=REOPENED, result=None))

    def _write(self, record: StageRecord) -> None:
        value = {
            "stage": record.stage,
            "input": record.input,
            "seconds": record.seconds,
            "result": record.result,
        }
        write_sealed(self._run / "stages" / f"{record.stage}.json", {"format": FORMAT, **value})


@dataclass(kw_only=True, slots=True)
class OpenRun:
    """An open and locked run: the state that its stages share."""

    folder: Path
    recipe: Recipe
    events: EventLog
    progress: Progress
    rendezvous: Rendezvous
    processes: int | None
    """None: as `[parallel]` asks."""
    until: RunStage
    """The last requested stage."""
    prepared: Path | None = None
    """Prepared data of a given run, which needs no raw files."""
    recipe_words: str = ""
    """The recipe as words of a shell, for warnings that print a command."""
    expected_plan: Planned | None = None
    """The plan for the expected vocabulary, made before preparing data."""
    hooks: Sequence[Hook] = ()
    """Hooks given in Python, in addition to `train.hooks`."""
    profile_steps: int = 0
    profile: Result | None = None
    """The table of the profiled steps, after they ran."""
    has_trained: bool = False
    """Whether this process has trained the run."""

    @property
    def stages(self) -> Stages:
        return Stages(self.folder, self.events)

    def prepared_result(self, key: str) -> Any:
        """A value of the result of `prepare`, which must have finished."""
        record = read_record(self.folder, "prepare")
        assert record is not None, "prepare comes first"
        assert record.result is not None, "prepare comes first"
        return record.result[key]


def read_record(run: Path, stage: str) -> StageRecord | None:
    """The record of a stage; None if it never began, or, with a warning, if its record is damaged: the stage then
    reruns and keeps intact output."""
    if not (run / "stages" / f"{stage}.json").exists():
        return None
    try:
        return StageRecord(**read_stage(run, stage))
    except DamagedFile as error:
        _warn(f"{error.fault}; the stage runs again and keeps everything that is whole")
        return None


@functools.lru_cache(maxsize=64)
def _warn(text: str) -> None:
    """Warns once: a record is read several times before it is rewritten."""
    _log.warning("%s", text)


def fingerprint(inputs: Any) -> str:
    """A hash of plain values (dicts, lists, scalars), independent of the order of keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs, sort_keys=True, ensure_ascii=False).encode())


def _interrupted_seconds(run: Path, stage: str) -> float:
    """Seconds spent in interrupted attempts at `stage` since it last finished, from their events; includes the time
    before that if the run has continued since."""
    spent, begun, last, finished = 0.0, None, 0.0, 0.0
    event: Event
    for event in read_events(events_path(run)):
        if event["kind"] in ("stage_started", "run_started") and begun is not None:
            spent, begun = spent + last - begun, None
        if event["kind"] == "stage_started" and event["stage"] == stage:
            begun = event["time"]
        if event["kind"] == "stage_finished" and event["stage"] == stage:
            spent, begun, finished = 0.0, None, event["seconds"]
        if event["kind"] == "continued":
            spent, finished = spent + finished, 0.0
        last = event["time"]
    return spent + (last - begun if begun is not None else 0.0)
