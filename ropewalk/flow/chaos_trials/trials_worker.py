"""Trains runs in child processes that are killed, signalled or given a bad disk:
`python -m ropewalk.flow.chaos_trials.trials_worker`.

Reads one job per line from stdin and answers with one JSON line when its child has ended. Torch is imported once; a
child is a fork of this process, made before any device is used.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import RopewalkError
from ropewalk.base.files import locked
from ropewalk.checkpoint.faulty import Fault, FaultyDisk
from ropewalk.config.threads import share_cores

TIMED_OUT = -1000
"""Status of a child that timed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialJob:
    """One child process."""

    run: str
    timeout_s: float
    at: str = ""
    """A labelled point (`base/files.py`) at which the child sends itself `signal`."""
    signal: int = signal.SIGKILL
    after_s: float | None = None
    """Seconds after its first step at which the child kills itself."""
    fault: Fault | None = None
    """The fault of the disk with its checkpoints."""

    def line(self) -> str:
        """The job as a line of the worker's input."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended."""

    status: int
    """Its exit status; negative for the signal that killed it."""
    seconds: float
    points: tuple[str, ...]
    """The labelled points it passed, in order."""
    output: str


def serve() -> None:
    """Answers jobs until stdin ends."""
    share_cores()
    # Imported once for all children; the optimizer would import the second at its first step.
    for module in ("ropewalk.train.loop", "torch._dynamo"):
        importlib.import_module(module)

    for line in sys.stdin:
        job = _job(json.loads(line))
        sys.stdout.write(json.dumps(asdict(_run(job))) + "\n")
        sys.stdout.flush()


def _run(job: TrialJob) -> Ended:
    start = time.monotonic()
    log, record = (Path(job.run) / name for name in ("chaos.log", "chaos.points"))
    child = os.fork()
    if child == 0:
        _child(job, log, record)
    status = _wait(child, start + job.timeout_s)
    points = record.read_text().split("\n")[:-1] if record.exists() else []
    return Ended(status, time.monotonic() - start, tuple(points), log.read_text(errors="replace"))


def _wait(child: int, deadline: float) -> int:
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return TIMED_OUT
        time.sleep(0.005)


def _child(job: TrialJob, log: Path, record: Path) -> None:
    """Never returns."""
    try:
        quiet = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        _listen(job, os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        _train(Path(job.run), FaultyDisk(job.fault) if job.fault else None)
        os._exit(0)
    except RopewalkError as error:
        os.write(2, f"{error}\n".encode())
        os._exit(error.exit_code)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _train(run: Path, disk: FaultyDisk | None) -> None:
    from ropewalk.train.loop import train

    with locked(run):
        train(run, disk=disk)


def _listen(job: TrialJob, record: int) -> None:
    """Records the points that are passed, and injects the fault at the chosen one."""
    waiting = [job.after_s] if job.after_s is not None else []

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "ropewalk.point":
            return
        label = str(arguments[0])
        os.write(record, f"{label}\n".encode())
        if label == job.at:
            os.kill(os.getpid(), job.signal)
        if waiting and label.startswith("train.step:"):
            threading.Thread(target=_strike_later, args=(waiting.pop(),), daemon=True).start()

    sys.addaudithook(hear)


def _strike_later(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _job(tree: dict[str, Any]) -> TrialJob:
    fault = tree.pop("fault")
    if fault:
        fault["on"] = tuple(fault["on"])
    return TrialJob(**tree, fault=Fault(**fault) if fault else None)


if __name__ == "__main__":
    serve()
