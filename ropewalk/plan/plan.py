"""A Plan: how the run is laid out on devices. Pure data, made on a laptop, executed by `parallel`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.files import read_json, upgraded, write_json
from ropewalk.base.progress import amount
from ropewalk.model.spec import Optimizer, Spec

from .config import Layout
from .forecast import Memory, Precision, memory
from .machine import Machine

FORMAT = 1
FILE = "plan.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One layout. The degrees multiply to the number of processes; with one process all are 1."""

    device: Literal["cpu", "cuda"]
    precision: Precision
    batch_rows: int
    microbatch_rows: int
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """Processes."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def microbatches(self) -> int:
        """Forward and backward passes in one step of one data rank."""
        return self.batch_rows // (self.microbatch_rows * self.replicate * self.shard)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan with what it was made from and what it will need."""

    plan: Plan
    spec: Spec
    memory: Memory
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.plan.batch_rows * self.spec.sequence_length

    @property
    def flops(self) -> int:
        """FLOPs of the whole run, causal-exact."""
        return self.tokens * self.spec.flops_per_token("causal")

    def tree(self) -> dict[str, Any]:
        """Plain values for JSON, with what follows from them under `derived`."""
        derived = {
            "parameters": self.spec.parameters(),
            "flops_per_token": self.spec.flops_per_token(),
            "flops_per_token_causal": self.spec.flops_per_token("causal"),
            "tokens": self.tokens,
            "flops": self.flops,
        }
        return {"format": FORMAT, **dataclasses.asdict(self), "derived": derived}


def choose(
    spec: Spec,
    layout: Layout,
    machine: Machine,
    *,
    batch_rows: int,
    steps: int,
    precision: Precision | Literal["auto"],
    optimizer: Optimizer = "adamw",
) -> Planned:
    """The plan for one process: the device, and the largest microbatch whose forecast fits its memory."""
    device = layout.device
    if device == "auto":
        device = "cuda" if machine.gpus else "cpu"
    if device == "cuda" and not machine.gpus:
        raise UserError("`plan.device` is cuda, but this machine shows no GPU; set `plan.device=cpu`")
    budget = layout.memory_bytes or round(
        0.8 * (machine.gpus[0].memory_bytes if device == "cuda" else machine.memory_bytes)
    )
    if precision == "auto":
        hardware = machine.gpus[0].capability >= 8.0 if device == "cuda" else machine.bf16
        precision = "bf16" if hardware else "fp32"

    def needed_with(rows: int) -> Memory:
        return memory(spec, rows=rows, precision=precision, optimizer=optimizer)

    divisors = _candidates(spec, batch_rows, device)
    fitting = (rows for rows in divisors if needed_with(rows).total <= budget)
    rows = layout.microbatch_rows or next(fitting, divisors[-1])
    if batch_rows % rows:
        raise UserError(
            f"`plan.microbatch_rows` ({rows}) does not divide `train.batch_rows` ({batch_rows}); choose a divisor"
        )
    plan = Plan(device=device, precision=precision, batch_rows=batch_rows, microbatch_rows=rows)
    needed = needed_with(rows)
    if needed.total > budget:
        raise UserError(_does_not_fit(needed, budget, rows))
    return Planned(plan=plan, spec=spec, memory=needed, steps=steps)


def save_plan(run: Path, planned: Planned) -> None:
    """Commits `plan.json`."""
    write_json(run / FILE, planned.tree())


def load_plan(run: Path) -> Planned:
    """The plan that was saved in `run`."""
    path = run / FILE
    tree: dict[str, Any] = upgraded(read_json(path, what="plan"), path=path, what="plan", current=FORMAT, upgrades={})
    try:
        return Planned(
            plan=Plan(**tree["plan"]),
            spec=Spec(**tree["spec"]),
            memory=Memory(**tree["memory"]),
            steps=tree["steps"],
        )
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: this plan is damaged: {error}; delete it and run the same command again") from None


CPU_MICROBATCH_TOKENS = 4096
"""On a CPU a larger microbatch gains nothing (the matrices are big enough) and loses cache: flat above this."""


def _candidates(spec: Spec, batch_rows: int, device: str) -> list[int]:
    """Rows of a microbatch worth trying, largest first."""
    divisors = [rows for rows in range(batch_rows, 0, -1) if batch_rows % rows == 0]
    if device == "cpu":
        small = [rows for rows in divisors if rows * spec.sequence_length <= CPU_MICROBATCH_TOKENS]
        return small or divisors[-1:]
    return divisors


def _does_not_fit(needed: Memory, budget: int, rows: int) -> str:
    parts = ", ".join(f"{name} {amount(value, 'B')}" for name, value in dataclasses.asdict(needed).items())
    remedy = "set a smaller `plan.microbatch_rows`" if rows > 1 else "choose a smaller model or a shorter row"
    return (
        f"plan: {amount(needed.total, 'B')} needed with {rows} {'rows' if rows > 1 else 'row'} a microbatch, "
        f"{amount(budget, 'B')} allowed ({parts}); {remedy}, or raise `plan.memory_bytes`"
    )
