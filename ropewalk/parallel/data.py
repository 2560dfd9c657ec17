"""Data parallelism: how the gradients of ranks that read different rows come together, and who keeps what.

`Replicas` keep everything and add up gradients (DDP: Li et al. 2020). `Shards` cut every parameter along dimension 0
and keep a part of the optimizer's state (ZeRO-1), of gradients too (2), of parameters too (3; Rajbhandari et al.
2020). Both reduce in buckets while the backward pass goes on.

Why not torch's DDP and `fully_shard`: the sums of exact mode, the bytes that a bar of ours counts, optimizers that see
plain tensors, a backward pass in two halves (zero-bubble pipelines) and parameters on a disk each need a seam that one
of them lacks; with the seams of one bucket all of it is one mechanism. `benchmarks/sharding.py` runs them side by side.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.base.files import storage

from .comm import Group, Pending
from .compress import Compressor, Plain, PowerSgd
from .cut import Cut, Part, Slicing, chunk_sizes, whole_cut

Parameters = dict[str, nn.Parameter]


class BinaryCounter:
    """Adds up terms as a balanced binary tree over their order, holding log2 n of them: as a counter carries bits."""

    def __init__(self) -> None:
        self._levels: list[Tensor | None] = []

    def add(self, term: Tensor) -> None:
        for level, held in enumerate(self._levels):
            if held is None:
                self._levels[level] = term
                return
            term, self._levels[level] = held + term, None
        self._levels.append(term)

    def total(self) -> Tensor:
        """The sum; begins anew."""
        held = [level for level in self._levels if level is not None]
        self._levels = []
        return functools.reduce(lambda low, high: high + low, held)


class Replicas:
    """Every rank of `group` holds all; gradients are added up in buckets of up to `fusion_bytes`.

    `weights` are what the backward pass fills, `parameters` what the optimizer updates: the same tensors, or float32
    masters of them.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        parameters: Parameters,
        cuts: dict[str, Cut],
        group: Group,
        *,
        fusion_bytes: int,
        compressor: Compressor | None = None,
    ) -> None:
        self.parameters, self.cuts, self._group = parameters, cuts, group
        self._compressor = compressor or Plain(group)
        self._buckets: list[_Bucket] = []
        self._ready = _InOrder(self._start)
        self._last = False
        if group.size == 1 and not group.exact:
            return  # exact sums are trees over microbatches too
        for names in fused(parameters, fusion_bytes):
            bucket = _Bucket({name: parameters[name] for name in names})
            self._buckets.append(bucket)
            for name in names:
                weights[name].register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket, name))

    def begin(self) -> None:
        """A step begins."""
        for bucket in self._buckets:
            bucket.clear()
        self._ready.reset(self._buckets)

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Forward and backward of one microbatch; gradients travel in the `last` one, or in each for exact sums."""
        self._last = last or self._group.exact
        if self._group.exact:
            self._ready.reset(self._buckets)
            for bucket in self._buckets:
                bucket.flat.zero_()
                bucket.missing = set(bucket.parameters)
        yield
        if self._group.exact:
            self._ready.flush()
            for bucket in self._buckets:
                bucket.pending.wait()
                bucket.tree.add(bucket.flat.clone())

    def finish(self) -> dict[str, Tensor]:
        """The gradients of the global batch, by name."""
        if self._group.exact and self._buckets:
            for bucket in self._buckets:
                bucket.flat.copy_(bucket.tree.total())
        else:
            self._ready.flush()
            for bucket in self._buckets:
                bucket.pending.wait()
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def owed(self) -> dict[str, Part]:
        """What compression has not yet sent: an error of each rank by itself, and factors that all share."""
        if not isinstance(self._compressor, PowerSgd):
            return {}
        group, found = self._group, {}
        for name, tensor in self._compressor.state.items():
            if name.startswith("error/"):
                slicing = Slicing(0, (1,) * group.size, group)
                found[name] = Part(tensor.unsqueeze(0), Cut((group.size, *tensor.shape), (slicing,)))
            else:
                found[name] = Part(tensor, whole_cut(tensor.shape, first=group.rank == 0))
        return found

    def owe(self, name: str, tensor: Tensor) -> None:
        """Takes over a whole tensor of what `owed` gave. Errors of another number of ranks are nobody's: they begin
        anew."""
        if not isinstance(self._compressor, PowerSgd):
            return
        if not name.startswith("error/"):
            self._compressor.state[name] = tensor.to(next(iter(self.parameters.values())).device, copy=True)
        elif len(tensor) == self._group.size:
            mine = tensor[self._group.rank]
            self._compressor.state[name] = mine.to(next(iter(self.parameters.values())).device, copy=True)

    def publish(self) -> None:
        """The update is done; nobody else needs to know."""
        if not self._buckets:
            for parameter in self.parameters.values():
                parameter.grad = None

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """In the block all parameters are there, and nothing travels."""
        self._last = False
        yield

    def _arrived(self, bucket: _Bucket, name: str, _: Tensor) -> None:
        if self._last:
            bucket.missing.discard(name)
            self._ready.look()

    def _start(self, bucket: _Bucket) -> None:
        bucket.pending = self._compressor.start(bucket.flat, dict(zip(bucket.parameters, bucket.views, strict=True)))


class Shards:
    """Every rank of `shard` keeps its part of each parameter's rows; `replicas` hold the same parts.

    Before use the rows come together by an all-gather, gradients go apart by a reduce-scatter. Of stage 3, `units` are
    the parameters that are used together, a block each; the root's are there during a whole microbatch. `held` keeps
    all of them from the first to the last microbatch of a step and reduces once, as a pipeline wants it.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        cuts: Mapping[str, Cut],
        shard: Group,
        replicas: Group,
        *,
        stage: int,
        fusion_bytes: int,
        trained: Iterable[str],
        modules: Mapping[str, nn.Module],
        masters: torch.dtype,
        narrow: Mapping[str, torch.dtype],
        held: bool = False,
        host: bool = False,
        folder: Path | None = None,
    ) -> None:
        self._shard, self._replicas, self._stage, self._held = shard, replicas, stage, held
        trained = set(trained)
        sizes = {name: chunk_sizes(weight.shape[0], shard.size) for name, weight in weights.items()}
        self.cuts = {name: cuts[name].further(0, sizes[name], shard) for name in weights}
        self.parameters: Parameters = {}
        self._units: dict[str, _Unit] = {}
        if stage == 3:
            groups = {key: [n for n in weights if n.startswith(f"{key}.")] for key in modules}
            inside = {name for names in groups.values() for name in names}
            groups[""] = [name for name in weights if name not in inside]
        else:
            groups = {str(i): names for i, names in enumerate(fused(dict(weights), fusion_bytes))}
        for key, names in groups.items():
            unit = _Unit(
                {name: weights[name] for name in names},
                shard,
                trained=trained,
                frees=stage == 3,
                masters=masters,
                narrow=narrow,
                place=_own_place(host, folder),
            )
            self._units[key] = unit
            self.parameters |= unit.parameters
            for name in names:
                if name in trained:
                    weights[name].register_post_accumulate_grad_hook(functools.partial(self._arrived, unit, name))
        # The order of the parameters is the model's, whatever the buckets are.
        self.parameters = {name: self.parameters[name] for name in weights}
        self._ready = _InOrder(self._start)
        self._reduces = False
        self._in_flight: list[_Unit] = []
        self._blocks = [self._units[key] for key in modules] if stage == 3 else []
        if stage == 3 and not held:
            for place, (key, module) in enumerate(modules.items()):
                self._follow(module, self._units[key], place)

    def begin(self) -> None:
        for unit in self._units.values():
            unit.gradient = None
            if self._held:
                unit.start_gather()
        if self._held:
            for unit in self._units.values():
                unit.finish_gather()

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        self._reduces = (last or self._stage > 1 or self._shard.exact or self._replicas.exact) and not self._held
        for unit in self._units.values():
            unit.expect()
        # Of stage 3 the units get ready in an order that the model decides, the same on every rank.
        self._ready.reset(list(self._units.values()), ordered=self._stage < 3)
        if self._stage == 3 and not self._held:
            self._units[""].start_gather()
            self._units[""].finish_gather()
        yield
        if self._reduces:
            self._ready.flush()
            self._settle(0)
        if self._stage == 3 and not self._held:
            for unit in self._units.values():
                unit.release()

    def finish(self) -> dict[str, Tensor]:
        if self._held:
            for unit in self._units.values():
                unit.expect()
                self._start(unit)
            self._settle(0)
            for unit in self._units.values():
                unit.release()
        for unit in self._units.values():
            unit.spread_gradient()
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def publish(self) -> None:
        """Stage 1 and 2: the updated rows go to all ranks of the shard."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self._stage < 3:
            for unit in self._units.values():
                unit.start_gather()
            for unit in self._units.values():
                unit.finish_gather()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        self._reduces = False
        if self._stage < 3 or self._held:
            if self._held and self._stage == 3:
                for unit in self._units.values():
                    unit.start_gather()
                    unit.finish_gather()
            yield
        else:
            self._units[""].start_gather()
            self._units[""].finish_gather()
            yield
        if self._stage == 3:
            for unit in self._units.values():
                unit.release()

    def _follow(self, module: nn.Module, unit: _Unit, place: int) -> None:
        """Gathers before the module runs, forward and backward, the next one already while it does."""

        def before(*_: Any) -> None:
            unit.start_gather()
            unit.finish_gather()
            self._prefetch(place - 1 if unit.backward else place + 1)

        def after(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if unit.backward:
                return  # computed again inside the backward pass, which comes next
            unit.release()
            if output.requires_grad:
                output.register_hook(backward)

        def backward(gradient: Tensor) -> Tensor:
            unit.backward = True
            if place + 1 < len(self._blocks):
                self._blocks[place + 1].release()  # its input has its gradient: frozen weights are done with as well
            before()
            return gradient

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _prefetch(self, place: int) -> None:
        if 0 <= place < len(self._blocks):
            self._blocks[place].start_gather()

    def _arrived(self, unit: _Unit, name: str, _: Tensor) -> None:
        unit.missing.discard(name)
        if self._reduces:
            self._ready.look()

    def _start(self, unit: _Unit) -> None:
        unit.start_reduce(self._replicas)
        if self._stage == 3 and not self._held and unit is not self._units[""] and not unit.has_frozen:
            unit.release()
        self._in_flight.append(unit)
        # What is under way holds memory: two buckets, one that travels and one that is being filled.
        self._settle(2)

    def _settle(self, most: int) -> None:
        while len(self._in_flight) > most:
            self._in_flight.pop(0).finish_reduce(self._replicas)


def fused(parameters: Mapping[str, Tensor], fusion_bytes: int) -> list[list[str]]:
    """Names of trained parameters in buckets of up to `fusion_bytes`, last ones first: as gradients arrive."""
    buckets: list[list[str]] = []
    room = 0
    for name in reversed(list(parameters)):
        size = parameters[name].numel() * parameters[name].element_size()
        if not buckets or size > room:
            buckets.append([])
            room = max(fusion_bytes, size)
        buckets[-1].append(name)
        room -= size
    return buckets


def _own_place(host: bool, folder: Path | None) -> Callable[[str, Tensor], Tensor] | None:
    """How a part leaves the device: to the host's memory, page-locked where a GPU reads it, or to a file that the
    system brings into memory as it is read."""
    if not host:
        return None

    def move(name: str, part: Tensor) -> Tensor:
        if folder and part.numel():
            path = folder / f"{name}.{os.getpid()}"
            with storage(f"writing {path}"):
                file = torch.from_file(str(path), shared=True, size=part.numel(), dtype=part.dtype).view(part.shape)
                path.unlink()  # the mapping keeps it; nothing is left when this process ends
            return file.copy_(part)
        return part.cpu().pin_memory() if part.is_cuda else part

    return move


class _InOrder:
    """Starts what is ready, in the same order on every rank: a later bucket waits for the ones before it."""

    def __init__(self, start: Callable[[Any], None]) -> None:
        self._start, self._waiting, self._ordered = start, [], True  # type: ignore[var-annotated]

    def reset(self, items: Sequence[Any], *, ordered: bool = True) -> None:
        self._waiting, self._ordered = list(items), ordered

    def look(self) -> None:
        """Something has arrived."""
        if self._ordered:
            while self._waiting and not self._waiting[0].missing:
                self._start(self._waiting.pop(0))
        else:
            for item in [item for item in self._waiting if not item.missing]:
                self._waiting.remove(item)
                self._start(item)

    def flush(self) -> None:
        """Nothing more arrives: starts the rest."""
        while self._waiting:
            self._start(self._waiting.pop(0))


@dataclass(slots=True)
class _Bucket:
    """Gradients that are added up together, as views of one buffer."""

    parameters: Mapping[str, nn.Parameter]
    flat: Tensor = field(init=False)
    views: list[Tensor] = field(init=False)
    missing: set[str] = field(init=False)
    pending: Pending = field(init=False)
    tree: BinaryCounter = field(init=False)

    def __post_init__(self) -> None:
        some = next(iter(self.parameters.values()))
        self.flat = some.new_zeros(sum(p.numel() for p in self.parameters.values()))
        parts = self.flat.split([p.numel() for p in self.parameters.values()])
        self.views = [part.view(p.shape) for part, p in zip(parts, self.parameters.values(), strict=True)]
        self.tree = BinaryCounter()
        self.clear()

    def clear(self) -> None:
        self.flat.zero_()
        self.missing = set(self.parameters)
        self.pending = Pending((), None)
        for parameter, view in zip(self.parameters.values(), self.views, strict=True):
            parameter.grad = view


class _Unit:
    """Parameters whose rows travel together.

    On the way they are a matrix of (ranks, numbers of one rank): of each parameter the rows of rank 0, padded to those
    of the others, then of rank 1, and so on.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        group: Group,
        *,
        trained: set[str],
        frees: bool,
        masters: torch.dtype,
        narrow: Mapping[str, torch.dtype],
        place: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        """`place` moves a rank's part of a parameter to where it is to lie between its uses."""
        self._weights, self._group, self._frees = weights, group, frees
        self._trained = [name for name in weights if name in trained]
        self.has_frozen = len(self._trained) < len(weights)
        self._rows = {name: chunk_sizes(weight.shape[0], group.size) for name, weight in weights.items()}
        # Rows of the longest part times numbers of a row.
        self._sides = {n: self._rows[n][0] * (w.numel() // w.shape[0]) for n, w in weights.items()}
        self._masters = masters
        self.gradient: Tensor | None = None
        """This rank's part of the sum so far, flat."""
        self.missing: set[str] = set()
        self.backward = False
        self._present = True
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._tree = BinaryCounter()
        self._full_bytes = {n: w.numel() * narrow.get(n, w.dtype).itemsize for n, w in weights.items()}
        mine = {name: self._mine(name, weight.data) for name, weight in weights.items()}
        # A part of its own, unless it can be a view of the whole.
        separate = frees or any(w.dtype != masters or narrow.get(n, w.dtype) != w.dtype for n, w in weights.items())
        self._views = not separate
        self.parameters: Parameters = {
            n: nn.Parameter(part.to(masters, copy=True) if separate else part, requires_grad=n in trained)
            for n, part in mine.items()
        }
        self._device = next(iter(weights.values())).device
        if place:
            for name, parameter in self.parameters.items():
                parameter.data = place(name, parameter.data)
        for name, dtype in narrow.items():
            if name in weights and weights[name].dtype != dtype:
                weights[name].data = weights[name].data.to(dtype)
        if frees:
            self.release()

    def expect(self) -> None:
        """A microbatch begins: all gradients are missing."""
        self.missing, self.backward = set(self._trained), False

    def start_gather(self) -> None:
        """Begins to bring the whole parameters together, unless they are there or under way."""
        if (self._present and self._frees) or self._gathering is not None:
            return
        dtype = max((w.dtype for w in self._weights.values()), key=lambda kind: kind.itemsize)
        flat = torch.zeros(sum(self._sides.values()), dtype=dtype, device=self._device)
        for part, name in zip(flat.split(list(self._sides.values())), self._weights, strict=True):
            own = self.parameters[name].detach()
            part[: own.numel()] = own.reshape(-1)
        self._gathering = self._group.start_all_gather(flat)

    def finish_gather(self) -> None:
        if self._gathering is None:
            return
        parts = self._gathering.wait()
        self._gathering = None
        for name, piece in zip(self._weights, parts.split(list(self._sides.values()), dim=1), strict=True):
            weight = self._weights[name]
            if self._frees:
                weight.untyped_storage().resize_(self._full_bytes[name])
            rows = piece.reshape(-1, *weight.shape[1:])[: weight.shape[0]]
            # The graph keeps these very tensors; their values are what they were.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):  # type: ignore[attr-defined]
                weight.copy_(rows)
        self._present = True

    def release(self) -> None:
        """Frees the whole parameters; the part stays."""
        if self._frees and self._gathering is not None:
            self.finish_gather()
        if self._frees and self._present:
            for weight in self._weights.values():
                weight.untyped_storage().resize_(0)
            self._present = False

    def start_reduce(self, replicas: Group) -> None:
        """Begins to send the gradients of this microbatch to those who keep them."""
        parts = torch.zeros(
            self._group.size, sum(self._sides[n] for n in self._trained), dtype=self._masters, device=self._device
        )
        for piece, name in zip(parts.split([self._sides[n] for n in self._trained], dim=1), self._trained, strict=True):
            weight = self._weights[name]
            if weight.grad is not None:
                flat = weight.grad.reshape(-1)
                side = self._sides[name]
                full, rest = divmod(flat.numel(), side) if side else (0, 0)
                piece[:full] = flat[: full * side].view(full, side)
                if rest:
                    piece[full, :rest] = flat[full * side :]
                weight.grad = None
        self._reducing = self._group.start_reduce_scatter(parts)

    def finish_reduce(self, replicas: Group) -> None:
        assert self._reducing is not None
        part = replicas.all_reduce(self._reducing.wait())
        self._reducing = None
        if self._group.exact or replicas.exact:
            self._tree.add(part)
            self.gradient = part
        else:
            self.gradient = part if self.gradient is None else self.gradient.add_(part)

    def spread_gradient(self) -> None:
        """Gives each parameter its part of the gradient."""
        if self.gradient is None:
            return
        if self._tree._levels:
            self.gradient = self._tree.total()
        for piece, name in zip(
            self.gradient.split([self._sides[n] for n in self._trained]), self._trained, strict=True
        ):
            parameter = self.parameters[name]
            parameter.grad = piece[: parameter.numel()].view(parameter.shape).to(parameter.device)

    def _mine(self, name: str, weight: Tensor) -> Tensor:
        rows = self._rows[name]
        return weight.narrow(0, min(weight.shape[0], sum(rows[: self._group.rank])), rows[self._group.rank])
