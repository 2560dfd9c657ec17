"""Creates all process groups: a plan's degrees become mesh axes, each with a group of ranks.

Ranks are numbered with tensor innermost, then context, shard, replicate, and pipeline outermost: axes that communicate
most are closest together.

A rank creates only its own groups (`use_local_synchronization`), at most 20 of them at any world size;
docs/guides/clusters.md counts the calls for 4,096 ranks. torch names such a group by its members and by the process's
group count, so every rank must create equally many in the same order: ranks without a partner create a group of one.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ropewalk.base.errors import UserError
from ropewalk.config.nccl import own_error_handling
from ropewalk.config.ranks import Ranks
from ropewalk.plan.messages import Channel, channels
from ropewalk.plan.plan import Plan

from . import mpi
from .comm import Group, Traffic

Axis = Literal["pipeline", "replicate", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "context", "tensor")

COMBINED: tuple[tuple[Axis, ...], ...] = (
    ("replicate", "shard"),  # data ranks: they read different sequences
    ("replicate", "context"),  # the same shard of every parameter, different tokens
    ("replicate", "shard", "context"),  # the tokens of a step are split over these
    AXES,
)
"""Groups over several axes."""


def pick_device(plan: Plan, ranks: Ranks) -> torch.device:
    """Returns this process's device under `plan`; raises if the world does not match the plan's."""
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


def join(plan: Plan, ranks: Ranks, *, timeout_s: float = 600.0, store: Store | None = None) -> None:
    """Initializes the plan's process group, before any mesh is made; no-op for one process. All ranks must call. With
    `store`, the rendezvous is there rather than at the launcher's address."""
    if plan.world > 1:
        enter(ranks, plan.backend, device=plan.device, timeout_s=timeout_s, store=store)


def enter(
    ranks: Ranks, backend: str = "auto", *, device: str, timeout_s: float = 600.0, store: Store | None = None
) -> None:
    """Initializes the process group of `ranks`; no-op if initialized. All ranks must call."""
    if dist.is_initialized():
        return
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "mpi" if ranks.launcher == "mpi" else "gloo"
    by_mpi = backend == "mpi" or ranks.rendezvous == "mpi://"
    if backend == "mpi":
        backend = mpi.register(ranks)
    store = store or (mpi.meet() if by_mpi else None)
    if device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    if backend == "nccl":
        own_error_handling()
    dist.init_process_group(
        backend,
        init_method=None if store else ranks.rendezvous,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def world_groups() -> tuple[Group, Group]:
    """Returns (all ranks for tensors, all ranks for host messages), separate from all other groups. All ranks must call
    together."""
    members, rank, traffic = range(dist.get_world_size()), dist.get_rank(), Traffic()
    tensors = Group("horovod", members, rank, _new_group(members), traffic)
    return tensors, Group("horovod control", members, rank, _new_group(members, _host_backend()), traffic)


def leave() -> None:
    """Destroys the process group. All ranks must call; a failing rank just exits, and its launcher ends the rest."""
    if dist.is_initialized():
        dist.destroy_process_group()
        mpi.part()


@dataclass(frozen=True, slots=True)
class SubMesh:
    """A mesh over the ranks of some axes, with axes of its own: expert ranks, say, out of replicas and shards."""

    of: tuple[Axis, ...]
    degrees: Mapping[str, int]
    """The degree of each of its own axes; `Mesh.group` takes their names."""


class Mesh:
    """The process groups of one plan. All ranks must create it together."""

    def __init__(self, plan: Plan, rank: int = 0, *, submeshes: Sequence[SubMesh] = ()) -> None:
        self.plan, self.rank = plan, rank
        self.degrees: dict[Axis, int] = {axis: getattr(plan, axis) for axis in AXES}
        self.place: dict[Axis, int] = dict(zip(AXES, _coordinates(rank, list(self.degrees.values())), strict=True))
        """This rank's coordinate on each axis."""
        self.traffic = Traffic(on_gpu=plan.device == "cuda")
        self._groups: dict[tuple[str, ...], Group] = {}
        self.channels: dict[Channel, Group] = {}
        """This rank's channels, by their ends on the pipeline axis."""
        self.relay: Group | None = None
        """The pipeline axis on gloo, for messages through the hosts; None where the channels use gloo or MPI."""
        self.ends: Group
        """The first and last pipeline rank, which share a tied embedding; a group of one on other ranks."""
        self.control: Group
        """All ranks, for host messages: nothing on it waits for a GPU."""
        self.sequences: Group
        """The ranks of `data`, for sequences moved between hosts before a step; a group of one unless balanced."""
        made: dict[tuple[int, ...], object] = {}
        for axes in (*((axis,) for axis in AXES), *COMBINED):
            members = self._members(axes)
            if len(members) > 1 and members not in made:
                made[members] = dist.group.WORLD if len(members) == plan.world else _new_group(members)
            # Exact mode orders sums over data; an axis of one rank sums nothing.
            summed = {axis for axis in axes if self.degrees[axis] > 1}
            exact = plan.exact and summed <= {"replicate", "shard"}
            name = "+".join(axes) if axes != AXES else "world"
            self._groups[axes] = Group(name, members, rank, made.get(members), self.traffic, exact=exact)

        for submesh in submeshes:
            self._make_submesh(submesh)
        self._make_pipeline_groups()
        self._make_control_group()
        self._make_sequences_group()

    def group(self, *axes: str) -> Group:
        """Returns the ranks that differ from this one only on `axes`; name an axis of a sub-mesh by itself."""
        return self._groups[axes]

    @property
    def world(self) -> Group:
        """Returns all ranks."""
        return self._groups[AXES]

    @property
    def data(self) -> Group:
        """Returns the data ranks, which read different sequences."""
        return self._groups["replicate", "shard"]

    @property
    def tokens(self) -> Group:
        """Returns the ranks over which the tokens of a step are split."""
        return self._groups["replicate", "shard", "context"]

    def is_first(self, *axes: Axis) -> bool:
        """Whether this rank is the first on all of `axes`."""
        return all(self.place[axis] == 0 for axis in axes)

    def _make_submesh(self, submesh: SubMesh) -> None:
        """Creates the group of each of its axes: the ranks that differ from this one only on that axis."""
        members, degrees = self._members(submesh.of), list(submesh.degrees.values())
        assert len(members) == math.prod(degrees), f"{submesh.degrees} does not number {len(members)} ranks"
        coordinates = [_coordinates(number, degrees) for number in range(len(members))]
        here = coordinates[members.index(self.rank)]
        exact = self.plan.exact and {*submesh.of} <= {"replicate", "shard"}
        for axis, name in enumerate(submesh.degrees):
            mine = [
                member
                for member, place in zip(members, coordinates, strict=True)
                if all(theirs == ours for n, (theirs, ours) in enumerate(zip(place, here, strict=True)) if n != axis)
            ]
            handle = _new_group(mine) if len(mine) > 1 else None
            self._groups[name,] = Group(name, mine, self.rank, handle, self.traffic, exact=exact)

    def _make_pipeline_groups(self) -> None:
        self.ends = Group("ends", (self.rank,), self.rank, None, self.traffic)
        ranks = self.degrees["pipeline"]
        if ranks == 1:
            return
        members, here = self._members(("pipeline",)), self.place["pipeline"]
        ends = (members[0], members[-1]) if here in (0, ranks - 1) else (self.rank,)
        self.ends = Group("ends", ends, self.rank, _new_group(ends), self.traffic)
        if dist.get_backend() == "nccl":
            self.relay = Group("pipeline relay", members, self.rank, _new_group(members, "gloo"), self.traffic)
        for each in channels(ranks, wraps=self.plan.chunks > 1):
            mine = next((channel for channel in each if here in channel[:2]), None)
            pair = sorted(members[place] for place in mine[:2]) if mine else [self.rank]
            handle = _new_group(pair)
            if mine:
                name = "pipeline back" if mine.backward else "pipeline"
                self.channels[mine] = Group(name, pair, self.rank, handle, self.traffic)
        if dist.get_backend() == "nccl":
            self._connect_channels()

    def _connect_channels(self) -> None:
        """Sends a number through every channel: NCCL creates a communicator at its first use, and both ends wait for
        each other. In rounds of disjoint pairs, the same on all ranks."""
        probe = torch.zeros(1, device=self.plan.device)
        for channel, group in self.channels.items():
            if self.place["pipeline"] == channel.source:
                group.start_send(probe, 1 - group.rank).wait()
            else:
                group.start_receive(probe, 1 - group.rank).wait()
        torch.cuda.synchronize()
        self.traffic.take()

    def _make_control_group(self) -> None:
        members = range(self.plan.world)
        handle = _new_group(members, _host_backend()) if len(members) > 1 else None
        self.control = Group("control", members, self.rank, handle, self.traffic)

    def _make_sequences_group(self) -> None:
        self.sequences = Group("sequences", (self.rank,), self.rank, None, self.traffic)
        if self.plan.balance and self.plan.data > 1:
            members = self._members(("replicate", "shard"))
            self.sequences = Group("sequences", members, self.rank, _new_group(members, _host_backend()), self.traffic)

    def _members(self, axes: Sequence[Axis]) -> tuple[int, ...]:
        """Returns the ranks that differ from this one only on `axes`, in order."""
        sides = [range(self.degrees[axis]) if axis in axes else [self.place[axis]] for axis in AXES]
        found = []
        for place in itertools.product(*sides):
            number = 0
            for coordinate, side in zip(place, self.degrees.values(), strict=True):
                number = number * side + coordinate
            found.append(number)
        return tuple(found)


def _new_group(members: Sequence[int], backend: str | None = None) -> object:
    return dist.new_group(list(members), backend=backend, use_local_synchronization=True)


def _host_backend() -> str | None:
    """Returns the backend for host messages; None: the world's."""
    return "gloo" if dist.get_backend() == "nccl" else None


def _coordinates(rank: int, sides: Sequence[int]) -> list[int]:
    place = []
    for side in reversed(sides):
        place.append(rank % side)
        rank //= side
    assert rank == 0, f"more ranks than {math.prod(sides)}"
    return place[::-1]
