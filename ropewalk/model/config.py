"""Settings of the model: a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from ropewalk.config.schema import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A decoder-only transformer."""

    layers: Annotated[int, Range(least=1)] = 4
    """Blocks of attention and feed-forward."""
    width: Annotated[int, Range(least=8)] = 256
    """Features of a token between blocks."""
    heads: Annotated[int, Range(least=1)] = 4
    """Query heads; `width / heads` is the size of each."""
    kv_heads: Annotated[int, Range(least=1)] | None = None
    """Key and value heads (grouped-query attention); as many as `heads` when not set."""
    hidden: Annotated[int, Range(least=8)] | None = None
    """Features inside the feed-forward part. Not set: 4 x width for `gelu`; 8/3 x width, rounded up to a multiple
    of 64, for `swiglu`."""
    norm: Literal["rms", "layer"] = "rms"
    """Normalisation before attention, before feed-forward and before the head."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward part."""
    position: Literal["rope", "learned"] = "rope"
    """How attention knows positions: rotation of queries and keys, or a learned vector added to the embedding."""
    rope_base: Annotated[float, Range(above=1)] = 10_000.0
    """Base of the rotation frequencies."""
    tied: bool = True
    """Whether the head shares the embedding's weights."""

    def check(self) -> Iterator[tuple[str, str]]:
        if self.width % self.heads:
            yield "heads", f"{self.heads} heads do not divide the width {self.width}; choose a divisor"
        elif self.position == "rope" and (self.width // self.heads) % 2:
            yield "heads", f"rope needs an even head size, width / heads is {self.width // self.heads}"
        if self.kv_heads and self.heads % self.kv_heads:
            yield "kv_heads", f"{self.kv_heads} does not divide the {self.heads} query heads; choose a divisor"
