"""Replicated data parallelism (DDP, Li et al. 2020): bucketed gradient all-reduce, overlapped with the backward pass.

Why not torch's DDP and `fully_shard` (parallel/data/shards.py): exact sums, counted bytes, optimizers that see plain
tensors, a backward pass in two halves (zero-bubble pipelines), a host optimizer that starts during the backward pass
and parameters on disk each need a hook that one of them lacks; hooks on one bucket serve them all.
`benchmarks/sharding.py` compares them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..comm import Group, Pending
from ..placement import LocalShard, Placement, Shard, whole_placement
from .buckets import UNDER_WAY, BinaryCounter, Final, InOrder, fused, when_accumulated
from .gradient_compression import Compressor, Plain, PowerSgd

Parameters = dict[str, nn.Parameter]


class Replicas:
    """Replicates all parameters on the ranks of `group`; gradients of those `trained` are summed in buckets of at least
    `bucket_bytes`.

    The backward pass fills `weights`, the optimizer updates `parameters`: the same tensors, or float32 masters.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        parameters: Parameters,
        placements: dict[str, Placement],
        group: Group,
        *,
        trained: Collection[str],
        bucket_bytes: int,
        compressor: Compressor | None = None,
    ) -> None:
        self.parameters, self.placements, self._group = parameters, placements, group
        self._trained = {name: weight for name, weight in weights.items() if name in trained}
        self._compressor = compressor or Plain(group)
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[str, _Bucket] = {}
        self._complete = InOrder(self._start)
        self._under_way: list[tuple[_Bucket, Pending]] = []
        self._final: Final | None = None
        self._last = False
        self._ending: set[str] = set()
        """Parameters whose last backward pass of this step has begun, as a pipeline reports."""
        if group.size == 1 and not group.exact:
            return  # exact sums are trees over microbatches too
        reduced = {name: parameters[name] for name in parameters if name in self._trained}
        for names in fused(reduced, bucket_bytes):
            bucket = _Bucket({name: parameters[name] for name in names})
            self._buckets.append(bucket)
            for name in names:
                self._bucket_of[name] = bucket
                when_accumulated(weights[name], self._arrived, name)

    def listen(self, final: Final) -> None:
        """As `Reducer.listen`."""
        if self._group.exact:
            return
        self._final = final
        if not self._buckets:
            for name, weight in self._trained.items():
                when_accumulated(weight, self._is_final, name)

    def begin(self) -> None:
        """Begins a step."""
        for bucket in self._buckets:
            bucket.clear()
        self._under_way = []
        self._ending = set()
        self._complete.reset(self._buckets)

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Runs forward and backward of one microbatch; gradients are reduced in the `last`, or in each for exact
        sums."""
        self._last = last or self._group.exact
        if self._group.exact:
            self._complete.reset(self._buckets)
            for bucket in self._buckets:
                bucket.flat.zero_()
                bucket.missing = set(bucket.parameters)
        yield
        if self._group.exact:
            self._complete.flush()
            self._settle(0)
            for bucket in self._buckets:
                bucket.tree.add(bucket.flat.clone())

    def last_backward(self, names: Collection[str]) -> None:
        """As `Reducer.last_backward`."""
        if not self._group.exact:
            self._ending.update(names)

    def complete(self, names: Collection[str]) -> None:
        """As `Reducer.complete`."""
        if self._group.exact:
            return
        for name in names:
            if name in self._bucket_of:
                self._bucket_of[name].missing.discard(name)
        self._complete.look()

    def finish(self) -> dict[str, Tensor]:
        """Returns the gradients of the global batch, by name."""
        if self._group.exact:
            for bucket in self._buckets:
                bucket.flat.copy_(bucket.tree.total())
        else:
            self._complete.flush()
            self._settle(0)
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def owed(self) -> dict[str, LocalShard]:
        """Returns the error-feedback state: one error per rank, and factors shared by all."""
        if not isinstance(self._compressor, PowerSgd):
            return {}
        group, found = self._group, {}
        for name, tensor in self._compressor.state.items():
            if name.startswith("error/"):
                shard = Shard(0, (1,) * group.size, group)
                found[name] = LocalShard(tensor.unsqueeze(0), Placement((group.size, *tensor.shape), (shard,)))
            else:
                found[name] = LocalShard(tensor, whole_placement(tensor.shape, first=group.rank == 0))
        return found

    def owe(self, name: str, tensor: Tensor) -> None:
        """Restores a whole tensor of `owed`; errors saved with another number of ranks are reset."""
        if not isinstance(self._compressor, PowerSgd):
            return
        if not name.startswith("error/"):
            self._compressor.state[name] = tensor.to(next(iter(self.parameters.values())).device, copy=True)
        elif len(tensor) == self._group.size:
            mine = tensor[self._group.rank]
            self._compressor.state[name] = mine.to(next(iter(self.parameters.values())).device, copy=True)

    def publish(self, *, everything: bool = False) -> None:
        """As `Reducer.publish`; replicas need no communication."""
        if not self._buckets:
            for parameter in self.parameters.values():
                parameter.grad = None

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """In the block, nothing is reduced; parameters are always whole."""
        self._last, self._ending = False, set()
        yield

    def _arrived(self, name: str) -> None:
        if self._last or name in self._ending:
            self._bucket_of[name].missing.discard(name)
            self._complete.look()

    def _is_final(self, name: str) -> None:
        if self._last and self._final:
            self._final([name])

    def _start(self, bucket: _Bucket) -> None:
        parts = dict(zip(bucket.parameters, bucket.views, strict=True))
        self._under_way.append((bucket, self._compressor.start(bucket.flat, parts)))
        if self._final:
            self._settle(UNDER_WAY)  # otherwise all may be in flight while the backward pass continues

    def _settle(self, most: int) -> None:
        """Waits, in start order, until at most `most` buckets are in flight."""
        while len(self._under_way) > most:
            bucket, pending = self._under_way.pop(0)
            pending.wait()
            if self._final and self._last:
                self._final(bucket.parameters.keys())


@dataclass(slots=True)
class _Bucket:
    """Gradients summed together, as views of one buffer."""

    parameters: Mapping[str, nn.Parameter]
    flat: Tensor = field(init=False)
    views: list[Tensor] = field(init=False)
    missing: set[str] = field(init=False)
    tree: BinaryCounter = field(init=False)

    def __post_init__(self) -> None:
        some = next(iter(self.parameters.values()))
        self.flat = some.new_zeros(sum(p.numel() for p in self.parameters.values()))
        parts = self.flat.split([p.numel() for p in self.parameters.values()])
        self.views = [part.view(p.shape) for part, p in zip(parts, self.parameters.values(), strict=True)]
        self.clear()

    def clear(self) -> None:
        """Zeroes the gradients at the start of a step."""
        self.flat.zero_()
        self.missing = set(self.parameters)
        self.tree = BinaryCounter()
        for parameter, view in zip(self.parameters.values(), self.views, strict=True):
            parameter.grad = view
