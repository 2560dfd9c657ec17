"""A larger model that starts as a smaller trained one.

Depth: `stack` puts copies of the trained blocks on top of them (Gong et al. 2019, "Efficient Training of BERT by
Progressively Stacking"); the function changes. `identity` puts the same copies there with the end of every residual
branch at 0: they add nothing yet, so logits stay what they were.

Width: Net2WiderNet (Chen, Goodfellow and Shlens 2016). Features, heads and hidden units are copied; whatever reads a
unit that now exists n times reads each copy with 1/n of its weight. Conditions for equal logits, checked by
model/growth/larger.py: features are copied evenly, so that norms see the same mean and mean square; heads are copied
whole, so that scores stay; a tied head reads n copies at full weight, so the last norm shrinks by n.

Copies are equal and get equal gradients: without noise (or dropout) they stay copies, and the larger model has no more
to say than the smaller. `noise` parts them at the price of an exact start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.base.seeds import seed_for

from ..init import fused, part_names, unfused
from ..sharding import split_of
from ..spec import Spec
from ..trainable import merged

NewBlocks = Literal["identity", "stack"]
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grown:
    """A larger model."""

    spec: Spec
    weights: dict[str, Tensor]
    preserving: bool
    """Whether its logits are those of the smaller model, up to rounding."""


def grow(
    weights: Weights,
    spec: Spec,
    larger: Spec,
    *,
    new_blocks: NewBlocks = "identity",
    noise: float = 0.0,
    seed: int = 0,
) -> Grown:
    """The weights of `larger` (of model/growth/larger.py), from those of `spec`; adapters are merged first.

    `noise` is the deviation of what is added to copied weights of the blocks, as a share of the root mean square of
    their matrix.
    """
    weights, spec = merged(weights, spec)
    deeper = larger.layers > spec.layers
    if deeper and new_blocks == "identity" and spec.norm_position == "post":
        raise UserError(
            "`model.layers`: after `post` norms no block is the identity; grow with --new-blocks stack, which changes "
            "the function"
        )
    widening = Widening(spec, larger)
    deep = _deepened(weights, spec, layers=larger.layers, new_blocks=new_blocks)
    wide = {name: widening.widened(name, tensor, noise=noise, seed=seed) for name, tensor in deep.items()}
    return Grown(
        spec=larger,
        weights={name: wide[name] for name in larger.shapes()},
        preserving=(not deeper or new_blocks == "identity") and not (noise and widening.copies),
    )


def _deepened(weights: Weights, spec: Spec, *, layers: int, new_blocks: NewBlocks) -> dict[str, Tensor]:
    """The trained blocks, then copies of them from the first on, as often as there is room."""
    found = {name: tensor for name, tensor in weights.items() if not name.startswith("blocks.")}
    ends = _branch_ends(spec)
    for layer in range(layers):
        source = f"blocks.{layer % spec.layers}."
        silent = layer >= spec.layers and new_blocks == "identity"
        for name, tensor in weights.items():
            if name.startswith(source):
                inner = name.removeprefix(source)
                ends_branch = inner.rpartition(".")[0] in ends
                found[f"blocks.{layer}.{inner}"] = torch.zeros_like(tensor) if silent and ends_branch else tensor
    return found


def _branch_ends(spec: Spec) -> tuple[str, ...]:
    """What a residual branch passes last: at 0 the branch adds nothing.

    One such part a branch, not two: after two zeros in a row neither would ever get a gradient.
    """
    if spec.norm_position == "both" and spec.norm != "none":
        return ("attention_post_norm", "mlp_post_norm")
    return ("attention.out", "mlp.down")


class Widening:
    """Which unit of the smaller model each unit of the larger one copies."""

    def __init__(self, spec: Spec, larger: Spec) -> None:
        # New layers have the parts of old ones.
        self._spec, self._larger = dataclasses.replace(spec, layers=larger.layers), larger
        stream = torch.arange(larger.width) % spec.width
        hidden = torch.arange(larger.mlp_width) % spec.mlp_width
        groups = torch.arange(larger.kv_heads) % spec.kv_heads
        queries = torch.arange(larger.heads // larger.kv_heads) % (spec.heads // spec.kv_heads)
        heads = (groups.unsqueeze(1) * (spec.heads // spec.kv_heads) + queries).flatten()
        head_rows, group_rows = (_rows_of(which, spec.head_size) for which in (heads, groups))
        self.copies = (larger.width, larger.mlp_width) != (spec.width, spec.mlp_width)
        """Whether anything is copied."""
        self._outputs = dict.fromkeys(("key", "value"), group_rows) | dict.fromkeys(("out", "down"), stream)
        self._outputs |= dict.fromkeys(("gate", "up"), hidden) | {"query": head_rows}
        self._inputs = {"out": head_rows, "down": hidden}
        self._stream = stream
        self._last_norm = "norm." if spec.norm_position != "post" else f"blocks.{larger.layers - 1}.mlp_norm."

    def widened(self, name: str, tensor: Tensor, *, noise: float, seed: int) -> Tensor:
        """One parameter at its new size."""
        if name.endswith(("query_norm.weight", "key_norm.weight")):
            return tensor
        if name in ("embedding.weight", "positions.weight"):
            return tensor[:, self._stream]
        if name == "head.weight":
            return _read_by(tensor, self._stream)
        if "norm." in name:
            shrink = name.startswith(self._last_norm) and self._spec.tie_embeddings
            return tensor[self._stream] / (self._larger.width // self._spec.width if shrink else 1)
        parts = zip(part_names(name, self._spec), unfused(tensor, split_of(name, self._spec)), strict=True)
        wide = [self._part(part, piece, noise=noise, seed=seed_for(seed, "grow", name, part)) for part, piece in parts]
        return fused(wide, split_of(name, self._larger))

    def _part(self, part: str, tensor: Tensor, *, noise: float, seed: int) -> Tensor:
        rows = self._outputs[part]
        if tensor.dim() == 1:
            return tensor[rows]
        columns = self._inputs.get(part, self._stream)
        wide = _read_by(tensor[rows], columns)
        if not noise:
            return wide
        copied = _is_copy(rows).unsqueeze(1) | _is_copy(columns)
        drawn = torch.randn(wide.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        size = noise * wide.double().square().mean().sqrt()
        return wide + (drawn * size * copied).to(wide.dtype)


def _read_by(matrix: Tensor, columns: Tensor) -> Tensor:
    """A matrix whose inputs are copied: each copy is read with its share of the weight."""
    times = torch.bincount(columns)
    return matrix[:, columns] / times[columns]


def _rows_of(heads: Tensor, size: int) -> Tensor:
    """The rows of whole heads."""
    return (heads.unsqueeze(1) * size + torch.arange(size)).flatten()


def _is_copy(index: Tensor) -> Tensor:
    """Whether the same unit already stands further left."""
    place = torch.arange(len(index))
    first = torch.full((int(index.max()) + 1,), len(index)).scatter_reduce(0, index, place, "amin")
    return place > first[index]
