"""What `doctor cluster` checks: the axes of the plan, sizes, time limits. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.plan.config import Backend, ContextKind
from ropewalk.plan.plan import Plan

FILE, TABLE = "brief.json", "table.json"
"""Files in the worker's folder: the brief, and rank 0's table."""
PLAN_FIELDS = ["device", "pipeline", "replicate", "shard", "context", "tensor", "chunks", "context_method", "backend"]
"""Fields that a brief takes from the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Brief:
    """Rank 0's choice for all ranks."""

    device: Literal["cpu", "cuda"]
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    chunks: int = 1
    context_method: ContextKind = "ring"
    backend: Backend = "auto"
    recipe: bool = True
    """Whether the axes come from a recipe; else there is one axis, `world`."""
    memory_bytes: int = 0
    """Forecast memory of a rank; 0: unknown."""
    checkpoint_bytes: int = 0
    """Forecast size of a checkpoint; 0: unknown."""
    checkpoints: int = 0
    """Most checkpoints on disk at once."""
    seconds: float = 0.5
    """Time per measurement."""
    timeout_s: float = 60.0
    """Time limit of a step; then ranks that have not finished it are reported."""

    @property
    def plan(self) -> Plan:
        """A plan with these axes, for the run's groups of ranks."""
        fields = {field: getattr(self, field) for field in PLAN_FIELDS}
        return Plan(precision="fp32", batch_size=1, microbatch_size=1, **fields)

    def tree(self) -> dict[str, Any]:
        """Plain values for JSON; `Brief(**tree)` is the inverse."""
        return dataclasses.asdict(self)


def existing_folder(folder: Path) -> Path:
    """`folder`, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
