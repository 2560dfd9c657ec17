"""Fertility: how many tokens a tokenizer makes of text, by source, domain and language.

Few bytes a token or many tokens a word mean that the vocabulary does not suit the text: training on it costs more, and
less of it fits into a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ropewalk.store.manifest import Manifest, read_manifest
from ropewalk.store.shards import Shard

from . import tokenizer
from .columns import Mask, Rows
from .language import identify
from .ledger import STATISTICS
from .trace import ledger_rows

SAMPLED = 1000
"""Documents whose language is identified when it was not measured: 0.3 s."""
SHOWN_TOKENS = 500
"""Of each, from its beginning."""
UNKNOWN = "unknown"

Counts = npt.NDArray[np.int64]


def fertility(folder: Path, ledger: pa.Table) -> list[dict[str, Any]]:
    """Rows of `by`, `name`, `documents`, `tokens` (without ends of text), `bytes_per_token`, `characters_per_token` and
    `tokens_per_word`, most tokens first; the last two are None where they are not known.

    Characters and words are those of documents that no stage has cut and no template has changed. `ledger` has the
    columns `id`, `source`, `domain`, `split`, `parts` and `bytes`.
    """
    manifest = read_manifest(folder)
    known = pq.read_schema(folder / STATISTICS).names
    columns = ["bytes", "characters", "words", *(["language"] if "language" in known else [])]
    statistics = pq.read_table(folder / STATISTICS, columns=columns)
    rows, tokens, sizes = _encoded(folder, manifest, ledger)
    measured = statistics["bytes"].to_numpy()[rows]
    counts = _Counts(
        tokens=tokens,
        bytes=sizes,
        characters=statistics["characters"].to_numpy()[rows],
        words=statistics["words"].to_numpy()[rows],
        whole=(ledger["bytes"].to_numpy()[rows] == measured) & (sizes == measured),
    )
    found = [
        *_by("source", _names(ledger["source"], rows), counts),
        *_by("domain", _names(ledger["domain"], rows), counts),
    ]
    if "language" in known:
        return [*found, *_by("language", _names(statistics["language"], rows), counts)]
    chosen, languages = _sampled_languages(folder, manifest, len(rows))
    return [*found, *_by(f"language of {len(chosen)} documents", languages, counts.of(chosen))]


class _Counts:
    """One number a document of the shards."""

    def __init__(self, *, tokens: Counts, bytes: Counts, characters: Counts, words: Counts, whole: Mask) -> None:
        self.tokens, self.bytes, self.characters, self.words, self.whole = tokens, bytes, characters, words, whole

    def of(self, documents: Rows | Mask) -> _Counts:
        return _Counts(
            tokens=self.tokens[documents],
            bytes=self.bytes[documents],
            characters=self.characters[documents],
            words=self.words[documents],
            whole=self.whole[documents],
        )


def _encoded(folder: Path, manifest: Manifest, ledger: pa.Table) -> tuple[Rows, Counts, Counts]:
    """(row in the ledger, tokens without the end of text, bytes behind them) of every document, shard by shard."""
    parts: list[tuple[Rows, Counts, Counts]] = []
    for entry, rows in ledger_rows(ledger, manifest):
        shard = Shard(folder / entry.file, checksum=entry.checksum)
        shard.verify_index()
        sizes = shard.text_bytes
        parts.append((rows, np.diff(shard.offsets) - 1, np.zeros(len(shard), np.int64) if sizes is None else sizes))
    rows, tokens, bytes_ = (np.concatenate(column) for column in zip(*parts, strict=True))
    return rows, tokens, bytes_


def _by(kind: str, names: pa.DictionaryArray, counts: _Counts) -> list[dict[str, Any]]:
    made = []
    index = names.indices.to_numpy(zero_copy_only=False)
    for number, name in enumerate(names.dictionary.to_pylist()):
        mine = counts.of(index == number)
        tokens, whole = int(mine.tokens.sum()), mine.of(mine.whole)
        made.append(
            {
                "by": kind,
                "name": name or UNKNOWN,
                "documents": len(mine.tokens),
                "tokens": tokens,
                "bytes_per_token": _ratio(int(mine.bytes.sum()), tokens),
                "characters_per_token": _ratio(int(whole.characters.sum()), int(whole.tokens.sum())),
                "tokens_per_word": _ratio(int(whole.tokens.sum()), int(whole.words.sum())),
            }
        )
    return sorted(made, key=lambda row: (-row["tokens"], row["name"]))


def _sampled_languages(folder: Path, manifest: Manifest, documents: int) -> tuple[Rows, pa.DictionaryArray]:
    """(documents, their languages) of some that are spread evenly over the shards."""
    chosen = np.arange(0, documents, max(1, -(-documents // SAMPLED)))
    decode = tokenizer.load(folder / manifest.tokenizer.file).decode
    texts: list[str] = []
    first = 0
    for entry in manifest.shards:
        shard = Shard(folder / entry.file, checksum=entry.checksum)
        for document in (chosen[(chosen >= first) & (chosen < first + len(shard))] - first).tolist():
            shard.verify_documents(document, document + 1)
            texts.append(decode(shard.document(document)[:SHOWN_TOKENS].tolist()))
        first += len(shard)
    return chosen, identify(pa.array(texts, pa.large_string()))["language"].dictionary_encode()


def _names(column: pa.ChunkedArray, rows: Rows) -> pa.DictionaryArray:
    return column.take(pa.array(rows)).combine_chunks().dictionary_encode()


def _ratio(one: int, other: int) -> float | None:
    return round(one / other, 4) if one and other else None
