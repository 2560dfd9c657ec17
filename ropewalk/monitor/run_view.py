"""A run directory as one value: everything that screens and pages show, read from files alone.

A run may be unfinished, killed in the middle of a line, or missing whole files. Everything readable is read; the rest
is listed in `RunView.missing`. Only a missing folder is an error.
"""

from __future__ import annotations

import difflib
import itertools
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.errors import ConfigError, DamagedFile, DataError
from ropewalk.base.events import Event, events_path
from ropewalk.base.files import NO_FILE, lock_owner, read_regular
from ropewalk.base.metric import Tasks, read_tasks
from ropewalk.base.progress import counted
from ropewalk.base.seal import ALTERED, parse_sealed, parse_sealed_lines, parse_sealed_toml
from ropewalk.config.read import DEFAULT
from ropewalk.config.resolved import with_new_names

from .evaluation_view import EvaluationView, read_evaluation
from .stream import MOST_NOTABLE, EventStream, warnings_of
from .values import mapping, number, text, whole

Json = Mapping[str, Any]

STAGES = ("prepare", "plan", "train", "evaluate", "report")
"""The order of the run stages; unknown ones follow by name."""
NOT_YET = "not written yet"
CONFIG = "config.toml"
_NO_WORK = ("run_started", "stage_skipped", "config_changed", "warning")
"""Events of a start that had nothing to do."""
MOST_LISTED = 6
"""Maximum number of runs that a message lists."""
SEALED_SINCE = {"plan.json": 3, "manifest.json": 3}
"""The first format of a file with a checksum; 2 of all others (docs/formats.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One value of the resolved config."""

    key: str
    value: Any
    origin: str

    @property
    def is_default(self) -> bool:
        return self.origin == DEFAULT


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One run stage; `seconds` is None until it has finished once."""

    name: str
    state: Literal["finished", "skipped", "unfinished"]
    seconds: float | None
    result: Json


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One metric line of training; missing values are nan."""

    step: int
    tokens: float
    loss: float
    lr: float
    grad_norm: float
    step_s: float
    data_wait_s: float
    tokens_per_s: float
    flops_per_s: float
    mfu: float
    memory_bytes: float
    importance_hit_rate: float
    """Only in runs that draw sequences by importance."""

    @property
    def wait_share(self) -> float:
        """Share of the step spent waiting for data."""
        return self.data_wait_s / self.step_s if self.step_s > 0 else float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPoint:
    """One measurement during training, on the first sequences of the held-out documents."""

    step: int
    loss: float
    bits_per_byte: float
    sequences: int | None = None
    """None in events of older versions."""

    @property
    def measured_on(self) -> str:
        """The sequences it was measured on, in words."""
        return "held-out sequences" if self.sequences is None else counted(self.sequences, "held-out sequence")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPoint:
    """Tasks measured on the model in training."""

    step: int
    tasks: Tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRecord:
    """The measurements of each layer at one step."""

    step: int
    names: tuple[str, ...]
    """In the order of the model."""
    figures: Mapping[str, Mapping[str, float]]
    """By figure (`gradient`, `activation`, ...), then by layer name."""

    def value(self, figure: str, name: str) -> float | None:
        """None if there was nothing to measure."""
        return self.figures.get(figure, {}).get(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One completion; `parses` is None for text that is not code."""

    prompt: str
    completion: str
    domain: str
    source: str
    parses: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """The contents of a run's files. Objects whose file is absent or unreadable are empty."""

    folder: Path
    read_at: float
    """When the files were read, in seconds since 1970."""
    name: str
    settings: tuple[Setting, ...]
    stages: tuple[Stage, ...]
    steps: tuple[StepRecord, ...]
    """Steps, without those that a restore undid; of very long runs, evenly spaced ones and the last ones."""
    logged_steps: int
    """Number of logged steps, including those that `steps` leaves out."""
    lost_steps: tuple[int, ...]
    """Steps whose loss was not finite."""
    validations: tuple[ValidationPoint, ...]
    evaluations: tuple[EvaluationPoint, ...]
    layers: tuple[LayerRecord, ...]
    """Layer measurements, without those that a restore undid."""
    notable: tuple[Event, ...]
    """Events of the kinds in `stream.NOTABLE`, of every rank, by time."""
    starts: int
    """Number of times the run was started."""
    first_time: float
    last_time: float
    """Times of the first and last event of rank 0; nan without events."""
    finished: bool
    process: str | None
    """The process that holds the run's lock, None if there is none."""
    saved_step: int | None
    """Step of the newest checkpoint, ignoring steps that a restore undid."""
    saving: Json
    """The last `save_interval` event: the decision of `checkpoint.save_every = "auto"`."""
    launch: Json
    """The last `run_started` event."""
    training: Json
    """The last `train_started` event."""
    plan: Json
    manifest: Json
    manifest_folder: str
    evaluation: Json
    tasks: Tasks
    """Evaluation metrics: from the results file, else from the summary."""
    evaluated: EvaluationView
    summary: Json
    samples: tuple[Completion, ...]
    missing: tuple[str, ...]

    def setting(self, key: str) -> Any:
        """The value of the dotted `key` in the resolved config, None if it is not there."""
        return next((setting.value for setting in self.settings if setting.key == key), None)


def runs_in(folder: Path) -> list[Path]:
    """The run directories in `folder`, the one with the newest settings first."""
    found = [path for path in folder.iterdir() if (path / CONFIG).is_file()] if folder.is_dir() else []
    return sorted(found, key=lambda path: (-(path / CONFIG).stat().st_mtime, path.name))


def is_run_directory(path: Path) -> bool:
    """Whether the folder `path` holds any file of a run."""
    return any((path / name).exists() for name in (CONFIG, "events.jsonl", "stages"))


def check_run(run: Path) -> None:
    """Raises DataError if `run` is not a run directory."""
    if not run.is_dir():
        raise DataError(f"{run}: no such run directory{_there_are(run)}")
    if not is_run_directory(run):
        raise DataError(f"{run}: not a run directory; runs lie in `runs/NAME`{_there_are(run)}")


def _there_are(path: Path) -> str:
    """Runs that `path` may refer to."""
    found = list(dict.fromkeys(run for folder in (path, path.parent, Path("runs")) for run in runs_in(folder)))
    if path.suffix == ".toml" and (own := next((run for run in found if run.name == path.stem), None)):
        return f"; it is a recipe, whose run may be `{own}`"
    near = difflib.get_close_matches(path.name, [run.name for run in found], n=1)
    if near:
        return f"; did you mean `{next(run for run in found if run.name == near[0])}`?"
    more = " ..." if len(found) > MOST_LISTED else ""
    return f"; there are {', '.join(map(str, found[:MOST_LISTED]))}{more}" if found else ""


def read_run(run: Path, *, stream: EventStream | None = None) -> RunView:
    """Reads the run in `run`; raises DataError only if it is not a run directory. `stream` continues an earlier read of
    its events."""
    check_run(run)
    missing: list[str] = []
    stream = stream or _stream(events_path(run), missing)
    events = stream.others
    process = lock_owner(run)
    if not stream.count:
        missing.append("events.jsonl: no events yet")
    settings = tuple(_settings(run / "config.toml", missing))
    stages = tuple(_stages(run / "stages", events, missing))
    summary = _object(run / "summary.json", missing)
    folder, manifest = _manifest(run, stages, missing)
    evaluation = _object(run / "evaluation" / "results.json", missing)
    started = [event for event in events if event["kind"] == "run_started"]
    saved = stream.of("saved")
    return RunView(
        folder=run,
        read_at=time.time(),
        name=text(summary.get("name")) or _value(settings, "name") or run.resolve().name,
        settings=settings,
        stages=stages,
        steps=tuple(_step(event) for event in stream.of("step")),
        logged_steps=stream.logged,
        lost_steps=stream.lost,
        validations=tuple(_validation(event) for event in stream.of("validation")),
        evaluations=tuple(
            EvaluationPoint(step=event["step"], tasks=read_tasks(event)) for event in stream.of("evaluation")
        ),
        layers=tuple(_layers(event) for event in stream.of("layers")),
        notable=tuple(_notable(run, stream.notable, missing)),
        starts=len(started),
        process=process,
        first_time=stream.first_time,
        last_time=stream.last_time,
        finished=_finished(stream, idle=process is None, summary=summary),
        saved_step=saved[-1]["step"] if saved else None,
        saving=next(reversed(stream.of("save_interval")), {}),
        launch=started[-1] if started else {},
        training=next((event for event in reversed(events) if event["kind"] == "train_started"), {}),
        plan=_object(run / "plan.json", missing),
        manifest=manifest,
        manifest_folder=folder,
        evaluation=evaluation,
        tasks=read_tasks(evaluation) or read_tasks(summary),
        evaluated=read_evaluation(run, evaluation, missing),
        summary=summary,
        samples=tuple(_samples(run / "samples.jsonl", missing)),
        missing=tuple(missing),
    )


def _object(path: Path, missing: list[str]) -> Json:
    """The JSON object in `path`; else an empty one, and a line in `missing`."""
    name = f"{path.parent.name}/{path.name}" if path.parent.name in ("evaluation", "stages") else path.name
    try:
        since = SEALED_SINCE.get(path.name, 2)
        return mapping(parse_sealed(read_regular(path), path=path, what=name, remedy="", sealed_since=since))
    except FileNotFoundError:
        missing.append(f"{name}: {NOT_YET}")
    except DamagedFile as error:
        missing.append(f"{name}: {_reason(error)}")
    except OSError as error:
        missing.append(f"{name}: cannot be read: {error}")
    return {}


def _reason(error: DamagedFile) -> str:
    return NO_FILE if NO_FILE in error.fault else ALTERED


def _settings(path: Path, missing: list[str]) -> Iterator[Setting]:
    try:
        data = read_regular(path)
        tree = tomllib.loads(parse_sealed_toml(data, path=path, what=path.name, remedy="", sealed_since=2))
        tree = with_new_names(tree)
    except FileNotFoundError:
        missing.append(f"{path.name}: {NOT_YET}")
        return
    except DamagedFile as error:
        missing.append(f"{path.name}: {_reason(error)}")
        return
    except (OSError, ValueError, ConfigError) as error:
        missing.append(f"{path.name}: cannot be read: {error}")
        return
    origins = mapping(tree.pop("origins", {}))
    tree.pop("format", None)
    for key, value in _leaves(tree):
        yield Setting(key=key, value=value, origin=text(origins.get(key)) or DEFAULT)


def _leaves(tree: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by dotted key; the items of a list of tables are numbered."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                yield from _leaves(item, f"{prefix}{key}.{index}.")
        else:
            yield f"{prefix}{key}", value


def _value(settings: tuple[Setting, ...], key: str) -> str:
    return next((text(setting.value) for setting in settings if setting.key == key), "")


def _stages(folder: Path, events: list[Event], missing: list[str]) -> Iterator[Stage]:
    """The stages with files or events. A file means that the stage is complete; events tell what happened last."""
    files = {path.stem: _object(path, missing) for path in sorted(folder.glob("*.json"))}
    last = {
        text(event.get("stage")): event for event in events if event["kind"].startswith("stage_") and event.get("stage")
    }
    names = sorted({*files, *last} - {""}, key=lambda name: (STAGES.index(name) if name in STAGES else 99, name))
    for name in names:
        event = last.get(name, {})
        ended = _ended_by_worker(events) if name == "train" and event.get("kind") == "stage_started" else None
        record = ended or files.get(name) or event
        state: Literal["finished", "skipped", "unfinished"] = "finished"
        if event.get("kind") == "stage_started" and not ended:
            state = "unfinished"
        elif event.get("kind") == "stage_skipped":
            state = "skipped"
        seconds = None if state == "unfinished" else number(record.get("seconds"))
        yield Stage(name=name, state=state, seconds=seconds, result=mapping(record.get("result")))


def _ended_by_worker(events: list[Event]) -> Event | None:
    """The `train_finished` event of a stage that has begun and not finished: a detached worker writes this event, and
    the next `ropewalk run` finishes the stage."""
    for event in reversed(events):
        if event["kind"] == "train_finished":
            return event
        if event["kind"] == "stage_started" and event.get("stage") == "train":
            return None
    return None


def _manifest(run: Path, stages: tuple[Stage, ...], missing: list[str]) -> tuple[str, Json]:
    """The prepared folder and its manifest. A relative folder is looked up here, then beside `runs/`."""
    prepared = next((text(stage.result.get("folder")) for stage in stages if stage.name == "prepare"), "")
    if not prepared:
        missing.append("manifest.json: the prepare stage has not finished")
        return "", {}
    places = (Path(prepared), run.resolve().parent.parent / prepared)
    folder = next((place for place in places if (place / "manifest.json").is_file()), None)
    if folder is None:
        missing.append(f"manifest.json: not in {prepared}")
        return prepared, {}
    return prepared, _object(folder / "manifest.json", missing)


def _step(event: Event) -> StepRecord:
    names = [name for name in StepRecord.__slots__ if name != "step"]
    nan = float("nan")
    values = {name: nan if (value := number(event.get(name))) is None else value for name in names}
    return StepRecord(step=event["step"], **values)


def _validation(event: Event) -> ValidationPoint:
    loss, bits = number(event.get("loss")), number(event.get("bits_per_byte"))
    nan = float("nan")
    return ValidationPoint(
        step=event["step"],
        loss=nan if loss is None else loss,
        bits_per_byte=nan if bits is None else bits,
        sequences=whole(event.get("sequences")),
    )


def _layers(event: Event) -> LayerRecord:
    names = tuple(map(text, event["layers"])) if isinstance(event.get("layers"), list) else ()
    figures = {}
    for figure in ("gradient", "weight", "update", "update_ratio", "activation"):
        column = event.get(figure)
        values = map(number, column) if isinstance(column, list) else ()
        found = zip(names, values, strict=False)
        figures[figure] = {name: value for name, value in found if value is not None}
    return LayerRecord(step=event["step"], names=names, figures=figures)


def _stream(path: Path, missing: list[str]) -> EventStream:
    try:
        return EventStream(path)
    except DamagedFile as error:
        missing.append(f"{path.name}: {_reason(error)}")
        return EventStream(None)


def _notable(run: Path, found: list[Event], missing: list[str]) -> list[Event]:
    """Rank 0's notable events and the warnings of the other ranks, whose other events repeat rank 0's."""
    if not any(event["kind"] == "phase_started" and event.get("phase") for event in found):
        found = [event for event in found if event["kind"] != "phase_started"]  # one phase is the run itself
    for path in sorted(run.glob("events-*.jsonl")):
        try:
            found += itertools.islice(warnings_of(path), MOST_NOTABLE)
        except DamagedFile as error:
            missing.append(f"{path.name}: {_reason(error)}")
    return sorted(found, key=lambda event: float(event["time"]))


def reached_end(events: Sequence[Event], *, idle: bool) -> bool | None:
    """Whether the run has reached its end; None if no event tells. Later starts that have ended (`idle`) and skipped
    every stage do not count, nor does `ropewalk evaluate` once it has completed."""
    kinds = [event["kind"] for event in events]
    evaluating = [i for i, event in enumerate(events) if kinds[i][:6] == "stage_" and event.get("stage") == "evaluate"]
    if evaluating and kinds[evaluating[-1]] == "stage_finished":
        for place in evaluating:
            kinds[place] = "stage_skipped"
    idle = idle and kinds[-1:] == ["stage_skipped"]  # a start that was killed at once proves nothing
    for place in reversed(range(len(kinds))):
        if kinds[place] == "run_finished":
            return True
        if kinds[place] not in _NO_WORK or (kinds[place] == "run_started" and not idle):
            return False if "run_started" in kinds else None
    return False if "run_started" in kinds else None


def _finished(stream: EventStream, *, idle: bool, summary: Json) -> bool:
    """A summary without events counts as an end."""
    ends = [float(event["time"]) for event in stream.others if event["kind"] == "run_finished"]
    longer = any(
        event["kind"] == "continued" and float(event["time"]) > max(ends, default=0) for event in stream.notable
    )
    end = reached_end(stream.others, idle=idle and not longer)
    return bool(summary) if end is None else end


def _samples(path: Path, missing: list[str]) -> Iterator[Completion]:
    try:
        rows = parse_sealed_lines(read_regular(path), path=path, what=path.name, remedy="")
    except FileNotFoundError:
        missing.append(f"{path.name}: {NOT_YET}")
        return
    except OSError as error:
        missing.append(f"{path.name}: cannot be read: {error}")
        return
    except DamagedFile as error:
        missing.append(f"{path.name}: {_reason(error)}")
        return
    for row in map(mapping, rows):
        if row:
            yield Completion(
                prompt=text(row.get("prompt")),
                completion=text(row.get("completion")),
                domain=text(row.get("domain")),
                source=text(row.get("source")),
                parses=row["parses"] if isinstance(row.get("parses"), bool) else None,
            )
