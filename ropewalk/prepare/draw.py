"""Random choices among documents as functions of text and seed: no order, worker or machine changes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.base.seeds import seed_for

from .sources import DOCSTRINGS, STDLIB

Mask = npt.NDArray[np.bool_]


def draws(hashes: pa.Array, *, seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """One number a document, uniform over 64 bits; equal texts draw equal numbers."""
    key = seed_for(seed, "prepare", purpose)
    numbers = (xxhash.xxh3_64_intdigest(digest, key) for digest in hashes.to_pylist())
    return np.fromiter(numbers, np.uint64, len(hashes))


def kin(ids: pa.Array, hashes: pa.Array) -> pa.Array:
    """What decides the split of each document: its text's hash, or its module's name for what comes from one module.

    The docstrings of a module are a part of its source; were they split apart, held-out text would be trained on.
    """
    keys = hashes.to_pylist()
    for index, name in enumerate(ids.to_pylist()):
        _, _, place = name.partition(":")
        for folder in (f"{STDLIB}/", f"{DOCSTRINGS}/"):
            if place.startswith(folder):
                keys[index] = xxhash.xxh3_128_digest(f"module:{place.removeprefix(folder)}".encode())
    return pa.array(keys, hashes.type)


def held_out(hashes: pa.Array, *, share: float, seed: int) -> Mask:
    """Which documents are for validation: `share` of the texts, but at least one text and never all."""
    numbers = draws(hashes, seed=seed, purpose="validation")
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest == highest:
        raise DataError(
            "the corpus is too small: one distinct document is left, training and validation need one each; "
            "add documents or relax `prepare.filter`"
        )
    border = min(max(int(share * 2.0**64), lowest + 1), highest)
    return numbers < np.uint64(border)


def sample(hashes: pa.Array, sizes: npt.NDArray[np.int64], *, limit_bytes: int, seed: int) -> Mask:
    """Which documents a tokenizer is trained on: drawn until `limit_bytes` is reached, at least one."""
    order = np.argsort(draws(hashes, seed=seed, purpose="tokenizer"), kind="stable")
    within = np.cumsum(sizes[order]) <= limit_bytes
    within[:1] = True
    chosen = np.zeros(len(order), bool)
    chosen[order[within]] = True
    return chosen
