"""Random choices among documents as functions of text and seed: no order, worker or machine changes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ropewalk.base.seeds import seed_for

from .columns import Mask, overlaid
from .sources import DOCSTRINGS, STDLIB


def draws(hashes: pa.Array, *, seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """One number a document, uniform over 64 bits; equal texts draw equal numbers."""
    first, second = halves(hashes).T
    return mixed(first ^ mixed(second ^ np.uint64(seed_for(seed, "prepare", purpose))))


def halves(hashes: pa.FixedSizeBinaryArray) -> npt.NDArray[np.uint64]:
    """128-bit hashes as two numbers each."""
    numbers = np.frombuffer(hashes.buffers()[1], np.uint64)
    return numbers[2 * hashes.offset :][: 2 * len(hashes)].reshape(-1, 2)


def kin(ids: pa.Array, hashes: pa.Array) -> pa.Array:
    """What decides the split of each document: its text's hash, or its module's name for what comes from one module.

    The docstrings of a module are a part of its source; were they split apart, held-out text would be trained on.
    """
    module = pc.struct_field(
        pc.extract_regex(ids, rf"^[^:]*:(?:{STDLIB}|{DOCSTRINGS})/(?P<name>[^:]*)(?::.*)?$"), "name"
    )
    rows = np.flatnonzero(module.is_valid())
    if not len(rows):
        return hashes
    names = module.take(pa.array(rows)).to_pylist()
    keys = pa.array([xxhash.xxh3_128_digest(f"module:{name}".encode()) for name in names], hashes.type)
    return overlaid(hashes, rows, keys)


def sample(hashes: pa.Array, sizes: npt.NDArray[np.int64], *, limit_bytes: int, seed: int) -> Mask:
    """Which documents a tokenizer is trained on: drawn until `limit_bytes` is reached, at least one."""
    order = np.argsort(draws(hashes, seed=seed, purpose="tokenizer"), kind="stable")
    within = np.cumsum(sizes[order]) <= limit_bytes
    within[:1] = True
    chosen = np.zeros(len(order), bool)
    chosen[order[within]] = True
    return chosen


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64 bits whose output bits all depend on all input bits (the finalizer of splitmix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
