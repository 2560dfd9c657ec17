"""Random numbers of a sample, computed from who it is: Philox4x32-10 keyed by (seed, stage), counted by (document,
epoch, draw). No torch, no state: the same numbers for any number of threads, ranks and batches, on any executor.

Philox (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) passes BigCrush and costs
about 20 ns a block of four numbers here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from ropewalk.base.seeds import seed_for

DRAWS = 4
"""Numbers in a block."""

Uniforms = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Who draws: the samples of a batch, in one stage of their way."""

    seed: int
    """Of the run and the source."""
    documents: npt.NDArray[np.uint64]
    """The 64-bit key of each sample."""
    epochs: npt.NDArray[np.int64]
    """How often each has been read before."""

    def uniforms(self, stage: str, *, blocks: int = 1) -> Uniforms:
        """Numbers in [0, 1) of shape (samples, blocks, 4); what `stage` draws does not depend on other stages."""
        key = np.uint64(seed_for(self.seed, "media", stage))
        result = np.empty((len(self.documents), blocks, DRAWS), np.float64)
        _fill(key, self.documents, self.epochs.astype(np.uint64), result)
        return result


@njit(cache=True, nogil=True)
def philox(
    counter: tuple[np.uint32, np.uint32, np.uint32, np.uint32], key: np.uint64
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """The block of four 32-bit numbers at `counter`, ten rounds."""
    low32 = np.uint64(0xFFFFFFFF)
    a, b, c, d = np.uint64(counter[0]), np.uint64(counter[1]), np.uint64(counter[2]), np.uint64(counter[3])
    left, right = key & low32, key >> np.uint64(32)
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (second >> np.uint64(32)) ^ b ^ left,
            second & low32,
            (first >> np.uint64(32)) ^ d ^ right,
            first & low32,
        )
        left = (left + np.uint64(0x9E3779B9)) & low32
        right = (right + np.uint64(0xBB67AE85)) & low32
    return np.uint32(a), np.uint32(b), np.uint32(c), np.uint32(d)


@njit(cache=True, nogil=True)
def _fill(
    key: np.uint64, documents: npt.NDArray[np.uint64], epochs: npt.NDArray[np.uint64], result: npt.NDArray[np.float64]
) -> None:
    low32 = np.uint64(0xFFFFFFFF)
    for sample in range(result.shape[0]):
        document, epoch = documents[sample], np.uint32(epochs[sample] & low32)
        for block in range(result.shape[1]):
            counter = (np.uint32(document & low32), np.uint32(document >> np.uint64(32)), epoch, np.uint32(block))
            numbers = philox(counter, key)
            for place in range(4):
                result[sample, block, place] = numbers[place] * 2.0**-32
