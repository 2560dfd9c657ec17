"""How a parameter may be split over devices: components declare it, `plan` chooses, `parallel` applies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .spec import Spec

Role = Literal["column", "row", "vocabulary", "replicate"]
Axis = Literal["tensor", "expert"]
"""Parallel axes that split parameters."""


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """The dimension of a parameter that one axis splits into equal parts."""

    axis: Axis
    dimension: int


@dataclass(frozen=True, slots=True)
class Split:
    """Tensor split of one parameter.

    `column` splits the outputs (dimension 0), `row` the inputs (dimension 1, partial sums are reduced), `vocabulary`
    the rows of the embedding or head, `replicate` nothing. Any split of the dimension into equal parts of whole units
    is valid.
    """

    role: Role
    units: int = 1
    """Indivisible pieces along the split dimension; a tensor degree must divide it."""
    parts: tuple[tuple[str, int], ...] = ()
    """Layout of one unit of a fused matrix, in order: (name, rows)."""
    partial_gradient: bool = False
    """Whether a replicated parameter acts on only this rank's features, so that its gradient is summed over ranks:
    norms of queries and keys, one factor of each adapter."""

    before: tuple[AxisSplit, ...] = ()
    """Other axes that split the parameter, before the tensor axis."""

    @property
    def axes(self) -> tuple[AxisSplit, ...]:
        """All axes that split the parameter, in this order."""
        own = () if self.dimension is None else (AxisSplit("tensor", self.dimension),)
        return (*self.before, *own)

    @property
    def dimension(self) -> int | None:
        """The dimension that the tensor axis splits."""
        return {"column": 0, "vocabulary": 0, "row": 1, "replicate": None}[self.role]


def splits(spec: Spec) -> dict[str, Split]:
    """The split of every parameter in `spec.shapes()`."""
    return {name: parameter.split for name, parameter in spec.parameter_specs().items()}


def split_of(name: str, spec: Spec) -> Split:
    """The split of one parameter."""
    return spec.parameter_specs()[whole_name(name, spec)].split


def whole_name(name: str, spec: Spec) -> str:
    """The name of parameter `name` in the whole model: the last pipeline stage has its own `head.weight` even if the
    head is tied, as a copy of the embedding."""
    return "embedding.weight" if name == "head.weight" and spec.tie_embeddings else name
