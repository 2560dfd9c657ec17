"""Dropout from a hash of positions instead of a generator: reproducible under any layout of devices.

The mask is hashed from (seed, step, layer, site, sequence of the global batch, position, feature), so it is independent
of microbatch size, parallelism and recompute; checkpoints save only seed and step. Price:
about 20 passes of integer arithmetic over each masked tensor in eager mode.

Shapes: B sequences, T tokens, C width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ropewalk.base.seeds import seed_for

Site = Literal["embedding", "attention", "mlp"]
SITES: dict[Site, int] = {"embedding": 0, "attention": 1, "mlp": 2}


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout masks of one forward pass."""

    rate: float
    """Probability of dropping a feature; the others are divided by 1 - rate."""
    key: Tensor
    """One int64 number, from `dropout_key`."""
    rows_B: Tensor
    """int64, indices of the sequences in the global batch."""
    places_T: Tensor | None = None
    """int64, token positions, unless they are the whole sequence."""
    positions_first: bool = False
    """Whether masked tensors are T B C."""

    def at(self, layer: int) -> Dropout:
        """The masks of `layer`; a new object has those of the first layer."""
        return replace(self, key=self.key + len(SITES) * layer)

    def __call__(self, x_BTC: Tensor, *, site: Site) -> Tensor:
        kept_BTC = self.kept(x_BTC.shape[0 if self.positions_first else 1], x_BTC.shape[2], site=site)
        return x_BTC.masked_fill(~kept_BTC, 0.0) * (1 / (1 - self.rate))

    def kept(self, tokens: int, features: int, *, site: Site) -> Tensor:
        """Boolean mask of kept features, B T C or T B C."""
        device = self.key.device
        place_T = torch.arange(tokens, device=device) if self.places_T is None else self.places_T
        token_BT = _mix64(self.key + SITES[site])
        rows, places = (0, 1) if self.positions_first else (1, 0)
        token_BT = _mix64(token_BT + self.rows_B.unsqueeze(rows))
        token_BT = _mix64(token_BT + place_T.unsqueeze(places))
        # 64 bits per token but 32 per feature, which halves the memory traffic.
        low_BT1, high_BT1 = (half.to(torch.int32).unsqueeze(2) for half in (_low(token_BT), _low(token_BT >> 32)))
        bits_BTC = _mix32(low_BT1 + torch.arange(features, device=device, dtype=torch.int32))
        bits_BTC = _mix32(bits_BTC.add_(high_BT1))
        return (bits_BTC & 0x7FFFFFFF) >= round(self.rate * 2**31)


def dropout_key(seed: int, step: Tensor) -> Tensor:
    """The key of a step. `step` is a device tensor, which avoids synchronization."""
    return _mix64(step.to(torch.int64) + seed_for(seed, "dropout"))


def _mix64(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), in wrapping int64; shifts made logical by a mask."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _mix32(x: Tensor) -> Tensor:
    """Two rounds of multiply and xor-shift, in wrapping int32 and in place.

    Shifts and factors are the least biased found by Wellons («Prospecting for Hash Functions», 2018: lowbias32).
    """
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(0x7FEB352D, 32)
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B, 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def _low(x: Tensor) -> Tensor:
    """The lower 32 bits as a signed value that fits int32."""
    return ((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
