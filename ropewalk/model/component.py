"""Torch-free declarations of a model's components: parameters, their splits, FLOPs and saved bytes.

A `Component` stands beside the module that computes it, with the same parameter names. `Spec` sums the declarations of
all components. Tests compare them with the modules and with tensors saved by autograd.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from .sharding import Split

if TYPE_CHECKING:
    from .activations import Tape, TracedTensor
    from .spec import Spec

REPLICATE = Split("replicate")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A declared parameter."""

    shape: tuple[int, ...]
    split: Split = REPLICATE
    is_table: bool = False
    """Whether tokens index its rows instead of multiplying it."""

    @property
    def is_matmul(self) -> bool:
        return len(self.shape) == 2 and not self.is_table


@dataclass(frozen=True, slots=True)
class ComponentFlops:
    """FLOPs per token, forward and backward."""

    linear: int
    """FLOPs of linear layers."""
    score_features: int = 0
    """Features over which attention scores are computed."""
    score_matmuls: int = 0
    """Matmuls over queries, keys and these features: 2 FLOPs each per query, key and feature."""


class Component(abc.ABC):
    """A component of a model. Subclasses are frozen dataclasses of sizes."""

    @abc.abstractmethod
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Parameters by their names in the module, in the order of the forward pass."""

    def flops(self, name: str, flow: GradientFlow) -> ComponentFlops:
        """FLOPs of the component called `name`; by default those of its matrices."""
        return ComponentFlops(
            linear=2
            * sum(
                prod(parameter.shape) * flow.matmuls(f"{name}.{inner}")
                for inner, parameter in self.parameters().items()
                if parameter.is_matmul
            )
        )

    def saved(self, tape: Tape, x: TracedTensor, name: str) -> TracedTensor:
        """Records tensors saved by autograd on `tape`; returns the output. By default: the input of each matrix, in
        sequence, with elementwise functions between them."""
        for inner, parameter in self.parameters().items():
            if parameter.is_matmul:
                if x.gradient:
                    tape.save(x.storage)
                x = tape.matmul(x, f"{name}.{inner}", outputs=tape.shape(f"{name}.{inner}")[0])
        return x


def linear_parameters(
    name: str, spec: Spec, *, branch: str, outputs: int, inputs: int, split: Split
) -> dict[str, ParameterSpec]:
    """Parameters of a block's linear layer, with bias and adapter if the spec has them.

    A bias is split like the outputs; after a `row` matrix it is replicated and added after the partial sums. The
    adapter factor on the split dimension of its matrix is split likewise, the other is replicated.
    """
    is_column = split.role == "column"
    found = {f"{name}.weight": ParameterSpec((outputs, inputs), split)}
    if spec.bias:
        found[f"{name}.bias"] = ParameterSpec((outputs,), split if is_column else REPLICATE)
    if f"{branch}.{name}" in spec.adapted:
        partial = Split("replicate", partial_gradient=True)
        found[f"{name}.lora_a"] = ParameterSpec((spec.lora_rank, inputs), partial if is_column else split)
        found[f"{name}.lora_b"] = ParameterSpec((outputs, spec.lora_rank), split if is_column else partial)
    return found


class GradientFlow:
    """Gradient flow when only some parameters are trained.

    Through the residual stream every parameter affects all later ones: gradients flow through everything above the
    lowest trained parameter and nothing below.
    """

    def __init__(self, order: Sequence[str], trained: Collection[str]) -> None:
        """`order` lists all parameters in the order of the forward pass."""
        self.trained = frozenset(trained)
        self._positions = {name: position for position, name in enumerate(order)}
        self._lowest = min((self._positions[name] for name in self.trained), default=len(order))

    def matmuls(self, name: str) -> int:
        """Number of matmuls of a matrix: for its output, for the gradient of its input if needed, and for its own
        gradient if trained."""
        part, _, kind = name.rpartition(".")
        input_flows = self.flows_below(f"{part}.weight" if kind in ("lora_a", "lora_b") else name)
        input_flows = input_flows or (kind == "lora_b" and f"{part}.lora_a" in self.trained)
        return 1 + input_flows + (name in self.trained)

    def flows_below(self, name: str) -> bool:
        """Whether the input of this matrix gets a gradient."""
        return self._lowest < self._positions[name]
