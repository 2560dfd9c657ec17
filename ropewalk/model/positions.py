"""Parameter-free position encodings: rotation (RoPE), sinusoids, ALiBi slopes.

Shapes: B sequences, T tokens, C width, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import Spec

Rotation = tuple[Tensor, Tensor]


def rotation(positions_BT: Tensor, spec: Spec, *, dtype: torch.dtype = torch.float32) -> Rotation:
    """Cosines and sines of RoPE (Su et al. 2021) for each position, B 1 T D/2; angles are float64, results `dtype`.

    Pair i of D/2 is rotated by position x base^(-2i/D). Scaling by a factor s: `linear` takes position / s (Chen et al.
    2023); `ntk` takes base x s^(D/(D-2)) (Peng et al. 2023, section 3.1), so that pair 0 is unchanged and the last pair
    rotates s times slower.
    """
    size, base, positions = spec.head_size, spec.rope_theta, positions_BT.to(torch.float64)
    if spec.rope_scaling == "linear":
        positions = positions / spec.rope_factor
    elif spec.rope_scaling == "ntk":
        base *= spec.rope_factor ** (size / (size - 2))
    even = torch.arange(0, size, 2, device=positions_BT.device, dtype=torch.float64)
    angles = (positions.unsqueeze(-1) * base ** (-even / size)).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BHTD: Tensor, by: Rotation) -> Tensor:
    """Rotates feature pairs (i, i + D/2) by their angles."""
    cos, sin = by[0].to(x_BHTD.dtype), by[1].to(x_BHTD.dtype)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def sinusoids(positions_BT: Tensor, *, width: int, dtype: torch.dtype) -> Tensor:
    """The vectors B T C of Vaswani et al. 2017, section 3.5: sines at even features, cosines at odd ones."""
    feature_C = torch.arange(width, device=positions_BT.device)
    frequencies_C = 10_000.0 ** (-(feature_C // 2 * 2).to(torch.float64) / width)
    angles_BTC = positions_BT.to(torch.float64).unsqueeze(-1) * frequencies_C
    return torch.where(feature_C % 2 == 0, angles_BTC.sin(), angles_BTC.cos()).to(dtype)


def with_sinusoids(x_BTC: Tensor, positions_BT: Tensor, spec: Spec) -> Tensor:
    """Token embeddings times sqrt(width), plus sinusoids (Vaswani et al. 2017, section 3.4): without the factor,
    sinusoids would dominate."""
    waves_BTC = sinusoids(positions_BT, width=spec.width, dtype=x_BTC.dtype)
    return x_BTC * spec.width**0.5 + waves_BTC


def alibi_slopes(heads: int, *, device: torch.device | str = "cpu") -> Tensor:
    """ALiBi's penalty per token of distance, H in float64 (Press et al. 2022, section 3; other counts as their code).

    For n = 2^k heads: 2^(-8/n), 2^(-16/n), ... Otherwise those of the largest such n below, then every second one of
    those for 2n heads. Computed on the device, which avoids a synchronizing copy.
    """
    power = 1 << (heads.bit_length() - 1)
    head_H = torch.arange(heads, device=device, dtype=torch.float64)
    return torch.exp2(-torch.where(head_H < power, 8 * (head_H + 1), 4 * (2 * (head_H - power) + 1)) / power)
