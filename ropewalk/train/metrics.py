"""What a run tells about itself: gathered on the device, read once an interval.

Reading a tensor waits for the device; between two readings nothing does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ropewalk.base.clock import Stopwatch
from ropewalk.parallel.compat import peak_memory_bytes
from ropewalk.parallel.executor import StepResult


class Meter:
    """Sums results of steps on the device and turns them into one record an interval."""

    def __init__(
        self, device: torch.device, *, tokens_per_step: int, flops_per_token: int, peak_flops: float | None
    ) -> None:
        self._device = device
        self._tokens = tokens_per_step
        self._flops = flops_per_token
        self._peak = peak_flops
        self._scale: torch.Tensor | None
        self.watch = Stopwatch()
        self._clear()

    def add(self, result: StepResult) -> None:
        """Takes one step's result; does not wait."""
        self._loss += result.loss
        self._skipped += result.skipped
        self._norm = result.grad_norm
        self._scale = result.loss_scale
        self._steps += 1

    def read(self, step: int, *, lr: float) -> dict[str, Any]:
        """The record of the interval that ends with `step` (fields as in docs/formats.md), then starts a new one."""
        last = [self._norm.to(self._loss), *([] if self._scale is None else [self._scale])]
        loss, skipped, norm, *scale = torch.stack([self._loss, self._skipped, *last]).tolist()
        seconds = time.perf_counter() - self._start
        spent = self.watch.take()
        pace = self._tokens * self._steps / seconds
        if self._peak:
            # A peak measured while the machine was busy is too low; what was reached is a better bound.
            self._peak = max(self._peak, pace * self._flops)
        record = {
            "step": step,
            "tokens": step * self._tokens,
            "loss": loss / self._steps,
            "lr": lr,
            "grad_norm": norm,
            "skipped": int(skipped),
            "loss_scale": scale[0] if scale else None,
            "step_s": seconds / self._steps,
            "data_wait_s": spent.get("data", 0.0) / self._steps,
            "tokens_per_s": pace,
            "flops_per_s": pace * self._flops,
            "mfu": pace * self._flops / self._peak if self._peak else None,
            "memory_bytes": peak_memory_bytes(self._device),
        }
        self._clear()
        return record

    def restart(self) -> None:
        """The interval begins now: what was spent on opening and restoring does not count."""
        self._clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in the block does not count as training. Waits for the device first: its queued steps do count."""
        self._loss.item()
        begin = time.perf_counter()
        yield
        self._start += time.perf_counter() - begin

    def _clear(self) -> None:
        self._loss = torch.zeros((), device=self._device)
        self._skipped = torch.zeros((), device=self._device)
        self._norm = torch.zeros((), device=self._device)
        self._scale = None
        self._steps = 0
        self._start = time.perf_counter()


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no number is infinite or nan; waits for the device once."""
    return bool(torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all())


def line(record: dict[str, Any], *, steps: int) -> str:
    """One aligned line for people."""
    mfu = f"  mfu {record['mfu']:4.0%}" if record["mfu"] else ""
    wait = record["data_wait_s"] / record["step_s"]
    return (
        f"step {record['step']:>{len(str(steps))}}/{steps}  loss {record['loss']:.4f}  "
        f"grad {record['grad_norm']:5.2f}  lr {record['lr']:.2e}  "
        f"{record['tokens_per_s']:>8,.0f} tok/s{mfu}  data wait {wait:.1%}"
    )
