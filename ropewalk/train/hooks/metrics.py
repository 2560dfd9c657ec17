"""Metrics of a run: summed on the device, read once per logging interval.

Reading a tensor waits for the device; between two readings nothing does.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropewalk.base.clock import Stopwatch
from ropewalk.base.events import EventLog
from ropewalk.parallel.comm import Group, Traffic
from ropewalk.parallel.compat import peak_memory_bytes
from ropewalk.parallel.executor import StepResult

from .hook import Activity, Hook
from .watchdog import stragglers

if TYPE_CHECKING:
    from ..training_run import TrainingRun

INTERVALS = 5
"""Logging intervals whose median is compared: a rank that is slow once is no straggler."""


class Metrics(Hook):
    """Writes the event `step` at regular intervals and at the end of each phase, and compares the ranks."""

    def __init__(self, meter: Meter, ranks: RankWatch, *, every_steps: int) -> None:
        self._meter, self._ranks, self._every_steps = meter, ranks, every_steps

    def before_phase(self, run: TrainingRun) -> None:
        self._meter.restart()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        self._meter.add(result, tokens=run.phase.tokens_read(), flops=run.phase.flops(run.at.phase_step - 1))

    def end_step(self, run: TrainingRun) -> None:
        if run.is_due(self._every_steps):
            with run.during("log"):
                self._log(run)

    def during(self, run: TrainingRun, activity: Activity) -> contextlib.AbstractContextManager[None]:
        if activity == "data":
            return self._meter.watch("data")
        pauses = activity in ("probe", "validate", "evaluate", "save", "copy")
        return self._meter.paused() if pauses else contextlib.nullcontext()

    def _log(self, run: TrainingRun) -> None:
        run.sync()
        metrics = self._meter.read(run.step, tokens=run.at.tokens, lr=run.lr)
        for hook in run.hooks:
            metrics |= hook.read_metrics(run)
        run.events.write("step", phase=run.at.phase, **metrics)
        self._ranks.look(metrics)
        run.progress.advance(run.step, line(metrics))
        for hook in run.hooks:
            hook.on_metrics(run, metrics)


class Meter:
    """Sums results of steps on the device and turns them into one record an interval."""

    def __init__(
        self,
        device: torch.device,
        *,
        peak_flops: float | None,
        traffic: Traffic | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device, self._clock = device, clock
        self._traffic = traffic or Traffic()
        self._peak = peak_flops
        self._anomalies: list[Tensor] = []
        self._scale: Tensor | None
        self.watch = Stopwatch(clock)
        self._clear()

    def add(self, result: StepResult, *, tokens: int, flops: int) -> None:
        """Takes one step's result and how much it read and computed; does not wait."""
        finite = torch.isfinite(result.loss)
        self._loss += torch.where(finite, result.loss, 0)
        self._finite += finite
        self._skipped += result.skipped
        self._anomalies.append(result.anomaly)
        self._tokens += tokens
        self._flops += flops
        self._norm = result.grad_norm
        self._scale = result.loss_scale
        self._steps += 1
        self._traffic.settle()

    def take_anomalies(self) -> list[int]:
        """The codes of the steps since the last call (parallel/anomaly_guard.py), in order; waits for the device."""
        codes = torch.stack(self._anomalies).tolist() if self._anomalies else []
        self._anomalies = []
        return codes

    def read(self, step: int, *, tokens: int, lr: float) -> dict[str, Any]:
        """The record of the interval that ends with `step`, when `tokens` are read (fields as in docs/formats.md), then
        starts a new one. The loss is the mean of those that are finite."""
        last = [self._norm, *([] if self._scale is None else [self._scale])]
        loss, finite, skipped, norm, *scale = torch.stack(
            [t.double() for t in (self._loss, self._finite, self._skipped, *last)]
        ).tolist()
        seconds = self._clock() - self._start
        # The device has nothing left to do: all its waits are read.
        spent, sent, exposed = self.watch.take(), self._traffic.take(), self._traffic.take_waited()
        data_wait = spent.get("data", 0.0)
        flops = self._flops / seconds
        if self._peak:
            # A peak measured while the machine was busy is too low; what was reached is a better bound.
            self._peak = max(self._peak, flops)
        record = {
            "step": step,
            "tokens": tokens,
            "loss": loss / finite if finite else float("nan"),
            "lr": lr,
            "grad_norm": norm,
            "skipped": int(skipped),
            "loss_scale": scale[0] if scale else None,
            "step_s": seconds / self._steps,
            "data_wait_s": data_wait / self._steps,
            "exposed_s": exposed / self._steps,
            "busy_s": max(0.0, seconds - data_wait - exposed) / self._steps,
            "sent_bytes": {f"{group} {kind}": each.bytes / self._steps for (group, kind), each in sent.items()},
            "tokens_per_s": self._tokens / seconds,
            "flops_per_s": flops,
            "mfu": flops / self._peak if self._peak else None,
            "memory_bytes": peak_memory_bytes(self._device),
        }
        self._clear()
        return record

    def restart(self) -> None:
        """The interval begins now: what was spent on opening and restoring does not count."""
        self._anomalies = []
        self._clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in the block does not count as training, nor does what is sent in it. Waits for the device first: its
        queued steps do count."""
        self._loss.item()
        begin, waited, sent = self._clock(), self._traffic.take_waited(), self._traffic.take()
        yield
        self._start += self._clock() - begin
        self._traffic.drop_queued()
        self._traffic.waited_s, self._traffic.sent = waited, sent

    def _clear(self) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._finite = torch.zeros((), device=self._device)
        self._tokens = self._flops = 0
        self._skipped = torch.zeros((), device=self._device)
        self._norm = torch.zeros((), device=self._device)
        self._scale = None
        self._steps = 0
        self._traffic.take()
        self._traffic.calibrate()
        self._traffic.take_waited()
        self._start = self._clock()


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no number is infinite or nan; waits for the device once."""
    return bool(torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all())


def all_ranks(record: dict[str, Any], group: Group) -> dict[str, Any]:
    """Who waited for whom in the interval of `record`: figures of every rank, and the rank that computed longest. All
    ranks of `group` must call, with their own records."""
    fields = ("busy_s", "data_wait_s", "exposed_s")
    mine = torch.tensor([record[field] for field in fields], dtype=torch.float64)
    table = group.start_all_gather(mine).wait().T.tolist()
    busy = table[0]
    return {**dict(zip(fields, table, strict=True)), "slowest_rank": busy.index(max(busy))}


class RankWatch:
    """Compares the ranks of a run, and names stragglers.

    Steps of synchronous ranks take equally long: the quick ones wait for the slow one. So it is the time in which a
    rank is busy that tells them apart.
    """

    def __init__(self, group: Group, *, events: EventLog, sigma: float) -> None:
        self._group, self._events, self._sigma = group, events, sigma
        self._busy: deque[list[float]] = deque(maxlen=INTERVALS)

    def look(self, record: dict[str, Any]) -> None:
        """Writes the events of the interval of `record`, on the first rank. All ranks must call."""
        if self._group.size == 1:
            return
        told, step = all_ranks(record, self._group), record["step"]
        if self._group.rank > 0:
            return
        self._events.write("ranks", step=step, **told)
        self._busy.append(told["busy_s"])
        busy = {rank: median(each) for rank, each in enumerate(zip(*self._busy, strict=True))}
        for rank, sigma in stragglers(busy, sigma=self._sigma).items():
            self._events.write("straggler", step=step, slow_rank=rank, busy_s=busy[rank], sigma=round(sigma, 2))


def line(record: dict[str, Any]) -> str:
    """The figures of an interval for people, aligned, the most important first."""
    mfu = f"  mfu {record['mfu']:<4.0%}" if record["mfu"] else ""
    wait = record["data_wait_s"] / record["step_s"]
    return (
        f"loss {record['loss']:.4f}  {record['tokens_per_s']:>8,.0f} tokens/s  grad {record['grad_norm']:<5.2f}  "
        f"lr {record['lr']:.2e}{mfu}  data wait {wait:.1%}"
    )
