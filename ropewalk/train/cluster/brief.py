"""What the ranks of `doctor cluster` are to check: the axes of the plan, the folder of runs, times. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.plan.config import Backend, ContextKind
from ropewalk.plan.plan import Plan

FILE, TABLE = "brief.json", "table.json"
"""In the folder that a worker is started with: what to check, and what rank 0 found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Brief:
    """The same on all ranks: rank 0's."""

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
    """Whether a recipe gave the axes; else there is one, `world`."""
    memory_bytes: int = 0
    """Forecast of a rank's memory; 0: not known."""
    checkpoint_bytes: int = 0
    """Forecast of one checkpoint; 0: not known."""
    checkpoints: int = 0
    """How many of them the run keeps at once."""
    seconds: float = 0.5
    """Time for each measurement."""
    timeout_s: float = 60.0
    """How long a step may take before the ranks that have not done it are named."""

    @property
    def plan(self) -> Plan:
        """A plan with these axes, for the groups of ranks that the run will use."""
        return Plan(
            device=self.device,
            precision="fp32",
            batch_size=1,
            microbatch_size=1,
            pipeline=self.pipeline,
            replicate=self.replicate,
            shard=self.shard,
            context=self.context,
            tensor=self.tensor,
            chunks=self.chunks,
            context_method=self.context_method,
            backend=self.backend,
        )

    def tree(self) -> dict[str, Any]:
        """Plain values for JSON; `Brief(**tree)` reads them."""
        return dataclasses.asdict(self)


def existing_folder(folder: Path) -> Path:
    """`folder`, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
