"""Well-known model sizes as `[model]` settings, for `ropewalk bench train`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from ropewalk.base.errors import UserError

from .config import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model, the sequences per step, and how they are computed on one GPU of 80 GB or more."""

    model: Model
    vocabulary: int
    sequence_length: int
    batch_size: int
    microbatch_size: int
    recompute: Literal["none", "full"] = "none"


SIZES: dict[str, Size] = {
    # Trains in seconds on one core.
    "tiny": Size(
        model=Model(layers=2, width=64, heads=4, mlp_width=128),
        vocabulary=512,
        sequence_length=64,
        batch_size=4,
        microbatch_size=2,
    ),
    # GPT-2 (Radford et al. 2019), with the vocabulary rounded up to a multiple of 128, as is usual.
    "124M": Size(
        model=Model(
            layers=12,
            width=768,
            heads=12,
            mlp="gelu-tanh",
            norm="layer",
            bias=True,
            position="learned",
            tie_embeddings=True,
        ),
        vocabulary=50304,
        sequence_length=1024,
        batch_size=64,
        microbatch_size=64,
    ),
    # GPT-2 medium, with sequences of 2048.
    "350M": Size(
        model=Model(
            layers=24,
            width=1024,
            heads=16,
            mlp="gelu-tanh",
            norm="layer",
            bias=True,
            position="learned",
            tie_embeddings=True,
        ),
        vocabulary=50304,
        sequence_length=2048,
        batch_size=16,
        microbatch_size=16,
    ),
    # Llama architecture (Touvron et al. 2023), with the width and depth of GPT-3 XL.
    "1.3B": Size(
        model=Model(layers=24, width=2048, heads=16, mlp_width=5632, tie_embeddings=False),
        vocabulary=32000,
        sequence_length=2048,
        batch_size=16,
        microbatch_size=16,
    ),
    # Llama 2 7B. Weights, gradients and moments take 108 GB in float32: one sequence at a time, with recompute.
    "7B": Size(
        model=Model(layers=32, width=4096, heads=32, mlp_width=11008, tie_embeddings=False),
        vocabulary=32000,
        sequence_length=4096,
        batch_size=4,
        microbatch_size=1,
        recompute="full",
    ),
}


def size_of(name: str) -> Size:
    """The size called `name`, case-insensitive."""
    known = {size.lower(): size for size in SIZES}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean `{known[near[0]]}`? There" if near else "there"
        raise UserError(f"no size `{name}`; {hint} are {', '.join(SIZES)}")
    return SIZES[known[name.lower()]]
