"""Documents whose texts are equal: the first in canonical order stays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from .columns import Rows

STAGE = "deduplicate"
RULE = "exact"


def first_equals(hashes: pa.Array) -> Rows:
    """For each row the first row with the same hash: itself for a document that stays.

    128 bits: among a billion documents two different texts collide with a chance of about 1e-21.
    """
    codes = hashes.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    _, first = np.unique(codes, return_index=True)
    return np.asarray(first[codes], np.int64)
