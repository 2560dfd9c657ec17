"""Training, as the story of one step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from ropewalk.base.errors import RunConflict, UserError
from ropewalk.base.events import EventLog, read_events
from ropewalk.base.events import steps as steps_of
from ropewalk.base.files import point
from ropewalk.base.progress import Progress, Silent, duration
from ropewalk.checkpoint.format import list_checkpoints, resolve_checkpoint, step_path
from ropewalk.checkpoint.tensors import State, load_newest, retain, save, set_aside
from ropewalk.config.ranks import ranks
from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.parallel.compat import deterministic, version_warning
from ropewalk.parallel.mesh import pick_device

from .adaptive import Plateau
from .data import open_data
from .hooks import Hook
from .interrupt import Interrupt
from .metrics import Meter, all_finite, line
from .optimizer import make_optimizer
from .peak import peak_flops
from .schedule import Extent, learning_rate
from .settings import Settings, read_settings
from .start import starting_weights


def train(run: Path, *, progress: Progress | None = None, hooks: Iterable[Hook] = ()) -> dict[str, float]:
    """Trains the run in directory `run` to its last step, from its newest whole checkpoint; the last figures."""
    trainer = Trainer(run, read_settings(run), progress or Silent(), list(hooks))
    with contextlib.closing(trainer), trainer.interrupt:
        return trainer.train()


class Trainer:
    """One process's part in a training run."""

    def __init__(self, run: Path, settings: Settings, progress: Progress, hooks: list[Hook]) -> None:
        self._run, self._settings, self._progress, self._hooks = run, settings, progress, hooks
        self._checkpoints = run / "checkpoints"
        self._plan, self._spec = settings.planned.plan, settings.planned.spec
        place = ranks()
        self._device = pick_device(self._plan, place)
        if settings.train.threads:
            torch.set_num_threads(settings.train.threads)
        self._events = EventLog(run, rank=place.rank)
        self._data = open_data(settings, pin=self._device.type == "cuda")
        model = build(self._spec, seed=settings.seed, device=self._device)
        self._executor = apply(
            self._plan,
            model,
            lambda parameters: make_optimizer(parameters, settings.train.optimizer, spec=self._spec),
            seed=settings.seed,
            clip_norm=settings.train.clip_norm,
        )
        peak = peak_flops(self._device, self._plan.precision)
        self._meter = Meter(
            self._device,
            tokens_per_step=self._tokens(1),
            flops_per_token=self._spec.flops_per_token(),
            peak_flops=peak,
        )
        self._extent = Extent(
            steps=settings.train.steps, tokens_per_step=self._tokens(1), tokens_per_epoch=self._data.tokens
        )
        self._plateau = Plateau(settings.train.schedule)
        self.interrupt = Interrupt()
        self._started = {"peak_flops": peak, "parameters": self._spec.parameters()}

    def train(self) -> dict[str, float]:
        settings, steps = self._settings.train, self._settings.train.steps
        first = self._restore()
        self._retain()
        self._begin(first)
        for step in range(first, steps):
            if self.interrupt.asked:
                self._leave(step)
            with self._meter.watch("data"):
                batch = self._data.loader.next()
            lr = self._plateau.share * learning_rate(step, extent=self._extent, schedule=settings.schedule)
            with deterministic(self._device):
                self._meter.add(self._executor.step(batch, lr=lr))
            done = step + 1
            point(f"train.step:{done}")
            for hook in self._hooks:
                hook.after_step(done)
            if done == steps or _is_due(done, settings.log_every_steps):
                self._log(done, lr)
            if done == steps or _is_due(done, settings.validate_every_steps):
                with self._meter.paused():
                    self._validate(done)
            if done == steps or _is_due(done, self._settings.checkpoint.save_every_steps):
                with self._meter.paused():
                    self._save(done)
        return self._end(steps)

    def _leave(self, step: int) -> None:
        """Saves what `step` steps have made and ends as Ctrl-C does; the same command continues from here."""
        if step and not step_path(self._checkpoints, step).exists():
            self._save(step)
            self._progress.say(f"interrupted: saved step {step}")
        raise KeyboardInterrupt

    def close(self) -> None:
        """Stops the reading thread and closes the diary."""
        self._data.loader.close()
        self._events.close()

    def _restore(self) -> int:
        """Takes over the newest whole checkpoint; returns the first step to run."""
        start = time.perf_counter()
        path, state, wrong = load_newest(self._checkpoints)
        for message in wrong:
            self._warn(f"{message} (continuing from an older one)")
        if path is None or state is None:
            self._start_from(self._settings.train.start_from)
            return 0
        if state.spec != self._spec or state.seed != self._settings.seed:
            raise RunConflict(f"{path}: this checkpoint is of another model or seed than the run; start a new run")
        # Newer ones are damaged; left in place, retention would keep them and delete this one.
        found = list_checkpoints(self._checkpoints)
        for newer in found[found.index(path) + 1 :]:
            set_aside(newer)
        self._executor.load_state(state.model, state.optimizer)
        self._plateau.load(state.schedule)
        self._data.loader.seek(state.data)
        self._events.write("restored", step=state.step, path=str(path), seconds=time.perf_counter() - start)
        self._progress.say(f"continuing from {path}")
        return state.step

    def _start_from(self, place: str) -> None:
        """Takes over the weights, and only them, of the checkpoint that the recipe names."""
        if place:
            path = resolve_checkpoint(Path(place))
            self._executor.load_state(starting_weights(path, self._spec, self._data.tokenizer), {})
            self._progress.say(f"starting from {path}")

    def _begin(self, step: int) -> None:
        self._events.write(
            "train_started",
            step=step,
            device=str(self._device),
            world=self._plan.world,
            torch=torch.__version__,
            flops_per_token=self._spec.flops_per_token(),
            **self._started,
        )
        warning = version_warning()
        if warning:
            self._warn(warning)
        self._progress.begin("train", self._settings.train.steps, "steps")
        self._progress.advance(step)
        for hook in self._hooks:
            hook.before_training(step)
        self._start = time.perf_counter()
        self._meter.restart()

    def _log(self, step: int, lr: float) -> None:
        record = self._meter.read(step, lr=lr)
        self._events.write("step", **record)
        self._progress.advance(step, line(record, steps=self._settings.train.steps))
        if record["skipped"]:
            scale = f", loss scale {record['loss_scale']:g}" if record["loss_scale"] else ""
            self._warn(
                f"step {step}: {record['skipped']} updates skipped since the last line: gradient not finite{scale}"
            )
        if not math.isfinite(record["loss"]):
            raise UserError(_diverged(f"the training loss became {record['loss']}", step))
        for hook in self._hooks:
            hook.on_metrics(step, record)

    def _validate(self, step: int) -> None:
        start = time.perf_counter()
        loss = -self._executor.score(self._data.held_out).log_probabilities.double().mean().item()
        bits_per_byte = loss / math.log(2) / self._data.bytes_per_token
        seconds = time.perf_counter() - start
        self._events.write("validation", step=step, loss=loss, bits_per_byte=bits_per_byte, seconds=seconds)
        self._progress.say(f"step {step}: validation loss {loss:.4f}, {bits_per_byte:.3f} bits per byte")
        if self._plateau.observe(loss):
            self._progress.say(
                f"step {step}: validation stopped gaining; learning rate now x {self._plateau.share:.3g}"
            )
        for hook in self._hooks:
            hook.on_validation(step, loss)

    def _save(self, step: int) -> None:
        start = time.perf_counter()
        # Saved, such weights would push the last good ones out of retention.
        if not all_finite(self._executor.model_state().values()):
            raise UserError(_diverged("the weights are no longer finite", step))
        state = State(
            step=step,
            tokens=self._tokens(step),
            seed=self._settings.seed,
            spec=self._spec,
            data=self._data.loader.state(),
            model=self._executor.model_state(),
            optimizer=self._executor.optimizer_state(),
            tokenizer=self._data.tokenizer,
            schedule=self._plateau.state(),
        )
        path = save(self._checkpoints, state)
        size = sum(file.stat().st_size for file in path.iterdir())
        self._events.write("saved", step=step, path=str(path), seconds=time.perf_counter() - start, bytes=size)
        self._retain()
        for hook in self._hooks:
            hook.after_save(step, str(path))

    def _end(self, step: int) -> dict[str, float]:
        seconds = time.perf_counter() - self._start
        self._events.write("train_finished", step=step, seconds=seconds)
        self._progress.end(f"{step} steps in {duration(seconds)}")
        for hook in self._hooks:
            hook.after_training(step)
        return {"step": step, "tokens": self._tokens(step), **self._losses()}

    def _retain(self) -> None:
        """Also at the start: a kill between a save and its retention leaves one checkpoint too many."""
        retain(self._checkpoints, keep_last=self._settings.checkpoint.keep_last)

    def _losses(self) -> dict[str, float]:
        """The last training and validation loss, from the diary: this process may have found nothing left to do."""
        events = list(read_events(self._events.path))
        found = {"train_loss": steps_of(events), "validation_loss": steps_of(events, "validation")}
        return {name: records[-1]["loss"] for name, records in found.items() if records}

    def _warn(self, message: str) -> None:
        self._events.write("warning", message=message)
        self._progress.say(f"warning: {message}")

    def _tokens(self, steps: int) -> int:
        return steps * self._settings.train.batch_rows * self._settings.load.sequence_length


def _is_due(done: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after step `done`."""
    return every > 0 and done % every == 0


def _diverged(what: str, step: int) -> str:
    return (
        f"{what} by step {step}; no checkpoint holds broken weights, the same command continues from the last one. "
        "Lower `train.schedule.peak_lr`, lengthen `train.schedule.warmup_steps` or use `train.precision=fp32`"
    )
