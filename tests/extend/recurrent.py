"""A user's kind of model: `model.kind = "recurrent:Recurrent"` in a recipe beside this file."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ropewalk.model.component import Component, ParameterSpec
from ropewalk.model.components import Table
from ropewalk.model.protocol import ForwardPass, LanguageModel
from ropewalk.model.spec import Spec


class Gates(Component):
    """Forget gate and value of a layer, by one matrix."""

    def __init__(self, width: int) -> None:
        self.width = width

    def parameters(self) -> dict[str, ParameterSpec]:
        return {"gates.weight": ParameterSpec((2 * self.width, self.width))}


class Layer(nn.Module):
    """h_t = f_t h_(t-1) + (1 - f_t) v_t, added to the stream."""

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.layer, self.gates = layer, nn.Linear(width, 2 * width, bias=False)

    def forward(self, x_BTC: Tensor, made: ForwardPass) -> Tensor:
        forget, value = self.gates(x_BTC).chunk(2, dim=-1)
        if made.losses is not None:
            made.losses.add("gates", (forget - 1).square().mean(-1).sum(), layer=self.layer, coefficient=0.1)
        forget, h, out = forget.sigmoid(), torch.zeros_like(x_BTC[:, 0]), []
        for f_BC, v_BC in zip(forget.unbind(1), value.unbind(1), strict=True):
            h = f_BC * h + (1 - f_BC) * v_BC
            out.append(h)
        return x_BTC + torch.stack(out, dim=1)


class Recurrent(LanguageModel):
    """A stack of gated recurrent layers."""

    def make_blocks(self, layers: Iterable[int]) -> None:
        self.blocks = nn.ModuleDict({str(layer): Layer(self.spec.width, layer) for layer in layers})

    def run(self, inputs: tuple[Tensor, ...], forward: ForwardPass) -> tuple[Tensor, ...]:
        (x,) = inputs or (self.embedded(forward.tokens_BT),)
        for block in self.blocks.values():
            x = self.run_block(block, x, lambda block, x: block(x, forward))
        return (x,)

    @staticmethod
    def components(spec: Spec) -> dict[str, Component]:
        layers = {f"blocks.{layer}": Gates(spec.width) for layer in range(spec.layers)}
        return {"embedding": Table(spec.vocabulary, spec.width), **layers}
