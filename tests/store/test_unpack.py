"""Packed units of other programs' corpora: whole, or refused before they fill the memory."""

from __future__ import annotations

import gzip
import io
import tarfile
from typing import Literal

import numpy as np
import pytest
import zstandard

from ropewalk.base.errors import DataError
from ropewalk.store.foreign.unpack import SMALL, unpacked
from ropewalk.store.references import Unit

Packing = Literal["zstd", "gzip", "tar-json"]


def unit(packing: Packing) -> Unit:
    return Unit(file="shard.bin", stop=1, file_bytes=1, packing=packing, column="json" if packing == "tar-json" else "")


def packed(packing: Packing, data: bytes) -> bytes:
    if packing == "zstd":
        half = len(data) // 2
        return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))
    if packing == "gzip":
        return gzip.compress(data)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        member = tarfile.TarInfo("0.json")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize("packing", ["zstd", "gzip"])
def test_all_frames_are_unpacked(packing: Packing) -> None:
    tokens = np.arange(300_000, dtype=np.uint32).tobytes()
    assert unpacked(unit(packing), packed(packing, tokens), dtype="uint32").tobytes() == tokens


@pytest.mark.parametrize("packing", ["zstd", "gzip", "tar-json"])
def test_a_bomb_is_refused_by_name(packing: Packing) -> None:
    bomb = packed(packing, bytes(SMALL + 2))
    assert len(bomb) * 100 < SMALL
    with pytest.raises(DataError, match=r"shard\.bin: .* bytes unpack to more than 67,108,864; .*without compression"):
        unpacked(unit(packing), bomb, dtype="uint32")
