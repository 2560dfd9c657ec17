"""Near-duplicates: keys of every document in workers, sets of those that share one, then one verified decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ..columns import Mask
from ..config import Near
from ..fates import Removal
from ..near.device import placed
from ..near.files import StoredSketch, open_sets, open_sketch, write_sets, write_sketch
from ..near.index import Index, Known
from ..near.match import canonical_ranks, capped, match
from ..near.propose import propose
from ..near.sketch import Sets, Sketch, algorithm, bands, sets, sketch
from ..severe import severe_duplicates
from ..stages import key_of
from ..texts import Texts, chosen_name, read_chosen
from .state import State

STAGE = "near"


@dataclass(frozen=True, slots=True)
class NearTask:
    """Some documents of one chunk, of which keys or sets are made."""

    texts: Texts
    wanted: Mask
    bytes: int
    near: Near
    target: Path

    @property
    def made(self) -> tuple[Path, ...]:
        """What is committed."""
        return (self.target,)


def sketch_chunk(task: NearTask) -> int:
    """Commits the keys of the wanted documents; their number."""
    parts = [sketch(text, task.near).keys for text in read_chosen(task.texts, task.wanted)]
    keys = np.concatenate([np.zeros((bands(task.near), 0), np.uint64), *parts], axis=1)
    write_sketch(task.target, Sketch(keys), task.near)
    return int(keys.shape[1])


def sets_of_chunk(task: NearTask) -> int:
    """Commits the shingle sets of the wanted documents; their number."""
    wanted = pa.chunked_array(read_chosen(task.texts, task.wanted), pa.large_string()).combine_chunks()
    write_sets(task.target, sets(wanted, np.arange(len(wanted)), task.near), task.near)
    return len(wanted)


def remove_near(state: State, *, addition: str) -> None:
    """Removes documents that are close enough to one that stays; sources that would lose too many raise an alarm.

    With an index, documents close to one that was there before `addition` go too.
    """
    near = state.settings.deduplicate.near
    rows = np.flatnonzero(state.fates.left)
    sketching = _tasks(state, "sketch", state.fates.left)
    where = placed(near, text_bytes=sum(task.bytes for task in sketching), processes=state.workers.processes)
    sketching = [dataclasses.replace(task, near=where) for task in sketching]
    state.workers.run("sketch", sketch_chunk, sketching, progress=state.progress)
    keys = [open_sketch(task.target, near) for task in sketching]
    known = _known(near, keys, addition=addition)
    fixed = len(known.ids)
    proposed = propose([known.sketch, *keys], bands=bands(near), memory_bytes=near.memory_bytes)
    candidates = np.zeros(len(state.corpus), bool)
    candidates[rows[proposed.documents[proposed.documents >= fixed] - fixed]] = True
    gathering = _tasks(state, "sets", candidates)
    state.workers.run("compare", sets_of_chunk, gathering, progress=state.progress)
    source, sizes = state.fates.source[rows], state.fates.sizes[rows]
    # The first source named in the recipe has the first say, then the longer text.
    ranks = np.concatenate([np.zeros(fixed, np.int64), canonical_ranks(source, -sizes)])
    shingles = [known.sets, *(open_sets(task.target, near) for task in gathering)]
    found = match(proposed, shingles, ranks, near, fixed=fixed, scratch=state.stages)
    found = dataclasses.replace(found, document=found.document - fixed)
    kept, alarms = capped(found, source, state.fates.sources, max_removed_share=near.max_removed_share)
    for alarm in alarms:
        state.warn(str(alarm))
    threshold = near.threshold if near.kind == "minhash" else 1 - near.max_distance / near.fingerprint_bits
    names = pa.concat_arrays([known.ids.cast(pa.string()), state.corpus.ids.take(pa.array(rows))])
    before = state.fates.left
    state.fates.close(
        STAGE,
        removals=[
            Removal(
                rows=rows[kept.document],
                rule=near.kind,
                value=kept.similarity,
                threshold=np.full(len(kept.document), threshold),
                partner=names.take(pa.array(kept.partner)),
                jaccard=kept.similarity if near.kind == "minhash" else None,
            )
        ],
    )
    for line in severe_duplicates(
        "near-duplicates",
        "raise `prepare.deduplicate.near.threshold` if they are not alike enough to go",
        gone=rows[kept.document],
        source=state.fates.source,
        names=state.fates.sources,
        sizes=state.fates.sizes,
        before=before,
    ):
        state.warn(line)


def add_to_index(state: State, *, addition: str) -> None:
    """Adds the documents that are left to the index of the settings, if there is one, under the name `addition`."""
    near = state.settings.deduplicate.near
    if near.index:
        Index.open(Path(near.index), near).append(addition, _left(state))


def _left(state: State) -> Iterator[tuple[pa.StringArray, pa.LargeStringArray]]:
    """(ids, texts) of the documents that are left, chunk by chunk."""
    ids = np.split(np.arange(len(state.corpus)), state.corpus.starts[1:-1])
    for (texts, wanted, _), rows in zip(state.chunks(state.fates.left), ids, strict=True):
        if wanted.any():
            chosen = pa.chunked_array(read_chosen(texts, wanted), pa.large_string()).combine_chunks()
            yield state.corpus.ids.take(pa.array(rows[wanted])), chosen


def _known(near: Near, keys: Sequence[StoredSketch], *, addition: str) -> Known:
    """What the index had before; nothing without an index."""
    if near.index:
        return Index.open(Path(near.index), near).before(addition).known(keys)
    no_keys, no_sets = np.zeros((bands(near), 0), np.uint64), Sets(np.zeros(0, np.uint64), np.zeros(1, np.int64))
    return Known(pa.array([], pa.large_string()), Sketch(no_keys), no_sets)


def _tasks(state: State, stage: str, chosen: Mask) -> list[NearTask]:
    near = state.settings.deduplicate.near
    tasks = []
    for texts, wanted, size in state.chunks(chosen):
        name = key_of(algorithm(near), chosen_name(texts, wanted))
        tasks.append(NearTask(texts, wanted, size, near, state.stages / stage / f"{name}.arrow"))
    return tasks
