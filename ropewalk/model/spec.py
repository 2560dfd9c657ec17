"""What a model is before it exists: shapes, parameters, FLOPs. No torch.

`Spec` is the resolved form of the settings: nothing left to derive. The shapes here are the ones the modules build; a
test compares them name by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from .config import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A decoder-only transformer with every size decided."""

    vocabulary: int
    sequence_length: int
    """Longest row; learned positions and the rotation table end here."""
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    norm: Literal["rms", "layer"]
    mlp: Literal["swiglu", "gelu"]
    position: Literal["rope", "learned"]
    rope_base: float
    tied: bool

    @property
    def group_heads(self) -> int:
        """Heads in one group of the fused projection: its queries, one key, one value."""
        return self.heads // self.kv_heads + 2

    @property
    def mlp_chunk(self) -> int:
        """Rows of gate, then as many rows of up, alternate in the fused projection of `swiglu`.

        Chunks are as long as leaves a number of them that 8 divides, so that tensor degrees 2, 4 and 8 are
        possible wherever 8 divides `hidden`.
        """
        return next((size for size in (128, 64, 32, 16, 8, 4, 2) if self.hidden % (8 * size) == 0), 1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by name, in the order of the forward pass."""
        width = self.width
        norm: dict[str, tuple[int, ...]] = {"weight": (width,)}
        if self.norm == "layer":
            norm["bias"] = (width,)
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocabulary, width)}
        if self.position == "learned":
            shapes["positions.weight"] = (self.sequence_length, width)
        for layer in range(self.layers):
            block = f"blocks.{layer}"
            shapes |= {f"{block}.attention_norm.{name}": shape for name, shape in norm.items()}
            shapes[f"{block}.attention.qkv.weight"] = (self.kv_heads * self.group_heads * self.head_size, width)
            shapes[f"{block}.attention.out.weight"] = (width, self.heads * self.head_size)
            shapes |= {f"{block}.mlp_norm.{name}": shape for name, shape in norm.items()}
            shapes[f"{block}.mlp.up.weight"] = (self.hidden * (2 if self.mlp == "swiglu" else 1), width)
            shapes[f"{block}.mlp.down.weight"] = (width, self.hidden)
        shapes |= {f"norm.{name}": shape for name, shape in norm.items()}
        if not self.tied:
            shapes["head.weight"] = (self.vocabulary, width)
        return shapes

    def parameters(self) -> int:
        """Trained numbers, shared ones counted once."""
        return sum(prod(shape) for shape in self.shapes().values())

    def matmul_parameters(self) -> int:
        """Numbers that multiply every token: all matrices but the embedding and positions, with the head."""
        blocks = sum(
            prod(shape) for name, shape in self.shapes().items() if name.startswith("blocks.") and len(shape) == 2
        )
        return blocks + self.vocabulary * self.width

    def flops_per_token(self, attention: Literal["full", "causal"] = "full") -> int:
        """Forward and backward FLOPs for a token of a full row, recomputation not counted.

        `full` is the convention of PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L H D T. `causal` counts only the
        pairs that are attended: the mean query sees (T + 1) / 2 keys.
        """
        keys = self.sequence_length if attention == "full" else (self.sequence_length + 1) / 2
        scores = 12 * self.layers * self.heads * self.head_size * keys
        return round(6 * self.matmul_parameters() + scores)


def resolve(model: Model, *, vocabulary: int, sequence_length: int) -> Spec:
    """The spec of `model` for a tokenizer and a row length."""
    hidden = model.hidden
    if hidden is None:
        hidden = 4 * model.width if model.mlp == "gelu" else -(-8 * model.width // 3 // 64) * 64
    return Spec(
        vocabulary=vocabulary,
        sequence_length=sequence_length,
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        head_size=model.width // model.heads,
        hidden=hidden,
        norm=model.norm,
        mlp=model.mlp,
        position=model.position,
        rope_base=model.rope_base,
        tied=model.tied,
    )
