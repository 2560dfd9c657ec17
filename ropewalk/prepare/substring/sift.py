"""Which stretches of the corpus may hold a repeat: all that do, and few others.

1. `sample` takes a sample for about every 50 bytes of a region (see `kernels.minimizers`). Regions are tasks.
2. `sift` counts their keys, in two bits each, and leaves the samples whose key was seen twice: of English books one in
   5000. They are divided into parts by their keys, so that equal windows meet in one part.

Equal windows have equal keys: no repeat is lost. Keys that share a counter let some stretches pass that hold none. That
costs time later and changes no result, which is why counters may be as few as memory allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ropewalk.store.sealed import content_bytes

from ..columns import Bytes, Rows
from ..config import Substring
from ..kernels import minimizers, repeats
from .corpus import Corpus, open_corpus, read_array, read_rows, sealed_file

REGION_BYTES = 16 << 20
PART_BYTES = 512 << 10
"""Text for each part. The table of its windows then lies in the processor's cache, unless most of them are copies."""
MOST_PARTS = 1 << 15
COUNTERS_A_SAMPLE = 32
"""One unique key in 32 shares its counter and passes."""
_SAMPLE_BYTES = 12


@dataclass(frozen=True, slots=True)
class SampleTask:
    """A region of the corpus to take samples from."""

    folder: Path
    settings: Substring
    region: tuple[int, int]


def sample_tasks(folder: Path, settings: Substring) -> list[SampleTask]:
    """The regions of the whole corpus."""
    return [SampleTask(folder, settings, region) for region in open_corpus(folder, settings).regions(REGION_BYTES)]


def sample(task: SampleTask) -> Path:
    """Commits the samples of a region, unless they are there."""
    begin, end = task.region
    path = _samples_path(task.folder, begin)
    if not path.exists():
        corpus = open_corpus(task.folder, task.settings)
        size = (corpus.reach + 1) // 2
        values = minimizers.byte_values()
        leaving = minimizers.leaving_values(values, size=size)
        starts, keys = np.empty(end - begin, np.uint32), np.empty(end - begin, np.uint64)
        count = minimizers.sample(
            corpus.text, corpus.bounds, begin, end, corpus.reach, size, values, leaving, starts, keys
        )
        with sealed_file(path) as file:
            file.write(keys[:count])
            file.write(starts[:count])
    return path


def sift(folder: Path, settings: Substring) -> int:
    """Commits the stretches to look at, unless they are there; the number of parts."""
    corpus = open_corpus(folder, settings)
    parts = min(len(corpus.text) // PART_BYTES + 1, MOST_PARTS)
    if not (_parts_path(folder).exists() and _candidates_path(folder).exists()):
        regions = corpus.regions(REGION_BYTES)
        counters, shift = _count(regions, folder=folder, memory_bytes=settings.memory_bytes)
        bounds = np.zeros(parts + 1, np.int64)
        for region in regions:
            _, places = _select(corpus, region, counters, shift, parts, folder=folder)
            bounds[1:] += np.bincount(places, minlength=parts)
        np.cumsum(bounds, out=bounds)
        with sealed_file(_candidates_path(folder), "wb+") as file:
            if bounds[-1]:
                out = np.memmap(file, np.int64, mode="w+", shape=(int(bounds[-1]), 2))
                cursors = bounds[:-1].copy()
                for region in regions:
                    repeats.scatter(*_select(corpus, region, counters, shift, parts, folder=folder), cursors, out)
                out.flush()
        with sealed_file(_parts_path(folder)) as file:
            file.write(bounds)
    return parts


def read_part(folder: Path, part: int) -> Rows:
    """The stretches of a part in rows (first start of a window, end of starts), ascending."""
    begin, end = read_array(_parts_path(folder), np.int64)[part : part + 2]
    return read_rows(_candidates_path(folder), columns=2)[begin:end]


def _count(regions: list[tuple[int, int]], *, folder: Path, memory_bytes: int) -> tuple[Bytes, np.uint64]:
    """(counters, shift): the counter of a key is that of its bits from `shift` on."""
    samples = sum(content_bytes(_samples_path(folder, begin)) for begin, _ in regions) // _SAMPLE_BYTES
    enough, most = (samples * COUNTERS_A_SAMPLE).bit_length(), (memory_bytes * 2).bit_length() - 1
    bits = max(2, min(enough, most))
    counters, shift = np.zeros(1 << bits >> 2, np.uint8), np.uint64(64 - bits)
    for begin, _ in regions:
        repeats.count_keys(_read_samples(folder, begin)[0], counters, shift)
    return counters, shift


def _select(
    corpus: Corpus, region: tuple[int, int], counters: Bytes, shift: np.uint64, parts: int, *, folder: Path
) -> tuple[Rows, npt.NDArray[np.int32]]:
    """(rows, their parts) of the samples of a region that pass."""
    keys, starts = _read_samples(folder, region[0])
    rows, places = np.empty((len(keys), 2), np.int64), np.empty(len(keys), np.int32)
    count = repeats.select(starts, keys, *region, corpus.bounds, counters, shift, parts, rows, places)
    return rows[:count], places[:count]


def _samples_path(folder: Path, begin: int) -> Path:
    return folder / "samples" / f"{begin:015d}.bin"


def _candidates_path(folder: Path) -> Path:
    return folder / "candidates.bin"


def _parts_path(folder: Path) -> Path:
    """Committed last: where each part begins and ends among the candidates."""
    return folder / "parts.bin"


def _read_samples(folder: Path, begin: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """(keys, starts) of a region's samples; starts count from its beginning."""
    content = read_array(_samples_path(folder, begin), np.uint8)
    cut = len(content) // _SAMPLE_BYTES * 8
    return content[:cut].view(np.uint64), content[cut:].view(np.uint32)
