"""Which process of how many this is, from the environment that torchrun, Open MPI or Slurm sets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ropewalk.base.errors import ConfigError, Problem

Launcher = Literal["", "torchrun", "mpi", "slurm"]

# Rank, world and rank on this machine. The innermost launcher first: torchrun and mpirun started inside a Slurm job
# inherit Slurm's variables.
_NAMES: dict[Launcher, tuple[str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
SLURM_STEP = "SLURM_STEP_NODELIST"
"""Set for what `srun` starts. The batch script itself has a rank too, 0 of all, though it runs once and alone."""

FIRST_PORT, PORTS = 20_000, 10_000
"""Jobs of one machine meet at ports of their own: the first of a range that is free of services and below the ports
that the kernel gives to outgoing connections (32768), plus the job's number modulo its size."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process is `rank` of `world`, and number `local_rank` on its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    rendezvous: str = "env://"
    """The rendezvous URL, as torch.distributed spells it; "mpi://": through MPI."""
    launcher: Launcher = ""
    """Who started it; "": nobody but the user."""
    local_world: int = 1
    """Processes on this machine."""
    node: int = 0
    """Number of this machine."""
    restart: int = 0
    """How many attempts ended before this one, by the launcher's count."""
    head: str = ""
    """The host of rank 0 as the launcher names it; "": it does not."""

    @property
    def launch(self) -> str:
        """What all processes of one launch share and, mostly, no other launch has."""
        return f"{self.launcher} {self.rendezvous} {self.head} {self.world} {self.restart}"


def ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The first of torchrun, Open MPI and Slurm whose variables are all set; else one process."""
    for launcher, names in _NAMES.items():
        if all(name in environment for name in names) and (launcher != "slurm" or SLURM_STEP in environment):
            rank, world, local_rank = (_number(name, environment[name]) for name in names)
            node = _first(environment, "GROUP_RANK" if launcher == "torchrun" else "SLURM_NODEID")
            return Ranks(
                rank=rank,
                world=world,
                local_rank=local_rank,
                rendezvous=_rendezvous(launcher, environment),
                launcher=launcher,
                local_world=_local_world(launcher, environment, node),
                node=node,
                restart=_first(environment, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"),
                head=_head(launcher, environment),
            )
    return Ranks()


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where torch's TCPStore of a launch is."""

    host: str
    port: int
    served: bool
    """Whether the launcher serves it; else rank 0 does."""


def store_address(place: Ranks, environment: Mapping[str, str] = os.environ) -> StoreAddress | None:
    """The TCPStore at which torch.distributed's processes find each other; None where MPI brings them together."""
    if place.rendezvous == "mpi://":
        return None
    if place.rendezvous == "env://":
        host, port = (environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        if not host or not port:
            problem = Problem("environment", "MASTER_ADDR and MASTER_PORT are not both set", "torchrun sets them")
            raise ConfigError([problem])
        served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return StoreAddress(host, _number("MASTER_PORT", port), served)
    host, _, port = place.rendezvous.removeprefix("tcp://").rpartition(":")
    return StoreAddress(host, int(port), served=False)


def hosts(text: str) -> list[str]:
    """The machines of a Slurm node list: `gpu[01-03,7],login` are gpu01, gpu02, gpu03, gpu7 and login."""
    found = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, inside in re.findall(r"([^\[]+)|\[([^\]]*)\]", pattern):
            names = [name + part for name in names for part in ([plain] if plain else _range(inside))]
        found += names
    return found


def _rendezvous(launcher: Launcher, environment: Mapping[str, str]) -> str:
    if launcher == "torchrun" or "MASTER_ADDR" in environment:
        return "env://"
    if launcher == "mpi":
        return "mpi://"
    port = FIRST_PORT + _first(environment, "SLURM_JOB_ID") % PORTS
    return f"tcp://{hosts(environment[SLURM_STEP])[0]}:{port}"


def _head(launcher: Launcher, environment: Mapping[str, str]) -> str:
    first = hosts(environment[SLURM_STEP])[0] if launcher == "slurm" else ""
    return environment.get("MASTER_ADDR", first)


def _local_world(launcher: Launcher, environment: Mapping[str, str], node: int) -> int:
    if launcher != "slurm":
        return _first(environment, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", default=1)
    # Slurm says `4(x2),3` for machines of 4, 4 and 3 processes.
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    counts = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    return counts[node]


def _range(text: str) -> Iterator[str]:
    """The numbers of `01-03,7`, with their zeros."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not last:
            yield first
        else:
            yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def _first(environment: Mapping[str, str], *names: str, default: int = 0) -> int:
    """The first of these variables that is set."""
    return next((_number(name, environment[name]) for name in names if name in environment), default)


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        problem = Problem("environment", f'{name} is "{text}"', "launchers set it to a number; unset it")
        raise ConfigError([problem])
    return int(text)
