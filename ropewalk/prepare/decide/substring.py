"""Spans that occur earlier in the corpus: cut out, or kept from the loss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from ropewalk.base.files import locked

from ..columns import Mask, Rows
from ..cuts import Spans
from ..kernels.words import WORDS_ID
from ..ledger import REPEATS
from ..stages import key_of
from ..substring.find import find_repeats
from ..substring.spans import join
from ..texts import chosen_name, read_chosen
from .state import State

STAGE = "substring"
RULE = "repeat"
SUBSTRING_VERSION = "substring-1"
"""Part of the name of the result: raise it when the same texts give other spans."""


def apply_repeats(state: State) -> Spans:
    """Finds repeated spans and ends the stage; with action `mask` they stay, and are returned to be masked."""
    settings = state.settings.deduplicate.substring
    chosen = state.fates.left & ~state.uncut
    names = [chosen_name(texts, wanted) for texts, wanted, _ in state.chunks(chosen)]
    folder = state.stages / STAGE / key_of(SUBSTRING_VERSION, WORDS_ID, settings.length, settings.unit, names)
    state.workers.made.add(folder)
    with locked(folder):
        found = find_repeats(
            _columns(state, chosen), settings=settings, folder=folder, workers=state.workers, progress=state.progress
        )
    rows = np.flatnonzero(chosen)
    state.repeats = _named(state, found.spans, rows)
    stretches = join(found.spans)
    documents, starts, stops = (stretches[name].to_numpy() for name in ("document", "start", "stop"))
    spans = Spans(rows[documents], starts, stops)
    if settings.action == "mask":
        state.fates.close(STAGE)
        return spans
    state.cut(STAGE, RULE, spans, least=settings.min_remaining_bytes, unit="bytes")
    return Spans.none()


def _named(state: State, spans: pa.Table, rows: Rows) -> pa.Table:
    """The spans with the ids of their documents, whose places in the corpus are `rows`."""
    ids = state.corpus.ids
    document, kept = (ids.take(pa.array(rows[spans[name].to_numpy()])) for name in ("document", "kept_document"))
    return pa.table([document, spans["start"], spans["stop"], kept, spans["kept_start"]], schema=REPEATS)


def _columns(state: State, chosen: Mask) -> Iterator[pa.LargeStringArray]:
    for texts, wanted, _ in state.chunks(chosen):
        yield from read_chosen(texts, wanted)
