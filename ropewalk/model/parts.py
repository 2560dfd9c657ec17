"""Fused matrices taken apart into what papers and other formats call them, and put together again.

Both directions read the declarations of model/sharding.py; they are exact inverses and copy numbers, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sharding import Split, split_of
from .spec import Spec


def part_names(name: str, spec: Spec) -> tuple[str, ...]:
    """What the parameter `name` is made of: ("query", "key", "value"), ("gate", "up"), or itself ("down")."""
    return tuple(part for part, _ in split_of(name, spec).parts) or (name.split(".")[-2],)


def unfused(fused: Tensor, split: Split) -> list[Tensor]:
    """The parts of a fused weight or bias, each with its rows in order; of another one, itself."""
    if not split.parts:
        return [fused]
    rows = [rows for _, rows in split.parts]
    units = fused.unflatten(0, (split.units, sum(rows)))
    return [part.flatten(0, 1) for part in units.split(rows, dim=1)]


def fused(parts: Sequence[Tensor], split: Split) -> Tensor:
    """The inverse of `unfused`."""
    if not split.parts:
        (alone,) = parts
        return alone
    units = [part.unflatten(0, (split.units, -1)) for part in parts]
    return torch.cat(units, dim=1).flatten(0, 1)
