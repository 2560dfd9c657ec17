"""Text for tests: words drawn by a seed."""

from __future__ import annotations

import random

WORDS = ["rope", "hemp", "fibre", "strand", "walk", "hall", "comb", "spin", "lay", "tar", "ünïcode", "绳索"]


def prose(seed: int, words: int = 60) -> str:
    """A document of random words, the same for the same seed."""
    chosen = random.Random(seed).choices(WORDS, k=words)
    return "".join(word + ("\n" if place % 9 == 8 else " ") for place, word in enumerate(chosen))
