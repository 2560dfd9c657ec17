"""How the moments of a parameter are cut: as it is, except where a moment is a mean or has another shape."""

from __future__ import annotations

from torch import Tensor

from .placement import LocalShard, Placement, Shard

MEANS = {"row_var": 1, "col_var": 0, "mean_scale": 1, "root_scale": 1}
"""Moments that sum up a dimension of their parameter, as means (Adafactor) or its largest (adamw-8bit): which one."""


def moment_placement(moment: str, tensor: Tensor, placement: Placement) -> Placement:
    """Which part of the whole moment a rank has: it is cut as its parameter is, a mean only along what it keeps."""
    shape = list(tensor.shape)
    for slicing in _slicings(moment, tensor.dim(), placement)[0]:
        shape[slicing.dim] = placement.shape[slicing.dim]
    return whole_moment_placement(moment, tuple(shape), placement)


def whole_moment_placement(moment: str, shape: tuple[int, ...], placement: Placement) -> Placement:
    """The same, by the `shape` of the whole moment."""
    kept, same = _slicings(moment, len(shape), placement)
    return Placement(shape, kept, placement.first and all(s.group.rank == 0 for s in same))


def moment_shard(moment: str, tensor: Tensor | LocalShard, placement: Placement) -> Tensor:
    """This rank's part of a whole moment, or of one that was read in parts, of a parameter that is cut like this."""
    shape = tensor.placement.shape if isinstance(tensor, LocalShard) else tuple(tensor.shape)
    return whole_moment_placement(moment, shape, placement).take(tensor)


def _slicings(moment: str, dims: int, placement: Placement) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """The cuts of a parameter that a moment of it shares, and those of which all ranks hold the same."""
    if dims != len(placement.shape):
        return (), placement.shards
    kept = tuple(s for s in placement.shards if s.dim != MEANS.get(moment))
    return kept, tuple(s for s in placement.shards if s not in kept)
