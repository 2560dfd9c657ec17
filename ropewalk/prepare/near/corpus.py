"""Near-duplicates of a corpus that can be read twice, in this process: what the stages of a run do, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..columns import text_buffers
from ..config import Near
from .match import Matches, canonical_ranks, match
from .propose import propose
from .sketch import bands, sets, sketch

Texts = Iterable[pa.LargeStringArray]


def near_duplicates(read: Callable[[], Texts], near: Near, *, scratch: Path | None = None) -> Matches:
    """Which documents go. `read` gives the text columns of the corpus, the same ones each time it is called.

    Of near-duplicates the longest stays, then the first. Texts pass by one column at a time; what stays in memory are
    the keys, and the sets of documents that share one.
    """
    sketches, sizes = [], []
    for text in read():
        sketches.append(sketch(text, near))
        sizes.append(np.diff(text_buffers(text)[1]))
    proposed = propose(sketches, bands=bands(near), memory_bytes=near.memory_bytes)
    candidates = proposed.by_chunk()
    found = [sets(text, rows, near) for text, rows in zip(read(), candidates, strict=True)]
    ranks = canonical_ranks(-np.concatenate([np.empty(0, np.int64), *sizes]))
    return match(proposed, found, ranks, near, scratch=scratch)
