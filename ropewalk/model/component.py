"""What a part of a model declares without torch: its parameters, how they may be split, its FLOPs and its saved bytes.

A `Component` stands beside the module that computes it; names of parameters are those of the module. `Spec` adds the
declarations of all components up. Tests compare them with the modules and with what autograd saves.
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
    """Whether tokens look rows up, rather than being multiplied by it."""

    @property
    def is_matmul(self) -> bool:
        return len(self.shape) == 2 and not self.is_table


@dataclass(frozen=True, slots=True)
class ComponentFlops:
    """FLOPs per token, forward and backward."""

    linear: int
    """Of linear layers."""
    score_features: int = 0
    """Features over which queries meet keys."""
    score_matmuls: int = 0
    """Matmuls over queries, keys and these features: 2 FLOPs each per query, key and feature."""


class Component(abc.ABC):
    """A part of a model. Subclasses are frozen dataclasses of sizes."""

    @abc.abstractmethod
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """By their names in the module, in the order of the forward pass."""

    def flops(self, name: str, flow: GradientFlow) -> ComponentFlops:
        """Of the component called `name`; those of its matrices unless overridden."""
        return ComponentFlops(
            linear=2
            * sum(
                prod(parameter.shape) * flow.matmuls(f"{name}.{inner}")
                for inner, parameter in self.parameters().items()
                if parameter.is_matmul
            )
        )

    def saved(self, tape: Tape, x: TracedTensor, name: str) -> TracedTensor:
        """Records on `tape` what autograd saves, and gives the output. Unless overridden: the input of every matrix,
        one after the other, and an elementwise function between them."""
        for inner, parameter in self.parameters().items():
            if parameter.is_matmul:
                if x.gradient:
                    tape.save(x.storage)
                x = tape.matmul(x, f"{name}.{inner}", outputs=tape.shape(f"{name}.{inner}")[0])
        return x


def linear_parameters(
    name: str, spec: Spec, *, branch: str, outputs: int, inputs: int, split: Split
) -> dict[str, ParameterSpec]:
    """A linear layer of a block as the spec has them: with a bias, with an adapter.

    A bias is split as the outputs are; after a `row` matrix it is replicated and joins after the partial sums. Of an
    adapter, the factor that meets the split dimension of its matrix is split as that is, the other is replicated.
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
    """Where gradients flow when only some parameters are trained.

    Whatever a parameter does reaches all that comes after it, through the residual stream: a gradient flows through
    everything above the lowest trained parameter and through nothing below.
    """

    def __init__(self, order: Sequence[str], trained: Collection[str]) -> None:
        """`order` has all parameters as the forward pass meets them."""
        self.trained = frozenset(trained)
        self._positions = {name: position for position, name in enumerate(order)}
        self._lowest = min((self._positions[name] for name in self.trained), default=len(order))

    def matmuls(self, name: str) -> int:
        """Matmuls of one matrix: for its output, for the gradient of its input where one flows there, and for its own
        where it is trained."""
        part, _, kind = name.rpartition(".")
        input_flows = self.flows_below(f"{part}.weight" if kind in ("lora_a", "lora_b") else name)
        input_flows = input_flows or (kind == "lora_b" and f"{part}.lora_a" in self.trained)
        return 1 + input_flows + (name in self.trained)

    def flows_below(self, name: str) -> bool:
        """Whether a gradient flows through the input of this matrix."""
        return self._lowest < self._positions[name]
