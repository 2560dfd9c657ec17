"""What a job on a cluster asks for, whoever schedules it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training, on `nodes` machines."""

    name: str
    recipe: str
    """Path of the recipe, as the job sees it."""
    overrides: Sequence[str] = ()
    runs: str = "runs"
    nodes: int = 1
    gpus_per_node: int = 0
    """A process a GPU; 0: one process a machine, on its CPU."""
    max_restarts: int = 3
    """How often all processes start again because one of them died."""
    grace_s: float = 30.0
    """How long a process may save when it is asked to end."""

    @property
    def processes_per_node(self) -> int:
        return max(1, self.gpus_per_node)

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def environment(self) -> dict[str, str]:
        """What the machines' agents are told."""
        return {
            # Else torch 2.13 keeps one store over all attempts, in which gloo finds the addresses of dead processes.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # Between the signal to end and the one that kills.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(self.grace_s) + 10),
        }

    @property
    def command(self) -> list[str]:
        """What every process runs."""
        return ["ropewalk", "train", self.recipe, *self.overrides, "--runs", self.runs]

    def __str__(self) -> str:
        machines = f"{self.nodes} machine{'s' if self.nodes > 1 else ''}"
        return f"{machines} with {self.gpus_per_node} GPUs each" if self.gpus_per_node else f"{machines}, on the CPU"
