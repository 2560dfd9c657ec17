"""Grows a trained model into a larger one that starts from its weights.

Depth: `stack` puts copies of the trained blocks on top (Gong et al. 2019, "Efficient Training of BERT by Progressively
Stacking"); the function changes. `identity` does the same with the last weight of every new residual branch at 0: the
branches add nothing yet, so logits are unchanged.

Width: Net2WiderNet (Chen, Goodfellow and Shlens 2016). Features, heads and hidden units are copied; weights that read a
unit with n copies are divided by n. Conditions for equal logits, checked by model/growth/larger.py: features are copied
evenly, so that norms see the same mean and mean square; heads are copied whole, so that scores are unchanged; a tied
head reads n copies at full weight, so the final norm is divided by n.

Copies get equal gradients: without noise (or dropout) they stay equal, and the larger model gains no capacity. `noise`
breaks the symmetry at the price of an exact start.
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
    """Whether its logits equal the smaller model's, up to rounding."""


def grow(
    weights: Weights,
    spec: Spec,
    larger: Spec,
    *,
    new_blocks: NewBlocks = "identity",
    noise: float = 0.0,
    seed: int = 0,
) -> Grown:
    """Weights of `larger` (from model/growth/larger.py), derived from those of `spec`; adapters are merged first.

    `noise` is the standard deviation of noise added to copied block weights, relative to the root mean square of the
    matrix.
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
    """The trained blocks, then copies of them from the first on, repeated up to `layers`."""
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
    """The last parameters of each residual branch: at 0 the branch adds nothing.

    One per branch, not two: behind two consecutive zeros neither would ever get a gradient.
    """
    if spec.norm_position == "both" and spec.norm != "none":
        return ("attention_post_norm", "mlp_post_norm")
    return ("attention.out", "mlp.down")


class Widening:
    """Maps each unit of the larger model to the unit of the smaller model that it copies."""

    def __init__(self, spec: Spec, larger: Spec) -> None:
        # New layers have the same parts as old ones.
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
        """One parameter, widened."""
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
    """Columns copied for copied inputs, each divided by its number of copies."""
    times = torch.bincount(columns)
    return matrix[:, columns] / times[columns]


def _rows_of(heads: Tensor, size: int) -> Tensor:
    """Row indices of whole heads."""
    return (heads.unsqueeze(1) * size + torch.arange(size)).flatten()


def _is_copy(index: Tensor) -> Tensor:
    """Whether the same unit already occurs further left."""
    place = torch.arange(len(index))
    first = torch.full((int(index.max()) + 1,), len(index)).scatter_reduce(0, index, place, "amin")
    return place > first[index]
