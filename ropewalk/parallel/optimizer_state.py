"""How the moments of a parameter are cut: as it is, except where a moment is a mean or has another shape."""

from __future__ import annotations

from torch import Tensor

from .placement import Cut, Part, Slicing

MEANS = {"row_var": 1, "col_var": 0, "mean_scale": 1, "root_scale": 1}
"""Moments that sum up a dimension of their parameter, as means (Adafactor) or its largest (adamw-8bit): which one."""


def moment_cut(moment: str, tensor: Tensor, cut: Cut) -> Cut:
    """Which part of the whole moment a rank has: it is cut as its parameter is, a mean only along what it keeps."""
    shape = list(tensor.shape)
    for slicing in _slicings(moment, tensor.dim(), cut)[0]:
        shape[slicing.dim] = cut.shape[slicing.dim]
    return whole_moment_cut(moment, tuple(shape), cut)


def whole_moment_cut(moment: str, shape: tuple[int, ...], cut: Cut) -> Cut:
    """The same, by the `shape` of the whole moment."""
    kept, same = _slicings(moment, len(shape), cut)
    return Cut(shape, kept, cut.first and all(s.group.rank == 0 for s in same))


def moment_part(moment: str, tensor: Tensor | Part, cut: Cut) -> Tensor:
    """This rank's part of a whole moment, or of one that was read in parts, of a parameter that is cut like this."""
    shape = tensor.cut.shape if isinstance(tensor, Part) else tuple(tensor.shape)
    return whole_moment_cut(moment, shape, cut).take(tensor)


def _slicings(moment: str, dims: int, cut: Cut) -> tuple[tuple[Slicing, ...], tuple[Slicing, ...]]:
    """The cuts of a parameter that a moment of it shares, and those of which all ranks hold the same."""
    if dims != len(cut.shape):
        return (), cut.slicings
    kept = tuple(s for s in cut.slicings if s.dim != MEANS.get(moment))
    return kept, tuple(s for s in cut.slicings if s not in kept)
