"""Shards give back what was written, and no damage passes unseen."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ropewalk.base.errors import DataError
from ropewalk.store import frame
from ropewalk.store.shards import Run, Shard, TokenType, Written, document_key, token_type, write_runs, write_shard

DTYPES: tuple[TokenType, ...] = ("uint16", "uint32")
DOCUMENTS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: st.tuples(
        st.just(dtype),
        st.lists(st.tuples(st.integers(0, 2**64 - 1), arrays.arrays(dtype, st.integers(0, 40))), max_size=6),
    )
)


def write(path: Path, *lengths: int, dtype: TokenType = "uint16") -> Written:
    tokens = [np.arange(length).astype(dtype) for length in lengths]
    return write_shard(path, iter([(document_key(str(n)), t) for n, t in enumerate(tokens)]), dtype=dtype)


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, st.sampled_from([7, 64, 1 << 20]))
def test_a_shard_gives_back_the_documents_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[TokenType, list[Any]], chunk: int
) -> None:
    dtype, documents = drawn
    path = tmp_path_factory.getbasetemp() / "random.tokens"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "CHUNK_BYTES", chunk)
        written = write_shard(path, iter(documents), dtype=dtype)
    shard = Shard(path, checksum=written.checksum)
    shard.verify()
    assert [shard.document(i).tolist() for i in range(len(shard))] == [t.tolist() for _, t in documents]
    assert shard.ids.tolist() == [key for key, _ in documents]
    assert shard.tokens.dtype == dtype
    assert (written.documents, written.tokens) == (len(documents), len(shard.tokens))
    assert written.bytes == path.stat().st_size


RUNS = st.lists(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.lists(st.tuples(st.integers(0, 99), st.booleans())))), max_size=4
)


@settings(max_examples=200, deadline=None)
@given(RUNS, st.data())
def test_counts_are_those_of_each_token_however_documents_are_grouped(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[list[Any]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    documents = [
        (key, np.array([t for t, _ in pairs], np.uint16), np.array([c for _, c in pairs], bool))
        for group in drawn
        for key, pairs in group
    ]
    one_by_one = write_shard(folder / "documents", documents, dtype="uint16")
    groups = [(len(group), [pair for _, pairs in group for pair in pairs]) for group in drawn]
    runs = [
        Run(
            keys=np.array([key for key, _ in group], np.uint64),
            lengths=np.array([len(pairs) for _, pairs in group], np.int64),
            tokens=np.array([token for token, _ in pairs], np.uint16),
            counts=None if all(count for _, count in pairs) else np.array([count for _, count in pairs]),
        )
        for group, (_, pairs) in zip(drawn, groups, strict=True)
    ]
    assert write_runs(folder / "runs", runs, dtype="uint16") == one_by_one
    assert (folder / "runs").read_bytes() == (folder / "documents").read_bytes()
    shard, truth = Shard(folder / "runs"), [count for _, pairs in groups for _, count in pairs]
    start = data.draw(st.integers(0, len(truth)))
    stop = data.draw(st.integers(start, len(truth)))
    found = shard.counts(start, stop)
    assert found.dtype == np.bool_
    assert found.tolist() == truth[start:stop]


def test_documents_without_counts_beside_some_with_them_count_everywhere(tmp_path: Path) -> None:
    tokens = np.arange(5, dtype=np.uint16)
    masked = np.array([False, True, False, False, True])
    write_shard(tmp_path / "a", [(1, tokens), (2, tokens, masked), (3, tokens)], dtype="uint16")
    assert Shard(tmp_path / "a").counts(0, 15).tolist() == [True] * 5 + masked.tolist() + [True] * 5
    assert "counts" in footer_of(tmp_path / "a")["sections"]
    write_shard(tmp_path / "b", [(1, tokens), (2, tokens, np.ones(5, bool))], dtype="uint16")
    assert "counts" not in footer_of(tmp_path / "b")["sections"]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6)])
def test_counts_outside_the_shard_are_an_index_error(tmp_path: Path, start: int, stop: int) -> None:
    write(tmp_path / "a", 5)
    with pytest.raises(IndexError, match="holds 5 tokens"):
        Shard(tmp_path / "a").counts(start, stop)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=8), st.data())
def test_a_run_taken_from_a_shard_is_the_chosen_documents(
    tmp_path_factory: pytest.TempPathFactory, shape: list[tuple[int, bool]], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "whole"
    lengths = np.array([length for length, _ in shape])
    counts = np.repeat([count for _, count in shape], lengths)
    keys, sizes = np.arange(len(shape), dtype=np.uint64), lengths * 3
    tokens = np.arange(lengths.sum(), dtype=np.uint16)
    write_runs(path, [Run(keys, lengths, tokens, counts, sizes)], dtype="uint16")
    shard = Shard(path)
    chosen = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True).map(sorted))
    run = shard.run(np.array(chosen, np.int64))
    assert run.keys.tolist() == chosen
    assert run.tokens.tolist() == [token for index in chosen for token in shard.document(index).tolist()]
    assert run.text_bytes is not None
    assert run.text_bytes.tolist() == sizes[chosen].tolist()
    truth = [shape[index][1] for index in chosen for _ in range(shape[index][0])]
    assert truth == ([True] * len(run.tokens) if run.counts is None else run.counts.tolist())


def test_a_shard_of_format_1_is_still_read(tmp_path: Path) -> None:
    write(tmp_path / "a", 3, 4)
    with_footer(tmp_path / "a", format=1)
    shard = Shard(tmp_path / "a")
    shard.verify()
    assert (shard.document(1).tolist(), shard.counts(0, 7).all(), shard.text_bytes) == ([0, 1, 2, 3], True, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_payload_around_one_chunk_is_whole(tmp_path: Path, dtype: TokenType, off: int) -> None:
    length = frame.CHUNK_BYTES // np.dtype(dtype).itemsize + off
    write(tmp_path / "a", length, 0, 1, dtype=dtype)
    shard = Shard(tmp_path / "a")
    shard.verify()
    np.testing.assert_array_equal(shard.document(0), np.arange(length).astype(dtype))
    assert len(shard) == 3


@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 191, 192, 193])
def test_the_last_byte_before_the_footer_is_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(frame, "CHUNK_BYTES", chunk)
    write(tmp_path / "a", 32)
    data = bytearray((tmp_path / "a").read_bytes())
    footer = int.from_bytes(data[-24:-16], "little")
    data[-24 - footer - 1] ^= 1
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(DataError, match="a: damaged shard: bytes"):
        Shard(tmp_path / "a").verify()


def test_every_flipped_bit_is_found_and_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "CHUNK_BYTES", 128)
    path = tmp_path / "small.tokens"
    write(path, 3, 0, 40)
    with open(path, "r+b", buffering=0) as file:
        for position in range(path.stat().st_size):
            file.seek(position)
            byte = file.read(1)[0]
            for bit in range(8):
                file.seek(position)
                file.write(bytes([byte ^ 1 << bit]))
                with pytest.raises(DataError, match=r"small\.tokens: damaged shard"):
                    Shard(path).verify()
            file.seek(position)
            file.write(bytes([byte]))
    Shard(path).verify()


def test_a_shard_cut_anywhere_is_refused_at_opening(tmp_path: Path) -> None:
    path = tmp_path / "cut.tokens"
    write(path, 5)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"cut\.tokens: damaged shard"):
            Shard(path)


@pytest.mark.parametrize(("begin", "end", "filling"), [(10, 20, b""), (0, 2, b""), (10, 10, b"\0" * 64)])
def test_a_shard_with_a_piece_lost_or_put_in_is_refused_at_opening(
    tmp_path: Path, begin: int, end: int, filling: bytes
) -> None:
    path = tmp_path / "cut.tokens"
    write(path, 50)
    whole = path.read_bytes()
    path.write_bytes(whole[:begin] + filling + whole[end:])
    with pytest.raises(DataError, match="bytes precede its footer"):
        Shard(path)


@pytest.mark.parametrize("content", [b"", b"text", b"x" * 1000, b"\0" * 16 + b"ROPEWALK", b"\xff" * 16 + b"ROPEWALK"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(DataError, match="foreign: damaged shard"):
        Shard(tmp_path / "foreign")


def footer_of(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(data[-24 - int.from_bytes(data[-24:-16], "little") : -24])


def with_footer(path: Path, **changes: Any) -> None:
    """Rewrites the footer of a shard, hash included, as another version would."""
    data = path.read_bytes()
    length = int.from_bytes(data[-24:-16], "little")
    body = json.dumps(json.loads(data[-24 - length : -24]) | changes).encode()
    trailer = len(body).to_bytes(8, "little") + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + b"ROPEWALK"
    path.write_bytes(data[: -24 - length] + body + trailer)


def test_another_version_or_kind_of_shard_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for changes, words in (
        ({"format": frame.FORMAT + 1}, "upgrade ropewalk"),
        ({"kind": "images"}, "holds images, not tokens"),
    ):
        write(path, 3)
        with_footer(path, **changes)
        with pytest.raises(DataError, match=f"a: this shard .*{words}"):
            Shard(path)


def test_a_missing_or_exchanged_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a: this shard is missing"):
        Shard(tmp_path / "a")
    one, two = write(tmp_path / "a", 3), write(tmp_path / "b", 4)
    Shard(tmp_path / "a", checksum=one.checksum)
    with pytest.raises(DataError, match=f"a: damaged shard: its checksum is {one.checksum}, the manifest says"):
        Shard(tmp_path / "a", checksum=two.checksum)


def test_a_token_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token 65536 does not fit in uint16"):
        write_shard(tmp_path / "a", iter([(1, np.array([3, 1 << 16], np.uint32))]), dtype="uint16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("index", [-1, 2])
def test_a_document_that_is_not_there_is_an_index_error(tmp_path: Path, index: int) -> None:
    write(tmp_path / "a", 3, 4)
    with pytest.raises(IndexError, match="holds 2 documents"):
        Shard(tmp_path / "a").document(index)


def test_the_same_documents_make_the_same_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "a", 3, 0, 9) == write(tmp_path / "b", 3, 0, 9)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_types_are_the_narrowest_and_keys_never_change() -> None:
    assert [token_type(size) for size in (257, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]
    assert document_key("source:path/ü.txt:3") == 12799440530120512565


@pytest.mark.parametrize(
    "change",
    [
        {"sections": {"tokens": [-5, 8]}},
        {"sections": {"tokens": [0, 1 << 40]}},
        {"sections": {"tokens": [0, 1.5]}},
        {"sections": []},
        {"chunks": [1, 2, 3, 4, 5]},
        {"chunk_bytes": 0},
        {"kind": 7},
    ],
    ids=str,
)
def test_a_footer_with_a_sound_hash_that_tells_of_other_bytes_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    body, file = b"x" * 100, tmp_path / "a.tokens"
    told = {"format": 3, "kind": "tokens", "sections": {"tokens": [0, 100]}, "chunk_bytes": 1 << 20, "chunks": [7]}

    def framed(footer: dict[str, object]) -> object:
        text = json.dumps(footer).encode()
        data = body + text + struct.pack("<QQ8s", len(text), xxhash.xxh3_64_intdigest(text), b"ROPEWALK")
        return frame.read_frame(str(file), size=len(data), read=lambda a, b: data[a:b], kinds=("tokens",))

    assert framed(told)
    with pytest.raises(DataError, match=r"a\.tokens: damaged shard: its footer"):
        framed({**told, **change})
