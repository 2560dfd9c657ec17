"""Shards read by ranges and compressed shards hold the same tokens as mapped ones, and no damage passes."""

from __future__ import annotations

from pathlib import Path

import fsspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.store import frame
from ropewalk.store.compression import Compression
from ropewalk.store.origin import Origin
from ropewalk.store.remote import RemoteShard
from ropewalk.store.shards import Run, Shard, TokenType, Written, write_runs

COMPRESSIONS: tuple[Compression, ...] = ("off", "zstd")


def write(
    path: Path,
    lengths: list[int],
    *,
    compression: Compression,
    dtype: TokenType = "uint16",
    masked: bool = False,
    seed: int = 0,
) -> Written:
    draw = np.random.default_rng(seed)
    total = sum(lengths)
    run = Run(
        keys=np.arange(len(lengths), dtype=np.uint64),
        lengths=np.array(lengths, np.int64),
        tokens=draw.integers(0, 60_000, total).astype(dtype),
        counts=draw.random(total) < 0.5 if masked else None,
        text_bytes=np.array(lengths, np.int64) * 4,
    )
    return write_runs(path, [run], dtype=dtype, compression=compression)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), max_size=12),
    compression=st.sampled_from(COMPRESSIONS),
    dtype=st.sampled_from(["uint16", "uint32"]),
    masked=st.booleans(),
    data=st.data(),
)
def test_ranges_of_a_remote_shard_are_those_of_the_mapped_one(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    compression: Compression,
    dtype: TokenType,
    masked: bool,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.getbasetemp() / "remote.tokens"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "CHUNK_BYTES", 128)
        plain = write(path, lengths, compression="off", dtype=dtype, masked=masked)
        truth = np.array(Shard(path).tokens)
        counts = Shard(path).counts(0, plain.tokens)
        written = write(path, lengths, compression=compression, dtype=dtype, masked=masked)
    url = "memory://ropewalk-remote/shard.tokens"
    with fsspec.open(url, "wb") as file:
        file.write(path.read_bytes())
    shard = RemoteShard(url, fetch=Origin(), size=written.bytes, checksum=written.checksum)
    start = data.draw(st.integers(0, len(truth)))
    stop = data.draw(st.integers(start, len(truth)))
    np.testing.assert_array_equal(shard.read(start, stop), truth[start:stop])
    found = shard.counts(start, stop)
    assert (counts[start:stop] if found is None else found).tolist() == counts[start:stop].tolist()
    assert shard.lengths.tolist() == lengths
    assert shard.text_bytes is not None
    assert shard.text_bytes.tolist() == [4 * length for length in lengths]
    np.testing.assert_array_equal(Shard(path).tokens, truth)
    Shard(path).verify()


def test_blocks_unpack_with_the_library_alone_to_the_raw_tokens(tmp_path: Path) -> None:
    write(tmp_path / "plain", [700_000, 40], compression="off")
    write(tmp_path / "packed", [700_000, 40], compression="zstd")
    shard = RemoteShard(
        str(tmp_path / "packed"), fetch=Origin(), size=(tmp_path / "packed").stat().st_size, checksum=None
    )
    stored = (tmp_path / "packed").read_bytes()
    pieces = shard.pieces_of(0, shard.token_count)
    raw = b"".join(
        zstandard.ZstdDecompressor().decompress(stored[shard.item(p).start : shard.item(p).stop]) for p in pieces
    )
    assert raw == Shard(tmp_path / "plain").tokens.tobytes()
    assert len(pieces) == 2


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_opening_reads_the_ends_and_a_read_fetches_only_its_pieces(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "large"
    written = write(path, [1_000_000] * 4, compression=compression)
    origin = Origin()
    shard = RemoteShard(str(path), fetch=origin, size=written.bytes)
    assert origin.stats().bytes < 1.2 * frame.CHUNK_BYTES
    before = origin.stats().bytes
    shard.read(2_000_000, 2_000_100)
    assert origin.stats().bytes - before <= 2 * frame.CHUNK_BYTES


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_flipped_bit_names_the_shard_and_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Compression
) -> None:
    monkeypatch.setattr(frame, "CHUNK_BYTES", 256)
    path = tmp_path / "flipped.tokens"
    written = write(path, [100] * 10, compression=compression)
    truth = np.array(Shard(path).tokens)
    stored = bytearray(path.read_bytes())
    stored[700] ^= 1
    path.write_bytes(stored)
    shard = Shard(path)
    spoiled = [chunk for chunk in shard.damaged_chunks()]
    assert spoiled == [2]
    lost = shard.damaged_tokens(2)
    remote = RemoteShard(str(path), fetch=Origin(), size=written.bytes)
    readable = [
        piece for piece in remote.pieces_of(0, remote.token_count) if not set(remote.tokens_of(piece)) <= set(lost)
    ]
    for piece in readable:
        held = remote.tokens_of(piece)
        np.testing.assert_array_equal(remote.read(held.start, held.stop), truth[held.start : held.stop])
    documents = shard.damaged_documents(2)
    assert list(documents) == sorted({token // 100 for token in lost})
    with pytest.raises(DataError, match=rf"flipped\.tokens: damaged shard: bytes 512 to 768 .*{documents.start}.*key"):
        shard.verify()
    with pytest.raises(DataError, match=r"flipped\.tokens: bytes .* not what was written"):
        remote.read(0, remote.token_count)


def test_a_remote_shard_that_was_exchanged_or_cut_is_refused(tmp_path: Path) -> None:
    written = write(tmp_path / "a", [5], compression="off")
    other = write(tmp_path / "b", [6], compression="off")
    with pytest.raises(DataError, match="the manifest says"):
        RemoteShard(str(tmp_path / "a"), fetch=Origin(), size=written.bytes, checksum=other.checksum)
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(DataError, match="a: "):
        RemoteShard(str(tmp_path / "a"), fetch=Origin(), size=written.bytes)
    with pytest.raises(DataError, match="damaged shard"):
        RemoteShard(str(tmp_path / "a"), fetch=Origin(), size=written.bytes - 1)


def test_damage_to_the_index_spoils_no_document_but_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "CHUNK_BYTES", 64)
    write(tmp_path / "a", [64, 64], compression="off")
    stored = bytearray((tmp_path / "a").read_bytes())
    stored[256 + 64] ^= 1
    (tmp_path / "a").write_bytes(stored)
    shard = Shard(tmp_path / "a")
    assert [list(shard.damaged_documents(chunk)) for chunk in shard.damaged_chunks()] == [[]]
    with pytest.raises(DataError, match="they hold the index"):
        shard.verify()
