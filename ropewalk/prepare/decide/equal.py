"""Documents, paragraphs and lines that are there already: the first in canonical order stays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from .. import deduplicate
from ..bloom import BloomFilter
from ..draw import halves
from ..fates import Removal
from ..pieces import Piece, PieceTask, list_pieces, piece_key, repeated
from ..severe import severe_duplicates
from ..texts import chosen_name
from .state import State

STAGE = deduplicate.STAGE


def remove_equals(state: State) -> None:
    """Removes documents whose text an earlier one has."""
    corpus, fates = state.corpus, state.fates
    rows = np.flatnonzero(fates.left)
    hashes = corpus.hashes.take(pa.array(rows))
    if state.settings.deduplicate.documents == "bloom":
        known = BloomFilter(state.settings.deduplicate.bloom)
        new = known.insert(halves(hashes)[:, 0])
        _close(state, Removal(rows=rows[~new], rule="bloom"))
        _warn_if_full(state, known)
        return
    first = deduplicate.first_equals(hashes)
    again = np.flatnonzero(first != np.arange(len(first)))
    partners = corpus.ids.take(pa.array(rows[first[again]]))
    _close(state, Removal(rows=rows[again], rule=deduplicate.RULE, partner=partners))


def _close(state: State, removal: Removal) -> None:
    fates, before = state.fates, state.fates.left
    fates.close(STAGE, removals=[removal])
    for line in severe_duplicates(
        "equal to earlier ones",
        'keep them with `prepare.deduplicate.documents = "off"` if they are meant to repeat',
        gone=removal.rows,
        source=fates.source,
        names=fates.sources,
        sizes=fates.sizes,
        before=before,
    ):
        state.warn(line)


def _warn_if_full(state: State, known: BloomFilter) -> None:
    expected = state.settings.deduplicate.bloom.expected_items
    if known.new > expected:
        state.warn(
            f"the Bloom filter was made for {expected:,} different documents and met {known.new:,}: "
            f"{known.false_positives:.2g} of new ones are taken for repeats; raise "
            "`prepare.deduplicate.bloom.expected_items`"
        )


def cut_pieces(state: State, kind: Piece) -> None:
    """Cuts paragraphs or lines that occurred before; a document that becomes too short for the filter goes."""
    least = state.settings.deduplicate.min_piece_bytes
    tasks = []
    for texts, wanted, size in state.chunks(state.fates.left & ~state.uncut):
        name = piece_key(chosen_name(texts, wanted), kind=kind, least=least)
        tasks.append(PieceTask(texts, wanted, size, kind, least, state.stages / "pieces" / f"{name}.arrow"))
    state.workers.run(f"compare {kind}", list_pieces, tasks, progress=state.progress)
    spans = repeated([task.target for task in tasks], starts=state.corpus.starts)
    state.cut(kind, kind, spans, least=state.settings.filter.min_characters, unit="characters")
