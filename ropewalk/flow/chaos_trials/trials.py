"""`ropewalk chaos`: does the user's own run, on the user's own storage, survive faults?

One copy of the run is trained without a fault; every trial must end with the same last checkpoint, bit for bit. A trial
injects a fault into a copy (a kill, a bad disk, flipped bits), checks that every remaining checkpoint is whole, then
runs the same command again without a fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.errors import UserError
from ropewalk.base.files import storage
from ropewalk.base.progress import Progress, Silent
from ropewalk.checkpoint.faulty import Fault
from ropewalk.checkpoint.format import LATEST, identity, list_checkpoints, read_checkpoint_manifest, verify_checkpoint
from ropewalk.config.read import Resolved

from ..recipe import Recipe
from ..run_or_recipe import RecipeLike, resolve_recipe
from ..run_recipe import advance
from ..run_stages import Result
from ..start_from.start_from import RUNS
from .trials_worker import Ended, TrialJob

MARK = ".chaos"
"""Marks the folder of the copies as ours to delete."""
LEAST_SAVES = 4
"""Minimum checkpoints of a run, so that faults can come before, between and after them."""
TIMEOUT_S = 3.0
"""`checkpoint.timeout_s` of the copies: the time a hanging disk costs each trial."""


def chaos(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    quick: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Injects faults into copies of the recipe's run, in a folder below `runs`; the result of each trial.

    The run itself is not touched; missing data is prepared. `quick` kills at one labelled point of each kind and at few
    random moments. The copies are kept if a trial failed.
    """
    resolved = _restless(resolve_recipe(recipe, overrides))
    if (steps := resolved.value.train.total_steps) < LEAST_SAVES:
        raise UserError(
            f"{steps} steps are too few to inject faults between; raise `train.steps` to {LEAST_SAVES} or more"
        )
    scratch = runs / f"{resolved.value.name}.chaos"
    clear(scratch)
    say = progress or Silent()
    advance(resolved, runs=scratch, until="plan", begin_training=True, progress=say)
    with Laboratory(scratch, scratch / resolved.value.name).working() as laboratory:
        trials = []
        planned = list(_trials(laboratory, quick=quick, draw=random.Random(seed)))
        say.begin("chaos", len(planned), "trials")
        for number, (name, strike) in enumerate(planned):
            start = time.monotonic()
            wrong = laboratory.attempt(strike)
            trials.append({"trial": name, "passed": not wrong, "seconds": time.monotonic() - start, "wrong": wrong})
            say.advance(number + 1, name)
    failed = [trial["trial"] for trial in trials if not trial["passed"]]
    if not failed:
        shutil.rmtree(scratch)
    say.end(f"{len(trials)} trials, {len(failed)} failed")
    kept = str(scratch) if failed else ""
    return {"trials": trials, "failed": failed, "steps": resolved.value.train.total_steps, "folder": kept}


def clear(scratch: Path) -> None:
    """Makes `scratch` an empty folder with our mark; a folder without the mark is not ours, since runs may have any
    name."""
    if scratch.is_symlink() or (scratch.exists() and not (scratch / MARK).is_file()):
        raise UserError(
            f"{scratch}: not made by `ropewalk chaos`, which works there; move it away or use other `--runs`"
        )
    with storage(f"creating {scratch}"):
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True)
        (scratch / MARK).touch()


class Wrong(Exception):
    """A trial did not end as it must."""


Strike = Callable[["Laboratory", Path], None]
"""Injects a fault into a copy and checks the result; raises Wrong."""


@dataclass(slots=True)
class Laboratory:
    """Copies of a run, and the process that trains them."""

    scratch: Path
    base: Path
    """The run, planned and not yet trained."""
    points: tuple[str, ...] = ()
    """The labelled points of an undisturbed run."""
    seconds: float = 0.0
    """Duration of an undisturbed run."""
    expected: str = ""
    """Identity of its last checkpoint."""
    bytes: int = 0
    """Of that checkpoint."""
    _worker: subprocess.Popen[str] | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[Laboratory]:
        """Starts the worker; trains the reference, and a run that is killed after three quarters of its saves."""
        command = [sys.executable, "-m", "ropewalk.flow.chaos_trials.trials_worker"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            self._worker = worker
            try:
                self._make_reference()
                yield self
            finally:
                assert worker.stdin
                worker.stdin.close()

    def train(self, run: Path, **how: object) -> Ended:
        """Trains a copy in a child process until it ends or dies."""
        job = TrialJob(run=str(run), timeout_s=120 + 20 * self.seconds if self.seconds else 1e9, **how)  # type: ignore[arg-type]
        assert self._worker, "trains inside `working`"
        assert self._worker.stdin
        assert self._worker.stdout
        self._worker.stdin.write(job.line())
        self._worker.stdin.flush()
        answer = self._worker.stdout.readline()
        if not answer:
            raise UserError("the worker of `ropewalk chaos` ended by itself; is there memory enough?")
        return Ended(**json.loads(answer))

    def attempt(self, strike: Strike) -> str:
        """Runs a trial on a fresh copy; what went wrong, empty if nothing did."""
        copy = self.copy("base", "trial")
        try:
            strike(self, copy)
            self.must_finish(copy)
        except Wrong as wrong:
            with contextlib.suppress(FileNotFoundError):
                os.replace(copy, self.scratch / f"failed-{sum(1 for _ in self.scratch.glob('failed-*')):03d}")
            return str(wrong)
        return ""

    def copy(self, source: str, name: str) -> Path:
        """A fresh copy of `base`, `halfway` or `reference`."""
        target = self.scratch / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.base if source == "base" else self.scratch / source, target)
        return target

    def must_finish(self, run: Path) -> None:
        """Runs the same command again without a fault; it must end with the expected bits."""
        must_be_whole(run)
        ended = self.train(run)
        if ended.status:
            raise Wrong(f"the same command again ended with {ended.status}: {_last(ended.output)}")
        self.must_be_expected(run)

    def must_be_expected(self, run: Path) -> None:
        """Checks that the last checkpoint equals that of the undisturbed run."""
        must_be_whole(run)
        newest = list_checkpoints(run / "checkpoints")[-1]
        if identity(read_checkpoint_manifest(newest)) != self.expected:
            raise Wrong(f"{newest}: not the bits of the undisturbed run")

    def _make_reference(self) -> None:
        run = self.copy("base", "reference")
        ended = self.train(run)
        if ended.status:
            raise UserError(f"the run cannot be trained at all: {_last(ended.output)}")
        newest = list_checkpoints(run / "checkpoints")[-1]
        manifest = read_checkpoint_manifest(newest)
        self.points, self.seconds = ended.points, ended.seconds
        self.expected, self.bytes = identity(manifest), manifest.bytes
        published = [label for label in self.points if label.startswith("checkpoint.published:")]
        if len(published) < LEAST_SAVES:
            raise UserError(
                f"the run stopped early, after {len(published)} checkpoints, too few to inject faults between; leave "
                "`train.early_stop` out"
            )
        self.train(self.copy("base", "halfway"), at=published[-2])


def must_be_whole(run: Path) -> None:
    """Checks that every listed checkpoint is what was written."""
    wrong = [message for path in list_checkpoints(run / "checkpoints") for message in verify_checkpoint(path)]
    if wrong:
        raise Wrong("; ".join(wrong))


def _restless(resolved: Resolved[Recipe]) -> Resolved[Recipe]:
    """The recipe with settings for short trials: frequent saves, short timeouts. None of them changes the weights."""
    recipe = resolved.value
    often = min(recipe.checkpoint.save_every_steps, max(1, recipe.train.total_steps // 6))
    checkpoint = dataclasses.replace(
        recipe.checkpoint,
        save_every="steps",
        save_every_steps=often,
        keep_last=max(2, recipe.checkpoint.keep_last),
        timeout_s=TIMEOUT_S,
        failures=1,
    )
    return dataclasses.replace(resolved, value=dataclasses.replace(recipe, checkpoint=checkpoint))


# The trials


def _trials(laboratory: Laboratory, *, quick: bool, draw: random.Random) -> Iterator[tuple[str, Strike]]:
    for label in _labels(laboratory.points, quick=quick, draw=draw):
        yield f"kill at {label}", _killed_at(label)
    for number in range(2 if quick else 20):
        moments = [draw.uniform(0, laboratory.seconds) for _ in range(2)]
        yield f"kill at random moments, {number + 1}", _killed_after(moments)
    size = laboratory.bytes
    yield "disk full", _struck(Fault(kind="quota", code=errno.ENOSPC, bytes=size * 3 // 2), says=errno.ENOSPC)
    yield "quota used up", _struck(Fault(kind="quota", code=errno.EDQUOT, bytes=size * 5 // 2), says=errno.EDQUOT)
    yield "device errors", _struck(Fault(kind="error", code=errno.EIO, on=("sync",), after=9), says=errno.EIO)
    yield "one device error", _struck(Fault(kind="error", code=errno.EIO, on=("write",), after=7, times=1))
    yield "read-only", _struck(Fault(kind="error", code=errno.EROFS, on=("make_folder",), after=3), says=errno.EROFS)
    yield "two file systems", _struck(Fault(kind="error", code=errno.EXDEV, on=("rename",), after=4), says=errno.EXDEV)
    yield "slow disk", _struck(Fault(kind="slow", seconds=0.002))
    yield "hanging disk", _struck(Fault(kind="hang", on=("sync",), after=9), says="the disk has not answered")
    yield (
        "disk that hangs while deleting",
        _struck(Fault(kind="hang", on=("remove",), after=1), says="the disk has not"),
    )
    newest = list_checkpoints(laboratory.scratch / "halfway" / "checkpoints")[-1]
    for file in sorted(path.name for path in newest.iterdir()):
        yield f"flipped bit in {file}", _flipped(file, draw.random(), draw.randrange(8))
    yield "flipped bits in every checkpoint", _all_flipped
    yield f"{LATEST} lost", _latest_lost
    steps = [label for label in laboratory.points if label.startswith("train.step:")][:-1]
    for name in ("SIGTERM", "SIGUSR1"):
        yield f"preemption by {name}", _preempted(draw.choice(steps), getattr(signal, name))


def _labels(points: Sequence[str], *, quick: bool, draw: random.Random) -> list[str]:
    """Points to kill at: every point of training, or one of each kind."""
    distinct = list(dict.fromkeys(points))
    if not quick:
        return distinct
    kinds: dict[str, list[str]] = {}
    for label in distinct:
        kinds.setdefault(label.split(":")[0], []).append(label)
    return [draw.choice(labels) for labels in kinds.values()]


def _killed_at(label: str) -> Strike:
    def strike(laboratory: Laboratory, run: Path) -> None:
        ended = laboratory.train(run, at=label)
        if ended.status != -signal.SIGKILL:
            raise Wrong(f"the point was not reached; status {ended.status}: {_last(ended.output)}")

    return strike


def _killed_after(moments: Sequence[float]) -> Strike:
    def strike(laboratory: Laboratory, run: Path) -> None:
        for moment in moments:
            ended = laboratory.train(run, after_s=moment)
            if ended.status not in (0, -signal.SIGKILL):
                raise Wrong(f"status {ended.status}: {_last(ended.output)}")
            must_be_whole(run)

    return strike


def _struck(fault: Fault, *, says: int | str = "") -> Strike:
    """On a bad disk, training ends with the stated error; if none is stated, it ends normally."""
    words = os.strerror(says) if isinstance(says, int) else says

    def strike(laboratory: Laboratory, run: Path) -> None:
        ended = laboratory.train(run, fault=fault)
        if ended.status != (2 if words else 0) or words not in ended.output:
            raise Wrong(
                f"status {ended.status}, expected {'2 and ' + repr(words) if words else 0}: {_last(ended.output)}"
            )
        if not words:
            laboratory.must_be_expected(run)

    return strike


def _flipped(file: str, share: float, bit: int) -> Strike:
    """A flipped bit is reported with its file, and the older checkpoint is used."""

    def strike(laboratory: Laboratory, run: Path) -> None:
        laboratory.copy("halfway", run.name)
        newest = list_checkpoints(run / "checkpoints")[-1]
        flip(newest / file, share, bit)
        found = verify_checkpoint(newest)
        if not found or not all(message.startswith(f"{newest / file}:") for message in found):
            raise Wrong(f"a flipped bit in {file} is reported as {found}")
        ended = laboratory.train(run)
        if ended.status or newest.with_name(newest.name + ".damaged") not in newest.parent.iterdir():
            raise Wrong(f"status {ended.status}, the damaged checkpoint was not set aside: {_last(ended.output)}")

    return strike


def _all_flipped(laboratory: Laboratory, run: Path) -> None:
    """If no checkpoint is whole, the run says so and does not start over by itself."""
    laboratory.copy("halfway", run.name)
    found = list_checkpoints(run / "checkpoints")
    for path in found:
        flip(path / "model.safetensors", 0.5, 3)
    ended = laboratory.train(run)
    if ended.status != 2 or "no checkpoint is whole" not in ended.output:
        raise Wrong(f"status {ended.status}, expected 2 and 'no checkpoint is whole': {_last(ended.output)}")
    for path in found:
        flip(path / "model.safetensors", 0.5, 3)  # back again


def _latest_lost(laboratory: Laboratory, run: Path) -> None:
    laboratory.copy("halfway", run.name)
    (run / "checkpoints" / LATEST).unlink()


def _preempted(label: str, number: int) -> Strike:
    def strike(laboratory: Laboratory, run: Path) -> None:
        ended = laboratory.train(run, at=label, signal=number)
        step = int(label.split(":")[1])
        newest = list_checkpoints(run / "checkpoints")[-1:]
        saved = bool(newest) and read_checkpoint_manifest(newest[0]).step == step
        if ended.status or not saved:
            raise Wrong(
                f"status {ended.status}, step {step} {'is' if saved else 'is not'} saved: {_last(ended.output)}"
            )

    return strike


def flip(path: Path, share: float, bit: int) -> None:
    """Flips a bit of the byte that lies at `share` of the file."""
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 1 << bit
    path.write_bytes(data)


def _last(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
