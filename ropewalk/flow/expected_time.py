"""Estimates the training time of a plan, as an interval with its basis.

The speed comes from a matmul timed on this machine or from its GPU's data sheet (plan/speed.py). Finished runs on this
machine correct it by their ratio of actual to estimated speed; the spread of these ratios gives the interval.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ropewalk.base.errors import DamagedFile, DataError, StorageError, UserError
from ropewalk.base.files import read_regular
from ropewalk.base.progress import counted
from ropewalk.base.seal import parse_sealed, read_sealed, write_sealed
from ropewalk.config.cache import cache_folder
from ropewalk.model.spec import Spec
from ropewalk.monitor.run_list import newest_runs
from ropewalk.plan.machine import Machine
from ropewalk.plan.plan import PhasePlan, Planned, load_plan
from ropewalk.plan.speed import Speed, speed_of

FILE = "speed.json"
FORMAT = 1
MEASURE_S = 0.05
"""Seconds for three matmuls, without process start-up."""
KEEP_S = 7 * 86400.0
"""Lifetime of a measured speed."""
MOST_RUNS = 20
UNTRIED = (0.6, 2.5)
"""Ratio of actual to estimated speed without earlier runs. Six models of width 32 to 384 reached 1.4 to 2.8 in CPU time
per step on one core of an EPYC; several cores, validation and saving lower it."""
LAYER_S, MICROBATCH_S = 1.5e-3, 3e-3
"""Minimum time of a layer and of the rest of a microbatch on a CPU."""
MARGIN = 1.25
"""Factor by which the next run may be faster or slower than all earlier ones."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedTime:
    """Seconds of training, without preparation and evaluation."""

    low_s: float
    high_s: float
    basis: str
    """The source of the interval, in words."""


@dataclass(frozen=True, slots=True)
class _Past:
    """A finished run on this machine: the ratio of its speed to the estimate."""

    name: str
    low: float
    """Speed including validation and saving."""
    high: float
    """Speed of its steps only."""
    same: bool
    """Whether it has the planned model."""


def expected_time(planned: Planned, machine: Machine, *, runs: Path, speed: Speed | None = None) -> ExpectedTime | None:
    """The training time of `planned` on `machine`, using earlier runs in `runs`; measures `speed` by default. None if
    that fails."""
    device = planned.phases[0].plan.device
    if speed is None:
        try:
            speed = _speed(machine if device == "cuda" else dataclasses.replace(machine, gpus=()))
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
    seconds = sum(_seconds(phase, speed) for phase in planned.phases)
    past = _past(runs, planned, machine, speed)
    past = [run for run in past if run.same] or past
    if not past:
        low, high = UNTRIED
        basis = f"on an idle machine; {speed.words}; earlier models were {low:g} to {high:g} times as fast as estimated"
        return ExpectedTime(low_s=seconds / high, high_s=seconds / low, basis=basis)
    low, high = min(run.low for run in past) / MARGIN, max(run.high for run in past) * MARGIN
    kind = "this model" if past[0].same else "other models"
    basis = f"{counted(len(past), 'run')} of {kind} on this machine, e.g. {past[0].name}; {speed.words}"
    return ExpectedTime(low_s=seconds / high, high_s=seconds / low, basis=basis)


def _speed(machine: Machine) -> Speed:
    """The speed of `machine`, measured weekly, since starting a process for it takes longer than planning."""
    known = f"{machine}, numpy {np.__version__}"
    kept = read_speed(cache_folder(), known)
    if kept is None:
        kept = speed_of(machine, seconds=MEASURE_S)
        with contextlib.suppress(StorageError):  # it is measured again next time
            keep_speed(cache_folder(), known, kept)
    return kept


def keep_speed(folder: Path, known: str, speed: Speed) -> None:
    """Saves the measured speed of the machine `known`."""
    value = {"format": FORMAT, "machine": known, "time": time.time(), "speed": dataclasses.asdict(speed)}
    write_sealed(folder / FILE, value)


def read_speed(folder: Path, known: str) -> Speed | None:
    """The saved speed of the machine `known`; None if there is none, it is too old or, with a warning, damaged."""
    path, remedy = folder / FILE, "this machine is measured again"
    try:
        kept = read_sealed(path, what="speed", remedy=remedy, current=FORMAT, sealed_since=FORMAT)
    except (DataError, StorageError) as error:
        if isinstance(error, DamagedFile):
            _log.warning("%s", error)
        return None
    if kept["machine"] != known or not 0 <= time.time() - kept["time"] < KEEP_S:
        return None
    return Speed(**kept["speed"])


def _seconds(phase: PhasePlan, speed: Speed) -> float:
    """The estimate without earlier runs."""
    plan, spec = phase.plan, phase.spec
    speed = dataclasses.replace(speed, bf16=plan.precision not in ("fp32", "fp16"))
    if speed.device == "cuda":
        speed = dataclasses.replace(speed, flops=speed.flops * plan.world)
    tokens_per_s = speed.tokens_per_s(spec, batch_tokens=plan.batch_size * spec.sequence_length)
    work_s = phase.flops / (tokens_per_s * spec.flops_per_token("causal"))
    if speed.device == "cuda":
        return work_s
    microbatches = phase.steps * plan.batch_size / (plan.microbatch_size * plan.data)
    return max(work_s, microbatches * (MICROBATCH_S + spec.layers * LAYER_S))


def _past(runs: Path, planned: Planned, machine: Machine, speed: Speed) -> list[_Past]:
    """This machine's finished runs in `runs` with the device, precision and number of processes of `planned`, newest
    first."""
    if not runs.is_dir():
        return []
    found = []
    for line in newest_runs(runs, most=MOST_RUNS):
        folder = Path(line.folder)
        try:
            run = _run(folder, load_plan(folder), planned, machine, speed)
        except (UserError, StorageError, OSError, ArithmeticError, LookupError, TypeError, AttributeError):
            continue  # damaged, of another version, or with a component whose module is not here
        found += [run] if run else []
    return found


def _run(folder: Path, made: Planned, planned: Planned, machine: Machine, speed: Speed) -> _Past | None:
    path = folder / "summary.json"
    summary = parse_sealed(read_regular(path), path=path, what="summary", remedy="", sealed_since=2)
    mine, its = planned.phases[0].plan, made.phases[0].plan
    alike = (mine.device, mine.precision, mine.world) == (its.device, its.precision, its.world)
    if summary["machine"] != str(machine) or not alike:
        return None
    pace, whole = summary["tokens_per_s"], summary["tokens"] / summary["seconds"]["train"]
    promised = made.tokens / sum(_seconds(phase, speed) for phase in made.phases)
    low, high = min(pace, whole) / promised, pace / promised
    return _Past(str(folder), low, high, _shapes(made) == _shapes(planned))


def _shapes(planned: Planned) -> list[Spec]:
    return [phase.spec for phase in planned.phases]
