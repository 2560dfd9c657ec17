"""Compressed activations: keeps a block's saved tensors in fewer bits until its backward pass.

    packed   boolean masks take one bit per element; gradients are bit-identical
    8-bit    also: inputs of linears, norms and activation functions take one byte per number, with one scale per 256
             numbers (ActNN, Chen et al. 2021, but rounded to nearest); the forward pass stays exact, gradients of
             weights and norms are those of slightly different inputs

Kept exact in both: attention's saved tensors (its backward pass recomputes probabilities from queries, keys and the
log-sum-exp, which must agree), weights, and small tensors such as means and rotations.

Autograd's hooks see what eager operations save; a compiled block saves what its compiler chose, attention's tensors
included. These settings therefore need blocks that are not compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ropewalk.model.activations import GROUP, SMALL_SHARE
from ropewalk.model.attend import Attend
from ropewalk.model.modules import Block

COPIES = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0")
"""Graph nodes between a weight and the autocast copy of it that a matmul saves."""


class ActivationPacking:
    """Compresses saved tensors of blocks; `ModelStage.run_block` and `attend` of one executor share an instance."""

    def __init__(self, kind: Literal["packed", "8-bit"]) -> None:
        self.kind = kind
        self.whole_bytes = 0
        """Bytes of all storages compressed so far."""
        self.packed_bytes = 0
        """Bytes of the compressed copies."""
        self._open: Packed | None = None

    def open(self, block: Block, x: Tensor) -> Packed:
        """Returns the hooks that compress what `block` saves in the next forward pass on `x`."""
        self._open = Packed(self, block, x.numel())
        return self._open

    def exactly(self, attend: Attend) -> Attend:
        """Returns `attend` with its saved tensors kept exact."""

        def attend_exactly(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
            with saved_tensors_hooks(self._keep_exact, _same):
                return attend(q_BHTD, k_BGTD, v_BGTD)

        return attend_exactly

    def _keep_exact(self, x: Tensor) -> Tensor:
        if self._open is not None:
            self._open.stays(x)
        return x.detach()


class Packed:
    """Saved tensors of one block in one forward pass: the autograd hooks `pack` and `unpack`."""

    def __init__(self, packing: ActivationPacking, block: Block, input_numel: int) -> None:
        self._packing = packing
        self._small_numel = input_numel // SMALL_SHARE
        self._weights = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
        self._weight_shapes = {tuple(sorted(weight.shape)) for weight in block.parameters()}
        self._exact: dict[int, StorageWeakRef] = {}
        self._seen: dict[int, tuple[StorageWeakRef, weakref.ref[Kept]]] = {}
        """Compressed storages by address; each lives as long as autograd holds a ticket for it."""

    def stays(self, x: Tensor) -> None:
        """Excludes the storage of `x`, which another owner keeps as it is."""
        storage = x.untyped_storage()
        self._exact[storage.data_ptr()] = StorageWeakRef(storage)

    def pack(self, x: Tensor) -> Any:
        """Compresses `x` and returns a ticket; returns `x` detached if it stays exact."""
        storage = x.untyped_storage()
        numel = storage.nbytes() // x.element_size()
        # Detached: the producer's graph saves the tensor, and the tensor would hold the graph.
        if numel <= self._small_numel or self._stays(x, storage):
            return x.detach()
        kept = self._known(storage)
        if kept is None:
            flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage)
            kept = _bits(flat) if x.dtype == torch.bool else _bytes(flat)
            self._seen[storage.data_ptr()] = StorageWeakRef(storage), weakref.ref(kept)
            self._packing.whole_bytes += storage.nbytes()
            self._packing.packed_bytes += kept.bytes
        return _Ticket(kept, x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        """Returns the decompressed tensor."""
        return packed.tensor() if isinstance(packed, _Ticket) else packed

    def _known(self, storage: torch.UntypedStorage) -> Kept | None:
        present, kept = self._seen.get(storage.data_ptr(), (None, None))
        # The address may have been reused by a new storage.
        return kept() if present and kept and not present.expired() else None

    def _stays(self, x: Tensor, storage: torch.UntypedStorage) -> bool:
        if x.dtype != torch.bool and (self._packing.kind == "packed" or not x.is_floating_point()):
            return True
        kept = self._exact.get(storage.data_ptr())
        return (kept is not None and not kept.expired()) or self._is_weight(x, storage)

    def _is_weight(self, x: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether `x` is a weight or an autocast copy of one, which lives for the whole pass anyway."""
        if storage.data_ptr() in self._weights:
            return True
        if not x.requires_grad:
            # A frozen weight, recognised by shape: an input of this shape below all trained weights stays exact too.
            return x.dim() == 2 and tuple(sorted(x.shape)) in self._weight_shapes
        return any(node.name() == "torch::autograd::AccumulateGrad" for node in _origins(x.grad_fn))


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Kept:
    """A storage in compressed form."""

    codes: Tensor
    scales: Tensor | None
    """One per group of `codes`; None for bits."""
    numel: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def flat(self) -> Tensor:
        """Returns the decompressed numbers, flat."""
        if self.scales is None:
            places = torch.arange(8, dtype=torch.uint8, device=self.codes.device)
            return (self.codes.unsqueeze(1) >> places).bitwise_and_(1).to(torch.bool).view(-1)[: self.numel]
        wide = self.codes.view(-1, GROUP) * self.scales
        return wide.to(self.dtype).view(-1)[: self.numel]


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A tensor as a view of its storage."""

    kept: Kept
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.kept.flat().as_strided(self.shape, self.stride, self.offset)


def _bits(flat: Tensor) -> Kept:
    groups = F.pad(flat.to(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=flat.device)
    return Kept((groups << places).sum(1, dtype=torch.uint8), None, len(flat), flat.dtype)


def _bytes(flat: Tensor) -> Kept:
    """Quantizes to multiples of 1 / 127 of each group's largest magnitude, rounded to nearest."""
    groups = F.pad(flat.detach(), (0, -len(flat) % GROUP)).view(-1, GROUP).float()
    scales = groups.abs().amax(1, keepdim=True) / 127
    codes = (groups / torch.where(scales > 0, scales, 1)).round_().to(torch.int8)
    return Kept(codes, scales, len(flat), flat.dtype)


def _origins(node: Node | None) -> Iterator[Node]:
    """Yields `node` and the nodes it copies."""
    while node is not None:
        yield node
        node = node.next_functions[0][0] if node.name() in COPIES and node.next_functions else None


def _same(x: Tensor) -> Tensor:
    return x
