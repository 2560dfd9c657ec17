"""The only maker of process groups: a plan's degrees become axes, and every axis a group of ranks.

Ranks are numbered with tensor innermost, then context, shard, replicate, and pipeline outermost: what communicates most
lies closest together.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from ropewalk.base.errors import UserError
from ropewalk.config.ranks import Ranks
from ropewalk.plan.plan import Plan

from . import mpi
from .comm import Group, Traffic

Axis = Literal["pipeline", "replicate", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "context", "tensor")

COMBINED: tuple[tuple[Axis, ...], ...] = (
    ("replicate", "shard"),  # who reads other rows
    ("replicate", "context"),  # who holds the same part of every parameter and saw other tokens
    ("replicate", "shard", "context"),  # over whom the tokens of a step are dealt
    AXES,
)
"""Groups over several axes that are needed."""


def pick_device(plan: Plan, ranks: Ranks) -> torch.device:
    """The device of this process under `plan`; refuses a world that the plan was not made for."""
    if ranks.world != plan.world:
        raise UserError(
            f"{ranks.world} processes were started, but the plan is for {plan.world}; "
            + (f"start it with `--nproc {plan.world}`" if ranks.world == 1 else "change `[parallel]` to fit them")
        )
    if plan.device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("the plan wants a GPU, but torch sees none; set `plan.device=cpu` or install a CUDA build")
        if torch.cuda.device_count() < plan.devices:
            raise UserError(
                f"`parallel.devices` is {plan.devices}, but torch sees {torch.cuda.device_count()} GPUs; lower it"
            )
        return torch.device("cuda", ranks.local_rank)
    return torch.device("cpu")


def join(plan: Plan, ranks: Ranks, *, timeout_s: float = 600.0) -> None:
    """Makes this process a member of the plan's world, which must be entered before any mesh is made. All ranks must
    call. Nothing to do for one process."""
    if plan.world == 1 or dist.is_initialized():
        return
    backend: str = plan.backend
    if backend == "auto":
        backend = "nccl" if plan.device == "cuda" else "mpi" if ranks.launcher == "mpi" else "gloo"
    by_mpi = backend == "mpi" or ranks.rendezvous == "mpi://"
    if backend == "mpi":
        backend = mpi.register(ranks)
    store = mpi.meet() if by_mpi else None
    if plan.device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    dist.init_process_group(
        backend,
        init_method=None if store else ranks.rendezvous,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def leave() -> None:
    """Ends this process's membership. All ranks must call; one that fails just exits, its launcher ends the rest."""
    if dist.is_initialized():
        dist.destroy_process_group()
        mpi.part()


class Mesh:
    """The groups of one plan. All ranks must make it at the same moment."""

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self.plan, self.rank = plan, rank
        self.degrees: dict[Axis, int] = {axis: getattr(plan, axis) for axis in AXES}
        self.place: dict[Axis, int] = dict(zip(AXES, _coordinates(rank, list(self.degrees.values())), strict=True))
        """Where this rank stands on each axis."""
        self.traffic = Traffic(on_gpu=plan.device == "cuda")
        self._groups: dict[tuple[Axis, ...], Group] = {}
        self.back: Group
        """The pipeline axis once more, for what travels backwards."""
        self.ends: Group
        """The first and the last rank of the pipeline, which share a tied embedding; of others, themselves."""
        self.control: Group
        """All ranks once more, for what hosts tell each other: nothing on it waits for a GPU."""
        self.rows: Group
        """`data` once more, for rows that travel from host to host before a step; alone unless they are balanced."""
        self.node: tuple[Group, Group] | None = None
        """Replicas of this machine, and those at the same place of other machines; where sums are made in two steps."""
        made: dict[tuple[int, ...], object] = {}
        for axes in (*((axis,) for axis in AXES), *COMBINED):
            for members in self._partition(axes):
                if len(members) > 1 and members not in made:
                    made[members] = dist.group.WORLD if len(members) == plan.world else dist.new_group(list(members))
                if rank in members:
                    # Sums over the data are what exact mode orders; an axis of one rank sums nothing.
                    summed = {axis for axis in axes if self.degrees[axis] > 1}
                    exact = plan.exact and summed <= {"replicate", "shard"}
                    self._groups[axes] = Group(
                        "+".join(axes) if axes != AXES else "world",
                        members,
                        rank,
                        made.get(members),
                        self.traffic,
                        exact=exact,
                    )

        self._make_pipeline_groups()
        self._make_control_group()
        self._make_rows_group()
        self._make_node_groups()

    def group(self, *axes: Axis) -> Group:
        """The ranks that differ from this one on `axes` alone."""
        return self._groups[axes]

    @property
    def world(self) -> Group:
        """All ranks."""
        return self._groups[AXES]

    @property
    def data(self) -> Group:
        """The ranks that read other rows than this one."""
        return self._groups["replicate", "shard"]

    @property
    def tokens(self) -> Group:
        """The ranks over which the tokens of a step are dealt."""
        return self._groups["replicate", "shard", "context"]

    def is_first(self, *axes: Axis) -> bool:
        """Whether this rank is the first on all of `axes`."""
        return all(self.place[axis] == 0 for axis in axes)

    def _make_pipeline_groups(self) -> None:
        self.back = self.ends = Group("ends", (self.rank,), self.rank, None, self.traffic)
        if self.degrees["pipeline"] == 1:
            return
        for members in self._partition(("pipeline",)):
            back, ends = dist.new_group(list(members)), dist.new_group([members[0], members[-1]])
            if self.rank in members:
                self.back = Group("pipeline back", members, self.rank, back, self.traffic)
            if self.rank in (members[0], members[-1]):
                self.ends = Group("ends", (members[0], members[-1]), self.rank, ends, self.traffic)

    def _make_node_groups(self) -> None:
        side = self.plan.node_ranks
        if not side:
            return
        for members in self._partition(("replicate", "context")):
            inner = [members[start : start + side] for start in range(0, len(members), side)]
            outer = [members[place::side] for place in range(side)]
            found = {}
            for name, groups in (("node", inner), ("between nodes", outer)):
                for each in groups:
                    handle = dist.new_group(list(each)) if len(each) > 1 else None
                    if self.rank in each:
                        found[name] = Group(name, each, self.rank, handle, self.traffic)
            if self.rank in members:
                self.node = (found["node"], found["between nodes"])

    def _make_control_group(self) -> None:
        members = range(self.plan.world)
        handle = None
        if len(members) > 1:
            own = "gloo" if dist.get_backend() == "nccl" else None
            handle = dist.new_group(list(members), backend=own)
        self.control = Group("control", members, self.rank, handle, self.traffic)

    def _make_rows_group(self) -> None:
        self.rows = Group("rows", (self.rank,), self.rank, None, self.traffic)
        if not self.plan.balance or self.plan.data == 1:
            return
        own = "gloo" if dist.get_backend() == "nccl" else None
        for members in self._partition(("replicate", "shard")):
            handle = dist.new_group(list(members), backend=own)
            if self.rank in members:
                self.rows = Group("rows", members, self.rank, handle, self.traffic)

    def _partition(self, axes: Sequence[Axis]) -> list[tuple[int, ...]]:
        """All groups along `axes`, in the same order on every rank."""
        sides = list(self.degrees.values())
        kept = [axis not in axes for axis in AXES]
        found: dict[tuple[int, ...], list[int]] = {}
        for number, place in enumerate(itertools.product(*map(range, sides))):
            found.setdefault(tuple(itertools.compress(place, kept)), []).append(number)
        return [tuple(members) for members in found.values()]


def _coordinates(rank: int, sides: Sequence[int]) -> list[int]:
    place = []
    for side in reversed(sides):
        place.append(rank % side)
        rank //= side
    assert rank == 0, f"more ranks than {math.prod(sides)}"
    return place[::-1]
