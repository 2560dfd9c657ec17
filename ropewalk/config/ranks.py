"""Which process of how many this is, from the environment that torchrun, Slurm or Open MPI sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process is `rank` of `world`, and number `local_rank` on its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0


def ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The first of torchrun, Slurm and Open MPI whose variables are all set; else one process."""
    for names in _NAMES:
        if all(name in environment for name in names):
            return Ranks(*(int(environment[name]) for name in names))
    return Ranks()
