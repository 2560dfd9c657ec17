"""Random streams named by what they are for, so that nothing depends on the order of calls."""

from __future__ import annotations

import hashlib


def seed_for(seed: int, *names: str | int) -> int:
    """A 63-bit seed, a pure function of `seed` and the names: the same on every machine and world size."""
    text = "\0".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
