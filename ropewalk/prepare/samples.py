"""A few documents that each rule removed, with the beginning of their text: to look at before trusting a rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ropewalk.base.files import committed_file

from .columns import Rows
from .corpus import Corpus
from .draw import draws
from .fates import Fates
from .texts import Texts, read_chosen

FILE = "samples.parquet"
EACH = 3
"""Documents of one rule."""
CHARACTERS = 600
"""Of the beginning of a text."""

SAMPLES = pa.schema(
    [
        ("stage", pa.string()),
        ("rule", pa.string()),
        ("id", pa.string()),
        ("value", pa.float64()),
        ("threshold", pa.float64()),
        ("partner", pa.string()),
        ("jaccard", pa.float64()),
        ("text", pa.large_string()),  # the beginning; empty for what was no text
        ("partner_text", pa.large_string()),  # the beginning of the document that stays in its place
    ]
)


def write_samples(folder: Path, corpus: Corpus, fates: Fates, texts: Sequence[Texts], *, seed: int) -> None:
    """Commits the samples, drawn by the hash of the text; `texts` are those before anything was cut out."""
    removed = fates.removed()
    rows = _drawn(corpus, removed, seed=seed)
    chosen = removed.take(pa.array(rows)).append_column("id", corpus.ids.take(pa.array(rows)))
    partners = pc.index_in(chosen["partner"].combine_chunks(), corpus.ids)
    found = np.asarray(partners.is_valid())
    partner_rows = partners.drop_null().to_numpy().astype(np.int64)
    starts = _beginnings(corpus, texts, np.unique(np.concatenate([rows, partner_rows])))
    partner_text = np.full(len(rows), None, object)
    partner_text[found] = [starts[row] for row in partner_rows.tolist()]
    columns = {
        **{name: chosen[name] for name in chosen.column_names},
        "text": pa.array([starts[row] for row in rows.tolist()], pa.large_string()),
        "partner_text": pa.array(partner_text, pa.large_string()),
    }
    with committed_file(folder / FILE) as file:
        pq.write_table(pa.table({name: columns[name] for name in SAMPLES.names}, schema=SAMPLES), file)


def _drawn(corpus: Corpus, removed: pa.Table, *, seed: int) -> Rows:
    """The rows of EACH documents of every stage and rule, in that order."""
    gone = np.flatnonzero(np.asarray(removed["rule"].is_valid()))
    some = removed.take(pa.array(gone))
    names = pc.binary_join_element_wise(some["stage"], some["rule"], "\0").combine_chunks()
    order = np.lexsort(
        (
            gone,
            draws(corpus.hashes.take(pa.array(gone)), seed=seed, purpose="samples"),
            names.to_numpy(zero_copy_only=False).astype(str),
        )
    )
    codes = names.take(pa.array(order)).dictionary_encode().indices.to_numpy()
    place = np.arange(len(codes)) - np.searchsorted(codes, codes)
    drawn: Rows = gone[order[place < EACH]]
    return drawn


def _beginnings(corpus: Corpus, texts: Sequence[Texts], rows: Rows) -> dict[int, str]:
    """The beginning of the text of each of `rows`."""
    wanted = np.zeros(len(corpus), bool)
    wanted[rows] = True
    found: list[str] = []
    for chunk, mask in zip(texts, corpus.by_chunk(wanted), strict=True):
        if mask.any():
            for text in read_chosen(chunk, mask):
                found += pc.utf8_slice_codeunits(text, 0, CHARACTERS).to_pylist()
    return dict(zip(rows.tolist(), found, strict=True))
