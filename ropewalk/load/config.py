"""Settings of `load`: how prepared tokens become batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Manifest -> the same batches in the same order, from any step."""

    sequence_length: Annotated[int, Range(least=8)] = 256
    """Tokens a row."""
    verify: Annotated[Literal["open", "off"], CONTINUES] = "open"
    """`open` checks every byte of the shards once when training starts (about 5 GB/s); `off` checks their footers
    only."""
