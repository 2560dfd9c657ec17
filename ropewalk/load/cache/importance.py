"""Sampling by importance, so that a small cache meets most reads, with an estimate that stays that of the plain mean.

After iCache (HPCA 2023). A sample's importance is its smoothed loss. The most important samples that fit the memory
form the high region and are drawn by importance; the others form the low region, in which all have the same
probability, so that any of them may stand in for any other (see `packages`). With p the probability of a draw, a drawn
sample's loss is weighted by 1 / (N p): the expected weighted gradient of a draw is the mean gradient over all N.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file, read_regular
from ropewalk.store.items import Item

_log = logging.getLogger(__name__)
_HEAD = struct.Struct("<8sqQ")
_DRAWS_MAGIC = b"rwdraws1"
_VALUES_MAGIC = b"rwvalue1"

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Importance:
    """The smoothed loss of each of N samples."""

    def __init__(self, samples: int, *, smoothing: float = 0.7) -> None:
        """`smoothing` is the weight of the past: 0 believes the last loss alone."""
        self._values = np.full(samples, np.nan)
        self._smoothing = smoothing

    def update(self, samples: Indices, losses: Floats) -> None:
        """Takes in the losses of a step; a sample that comes twice is taken in twice. A loss that is not finite (a
        step that will be rolled back) is left out."""
        for sample, loss in zip(samples.tolist(), losses.tolist(), strict=True):
            if np.isfinite(loss):
                old = self._values[sample]
                new = loss if np.isnan(old) else self._smoothing * old + (1 - self._smoothing) * loss
                self._values[sample] = new

    @property
    def seen(self) -> Floats:
        """The smoothed losses, NaN for what was never seen: what to remember."""
        return self._values.copy()

    def remember(self, seen: Floats) -> None:
        """Takes over what `seen` gave."""
        self._values = seen.copy()

    def values(self) -> Floats:
        """The importance of all; what was never seen counts as the mean of what was."""
        seen = ~np.isnan(self._values)
        return np.where(seen, self._values, self._values[seen].mean() if seen.any() else 1.0)


class ValueOf:
    """The current importance of an item by its key, as a cache policy asks for it."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._place = {item.key: place for place, item in enumerate(items)}
        self._values: Floats = np.zeros(len(items))

    def set(self, values: Floats) -> None:
        """Takes the values of a new epoch; the policy must `refresh`."""
        self._values = values

    def __call__(self, key: int) -> float:
        place = self._place.get(key)
        return -np.inf if place is None else float(self._values[place])


@dataclass(frozen=True, slots=True)
class Regions:
    """Which samples are important enough to be held, and how often each is drawn."""

    high: Mask
    probability: Floats
    """Of one draw; sums to one; the same for all samples of the low region."""

    @property
    def weights(self) -> Floats:
        """What makes the mean over draws the mean over samples: 1 / (N p)."""
        return 1.0 / (len(self.probability) * self.probability)


def make_regions(
    importance: Floats, sizes: Indices, *, high_bytes: int, floor: float = 0.25, shared: Floats | None = None
) -> Regions:
    """The high region is as many of the most important samples as `high_bytes` hold.

    A share `floor` of the draws is uniform, which bounds a weight by 1 / floor, and with it the variance that a sample
    can cause whose importance was wrong. Jobs that share a cache give `shared`, the `combined` importance: it decides
    what is held, their own decides what they draw.
    """
    order = np.argsort(-(importance if shared is None else shared), kind="stable")
    high = np.zeros(len(importance), np.bool_)
    high[order[np.cumsum(sizes[order]) <= high_bytes]] = True
    strength = np.maximum(importance, 0.0)
    if not high.all():
        strength = np.where(high, strength, strength[~high].mean())
    total = strength.sum()
    share = strength / total if total > 0 else np.full(len(strength), 1 / len(strength))
    return Regions(high, (1 - floor) * share + floor / len(share))


@dataclass(frozen=True, slots=True)
class Draws:
    """The samples of an epoch in the order in which they are read."""

    asked: Indices
    """What the sampler drew."""
    given: Indices
    """What is read: for a sample of the low region another one of it may stand in."""
    weights: Floats
    """Factor of each one's loss."""

    @property
    def substituted(self) -> int:
        """How many were replaced by another."""
        return int((self.asked != self.given).sum())


def draw(regions: Regions, *, count: int, seed: int, epoch: int, line: Indices | None = None) -> Draws:
    """`count` draws of an epoch: a function of its arguments alone.

    Draws are systematic (one random offset, equal steps through the summed probabilities), so that a sample comes
    count * p times, rounded up or down: less variance than independent draws at the same expectation. Draws of the
    low region are served from `line`, its samples in the order of their packages, from a random place on and round
    again: each sample of it is equally likely, whatever the order, and a package is used up before the next is read.
    """
    random = np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch]))
    steps = (np.arange(count) + random.random()) / count
    edges = np.cumsum(regions.probability)
    asked = np.minimum(np.searchsorted(edges / edges[-1], steps, side="right"), len(edges) - 1).astype(np.int64)
    random.shuffle(asked)
    given = asked.copy()
    if line is not None and len(line):
        low = np.flatnonzero(~regions.high[asked])
        first = int(random.integers(len(line)))
        given[low] = line[(first + np.arange(len(low))) % len(line)]
    return Draws(asked, given, regions.weights[given])


def combined(importances: Sequence[Floats]) -> Floats:
    """What several jobs find important together: the mean of each job's ranks, from 0 (least) to 1.

    Losses of different models have different scales; ranks have not. With one ranking for all, no job drops what
    another has just brought in.
    """
    return np.mean([_ranks(values) for values in importances], axis=0)


def publish(folder: Path, values: Floats, *, job: int) -> None:
    """Leaves a job's importance where the other jobs on the data set find it."""
    data = values.astype("<f8").tobytes()
    with committed_file(folder / f"importance-{job}.bin") as file:
        file.write(_HEAD.pack(_VALUES_MAGIC, len(values), xxhash.xxh3_64_intdigest(data)) + data)


def published(folder: Path, *, samples: int) -> list[Floats]:
    """What all jobs have left for `samples` samples; a damaged file, or one of another data set, is passed over."""
    found = []
    for path in sorted(folder.glob("importance-*.bin")):
        try:
            values = np.frombuffer(_body(path, _VALUES_MAGIC, width=8, rows=samples), "<f8")
        except DataError as error:
            _log.warning("%s; it does not count", error)
            continue
        found.append(values.astype(np.float64))
    return found


def write_draws(path: Path, draws: Draws) -> None:
    """Records an epoch, so that it can be read again exactly: importance cannot be had back, it came from training."""
    columns = [draws.asked.astype("<i8"), draws.given.astype("<i8"), draws.weights.astype("<f8")]
    data = b"".join(column.tobytes() for column in columns)
    with committed_file(path) as file:
        file.write(_HEAD.pack(_DRAWS_MAGIC, len(draws.asked), xxhash.xxh3_64_intdigest(data)) + data)


def read_draws(path: Path) -> Draws:
    """A recorded epoch; DataError when the file is missing or damaged."""
    body = _body(path, _DRAWS_MAGIC, width=24, rows=None)
    asked, given, weights = (body[len(body) * part // 3 : len(body) * (part + 1) // 3] for part in range(3))
    return Draws(
        np.frombuffer(asked, "<i8").astype(np.int64),
        np.frombuffer(given, "<i8").astype(np.int64),
        np.frombuffer(weights, "<f8").astype(np.float64),
    )


def _body(path: Path, magic: bytes, *, width: int, rows: int | None) -> bytes:
    try:
        content = read_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such record of an epoch") from None
    head, body = content[: _HEAD.size], content[_HEAD.size :]
    found, count, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", -1, 0)
    if found != magic or count * width != len(body) or xxhash.xxh3_64_intdigest(body) != checksum:
        raise DataError(f"{path}: damaged, or not written by this version of ropewalk; move it away")
    if rows is not None and rows != count:
        raise DataError(f"{path}: made for {count} samples, not for {rows}; move it away if it is of another data set")
    return body


def _ranks(values: Floats) -> Floats:
    """Ranks from 0 to 1; equal values share the mean of their ranks."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes)
    return ((last - (sizes + 1) / 2)[group]) / max(len(values) - 1, 1)
