"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ropewalk.config.schema import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Checkpoint -> held-out loss, accuracy, compression beside zlib and xz, samples."""

    max_bytes: Annotated[int, Range(least=1000)] = 400_000
    """Most UTF-8 bytes of held-out text that are scored, whole documents in a seeded order."""
    samples: Annotated[int, Range(least=0, most=1_000_000)] = 24
    """Completions drawn from beginnings of held-out documents; those in domain `code` are parsed as Python."""
    prompt_tokens: Annotated[int, Range(least=1)] = 48
    """Tokens of the document that a completion starts from."""
    max_new_tokens: Annotated[int, Range(least=1, most=1 << 20)] = 96
    """Maximum tokens drawn for a completion; it ends earlier at the end of text."""
    temperature: Annotated[float, Range(least=0)] = 0.7
    """Sharpness of sampling; 0 takes the likeliest token."""
    top_k: Annotated[int, Range(least=0)] = 50
    """Only the k likeliest tokens are drawn from; 0 means all."""
