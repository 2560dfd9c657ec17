"""A loader written to be read: what a batch has to be, token by token, for the tests of the fast one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ropewalk.load.order import Rows
from ropewalk.store.manifest import read_manifest, write_manifest
from ropewalk.store.shards import Document, document_key, write_shard
from tests.tiny import write_prepared


@dataclasses.dataclass(frozen=True)
class Text:
    """A document: its tokens, and whether each counts as a target."""

    tokens: list[int]
    counts: list[bool]


Sources = dict[str, list[list[Text]]]
"""The documents of each shard of each source."""


@dataclasses.dataclass
class SlowRow:
    """One row as lists, a value a place."""

    tokens: list[int]
    targets: list[int | None]
    """None where there is none, or none that counts."""
    positions: list[int]
    documents: list[int]


def numbered(sizes: dict[str, list[list[int]]], *, masked: bool = False, seed: int = 0) -> Sources:
    """Sources whose documents have these sizes, by shard; tokens are 1, 2, 3, ... over all of them, so that a token
    tells its place."""
    draw, sources, first = np.random.default_rng(seed), {}, 1
    for name, shards in sizes.items():
        sources[name] = []
        for shard in shards:
            texts = []
            for size in shard:
                counts = draw.random(size) < 0.7 if masked else np.ones(size, bool)
                texts.append(Text(list(range(first, first + size)), counts.tolist()))
                first += size
            sources[name].append(texts)
    return sources


def write(folder: Path, sources: Sources, **weights: float) -> Path:
    """Commits a prepared folder with these training documents."""
    plain = {name: [[text.tokens for text in shard] for shard in shards] for name, shards in sources.items()}
    write_prepared(folder, plain, {}, **weights)
    manifest, entries = read_manifest(folder), []
    for entry in manifest.shards:
        shard = sources[entry.source][int(entry.file.split(".")[0][-5:])]
        documents = [
            Document(document_key(f"{entry.file}:{n}"), np.array(t.tokens, np.uint16), np.array(t.counts, bool))
            for n, t in enumerate(shard)
        ]
        written = write_shard(folder / entry.file, documents, dtype="uint16")
        entries.append(dataclasses.replace(entry, checksum=written.checksum, file_bytes=written.bytes))
    write_manifest(folder, dataclasses.replace(manifest, shards=tuple(entries)))
    return folder


def slow_rows(rows: Rows, shards: Sequence[list[list[Text]]], *, length: int, packing: str) -> list[SlowRow]:
    """The rows that an order asks for, of sources given by their shards."""
    lines = [[text for shard in several for text in shard] for several in shards]
    made = []
    for number in range(len(rows)):
        row = SlowRow([], [], [], [])
        for piece in range(int(rows.starts[number]), int(rows.starts[number + 1])):
            texts = lines[int(rows.source[piece])]
            line = [
                (token, counts, index)
                for index, text in enumerate(texts)
                for token, counts in zip(text.tokens, text.counts, strict=True)
            ]
            begin, inputs, targets = (int(a[piece]) for a in (rows.begin, rows.length, rows.targets))
            for place in range(inputs):
                token, _, owner = line[begin + place]
                follower, counts, _ = line[begin + place + 1] if place < targets else (None, False, None)
                row.tokens.append(token)
                row.targets.append(follower if counts else None)
                row.positions.append(place)
                row.documents.append(
                    owner - line[begin][2] if packing == "windows" else piece - int(rows.starts[number])
                )
        padding = length - len(row.tokens)
        row.tokens += [0] * padding
        row.targets += [None] * padding
        row.positions += range(padding)
        row.documents += [max(row.documents, default=-1) + 1] * padding
        made.append(row)
    return made
