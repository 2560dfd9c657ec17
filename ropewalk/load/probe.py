"""The differential measurement of DS-Analyzer on real data: warm, cold, and what handing over costs.

Memory-mapped shards: warm data give the rate of preparing, cold data the same and the store, and the difference is the
store's. A store is made cold by asking the kernel to forget its pages; whether that worked is seen in what the disk
delivered (`/proc/self/io`), and when it did not the store counts as not measured. Shards that are read piece by piece
tell by themselves how long they were fetched and prepared; twice the requests show whether the store has more to give.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from .loader import Loader
from .stalls import Stalls

GROUPS = 20
"""Parts of a measurement whose spread is the jitter."""
FORGOTTEN = 0.5
"""Least share of the bytes read that the disk has to deliver for them to count as cold."""
SLOW_BATCH_S = 1e-3
"""Seconds from which on a batch is slow: what Python costs it no longer counts."""
MOST_OF_THE_TIME = 0.8
SEEN = 0.2
"""Least share of the waiting that is the store's for it to count as a limit."""
PIECEWISE = 4
"""How many times as long stores are measured that answer in their own time."""
MORE = 1.5
"""Gain from twice the requests above which a store has more to give."""


class Opening(Protocol):
    """Opens the data of a run anew."""

    def __call__(self, *, stalls: Stalls, requests_factor: int = 1, prefetch_bytes: int | None = None) -> Loader:
        """A loader of one thread, with as many times the recipe's requests in flight, and other bytes ahead than it
        says unless None."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast batches came when nothing else was done."""

    tokens_per_s: float
    jitter: float
    """Standard deviation of the seconds of some batches over their mean."""
    batches: int
    tokens: int
    seconds: float
    delivered_bytes: int | None
    """What the disk had to read for it; None where the system does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRates:
    """What the data path does alone, in tokens a second."""

    prepare: float
    """One thread, from bytes at hand."""
    fetch: float
    """The store, one request after the other; infinite when it is not seen beside preparing, or not measured."""
    bandwidth: float
    """The store in all, as far as it was seen."""
    measured_cold: bool
    """Whether the store was measured: data could be made cold."""
    fetch_jitter: float
    """Of the seconds in which batches are fetched."""
    prepare_jitter: float
    """Of the seconds in which they are prepared."""
    mapped: bool
    """Whether threads fetch and prepare in one go."""
    hand_over: float = math.inf
    """From a batch as it travels to one on the device, as the step wants it."""
    policy: tuple[str, ...] = ()
    """How what is not mapped is read, in words: requests in flight to each store, how far ahead, what overlaps."""


def probe(opening: Opening, *, files: Sequence[Path], device: torch.device, seconds: float) -> DataRates:
    """The rates of the data that `opening` opens and that lie in `files`, in about four times `seconds`."""
    stalls, file_bytes = Stalls(), sum(file.stat().st_size for file in files)
    with contextlib.closing(opening(stalls=stalls)) as loader:
        mapped = not loader.needs(0, 1)
        loader.take()  # kernels are compiled
        first = pace(loader, seconds=seconds)
        stalls.take()
        if not mapped:
            read = pace(loader, seconds=PIECEWISE * seconds)  # goes on, now that enough is read ahead
            waited, policy = stalls.take(), tuple(loader.describe())
        hand_over = _hand_over(loader, device, seconds=seconds / 4)
        epoch = max(3, int(first.batches * loader.tokens / first.tokens))
    del loader
    if not mapped:
        found = _piecewise(opening, read, waited, seconds=seconds)
        return dataclasses.replace(found, hand_over=hand_over, policy=policy)
    # Blocks share what Python costs a batch; slow batches need no such help, and a block of them takes too long to see.
    prefetch_bytes = 0 if first.seconds > SLOW_BATCH_S * first.batches else None
    with contextlib.closing(opening(stalls=stalls, prefetch_bytes=prefetch_bytes)) as loader:
        warm = pace(loader, seconds=seconds, most=first.batches)
    del loader
    forget(files)
    with contextlib.closing(opening(stalls=stalls, prefetch_bytes=prefetch_bytes)) as loader:
        cold = pace(loader, seconds=seconds, most=epoch)  # a second epoch would come from memory
    # Rows come one by one from all over the files: the pages of each are read, and some around them.
    wanted = file_bytes * min(1.0, cold.batches / epoch)
    is_cold = cold.delivered_bytes is None or cold.delivered_bytes >= FORGOTTEN * wanted
    return DataRates(
        prepare=warm.tokens_per_s,
        fetch=store_rate(cold.tokens_per_s, warm.tokens_per_s) if is_cold else math.inf,
        bandwidth=math.inf,
        measured_cold=is_cold,
        hand_over=hand_over,
        fetch_jitter=cold.jitter,
        prepare_jitter=warm.jitter,
        mapped=True,
    )


def store_rate(cold: float, warm: float) -> float:
    """Tokens a second of the store alone, of a `cold` epoch that reads and prepares and a `warm` one that prepares."""
    return 1.0 / (1.0 / cold - 1.0 / warm) if cold < warm else math.inf


def pace(loader: Loader, *, seconds: float, most: int = 1 << 30) -> Pace:
    """Takes batches as fast as they come for about `seconds`, at most `most` of them."""
    before, times, tokens = _delivered_bytes(), [time.perf_counter()], 0
    while len(times) <= most and (len(times) < 3 or times[-1] - times[0] < seconds):
        tokens += loader.take().filled
        times.append(time.perf_counter())
    after = _delivered_bytes()
    rate, jitter = _steady(times, tokens / (len(times) - 1))
    return Pace(
        tokens_per_s=rate,
        jitter=jitter,
        batches=len(times) - 1,
        tokens=tokens,
        seconds=times[-1] - times[0],
        delivered_bytes=None if before is None or after is None else after - before,
    )


def forget(files: Sequence[Path]) -> None:
    """Asks the kernel to drop what it holds of `files` in memory; pages that a process has mapped stay."""
    gc.collect()  # mappings of loaders that are gone
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _piecewise(opening: Opening, read: Pace, waited: Mapping[str, float], *, seconds: float) -> DataRates:
    """The rates of shards that are fetched piece by piece, of which `read` was read while `waited` was counted: who
    does nothing but take batches always waits, for the store or for the one thread that prepares."""
    store_s, thread_s = waited["queue_s"] + waited["fetch_s"], waited["prepare_s"] + waited["copy_s"]
    prepare = max(read.tokens_per_s, read.tokens / max(thread_s, 1e-9))
    with contextlib.closing(opening(stalls=Stalls(), requests_factor=2)) as loader:
        pace(loader, seconds=seconds)
        more = pace(loader, seconds=PIECEWISE * seconds)
    fetches = store_s > SEEN * (store_s + thread_s)
    grows = more.tokens_per_s > MORE * read.tokens_per_s
    return DataRates(
        prepare=prepare,
        fetch=read.tokens_per_s if fetches else math.inf,
        bandwidth=math.inf if grows or not fetches else max(read.tokens_per_s, more.tokens_per_s),
        measured_cold=True,
        fetch_jitter=read.jitter,
        prepare_jitter=0.0 if fetches else read.jitter,
        mapped=False,
    )


def _steady(times: Sequence[float], batch_tokens: float) -> tuple[float, float]:
    """Tokens a second and jitter of batches that came at `times`, the first of which is the beginning.

    Batches are made in blocks: many come at once, then none for a while. The waits that make up most of the time tell
    blocks apart, and a wait is the time in which the block that ends it was made. Only whole blocks count.
    """
    gaps = [after - before for before, after in itertools.pairwise(times)]
    least, left = math.inf, MOST_OF_THE_TIME * sum(gaps)
    for gap in sorted(gaps, reverse=True):
        if left <= 0:
            break
        least, left = gap, left - gap
    firsts = [number for number, gap in enumerate(gaps, 1) if gap >= least]
    if len(firsts) < 3:
        return batch_tokens * len(gaps) / (times[-1] - times[0]), 0.0
    rate = batch_tokens * (firsts[-1] - firsts[1]) / (times[firsts[-2]] - times[firsts[0]])
    # Seconds a batch of each part; quartiles, since a busy machine has outliers.
    ends = firsts[:: max(1, len(firsts) // GROUPS)]
    parts = [(times[b] - times[a]) / (c - b) for a, b, c in zip(ends, ends[1:], ends[2:], strict=False)]
    if len(parts) < 4:
        return rate, 0.0
    low, middle, high = statistics.quantiles(parts, n=4)
    return rate, min(1.0, (high - low) / 1.349 / max(middle, 1e-9))


def _hand_over(loader: Loader, device: torch.device, *, seconds: float) -> float:
    batch = loader.take()
    batch.to(device)
    start, rounds = time.perf_counter(), 0
    while not rounds or time.perf_counter() - start < seconds:
        batch.to(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rounds += 1
    return rounds * batch.filled / (time.perf_counter() - start)


def _delivered_bytes() -> int | None:
    """What storage has delivered to this process so far."""
    path = Path("/proc/self/io")
    if not path.exists():
        return None
    fields = dict(line.split(": ") for line in path.read_text().splitlines())
    return int(fields["read_bytes"])
