"""The parts of a block: norms, positions, attention, feed-forward. Plain PyTorch, one device, no distribution.

Shapes: B rows, T tokens, C width, H query heads, G key and value heads, D head size, F hidden features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import Attend
from .spec import Spec

Rotation = tuple[Tensor, Tensor]


def make_norm(spec: Spec) -> nn.Module:
    """The spec's normalisation over the width."""
    if spec.norm == "rms":
        return nn.RMSNorm(spec.width, eps=1e-6)
    return nn.LayerNorm(spec.width, eps=1e-5)


def rotation(positions_BT: Tensor, *, head_size: int, base: float, dtype: torch.dtype = torch.float32) -> Rotation:
    """Cosines and sines of RoPE (Su et al. 2021) for each position, B 1 T D/2; angles are float64, results `dtype`."""
    half = torch.arange(0, head_size, 2, device=positions_BT.device, dtype=torch.float64)
    frequencies = base ** (-half / head_size)
    angles = (positions_BT.to(torch.float64).unsqueeze(-1) * frequencies).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BHTD: Tensor, by: Rotation) -> Tensor:
    """Turns feature pairs (i, i + D/2) by their angles."""
    cos, sin = by[0].to(x_BHTD.dtype), by[1].to(x_BHTD.dtype)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Self-attention with one fused projection.

    Its rows are grouped by key-value head (queries, key, value of group 0, then group 1, ...), so that a cut of
    dimension 0 between groups is a valid tensor split.
    """

    def __init__(self, spec: Spec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = spec.head_size
        self.group_heads = spec.group_heads
        self.qkv = nn.Linear(spec.width, spec.kv_heads * spec.group_heads * spec.head_size, bias=False)
        self.out = nn.Linear(spec.heads * spec.head_size, spec.width, bias=False)

    def forward(self, x_BTC: Tensor, *, turn: Rotation | None, attend: Attend) -> Tensor:
        batch, tokens, _ = x_BTC.shape
        # -1 rather than the number of groups: a tensor-parallel rank holds only some of them.
        fused = self.qkv(x_BTC).view(batch, tokens, -1, self.group_heads, self.head_size)
        queries, keys, values = fused.split((self.group_heads - 2, 1, 1), dim=3)
        q_BHTD = queries.flatten(2, 3).transpose(1, 2)
        k_BGTD = keys.squeeze(3).transpose(1, 2)
        v_BGTD = values.squeeze(3).transpose(1, 2)
        if turn is not None:
            q_BHTD, k_BGTD = rotate(q_BHTD, turn), rotate(k_BGTD, turn)
        attended_BHTD = attend(self.layer, q_BHTD, k_BGTD, v_BGTD)
        return self.out(attended_BHTD.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020) or GeLU. SwiGLU's gate and up rows alternate in chunks: dimension 0 splits between them."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.gated = spec.mlp == "swiglu"
        self.chunk = spec.mlp_chunk
        self.up = nn.Linear(spec.width, spec.hidden * (2 if self.gated else 1), bias=False)
        self.down = nn.Linear(spec.hidden, spec.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        inner = self.up(x_BTC)
        if not self.gated:
            return self.down(F.gelu(inner))
        gate, up = inner.unflatten(-1, (-1, 2, self.chunk)).unbind(-2)
        return self.down((F.silu(gate) * up).flatten(-2))


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, spec: Spec, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec, layer)
        self.mlp_norm = make_norm(spec)
        self.mlp = FeedForward(spec)

    def forward(self, x_BTC: Tensor, *, turn: Rotation | None, attend: Attend) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), turn=turn, attend=attend)
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))
