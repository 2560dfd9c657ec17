"""Corpora of other programs are the same line of tokens as the documents that were written, from any place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.load import references
from ropewalk.load.references import ReferencedTokens, open_references
from ropewalk.load.sources import open_source
from ropewalk.store.foreign.corpora import detect, scan
from ropewalk.store.manifest import ShardEntry
from ropewalk.store.origin import Origin
from ropewalk.store.references import Catalogue, read_references, write_references
from tests.foreign_corpora import (
    Documents,
    write_litdata,
    write_mds,
    write_megatron,
    write_parquet,
    write_webdataset,
)

DRAW = np.random.default_rng(1)
DOCUMENTS: Documents = [DRAW.integers(0, 120, size).tolist() for size in (5, 1, 40, 300, 7, 7, 64, 2, 90, 13)]
LINE = np.concatenate([np.array(document) for document in DOCUMENTS])
Writer = Callable[..., str]
CASES: list[tuple[str, Writer, dict[str, Any], dict[str, str]]] = [
    *(("megatron", write_megatron, {"dtype": d}, {}) for d in ("uint8", "int8", "int16", "int32", "int64", "uint16")),
    ("megatron", write_megatron, {"sequences": 3}, {}),
    ("mds", write_mds, {}, {}),
    ("mds", write_mds, {"encoding": "ndarray", "dtype": "uint16"}, {}),
    ("mds", write_mds, {"encoding": "bytes", "dtype": "int64"}, {}),
    ("mds", write_mds, {"encoding": "bytes", "dtype": "uint32"}, {"dtype": "uint32", "column": "tokens"}),
    ("mds", write_mds, {"compression": "zstd"}, {}),
    ("mds", write_mds, {"compression": "gz", "encoding": "ndarray:uint16", "dtype": "uint16"}, {}),
    ("litdata", write_litdata, {}, {}),
    ("litdata", write_litdata, {"code": 20}, {}),
    ("litdata", write_litdata, {"compression": "chunk", "code": 17}, {}),
    ("litdata", write_litdata, {"compression": "batch"}, {}),
    ("litdata", write_litdata, {"loader": "PyTreeLoader"}, {}),
    ("litdata", write_litdata, {"loader": "PyTreeLoader", "compression": "batch"}, {"column": "1"}),
    ("webdataset", write_webdataset, {}, {}),
    ("webdataset", write_webdataset, {"ending": "npy", "dtype": "uint16", "packed": True}, {}),
    ("webdataset", write_webdataset, {"ending": "bin", "dtype": "uint16"}, {}),
    ("webdataset", write_webdataset, {"ending": "bin", "dtype": "int64"}, {"dtype": "int64", "column": "bin"}),
    ("webdataset", write_webdataset, {"ending": "json"}, {}),
    ("webdataset", write_webdataset, {"ending": "json", "packed": True}, {"column": "json:input_ids"}),
    ("parquet", write_parquet, {}, {}),
    ("parquet", write_parquet, {"dtype": "uint16", "compression": "none"}, {"column": "input_ids"}),
]
IDS = [f"{name}-{'-'.join(map(str, how.values()))}" for name, _, how, _ in CASES]


def ranges(seed: int = 0, count: int = 20) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    begin = draw.integers(0, len(LINE), count)
    return begin, np.minimum(draw.integers(0, 200, count), len(LINE) - begin).astype(np.int32)


def assert_line(source: ReferencedTokens) -> None:
    assert source.lengths.tolist() == [len(document) for document in DOCUMENTS]
    begin, count = ranges()
    truth = np.concatenate([LINE[b : b + c] for b, c in zip(begin, count, strict=True)])
    np.testing.assert_array_equal(source.read(begin, count), truth)
    assert source.read(begin, count).dtype == np.uint16
    for each in (source, ReferencedTokens(dataclasses.replace(source.catalogue, vocabulary=1 << 20))):
        parts = each.mapped()
        if parts is None:
            continue
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), LINE)
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        assert lengths.tolist() == source.lengths.tolist()


def catalogue_of(place: str, told: dict[str, str]) -> Catalogue:
    origin = Origin()
    found = scan(place, format=detect(place, origin=origin), origin=origin, **told)  # type: ignore[arg-type]
    return Catalogue(found.dtype, found.units, found.unit, found.start, found.length, vocabulary=128)


@pytest.mark.parametrize(("name", "write", "how", "told"), CASES, ids=IDS)
def test_a_corpus_of_another_program_is_the_line_that_was_written(
    tmp_path: Path, name: str, write: Writer, how: dict[str, Any], told: dict[str, str]
) -> None:
    place = write(tmp_path / "corpus", DOCUMENTS, **how)
    assert detect(place, origin=Origin()) == name
    catalogue = catalogue_of(place, told)
    assert_line(ReferencedTokens(catalogue))
    written = write_references(tmp_path / "a.refs", catalogue)
    again = read_references(tmp_path / "a.refs", checksum=written.checksum)
    assert_line(ReferencedTokens(again, kept_bytes=1))


@pytest.mark.parametrize(("name", "write", "how", "told"), CASES[::3], ids=IDS[::3])
def test_the_same_corpus_behind_a_url_is_the_same_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    write: Writer,
    how: dict[str, Any],
    told: dict[str, str],
) -> None:
    monkeypatch.setattr(references, "PIECE_BYTES", 64)
    write(tmp_path / "corpus" / "set", DOCUMENTS, **how)
    root = f"memory://ropewalk-{tmp_path.name}"
    for path in (p for p in (tmp_path / "corpus").rglob("*") if p.is_file()):
        with fsspec.open(f"{root}/{path.relative_to(tmp_path / 'corpus')}", "wb") as file:
            file.write(path.read_bytes())
    place = f"{root}/set"
    assert detect(place, origin=Origin()) == name
    source = ReferencedTokens(catalogue_of(place, told))
    assert source.mapped() is None
    begin, count = ranges()
    needed = source.needs(begin, count)
    assert len({item.key for item in needed}) == len(needed) > 0
    assert_line(source)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=2, max_size=20),
    first=st.integers(0, 20),
    size=st.integers(0, 20),
    scattered=st.booleans(),
    data=st.data(),
)
def test_any_ranges_of_a_part_of_a_catalogue_are_those_of_its_documents(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    first: int,
    size: int,
    scattered: bool,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("part")
    documents = [[(number + place) % 100 for place in range(length)] for number, length in enumerate(lengths)]
    write = write_webdataset if scattered else write_megatron
    whole = scan(write(folder / "corpus", documents), format="webdataset" if scattered else "megatron", origin=Origin())
    source = ReferencedTokens(whole.part(first, first + size))
    line = [token for document in documents[first : first + size] for token in document]
    assert source.lengths.tolist() == lengths[first : first + size]
    begin = data.draw(st.lists(st.integers(0, len(line)), max_size=6))
    count = [data.draw(st.integers(0, len(line) - start)) for start in begin]
    wanted = [token for start, length in zip(begin, count, strict=True) for token in line[start : start + length]]
    assert source.read(np.array(begin, np.int64), np.array(count, np.int32)).tolist() == wanted


def test_arrays_of_a_shape_that_the_encoding_names_have_no_headers(tmp_path: Path) -> None:
    equal = [document[:2] if len(document) > 1 else [*document, 3] for document in DOCUMENTS]
    place = write_mds(tmp_path / "corpus", equal, encoding="ndarray:uint16:2", dtype="uint16")
    source = ReferencedTokens(catalogue_of(place, {}))
    assert source.lengths.tolist() == [2] * len(equal)
    line = [token for document in equal for token in document]
    assert source.read(np.array([0]), np.array([len(line)], np.int32)).tolist() == line


def test_contiguous_tokens_as_wide_as_the_vocabulary_needs_are_mapped_and_others_are_not(tmp_path: Path) -> None:
    def parts(place: str, vocabulary: int) -> int:
        catalogue = dataclasses.replace(catalogue_of(place, {}), vocabulary=vocabulary)
        return len(ReferencedTokens(catalogue).mapped() or ())

    short = write_megatron(tmp_path / "a", DOCUMENTS, dtype="uint16")
    word = write_megatron(tmp_path / "b", DOCUMENTS, dtype="int32")
    long = write_megatron(tmp_path / "c", DOCUMENTS, dtype="int64")
    lit = write_litdata(tmp_path / "d", DOCUMENTS)
    packed = write_mds(tmp_path / "e", DOCUMENTS, compression="zstd")
    assert [parts(place, 128) for place in (short, word, long, lit, packed)] == [1, 0, 0, 0, 0]
    assert [parts(place, 100_000) for place in (short, word, long, lit, packed)] == [1, 1, 0, 2, 0]


def test_a_token_outside_the_vocabulary_is_named_mapped_or_not(tmp_path: Path) -> None:
    for number, dtype in enumerate(("uint16", "int32", "int64")):
        place = write_megatron(tmp_path / str(number), [[5, 200, 7]], dtype=dtype)
        source = ReferencedTokens(catalogue_of(place, {}))
        with pytest.raises(DataError, match=rf"{number}\.bin: holds token 200, the vocabulary has 128"):
            source.read(np.array([0]), np.array([3], np.int32))
        if dtype == "uint16":
            with pytest.raises(DataError, match="holds token 200"):
                source.verify()


def test_a_file_that_has_changed_since_is_refused_at_opening(tmp_path: Path) -> None:
    place = write_megatron(tmp_path / "corpus", DOCUMENTS)
    written = write_references(tmp_path / "a.refs", catalogue_of(place, {}))
    entry = ShardEntry(
        file="a.refs",
        source="corpus",
        split="train",
        documents=written.documents,
        tokens=written.tokens,
        text_bytes=0,
        file_bytes=written.bytes,
        checksum=written.checksum,
        kind="references",
    )
    opened = open_source(tmp_path, [entry], verify=True)
    assert isinstance(opened, ReferencedTokens)
    assert_line(opened)
    with open(f"{place}.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match=r"corpus\.bin: \d+ bytes, \d+ when the corpus was looked at"):
        open_references(tmp_path, [entry], verify=True)
