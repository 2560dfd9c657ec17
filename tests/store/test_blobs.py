"""Shards of bytes and arrays give back what was written, from a disk or a URL, and name a damaged document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ropewalk.base.errors import DataError
from ropewalk.store import frame
from ropewalk.store.blobs import Blob, Blobs, open_blobs, write_arrays, write_blobs
from ropewalk.store.compression import Compression
from ropewalk.store.origin import Origin
from ropewalk.store.shards import Shard, document_key, write_shard

BLOBS = st.lists(
    st.builds(
        Blob,
        name=st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
        data=st.binary(max_size=400),
        media_type=st.sampled_from(["image/jpeg", "image/png", ""]),
        note=st.one_of(st.none(), st.integers(), st.dictionaries(st.text("ab"), st.booleans())),
    ),
    max_size=10,
)


@settings(max_examples=60, deadline=None)
@given(documents=BLOBS, compression=st.sampled_from(["off", "zstd"]), chunk=st.sampled_from([64, 1000, 1 << 20]))
def test_blobs_come_back_with_name_type_and_note_from_a_url(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Blob], compression: Compression, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.blobs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "CHUNK_BYTES", chunk)
        written = write_blobs(path, documents, compression=compression)
    with fsspec.open("memory://ropewalk-blobs/shard", "wb") as file:
        file.write(path.read_bytes())
    shard = open_blobs("memory://ropewalk-blobs/shard", checksum=written.checksum)
    shard.verify()
    assert len(shard) == written.documents == len(documents)
    found = [
        Blob(shard.name(i), bytes(shard.document(i)), shard.media_type(i), shard.note(i)) for i in range(len(shard))
    ]
    assert found == documents
    assert shard.ids.tolist() == [document_key(blob.name) for blob in documents]


@settings(max_examples=40, deadline=None)
@given(
    documents=st.sampled_from(["float32", "uint8", "int16"]).flatmap(
        lambda dtype: st.lists(
            arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0)), min_size=1, max_size=6
        )
    ),
    compression=st.sampled_from(["off", "zstd"]),
)
def test_arrays_of_any_shape_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Any], compression: Compression
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.arrays"
    blobs = [Blob(str(number), array) for number, array in enumerate(documents)]
    write_arrays(path, blobs, dtype=documents[0].dtype, compression=compression)
    shard = open_blobs(str(path))
    for number, array in enumerate(documents):
        found = np.asarray(shard.document(number))
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_document_lies_where_its_item_says_aligned_and_hashed(tmp_path: Path) -> None:
    documents = [Blob(f"cat-{n}.jpg", bytes([n]) * (n * 50 + 1), "image/jpeg") for n in range(5)]
    write_blobs(tmp_path / "a", documents)
    stored = (tmp_path / "a").read_bytes()
    shard = open_blobs(str(tmp_path / "a"))
    for number, document in enumerate(documents):
        item = shard.item(number)
        assert item.start % 64 == 0
        assert stored[item.start : item.stop] == document.data
        assert item.checksum == xxhash.xxh3_64_intdigest(document.data)
        assert item.name == document.name


def test_every_flipped_bit_before_the_footer_is_found_and_a_document_is_named(tmp_path: Path) -> None:
    path = tmp_path / "flip.blobs"
    write_blobs(path, [Blob("one", b"abc"), Blob("two", b"defg" * 20)])
    whole = path.read_bytes()
    start = open_blobs(str(path)).item(1).start
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(DataError, match=r"flip\.blobs"):
            open_blobs(str(path)).verify()
    path.write_bytes(whole)
    shard = open_blobs(str(path))
    assert shard.damaged_documents(0) == [0, 1]
    path.write_bytes(whole[:start] + b"x" + whole[start + 1 :])
    with pytest.raises(DataError, match=r"flip\.blobs: .*document two"):
        shard.document(1)
    assert bytes(shard.document(0)) == b"abc"


def test_opening_does_not_read_the_documents(tmp_path: Path) -> None:
    write_blobs(tmp_path / "a", [Blob(str(n), bytes(1 << 20)) for n in range(8)])
    origin = Origin()
    shard = Blobs(str(tmp_path / "a"), fetch=origin, size=origin.size(str(tmp_path / "a")))
    assert origin.stats().bytes < (1 << 20) + (1 << 17)
    assert len(bytes(shard.document(3))) == 1 << 20


def test_wrong_kinds_are_told_apart(tmp_path: Path) -> None:
    write_blobs(tmp_path / "bytes", [Blob("a", b"1")])
    write_shard(tmp_path / "tokens", [(1, np.arange(3, dtype=np.uint16))], dtype="uint16")
    with pytest.raises(DataError, match="holds bytes, not tokens"):
        Shard(tmp_path / "bytes")
    with pytest.raises(DataError, match="holds tokens, not bytes or arrays"):
        open_blobs(str(tmp_path / "tokens"))
    shard = open_blobs(str(tmp_path / "bytes"))
    with pytest.raises(DataError, match="holds bytes, not arrays"):
        shard.array(0, b"1")
    with pytest.raises(DataError, match="document a is of float64, the shard of float32"):
        write_arrays(tmp_path / "c", [Blob("a", np.zeros(3))], dtype="float32")
    with pytest.raises(DataError, match="write it with write_arrays"):
        write_blobs(tmp_path / "c", [Blob("a", np.zeros(3))])
