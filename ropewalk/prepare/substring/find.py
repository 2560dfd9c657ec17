"""Exact repeated spans of a corpus (Lee et al. 2021), in bounded memory.

A span counts when it has `length` bytes or words at least (see `kernels.windows`) and occurs twice. A byte is repeated
when it lies in a window that occurs earlier in canonical order, without overlapping it; everything else stays. So the
result is a function of the texts, their order, the length and the unit. That it is made in parts, by several workers or
after a kill does not show.

Two ways lead to the same spans. `windows` looks at the few stretches that may hold a repeat (`sift`, `match`).
`suffix-array` sorts all suffixes (`suffixes`). Both commit copies, rows (start, stop, source), which `spans` settles.

    work/text.bin, bounds.bin                    all texts, and where each begins
    work/samples/, candidates.bin, parts.bin     what `windows` looks at
    work/splitters-*.bin                         where `suffix-array` cuts
    work/copies/                                 the end of both ways
    documents.parquet, spans.parquet             the result; with it `work` goes
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from ropewalk.base.progress import Progress, Silent

from ..config import Substring
from ..workers import Workers
from .corpus import WORK, gather, open_corpus, sweep
from .match import match, match_tasks
from .sift import sample, sample_tasks, sift
from .spans import Repeats, read_repeats, settle
from .suffixes import match_range, range_tasks

Task = TypeVar("Task")

_SILENT = Silent()


def find_repeats(
    texts: Iterable[pa.LargeStringArray],
    *,
    settings: Substring,
    folder: Path,
    workers: Workers,
    progress: Progress = _SILENT,
) -> Repeats:
    """The repeated spans of `texts`, the documents of the corpus in canonical order.

    `folder` belongs to these texts, this length and this unit. A killed call continues in it: `texts` is not read again
    once it was copied, and a finished result is returned as it is. Until then the disk holds the text and half as much
    again (measured on 1 GB, of which a third was repeats); with `suffix-array`, the text and 24 bytes for each repeated
    window.
    """
    work = folder / WORK
    found = read_repeats(folder)
    if found is None:
        sweep(work)
        gather(texts, folder=work)
        match_all = _by_suffix_array if settings.method == "suffix-array" else _by_windows
        copies = match_all(work, settings, workers, progress)
        found = settle(open_corpus(work, settings), sorted(copies), folder=folder)
    shutil.rmtree(work, ignore_errors=True)
    return found


def _by_windows(work: Path, settings: Substring, workers: Workers, progress: Progress) -> list[Path]:
    _committed("substring: sample", workers, sample, sample_tasks(work, settings), progress)
    parts = sift(work, settings)
    return _committed("substring: match", workers, match, match_tasks(work, settings, parts=parts), progress)


def _by_suffix_array(work: Path, settings: Substring, workers: Workers, progress: Progress) -> list[Path]:
    return _committed("substring: suffix array", workers, match_range, range_tasks(work, settings), progress)


def _committed(
    title: str, workers: Workers, function: Callable[[Task], Path], tasks: Sequence[Task], progress: Progress
) -> list[Path]:
    """The files that `function` commits for `tasks`."""
    paths: list[Path] = []
    progress.begin(title, len(tasks), "tasks")
    for path in workers.map(function, tasks):
        paths.append(path)
        progress.advance(len(paths))
    progress.end()
    return paths
