"""Muon (Jordan et al. 2024): orthogonalized momentum for the matrices inside blocks, AdamW for everything else.

Five Newton-Schulz iterations bring the singular values of an update near 1. Embedding, head, positions, norms and
biases are not linear layers between hidden features.

Parts of a fused matrix (query, key, value; gate, up) are orthogonalized separately. They are different linears that
share storage for speed: 3 C rows of C columns cannot be orthogonal, and a large gradient of one part would shrink the
others. Runs also do not depend on how the model stores them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.model.sharding import splits
from ropewalk.model.spec import Spec

from .adamw import adam
from .rule import Group, Guarded, Moments, Parameters, Placements, Update, by_parameter, decay_groups
from .sharded import Mapped
from .table import MuonSettings, is_hidden

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan et al. 2024: a quintic with maximum slope at 0 that keeps singular values in [0.7, 1.2]."""
ITERATIONS = 5
RMS = 0.2
"""Liu et al. 2025 (Muon is scalable for LLM training), section 2.2: updates of root mean square 0.2 match the typical
norm of AdamW's, so that both share one learning rate and weight decay."""


def make(
    parameters: Parameters, settings: MuonSettings, spec: Spec | None, placements: Placements
) -> torch.optim.Optimizer:
    """Muon on the matrices inside blocks, AdamW on the rest."""
    assert spec is not None, "Muon must know which matrices are fused"
    known = splits(spec)
    hidden: dict[tuple[int, ...], Parameters] = {}
    for name, parameter in parameters.items():
        if is_hidden(name, parameter.shape):
            parts = tuple(rows for _, rows in known[name].parts)
            hidden.setdefault(parts, {})[name] = parameter
    groups: list[Group] = []
    for parts, matrices in hidden.items():
        rule = Orthogonal(momentum=settings.momentum, parts=parts)
        groups += decay_groups(matrices, settings.weight_decay, rule=rule)
    rest = {name: p for name, p in parameters.items() if not is_hidden(name, p.shape)}
    groups += decay_groups(rest, settings.weight_decay, rule=adam(settings), lr_ratio=settings.rest_lr_ratio)
    return Guarded(groups, by_parameter(parameters, placements))


@dataclass(frozen=True, kw_only=True, slots=True)
class Orthogonal:
    """Nesterov momentum, orthogonalized; decoupled weight decay."""

    momentum: float
    parts: tuple[int, ...] = ()
    """Rows of each part per unit of a fused matrix (model/sharding.py); empty if not fused."""

    def begin(self, weight: Tensor) -> Moments:
        return {"momentum_buffer": torch.zeros_like(weight)}

    def update(
        self, weight: Tensor, gradient: Tensor, moments: Moments, *, step: Tensor, lr: float, decay: float
    ) -> Update:
        mean = torch.lerp(moments["momentum_buffer"], gradient, 1 - self.momentum)
        ahead = torch.lerp(gradient, mean, self.momentum)
        (update,) = yield [Mapped(ahead, self.orthogonal_parts)]
        return weight * (1 - lr * decay) - lr * update, {"momentum_buffer": mean}

    def orthogonal_parts(self, matrix: Tensor) -> Tensor:
        """Orthogonalizes every part of whole matrices (N A B) and scales it to `RMS`."""
        pieces = [_scale(piece) * orthogonal(piece) for piece in _unfused(matrix, self.parts)]
        return _fused(pieces, self.parts)


def orthogonal(matrix: Tensor) -> Tensor:
    """Matrices (N A B) with singular values near 1 (0.7 to 1.2; tiny ones less) and the same singular vectors.

    In bfloat16 on a GPU, as the authors do: the result is approximate anyway, and matmuls are several times faster.
    """
    x = matrix.bfloat16() if matrix.is_cuda and matrix.dtype == torch.float32 else matrix
    tall = matrix.shape[1] > matrix.shape[2]
    # Transposed if tall: the Gram matrix is the smaller one.
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return (x.mT if tall else x).to(matrix.dtype)


def _scale(matrix: Tensor) -> float:
    """The factor to `RMS`: an orthogonal A x B matrix has root mean square 1 / sqrt(max(A, B))."""
    return RMS * math.sqrt(max(matrix.shape[1:]))


def _unfused(matrix: Tensor, parts: Sequence[int]) -> list[Tensor]:
    """The matrices whose rows are interleaved in a fused one (N A B)."""
    if not parts:
        return [matrix]
    units = matrix.unflatten(1, (-1, sum(parts)))
    return [piece.flatten(1, 2) for piece in units.split(list(parts), dim=2)]


def _fused(pieces: list[Tensor], parts: Sequence[int]) -> Tensor:
    """The inverse of `_unfused`."""
    if not parts:
        return pieces[0]
    units = [piece.unflatten(1, (-1, rows)) for piece, rows in zip(pieces, parts, strict=True)]
    return torch.cat(units, dim=2).flatten(1, 2)
