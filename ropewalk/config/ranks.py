"""Which process of how many this is, from the environment that torchrun, Open MPI or Slurm sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ropewalk.base.errors import ConfigError, Problem

# The innermost launcher first: torchrun and mpirun started inside a Slurm job inherit Slurm's variables.
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process is `rank` of `world`, and number `local_rank` on its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    rendezvous: str = "env://"
    """Where the processes find each other, as torch.distributed says it."""


def ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The first of torchrun, Open MPI and Slurm whose variables are all set; else one process."""
    for names in _NAMES:
        if all(name in environment for name in names):
            return Ranks(*(_number(name, environment[name]) for name in names))
    return Ranks()


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        problem = Problem("environment", f'{name} is "{text}"', "launchers set it to a number; unset it")
        raise ConfigError([problem])
    return int(text)
