"""One FSDP unit: all-gather before use, reduce-scatter after backward.

A parameter is gathered in its compute dtype: in `bf16` the matrices of a block are bfloat16 and its norms and biases
float32. All share one byte buffer, wide dtypes first so that every shard is aligned: one collective per group. A flat
buffer per dtype would double the collectives for the norms, a few kilobytes whose cost is all latency. Gradients are
reduced in the dtype of the master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..comm import Group, Pending
from ..placement import chunk_sizes
from .buckets import BinaryCounter

Fill = Callable[[Collection[str]], Iterator[tuple[str, Tensor]]]
"""Yields initial values of whole parameters by name, one at a time."""


class ShardGroup:
    """Parameters that the ranks of `group` shard by rows; ranks of `replicas` hold the same shards.

    They are gathered as a matrix (ranks, bytes per rank) and reduced as (ranks, numbers per rank): each row holds one
    rank's rows of every parameter, padded to equal size.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        group: Group,
        replicas: Group,
        *,
        trained: set[str],
        frees: bool,
        accumulates: bool,
        masters: torch.dtype,
        narrow: Mapping[str, torch.dtype],
        place: Callable[[str, Tensor], Tensor] | None = None,
        fill: Fill | None = None,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        """With `frees`, whole parameters exist only between `finish_gather` and `release`. With `accumulates`, `grad`
        of a weight sums several microbatches, in the dtype of `masters`. `place` moves a shard to its storage between
        uses. Weights without storage (`hollow`) take the values of `fill`. On a GPU, the all-reduce over replicas is
        queued on the stream `side`."""
        self._weights, self._group, self._replicas, self._frees = weights, group, replicas, frees
        self._exact = group.exact or replicas.exact
        self.trained = [name for name in weights if name in trained]
        self.has_frozen = len(self.trained) < len(weights)
        self._rows = {name: chunk_sizes(weight.shape[0], group.size) for name, weight in weights.items()}
        # Rows of the largest shard times numbers per row.
        self._sides = {n: self._rows[n][0] * (w.numel() // w.shape[0]) for n, w in weights.items()}
        self._masters = masters
        self.gradient: Tensor | None = None
        """This rank's shard of the sum so far, flat; exact sums are in the counter."""
        self._counter = BinaryCounter()
        self.missing: set[str] = set()
        self.backward = False
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._sent: Tensor | None = None
        """Input of the reduce-scatter in flight: kept until the compute stream has waited."""
        self._over_replicas, self._side = False, side
        self._dtypes = {n: narrow.get(n, w.dtype) for n, w in weights.items()}
        self._gathered = self._layout()
        # Rounded up, so that the next rank's bytes are aligned too.
        widest = max(dtype.itemsize for dtype in self._dtypes.values())
        self._row_bytes = -(-max(end for _, end in self._gathered.values()) // widest) * widest
        self._device = next(iter(weights.values())).device
        # The shard needs its own storage unless it can be a view of the whole parameter.
        self._separate = frees or any(w.dtype != masters or self._dtypes[n] != masters for n, w in weights.items())
        values = fill(weights) if fill else ((name, weight.data) for name, weight in weights.items())
        self.parameters: dict[str, nn.Parameter] = {}
        for name, value in values:
            part = self._take(name, value)
            self.parameters[name] = nn.Parameter(place(name, part) if place else part, requires_grad=name in trained)
        if accumulates:
            for name in self.trained:
                weights[name].grad_dtype = masters
        self._present = not frees

    def begin(self) -> None:
        """Begins a step without gradients."""
        self.gradient, self._counter = None, BinaryCounter()

    def expect(self) -> None:
        """Begins a microbatch: all gradients are missing."""
        self.missing, self.backward = set(self.trained), False

    def start_gather(self) -> None:
        """Starts the all-gather, unless the parameters are whole or it is in flight."""
        if (self._present and self._frees) or self._gathering is not None:
            return
        flat = torch.empty(self._row_bytes, dtype=torch.uint8, device=self._device)
        for name, (begin, end) in self._gathered.items():
            own = self.parameters[name].detach()
            flat[begin:end].view(self._dtypes[name])[: own.numel()] = own.reshape(-1)
        self._gathering = self._group.start_all_gather(flat)

    def finish_gather(self) -> None:
        if self._gathering is None:
            return
        parts = self._gathering.wait()
        self._gathering = None
        for name, (begin, end) in self._gathered.items():
            weight, dtype = self._weights[name], self._dtypes[name]
            if self._frees:
                weight.untyped_storage().resize_(weight.numel() * dtype.itemsize)
            rows = parts[:, begin:end].view(dtype).reshape(-1, *weight.shape[1:])[: weight.shape[0]]
            # The graph saves these tensors; a gather restores the same values, so versions must not change.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):  # type: ignore[attr-defined]
                weight.copy_(rows)
        self._present = True

    def forget_gather(self) -> None:
        """Waits for an outdated all-gather and drops its result."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Frees the whole parameters; the shard stays."""
        if self._frees and self._gathering is not None:
            self.finish_gather()
        if self._frees and self._present:
            for weight in self._weights.values():
                weight.untyped_storage().resize_(0)
            self._present = False

    def start_reduce(self) -> None:
        """Starts the reduce-scatter of this microbatch's gradients."""
        sides = [self._sides[name] for name in self.trained]
        parts = torch.zeros(self._group.size, sum(sides), dtype=self._masters, device=self._device)
        for piece, name in zip(parts.split(sides, dim=1), self.trained, strict=True):
            weight = self._weights[name]
            if weight.grad is not None:
                flat = weight.grad.reshape(-1)
                side = self._sides[name]
                full, rest = divmod(flat.numel(), side) if side else (0, 0)
                piece[:full] = flat[: full * side].view(full, side)
                if rest:
                    piece[full, :rest] = flat[full * side :]
                weight.grad = None
        self._sent, self._over_replicas = parts, False
        self._reducing = self._group.start_reduce_scatter(parts)
        if self._side is not None:
            with torch.cuda.stream(self._side):
                self.start_replica_sum()

    def start_replica_sum(self) -> None:
        """HSDP: starts to all-reduce the reduce-scatter's result over replicas, unless started. The host waits for the
        reduce-scatter, or on a GPU the current stream, which is not the compute stream."""
        if self._over_replicas or self._exact or self._replicas.size == 1:
            return
        assert self._reducing is not None
        self._reducing, self._over_replicas = self._replicas.start_all_reduce(self._reducing.wait()), True

    def finish_reduce(self) -> None:
        """Adds the reduced gradients to the sum of this step."""
        self.start_replica_sum()
        assert self._reducing is not None
        part = self._reducing.wait()
        self._reducing = self._sent = None
        if self._exact:
            self._counter.add(self._replicas.all_reduce(part))
        else:
            self.gradient = part if self.gradient is None else self.gradient.add_(part)

    def spread_gradient(self) -> None:
        """Sets the gradient of each parameter from the sum, and drops the sum."""
        total = self._counter.total() if self._exact else self.gradient
        self.gradient = None
        if total is None:
            return
        for piece, name in zip(total.split([self._sides[n] for n in self.trained]), self.trained, strict=True):
            parameter = self.parameters[name]
            parameter.grad = piece[: parameter.numel()].view(parameter.shape).to(parameter.device)

    def _layout(self) -> dict[str, tuple[int, int]]:
        """Returns each parameter's byte range in this rank's all-gather input, widest dtype first."""
        found, end = {}, 0
        for name in sorted(self._weights, key=lambda name: -self._dtypes[name].itemsize):
            begin, end = end, end + self._sides[name] * self._dtypes[name].itemsize
            found[name] = (begin, end)
        return found

    def _take(self, name: str, value: Tensor) -> Tensor:
        """Returns this rank's shard of an initial value. The weight gets the whole value, or frees its storage."""
        weight, dtype = self._weights[name], self._dtypes[name]
        part = self._mine(name, value)
        if self._separate:
            part = part.detach().to(self._device, self._masters, copy=True)
        if self._frees:
            weight.data = hollow(weight, dtype=dtype)
        elif value.data_ptr() != weight.data_ptr() or weight.dtype != dtype:
            weight.data = value.to(self._device, dtype, copy=True)
        return part if self._separate else self._mine(name, weight.data)

    def _mine(self, name: str, weight: Tensor) -> Tensor:
        rows = self._rows[name]
        return weight.narrow(0, min(weight.shape[0], sum(rows[: self._group.rank])), rows[self._group.rank])


def hollow(like: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """Returns a tensor shaped like `like`, without storage."""
    found = torch.empty_like(like, dtype=dtype, device=device, memory_format=torch.contiguous_format)
    found.untyped_storage().resize_(0)
    return found.detach()
