"""ZeRO data parallelism (FSDP): shards every parameter along dimension 0.

A rank keeps its shard of the optimizer state (ZeRO-1), also of gradients (2), also of parameters (3; Rajbhandari et al.
2020). Shard groups reduce gradients during the backward pass; parallel/data/replicas.py says why not `fully_shard`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.base.files import storage

from ..comm import Group
from ..placement import LocalShard, Placement, chunk_sizes
from .buckets import UNDER_WAY, Final, InOrder, fused, when_accumulated
from .shard_group import Fill, ShardGroup


class Shards:
    """Shards each parameter's rows over the ranks of `shard`; `replicas` hold the same shards.

    Parameters are all-gathered before use, gradients reduce-scattered. In stage 3 each of `modules` is a shard group;
    parameters outside of modules are gathered for a whole microbatch. In stages 1 and 2, shard groups are buckets of
    `trained` parameters, gathered between an update and the next use, and of frozen ones, gathered when set. `held`
    keeps all parameters whole from the first to the last microbatch of a step and reduces once, as pipelines need: when
    the pipeline reports final gradients, or at the end.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        placements: Mapping[str, Placement],
        shard: Group,
        replicas: Group,
        *,
        stage: int,
        bucket_bytes: int,
        trained: Collection[str],
        modules: Mapping[str, nn.Module],
        masters: torch.dtype,
        narrow: Mapping[str, torch.dtype],
        held: bool = False,
        host: bool = False,
        folder: Path | None = None,
        fill: Fill | None = None,
    ) -> None:
        """Builds shard groups one at a time, from whole parameters in `weights` or from `fill`: at most one group's are
        in memory beside the shards. `host` and `folder` select where shards are stored."""
        self._stage, self._held = stage, held
        modules = {key: module for key, module in modules.items() if any(n.startswith(f"{key}.") for n in weights)}
        device = next(iter(weights.values())).device
        side = torch.cuda.Stream(device) if device.type == "cuda" and replicas.size > 1 else None
        self._exact = shard.exact or replicas.exact
        sizes = {name: chunk_sizes(weight.shape[0], shard.size) for name, weight in weights.items()}
        self.placements = {name: placements[name].further(0, sizes[name], shard) for name in weights}
        groups = _by_module(weights, modules) if stage == 3 else _by_size(weights, bucket_bytes, trained)
        self._units = {
            key: ShardGroup(
                {name: weights[name] for name in names},
                shard,
                replicas,
                trained=set(trained),
                frees=stage == 3,
                accumulates=stage == 1 or held,
                masters=masters,
                narrow=narrow,
                place=_own_place(host, folder),
                fill=fill,
                side=side,
            )
            for key, names in groups.items()
            if names
        }
        self._trained = [unit for unit in self._units.values() if unit.trained]
        self._outer = [self._units[""]] if stage == 3 and "" in self._units else []
        """Parameters outside of all modules, gathered for a whole microbatch."""
        # Parameters keep the model's order, whatever the shard groups.
        parameters = {name: p for unit in self._units.values() for name, p in unit.parameters.items()}
        self.parameters = {name: parameters[name] for name in weights}
        self._unit_of: dict[str, ShardGroup] = {}
        for unit in self._trained:
            for name in unit.trained:
                self._unit_of[name] = unit
                when_accumulated(weights[name], self._arrived, name)
        self._complete = InOrder(self._start)
        self._reduces, self._last = False, False
        self._ending: set[str] = set()
        """As in `Replicas`."""
        self._under_way: list[ShardGroup] = []
        self._final: Final | None = None
        self._blocks = [self._units[key] for key in modules] if stage == 3 else []
        self._stale: list[ShardGroup] = []
        """Shard groups of stages 1 and 2 to be gathered after an update, in order of use."""
        users = _users(self._trained, modules) if stage < 3 else {}
        self._root = users.get("", [])
        # The root's first, then by block: buckets are in reverse order.
        self._in_order_of_use = sorted(reversed(self._trained), key=lambda unit: unit not in self._root)
        for place, (key, module) in enumerate(modules.items()):
            if stage < 3:
                module.register_forward_pre_hook(functools.partial(self._before_use, users[key]))
            elif not held:
                self._follow(module, self._units[key], place)

    def listen(self, final: Final) -> None:
        """As `Reducer.listen`."""
        self._final = None if self._exact else final

    def begin(self) -> None:
        """Begins a step."""
        self._under_way, self._ending = [], set()
        for unit in self._units.values():
            unit.begin()
        if self._held and self._stage == 3:
            _gather(list(self._units.values()))

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Runs forward and backward of one microbatch; in stage 1, gradients are reduced in the `last`."""
        self._last = last
        self._reduces = (last or self._stage > 1 or self._exact) and not self._held
        for unit in self._units.values():
            unit.expect()
        # In stage 3 the model determines the order in which groups complete, the same on every rank.
        self._complete.reset(self._trained, ordered=self._stage < 3)
        self._catch_up(self._root)
        if not self._held:
            _gather(self._outer)
        yield
        if self._reduces:
            self._complete.flush()
            self._settle(0)
        if self._stage == 3 and not self._held:
            for unit in self._units.values():
                unit.release()

    def last_backward(self, names: Collection[str]) -> None:
        """As `Reducer.last_backward`."""
        if self._held:
            self._ending.update(names)

    def complete(self, names: Collection[str]) -> None:
        """As `Reducer.complete`."""
        if not self._held:
            return
        for name in names:
            if name in self._unit_of:
                self._unit_of[name].missing.discard(name)
        self._complete.look()

    def finish(self) -> dict[str, Tensor]:
        """Returns this rank's shards of the gradients of the global batch, by name."""
        self._catch_up(self._stale)  # of unused modules
        if self._held:
            self._complete.flush()
            self._settle(0)
            for unit in self._units.values():
                unit.release()
        for unit in self._trained:
            unit.spread_gradient()
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def publish(self, *, everything: bool = False) -> None:
        """As `Reducer.publish`: in stages 1 and 2, new rows are all-gathered, after an update as they are needed and
        the first ones immediately."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self._stage == 3:
            return
        if everything:
            for unit in self._stale:
                unit.forget_gather()
            self._stale = []
            _gather(list(self._units.values()))
        else:
            self._stale = list(self._in_order_of_use)
            self._gather_ahead()

    def owed(self) -> dict[str, LocalShard]:
        """Returns nothing: gradients are not compressed."""
        return {}

    def owe(self, name: str, tensor: Tensor) -> None:
        """Ignores the error-feedback state of an earlier run."""

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """In the block, all parameters are unsharded when used, and nothing is reduced."""
        self._reduces, self._ending = False, set()
        for unit in self._units.values():
            unit.expect()  # after a backward pass, blocks would otherwise stay gathered for another
        self._catch_up(self._stale)
        if self._stage < 3 or self._held:
            if self._held and self._stage == 3:
                _gather(list(self._units.values()))
            yield
        else:
            _gather(self._outer)
            yield
        if self._stage == 3:
            for unit in self._units.values():
                unit.release()

    def _before_use(self, units: Sequence[ShardGroup], *_: Any) -> None:
        self._catch_up(units)

    def _catch_up(self, units: Sequence[ShardGroup]) -> None:
        """Waits for the new rows of `units` and of all used before them; always in the same order, so that collectives
        are ordered alike on every rank."""
        needed = {id(unit) for unit in units}
        while any(id(unit) in needed for unit in self._stale):
            unit = self._stale.pop(0)
            unit.start_gather()
            self._gather_ahead()
            unit.finish_gather()

    def _gather_ahead(self) -> None:
        for unit in self._stale[:UNDER_WAY]:
            unit.start_gather()

    def _follow(self, module: nn.Module, unit: ShardGroup, place: int) -> None:
        """Hooks `module` to gather `unit` before forward and backward, and to prefetch the next one meanwhile."""

        def before(*_: Any) -> None:
            unit.start_gather()
            unit.finish_gather()
            self._prefetch(place - 1 if unit.backward else place + 1)

        def after(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if unit.backward:
                return  # recomputed inside its own backward pass, which needs the parameters next
            unit.release()
            if output.requires_grad:
                output.register_hook(backward)

        def backward(gradient: Tensor) -> Tensor:
            unit.backward = True
            if place + 1 < len(self._blocks):
                self._blocks[place + 1].release()  # its input gradient is done: frozen weights are free as well
            before()
            return gradient

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _prefetch(self, place: int) -> None:
        if 0 <= place < len(self._blocks):
            self._blocks[place].start_gather()

    def _arrived(self, name: str) -> None:
        if self._held and name not in self._ending:
            return  # more microbatches follow
        self._unit_of[name].missing.discard(name)
        if self._reduces or self._held:
            self._complete.look()

    def _start(self, unit: ShardGroup) -> None:
        if self._under_way:
            self._under_way[-1].start_replica_sum()  # overlaps with this group's reduce-scatter
        unit.start_reduce()
        if self._stage == 3 and not self._held and unit not in self._outer and not unit.has_frozen:
            unit.release()
        self._under_way.append(unit)
        self._settle(UNDER_WAY)

    def _settle(self, most: int) -> None:
        """Waits, in start order, until at most `most` shard groups are in flight."""
        while len(self._under_way) > most:
            unit = self._under_way.pop(0)
            unit.finish_reduce()
            if self._final and self._last:
                unit.spread_gradient()
                self._final(unit.trained)


def _gather(units: Sequence[ShardGroup]) -> None:
    """Gathers the parameters of all `units`, few at a time: each needs twice its memory meanwhile."""
    for place, unit in enumerate(units):
        for ahead in units[place : place + UNDER_WAY]:
            ahead.start_gather()
        unit.finish_gather()


def _users(units: Sequence[ShardGroup], modules: Mapping[str, nn.Module]) -> dict[str, list[ShardGroup]]:
    """Returns the shard groups with parameters of each module; the empty name holds those outside of all modules."""
    found: dict[str, list[ShardGroup]] = {key: [] for key in (*modules, "")}
    for unit in units:
        for key in {_owner(name, modules) for name in unit.trained}:
            found[key].append(unit)
    return found


def _owner(name: str, modules: Mapping[str, nn.Module]) -> str:
    return next((key for key in modules if name.startswith(f"{key}.")), "")


def _by_module(weights: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    """Returns the names of each module's parameters; the empty name holds those outside of all modules."""
    groups = {key: [name for name in weights if name.startswith(f"{key}.")] for key in modules}
    inside = {name for names in groups.values() for name in names}
    return groups | {"": [name for name in weights if name not in inside]}


def _by_size(weights: Mapping[str, Tensor], bucket_bytes: int, trained: Collection[str]) -> dict[str, list[str]]:
    """Buckets names; no bucket mixes trained and frozen parameters."""
    changing = {name: weight for name, weight in weights.items() if name in trained}
    frozen = {name: weight for name, weight in weights.items() if name not in trained}
    buckets = [*fused(changing, bucket_bytes), *fused(frozen, bucket_bytes)]
    return {str(number): names for number, names in enumerate(buckets)}


def _own_place(host: bool, folder: Path | None) -> Callable[[str, Tensor], Tensor] | None:
    """Returns a function that moves a shard to host memory, pinned for a GPU, or to a memory-mapped file."""
    if not host:
        return None

    def move(name: str, part: Tensor) -> Tensor:
        if folder and part.numel():
            path = folder / f"{name}.{os.getpid()}"
            with storage(f"writing {path}"):
                file = torch.from_file(str(path), shared=True, size=part.numel(), dtype=part.dtype).view(part.shape)
                path.unlink()  # the mapping keeps it; nothing remains when this process exits
            return file.copy_(part)
        return part.cpu().pin_memory() if part.is_cuda else part

    return move
