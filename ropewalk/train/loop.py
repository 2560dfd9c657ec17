"""Training, as the story of one step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ropewalk.base.errors import Preempted, StorageError, UserError
from ropewalk.base.events import EventLog, read_events
from ropewalk.base.events import steps as steps_of
from ropewalk.base.files import point
from ropewalk.base.progress import Progress, Silent, counted, duration
from ropewalk.base.rendezvous import Rendezvous
from ropewalk.checkpoint.disk import Disk
from ropewalk.checkpoint.run_state import State
from ropewalk.config.ranks import ranks
from ropewalk.load.batch import Batch
from ropewalk.load.expected import Expected, Kind
from ropewalk.parallel.compat import deterministic, version_warning
from ropewalk.parallel.executor import Points
from ropewalk.parallel.kernels.matmul_tuning import Tuning
from ropewalk.parallel.labels import label
from ropewalk.parallel.mesh import Mesh, join, leave, pick_device
from ropewalk.parallel.placement import LocalShard

from .active_phase import ActivePhase
from .checkpointer import Checkpointer
from .hooks.anomaly import Policy, RollBack
from .hooks.corruption import probe
from .hooks.data_stalls import ReadingWatch, packages_folder
from .hooks.hook import Hook
from .hooks.layer_stats import LayerWatch
from .hooks.pipeline_balance import StageWatch
from .hooks.timeline import Timeline
from .hooks.watchdog import Watchdog
from .interrupt import Interrupt
from .measure.ceilings import peak_flops
from .mesh_coordinator import MeshCoordinator, StopFlag
from .metrics import Meter, RankWatch, all_finite, line
from .phase_runner import PhaseRunner
from .settings import Settings, read_settings

TUNING = "measuring which kernels are quickest for these shapes, once on GPUs of this kind"


def train(
    run: Path,
    *,
    progress: Progress | None = None,
    hooks: Iterable[Hook] = (),
    disk: Disk | None = None,
    rendezvous: Rendezvous | None = None,
    stays: bool = False,
) -> dict[str, float]:
    """Trains the run in directory `run` to its last step, from its newest whole checkpoint; the last figures.

    Checkpoints go to `disk`: this machine's, unless somebody wants to see how a bad one is borne. A failure is reported
    to the other ranks by `rendezvous`. With `stays` the ranks keep their world, for what follows.
    """
    trainer = Trainer(run, read_settings(run), progress or Silent(), list(hooks), disk=disk)
    # Reported before anything is closed, which may wait for the others.
    reporting = rendezvous.reporting(lambda: trainer.step) if rendezvous else contextlib.nullcontext()
    try:
        with contextlib.closing(trainer), trainer.interrupt, trainer.watchdog, reporting:
            return trainer.train()
    finally:
        # Not when training failed: the others may be in the middle of a collective, and to leave takes all ranks.
        if trainer.ends_together and not stays:
            leave()


class Trainer:
    """One process's part in a training run."""

    def __init__(
        self, run: Path, settings: Settings, progress: Progress, hooks: list[Hook], *, disk: Disk | None = None
    ) -> None:
        self._run, self._settings, self._progress, self._hooks = run, settings, progress, hooks
        plan = settings.planned.phases[0].plan
        place = ranks()
        self._device = pick_device(plan, place)
        join(plan, place)
        self._mesh = Mesh(plan, place.rank)
        self._coordinator = MeshCoordinator(self._mesh.control)
        self._stop_flag = StopFlag(self._mesh.control)
        self._leads = place.rank == 0
        if settings.train.threads:
            torch.set_num_threads(settings.train.threads)
        self._events = EventLog(run, rank=place.rank)
        self._checkpointer = Checkpointer(
            run,
            settings.checkpoint,
            warn=self._warn,
            ranks=plan.world,
            place=place,
            attempt=self._coordinator.broadcast(f"{time.time_ns():x}-{place.restart}"),
            coordinator=self._coordinator if plan.world > 1 else None,
            disk=disk,
        )
        self._checkpointer.observe(self._mesh.traffic, but=self._mesh.control.name)
        self._peak = peak_flops(self._device, plan.precision)
        self._meter = Meter(self._device, peak_flops=self._peak, traffic=self._mesh.traffic)
        self._layers = LayerWatch(
            settings.train.layer_stats_every_steps,
            events=self._events,
            warn=self._warn,
            scaled_loss=plan.precision == "fp16",
        )
        self._policy = Policy(settings.train.guard)
        # An optimizer on the host waits for whoever looks at gradients.
        looks = any(type(hook).on_gradients is not Hook.on_gradients for hook in hooks)
        points = Points(
            on_gradients=[self._on_gradients] if looks else [],
            before_change=[self._checkpointer.fence],
            before_tuning=[lambda: progress.say(TUNING)] if self._leads else [],
            after_tuning=[self._after_tuning],
        )
        self._reading = ReadingWatch(self._events, say=progress.say, warn=self._warn, adapt=settings.load.autotune)
        self._phase_runner = PhaseRunner(
            settings,
            self._checkpointer,
            device=self._device,
            points=points,
            stalls=self._reading.stalls,
            mesh=self._mesh,
            packages=packages_folder(run, settings.load),
        )
        self._stages = StageWatch(
            run, settings.planned, self._mesh.control, events=self._events, say=progress.say if self._leads else None
        )
        self.interrupt = Interrupt()
        self.ends_together = False
        """Whether all ranks have come to the end, or to a stop that they agreed on."""
        self.watchdog = Watchdog(run, settings.train.faults, rank=place.rank)
        self._ranks = RankWatch(self._mesh.control, events=self._events, sigma=settings.train.faults.straggler_sigma)
        self._timeline = Timeline(
            run,
            steps=settings.train.timeline_steps,
            last_step=settings.planned.steps,
            rank=place.rank,
            world=plan.world,
            traffic=self._mesh.traffic,
            coordinator=self._coordinator,
            say=progress.say,
        )

    @property
    def step(self) -> int:
        """Steps done."""
        return self._phase_runner.at.step

    def train(self) -> dict[str, float]:
        phase_runner = self._phase_runner
        self._restore()
        self._checkpointer.spare(phase_runner.stable_step)
        self._checkpointer.retain(best_step=phase_runner.running.stopper.best_step if phase_runner.running else 0)
        self._begin()
        while phase_runner.running:
            try:
                self._checkpointer.spare(phase_runner.stable_step)
                self._enter(phase_runner.running)
                self._train_phase(phase_runner.running)
                self._reading.leave(phase_runner.at.step)
                with self.watchdog.paused():
                    phase_runner.advance()
            except RollBack as failure:
                self._roll_back(failure)
        return self._end()

    def _train_phase(self, running: ActivePhase) -> None:
        """The steps of a phase, from where it stands to its end."""
        at, phase, settings = self._phase_runner.at, running.phase, self._settings
        phase_plan = self._settings.planned.phases[0].plan
        ended = False
        while not ended:
            if self._stop_flag.exchange(self.interrupt.asked):
                self._leave()
            self._checkpointer.step_began()
            self._timeline.step_began(at.step + 1)
            with label("data wait"), self._meter.watch("data"), self._checkpointer.traffic():
                batch = self._next_batch(running)
            self._probe(running, batch)
            if at.phase_step in phase.schedule.restarts:
                running.begin_cycle()
                self._progress.say(f"step {at.step}: a new cycle of the learning rate begins")
            lr = running.learning_rate(at.phase_step)
            same_bits = deterministic(self._device) if phase_plan.deterministic else contextlib.nullcontext()
            with self._layers.watching(running.executor, step=at.step + 1), same_bits:
                result = running.executor.step(batch, lr=lr)
            self._reading.after_step(running.importance, result.sequence_losses, step=at.step + 1)
            self._meter.add(result, tokens=running.tokens_read(), flops=running.flops(at.phase_step))
            at.phase_step, at.step = at.phase_step + 1, at.step + 1
            at.tokens += batch.tokens.numel() * self._mesh.data.size
            self.watchdog.beat(at.step)
            self._progress.advance(at.step)
            point(f"train.step:{at.step}")
            for hook in self._hooks:
                hook.after_step(at.step)
            if self._device.type == "cpu":
                self._checkpointer.steps_settled()
            if not self._checkpointer.prepared:
                self._checkpointer.prepare(self._phase_runner.state())
            ended = at.phase_step == phase.steps
            if ended or _is_due(at.step, settings.train.log_every_steps):
                with label("log"):
                    self._log(lr)
            if ended or _is_due(at.step, settings.train.validate_every_steps):
                with label("validate"), self._meter.paused(), self.watchdog.paused():
                    ended = self._validate(running) or ended
            if ended or self._checkpointer.interval.due(at.step) or at.phase_step == phase.stable_steps:
                with label("save"), self._meter.paused(), self.watchdog.paused():
                    self._save(ended=ended)
            elif self._checkpointer.copy_due(at.step):
                with label("save"), self._meter.paused():
                    self._checkpointer.copy(self._sound_state(ended=False))
            self._report_saves()
            self._timeline.step_ended()

    def _next_batch(self, running: ActivePhase) -> Batch:
        """The batch of the step at hand, in rows as long as it wants them."""
        at, loader = self._phase_runner.at, running.data.loader
        rows = running.phase.rows(at.phase_step)
        loader.skip(rows * self._policy.left_out(at.step + 1))
        batch = loader.next(rows).cut(running.phase.length(at.phase_step))
        for hook in self._hooks:
            batch = hook.on_batch(at.step + 1, batch)
        return batch

    def _probe(self, running: ActivePhase, batch: Batch) -> None:
        """Looks for silent corruption before the step at hand, when that is due."""
        step = self._phase_runner.at.step + 1
        if _is_due(step, self._settings.train.faults.probe_every_steps):
            start = time.perf_counter()
            with self._meter.paused(), self.watchdog.paused(), deterministic(self._device):
                probe(running.executor, batch, step=step)
            self._events.write("probed", step=step, seconds=time.perf_counter() - start)

    def _log(self, lr: float) -> None:
        at = self._phase_runner.at
        self._look_for_anomalies()
        record = self._meter.read(at.step, tokens=at.tokens, lr=lr) | self._reading.read(at.step)
        self._checkpointer.steps_settled()
        self._events.write("step", phase=at.phase, **record)
        self._ranks.look(record)
        self._progress.advance(at.step, line(record))
        for hook in self._hooks:
            hook.on_metrics(at.step, record)

    def _validate(self, running: ActivePhase) -> bool:
        """Measures the validation loss; whether the phase is to end with it."""
        self._checkpointer.steps_settled()
        self._look_for_anomalies()
        start, step, held_out = time.perf_counter(), self._phase_runner.at.step, running.data.held_out
        scores = running.executor.score(held_out).log_probabilities.double().cpu()
        weight = held_out.weight.double()
        loss = -(scores * weight).sum().item() / max(1.0, weight.sum().item())
        bits_per_byte = loss / math.log(2) / running.data.bytes_per_token
        seconds = time.perf_counter() - start
        sequences = len(held_out.tokens)
        self._events.write(
            "validation", step=step, loss=loss, bits_per_byte=bits_per_byte, sequences=sequences, seconds=seconds
        )
        measured = counted(sequences, "held-out sequence")
        self._progress.say(f"step {step}: validation loss {loss:.4f} ({measured})")
        self._expect_again(self._settings.train.validate_every_steps, seconds)
        for hook in self._hooks:
            hook.on_validation(step, loss)
        if running.plateau.observe(loss):
            share = running.plateau.share
            self._progress.say(f"step {step}: validation stopped gaining; learning rate now x {share:.3g}")
        if running.stopper.observe(loss, step=step):
            self._checkpointer.save_best(self._phase_runner.state())
        if running.stopper.stops:
            self._stop_early(running)
        return running.stopper.stops

    def _stop_early(self, running: ActivePhase) -> None:
        """Ends the phase with the weights of its best validation."""
        best = running.stopper.best_step
        self._events.write("stopped_early", step=self._phase_runner.at.step, best_step=best)
        self._progress.say(
            f"step {self._phase_runner.at.step}: validation stopped gaining; the phase ends as of step {best}"
        )
        weights = self._checkpointer.best_weights(best, running.executor.wants())
        running.executor.load_state(weights, {})
        weights.check()

    def _save(self, *, ended: bool) -> None:
        self._checkpointer.steps_settled()
        start = time.perf_counter()
        state = self._sound_state(ended=ended)
        self._checkpointer.save(state, spent_s=time.perf_counter() - start)
        if self._phase_runner.running:
            self._stages.look(self._phase_runner.running.executor, phase=state.phase, step=state.step)
        if ended:
            # The next phase may take the memory, and the end of a run is not announced before it is durable.
            self._checkpointer.settle()
            self._report_saves()
            while not self._checkpointer.holds(state.step):
                # Each failure counts; the last one allowed raises.
                self._checkpointer.save(state)
                self._checkpointer.settle()
                self._report_saves()

    def _sound_state(self, *, ended: bool) -> State:
        """The state at hand, after a look at what may be wrong with it."""
        self._look_for_anomalies()
        state = self._phase_runner.state(ended=ended)
        # Saved, such weights would push the last good ones out of retention.
        if not self._coordinator.agree(all_finite(_local(tensor) for tensor in state.model.values())):
            raise UserError(_diverged("the weights are no longer finite", state.step))
        return state

    def _report_saves(self) -> None:
        """Tells which checkpoints have become durable, and how often they will come."""
        for saved in self._checkpointer.finished():
            if saved.error:
                self._events.write("save_failed", step=saved.step, error=str(saved.error))
                continue
            self._expect_save(saved.copy_s + saved.persist_s)
            if not self._leads:
                continue  # rank 0 alone knows when it is whole
            self._events.write(
                "saved",
                step=saved.step,
                path=str(saved.path),
                seconds=saved.blocked_s,
                copy_s=saved.copy_s,
                persist_s=saved.persist_s,
                tasks_s=saved.tasks_s,
                bytes=saved.bytes,
            )
            for hook in self._hooks:
                hook.after_save(saved.step, str(saved.path))
        for copied in self._checkpointer.copied():
            self._events.write("copied", **dataclasses.asdict(copied))
        decision = self._checkpointer.decide()
        if decision:
            self._events.write("save_interval", step=self._phase_runner.at.step, **dataclasses.asdict(decision))
            self._progress.say(f"checkpoints: {decision}")

    def _expect_again(self, every_steps: int, seconds: float) -> None:
        """Tells the loader that the steps pause for as long again, `every_steps` from now: it reads on meanwhile."""
        self._expect("evaluation", every_steps, seconds)

    def _expect_save(self, seconds: float) -> None:
        """Tells the loader that the storage will be busy for as long again: what is read then is at hand before."""
        self._expect("checkpoint", self._checkpointer.interval.until_due(self._phase_runner.at.step), seconds)

    def _expect(self, kind: Kind, in_steps: int, seconds: float) -> None:
        running, done = self._phase_runner.running, self._phase_runner.at.phase_step
        if running and in_steps:
            rows = sum(running.phase.rows(step) for step in range(done, done + in_steps))
            running.data.loader.expect(Expected(kind=kind, at=rows, seconds=seconds))

    def _look_for_anomalies(self) -> None:
        """Tells what went wrong since the last look, and does what the guard says."""
        for anomaly in self._policy.judge(self._meter.take_anomalies(), last_step=self._phase_runner.at.step):
            self._events.write("anomaly", step=anomaly.step, what=anomaly.what, action=anomaly.action)
            self._progress.say(f"warning: step {anomaly.step}: {anomaly.what} ({anomaly.action})")
            for hook in self._hooks:
                hook.on_anomaly(anomaly.step, anomaly.what, anomaly.action)
            if anomaly.action == "stop" or self._policy.exhausted:
                raise UserError(_diverged(anomaly.what, anomaly.step))
            if anomaly.action == "rollback":
                raise RollBack(anomaly)

    def _roll_back(self, failure: RollBack) -> None:
        """Goes back to the newest checkpoint, or to the beginning, and repeats the steps from there."""
        step = failure.anomaly.step
        times = self._policy.note_failure(step)
        if times > self._settings.train.guard.max_consecutive:
            raise UserError(_diverged(f"{failure.anomaly.what}, in spite of {times - 1} rollbacks,", step))
        self._restore(rolling_back=True)
        left_out = self._policy.left_out(step)
        self._events.write("rolled_back", step=self._phase_runner.at.step, failed_step=step, left_out=left_out)
        without = f" without {left_out} of its batches" if left_out else ""
        self._progress.say(f"rolled back to step {self._phase_runner.at.step}; repeating step {step}{without}")
        self._progress.advance(self._phase_runner.at.step)

    def _restore(self, *, rolling_back: bool = False) -> None:
        """Takes over the newest whole checkpoint, or begins the first phase."""
        start = time.perf_counter()
        with self.watchdog.paused():
            path = self._phase_runner.restore()
        if path or rolling_back:
            seconds = time.perf_counter() - start
            self._events.write("restored", step=self._phase_runner.at.step, path=str(path or ""), seconds=seconds)
        found = self._checkpointer.found
        if found and path:
            self._events.write("gathered", **dataclasses.asdict(found))
            places = ", ".join(f"{size} bytes from {source}" for source, size in found.sources.items())
            self._progress.say(f"step {found.step}: {places}")
        if path and not rolling_back:
            self._progress.say(f"continuing from {path}")

    def _enter(self, running: ActivePhase) -> None:
        """Tells that a phase begins or goes on."""
        at, phase = self._phase_runner.at, running.phase
        if at.phase_step == 0:
            start = running.start
            self._events.write("phase_started", step=at.step, phase=phase.index, name=phase.name, start_from=start)
            if start:
                self._progress.say(f"starting from {start}")
            if len(self._settings.phases) > 1:
                self._progress.say(f"phase {phase.name}: {phase.steps} steps of rows of {phase.sequence_length} tokens")
        for contest in running.executor.contests:
            self._events.write("kernel_chosen", step=at.step, what=contest.what, milliseconds=contest.milliseconds)
        for hook in self._hooks:
            hook.before_phase(phase.index, phase.name)
        self._reading.enter(running.data.loader, step=at.step)
        self._meter.restart()

    def _begin(self) -> None:
        step = self._phase_runner.at.step
        self._events.write(
            "train_started",
            step=step,
            device=str(self._device),
            world=self._settings.planned.phases[0].plan.world,
            torch=torch.__version__,
            peak_flops=self._peak,
            parameters=self._settings.planned.phases[0].spec.parameters(),
            flops_per_token=self._settings.planned.phases[0].spec.flops_per_token(),
        )
        warning = version_warning()
        if warning:
            self._warn(warning)
        self._progress.begin("train", self._settings.planned.steps, "steps")
        self._progress.advance(step)
        self._first = step
        if self._phase_runner.running:
            self._timeline.before_training(step)
            for hook in self._hooks:
                hook.before_training(step)
        self._start = time.perf_counter()

    def _leave(self) -> None:
        """Saves what is made and ends as Ctrl-C does, or well when a scheduler asked; the same command continues."""
        with self.watchdog.paused():
            if not self._coordinator.agree(self.interrupt.preempted_at is None):
                self._make_room(self.interrupt.preempted_at or time.monotonic())
            self._checkpointer.settle()
            self._save_last()
            self._checkpointer.interval.stop()
        self.ends_together = True
        raise KeyboardInterrupt

    def _make_room(self, asked: float) -> None:
        """Ends in the grace time, with the step at hand saved when that can be done by then."""
        step, grace = self._phase_runner.at.step, self._settings.train.faults.grace_s
        fits = self._checkpointer.hurry(asked + grace - time.monotonic())
        try:
            if fits:
                self._checkpointer.settle()
                self._save_last()
        except StorageError as error:
            self._warn(str(error))
        saved = self._checkpointer.holds(step)
        if saved:
            self._checkpointer.interval.stop()
        self._events.write("preempted", step=step, saved=saved, seconds=time.monotonic() - asked)
        state = f"step {step} is saved" if saved else f"no time to save step {step}, older checkpoints are intact"
        self.ends_together = True
        raise Preempted(f"preempted: {state}; the same command continues")

    def _save_last(self) -> None:
        """Makes a checkpoint of the step at hand, when there is none."""
        step = self._phase_runner.at.step
        if step and not self._checkpointer.holds(step):
            self._save(ended=False)
            self._checkpointer.settle()
            self._progress.say(f"interrupted: saved step {step}")
        self._report_saves()

    def _end(self) -> dict[str, float]:
        self._timeline.finish()
        self._checkpointer.end()
        self._report_saves()
        step, seconds = self._phase_runner.at.step, time.perf_counter() - self._start
        self._events.write("train_finished", step=step, seconds=seconds)
        made = f"steps {self._first + 1} to {step}" if 0 < self._first < step else f"{step - self._first} steps"
        self._progress.end(f"{made} in {duration(seconds)}")
        for hook in self._hooks:
            hook.after_training(step)
        self.ends_together = True
        return {"step": step, "tokens": self._phase_runner.at.tokens, **self._losses()}

    def close(self) -> None:
        """Finishes what is being saved, stops the reading thread and closes the diary."""
        self._checkpointer.close()
        self._phase_runner.close()
        self._events.close()

    def _after_tuning(self, tuning: Tuning) -> None:
        self._events.write("tuned", step=self._phase_runner.at.step, **dataclasses.asdict(tuning))
        if tuning.left_out and self._leads:
            self._progress.say(tuning.reason())

    def _on_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for hook in self._hooks:
            hook.on_gradients(self._phase_runner.at.step + 1, gradients)

    def _losses(self) -> dict[str, float]:
        """The last training and validation loss, from the diary: this process may have found nothing left to do."""
        events = list(read_events(self._events.path))
        found = {"train_loss": steps_of(events), "validation_loss": steps_of(events, "validation")}
        return {name: records[-1]["loss"] for name, records in found.items() if records}

    def _warn(self, message: str) -> None:
        self._events.write("warning", message=message)
        self._progress.say(f"warning: {message}")


def _local(tensor: torch.Tensor | LocalShard) -> torch.Tensor:
    return tensor.local if isinstance(tensor, LocalShard) else tensor


def _is_due(done: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after step `done`."""
    return every > 0 and done % every == 0


def _diverged(what: str, step: int) -> str:
    return (
        f"{what} at step {step}; no checkpoint holds broken weights, the same command continues from the last one. "
        "Lower `train.schedule.peak_lr`, lengthen `train.schedule.warmup_steps` or use `train.precision=fp32`; "
        "`[train.guard]` says what is done about it"
    )
