"""Stages of a run: each is skipped when its inputs have not changed, and continues when it was interrupted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ropewalk.base.errors import RunConflict
from ropewalk.base.events import Event, EventLog, events_path, read_events
from ropewalk.base.files import read_json, upgraded, write_json

FORMAT = 1

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """`stages/STAGE.json`. A stage that has begun and not finished has no result."""

    stage: str
    input: str
    seconds: float
    result: Result | None


class Stages:
    """The stages of the run in `run`, and the events that tell of them."""

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
        """The result of `stage`: read back when `inputs` are those of the last time and its files are `whole`, else
        made.

        The unfinished or finished output of a `precious` stage is not thrown away for new inputs: that is a
        RunConflict.
        """
        key = fingerprint(inputs)
        record = read_record(self._run, stage)
        if record and record.input == key and record.result is not None and whole(record.result):
            self._events.write("stage_skipped", stage=stage)
            return record.result
        if precious and record and record.input != key:
            raise RunConflict(
                f"{self._run}: the inputs of `{stage}` are not those this run began with (settings or input files "
                "changed); give the recipe another `name`, or start anew with --new (the old run is kept beside it)"
            )
        earlier = _interrupted_seconds(self._run, stage) if record and record.input == key else 0.0
        self.begin(stage, inputs, seconds=earlier)
        start = time.perf_counter()
        result = work()
        seconds = round(earlier + time.perf_counter() - start, 3)
        self._write(Record(stage=stage, input=key, seconds=seconds, result=result))
        self._events.write("stage_finished", stage=stage, seconds=seconds, result=result)
        return result

    def begin(self, stage: str, inputs: Any, *, seconds: float = 0.0) -> None:
        """Notes that `stage` has begun with `inputs`, after `seconds` of earlier attempts."""
        self._write(Record(stage=stage, input=fingerprint(inputs), seconds=seconds, result=None))
        self._events.write("stage_started", stage=stage)

    def _write(self, record: Record) -> None:
        value = {
            "stage": record.stage,
            "input": record.input,
            "seconds": record.seconds,
            "result": record.result,
        }
        write_json(self._run / "stages" / f"{record.stage}.json", {"format": FORMAT, **value})


def read_record(run: Path, stage: str) -> Record | None:
    """What is known of a stage; None when it never began."""
    path = run / "stages" / f"{stage}.json"
    if not path.exists():
        return None
    tree = upgraded(read_json(path, what="stage record"), path=path, what="stage record", current=FORMAT, upgrades={})
    tree.pop("format")
    return Record(**tree)


def fingerprint(inputs: Any) -> str:
    """A hash of plain values (dicts, lists, scalars) that does not depend on the order of keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs, sort_keys=True, ensure_ascii=False).encode())


def _interrupted_seconds(run: Path, stage: str) -> float:
    """Time that earlier, interrupted attempts at `stage` spent, by their events since it last finished."""
    spent, begun, last = 0.0, None, 0.0
    event: Event
    for event in read_events(events_path(run)):
        if event["kind"] in ("stage_started", "run_started") and begun is not None:
            spent, begun = spent + last - begun, None
        if event["kind"] == "stage_started" and event["stage"] == stage:
            begun = event["time"]
        if event["kind"] == "stage_finished" and event["stage"] == stage:
            spent, begun = 0.0, None
        last = event["time"]
    return spent + (last - begun if begun is not None else 0.0)
