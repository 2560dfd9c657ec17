"""Compressed shards give the batches of plain ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ropewalk.load.config import Packing
from ropewalk.load.loader import Loader
from ropewalk.store import frame
from ropewalk.store.manifest import read_manifest, write_manifest
from ropewalk.store.shards import Shard, write_runs
from tests.tiny import write_corpus


def compress(plain: Path, packed: Path) -> Path:
    """A copy of a prepared folder with every shard compressed, in blocks of 512 bytes."""
    packed.mkdir()
    manifest = read_manifest(plain)
    shards = []
    for entry in manifest.shards:
        run = Shard(plain / entry.file).run(np.arange(entry.documents))
        written = write_runs(packed / entry.file, [run], dtype=manifest.dtype, compression="zstd")
        shards.append(
            dataclasses.replace(entry, checksum=written.checksum, file_bytes=written.bytes, compression="zstd")
        )
    (packed / manifest.tokenizer.file).write_bytes((plain / manifest.tokenizer.file).read_bytes())
    write_manifest(packed, dataclasses.replace(manifest, shards=tuple(shards)))
    return packed


@pytest.mark.parametrize("packing", ["windows", "best-fit"])
def test_batches_of_compressed_shards_are_those_of_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: Packing
) -> None:
    plain = write_corpus(tmp_path / "plain")
    monkeypatch.setattr(frame, "CHUNK_BYTES", 512)
    packed = compress(plain, tmp_path / "packed")
    batches = []
    for folder in (plain, packed):
        loader = Loader(folder, sequence_length=16, batch_size=4, seed=1, packing=packing)
        batches.append([loader.next() for _ in range(8)])
        loader.close()
    for one, two in zip(*batches, strict=True):
        assert one.tokens.equal(two.tokens)
        assert one.weight.equal(two.weight)
        assert one.documents.equal(two.documents)
