"""Files of other programs that are damaged, of another kind or unclear are named with what to do."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ropewalk.base.errors import DataError
from ropewalk.store.foreign.corpora import detect, scan
from ropewalk.store.origin import Origin
from ropewalk.store.references import read_references, write_references
from tests.foreign_corpora import write_litdata, write_mds, write_megatron, write_parquet, write_webdataset

DOCUMENTS = [[1, 2, 3], [4, 5], [6]]


def read(place: str, **told: Any) -> Any:
    origin = Origin()
    return scan(place, format=detect(place, origin=origin), origin=origin, **told)


def test_damaged_megatron_files_are_named(tmp_path: Path) -> None:
    place = write_megatron(tmp_path / "m", DOCUMENTS)
    index, tokens = tmp_path / "m.idx", tmp_path / "m.bin"
    whole = index.read_bytes()
    header = struct.Struct("<9sQBQQ").size
    for data, words in (
        (b"X" + whole[1:], "does not begin with MMIDIDX"),
        (whole[:9] + b"\x02" + whole[10:], "version 2"),
        (whole[:17] + b"\x07" + whole[18:], "tokens are of float32"),
        (whole[:-1], "its counts need"),
        (whole[: header + 12] + b"\x01" + whole[header + 13 :], "do not follow each other"),
        (whole[:-8] + b"\x09" + whole[-7:], "document boundaries"),
    ):
        index.write_bytes(data)
        with pytest.raises(DataError, match=rf"m\.idx: .*{words}"):
            read(place)
    index.write_bytes(whole)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"m\.bin: 10 bytes, its index tells of 12"):
        read(place)


def test_a_folder_of_megatron_datasets_is_their_documents_one_after_the_other(tmp_path: Path) -> None:
    write_megatron(tmp_path / "set" / "b", [[9]])
    write_megatron(tmp_path / "set" / "a", DOCUMENTS)
    assert read(str(tmp_path / "set")).length.tolist() == [3, 2, 1, 1]
    for place in ("set/a", "set/a.bin", "set/a.idx"):
        assert read(str(tmp_path / place)).length.tolist() == [3, 2, 1]


def test_unclear_columns_ask_for_the_one_that_holds_the_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no column ids; there are kind, source, tokens"):
        read(write_mds(tmp_path / "m", DOCUMENTS), column="ids")
    index = json.loads((tmp_path / "m" / "index.json").read_text())
    for shard in index["shards"]:
        shard["column_names"] = ["kind", "source", "words"]
    (tmp_path / "m" / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="which column holds the tokens"):
        read(str(tmp_path / "m"))
    with pytest.raises(DataError, match="a column of str holds no tokens"):
        read(str(tmp_path / "m"), column="source")
    with pytest.raises(DataError, match=r"leaf 0 of \['str', 'no_header_tensor:15'\] is no row of tokens"):
        read(write_litdata(tmp_path / "l", DOCUMENTS, loader="PyTreeLoader"), column="0")
    with pytest.raises(DataError, match=r"no member ends in \.ids; set `column`"):
        read(write_webdataset(tmp_path / "w", DOCUMENTS), column="ids")
    with pytest.raises(DataError, match="no tokens among"):
        read(write_webdataset(tmp_path / "v", DOCUMENTS, ending="jpg"))
    (tmp_path / "p").mkdir()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "p" / "a.parquet")
    with pytest.raises(DataError, match=r"Text has to be prepared"):
        read(str(tmp_path / "p"))
    with pytest.raises(DataError, match="column text does not hold lists of integers"):
        read(str(tmp_path / "p"), column="text")


def test_cut_shards_are_named(tmp_path: Path) -> None:
    for write, pattern, words in (
        (write_mds, "*.mds", "not the shard of"),
        (write_litdata, "chunk-*", "its offsets tell of"),
        (write_parquet, "*.parquet", "does not end in PAR1"),
    ):
        place = tmp_path / write.__name__
        write(place, DOCUMENTS)
        victim = sorted(place.glob(pattern))[0]
        victim.write_bytes(victim.read_bytes()[:-1])
        with pytest.raises(DataError, match=f"{re.escape(victim.name)}: .*{words}"):
            read(str(place))


@pytest.mark.parametrize(
    ("config", "words"),
    [({"encryption": {"level": "chunk"}}, "encrypted"), ({"compression_level": "sample"}, "itself")],
)
def test_litdata_written_in_ways_that_are_not_read_is_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    place = write_litdata(tmp_path / "l", DOCUMENTS)
    index = json.loads((tmp_path / "l" / "index.json").read_text())
    index["config"] |= config
    (tmp_path / "l" / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=words):
        read(place)


def test_a_place_without_a_corpus_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no corpus")
    with pytest.raises(DataError, match=r"no corpus is known there.*\.idx"):
        detect(str(tmp_path), origin=Origin())
    write_mds(tmp_path / "train", DOCUMENTS)
    with pytest.raises(DataError, match="there are corpora in train: name one of them"):
        detect(str(tmp_path), origin=Origin())


def test_every_flipped_bit_in_references_is_found(tmp_path: Path) -> None:
    place = write_megatron(tmp_path / "m", DOCUMENTS)
    path = tmp_path / "a.refs"
    write_references(path, read(place))
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(DataError, match=r"a\.refs"):
            read_references(path)
