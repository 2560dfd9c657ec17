"""Corpora of other programs with one thing changed: read within their folder, or refused by name. Never a bug."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk.base.errors import DataError, RopewalkError
from ropewalk.load.references import ReferencedTokens
from ropewalk.store.foreign.corpora import detect, scan
from ropewalk.store.origin import Origin
from tests.checkpoint.hostile import VALUES, Hang, _places, watched
from tests.foreign_corpora import write_litdata, write_mds, write_megatron, write_parquet, write_webdataset

DOCUMENTS = [[number % 50 + 1 for number in range(length)] for length in (5, 9, 3, 7, 4, 8)]
WRITERS: dict[str, Callable[[Path], str]] = {
    "megatron": lambda path: write_megatron(path, DOCUMENTS),
    "mds": lambda path: write_mds(path, DOCUMENTS),
    "mds, zstd": lambda path: write_mds(path, DOCUMENTS, compression="zstd"),
    "mds, gz": lambda path: write_mds(path, DOCUMENTS, compression="gz"),
    "mds, types in cells": lambda path: write_mds(path, DOCUMENTS, encoding="ndarray", dtype="uint16"),
    "litdata": lambda path: write_litdata(path, DOCUMENTS),
    "litdata, leaves": lambda path: write_litdata(path, DOCUMENTS, loader="PyTreeLoader"),
    "litdata, chunk": lambda path: write_litdata(path, DOCUMENTS, compression="chunk"),
    "litdata, batch": lambda path: write_litdata(path, DOCUMENTS, compression="batch"),
    "webdataset": lambda path: write_webdataset(path, DOCUMENTS),
    "webdataset, json": lambda path: write_webdataset(path, DOCUMENTS, ending="json"),
    "webdataset, gz": lambda path: write_webdataset(path, DOCUMENTS, packed=True),
    "parquet": lambda path: write_parquet(path, DOCUMENTS),
}
FILE_KINDS = ("flip", "flip in the head", "truncate", "zero", "gone", "pipe", "folder", "grown", "empty", "device")
INDEX_KINDS = ("value", "value", "missing", "deep")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    for name, write in WRITERS.items():
        (folder / name).mkdir()
        write(folder / name / "corpus")
    return folder


def read(place: Path) -> list[int]:
    """All tokens of a corpus, as a run that trains on it gets them."""
    origin = Origin()
    catalogue = scan(str(place), format=detect(str(place), origin=origin), origin=origin)
    return [
        token
        for start, length in zip(np.cumsum(catalogue.length) - catalogue.length, catalogue.length, strict=True)
        for token in ReferencedTokens(catalogue).read(np.array([start]), np.array([length], np.int32)).tolist()
    ]


def mutate(folder: Path, draw: random.Random) -> str:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    index = next((path for path in files if path.name == "index.json"), None)
    kind = draw.choice(FILE_KINDS if index is None or draw.random() < 0.5 else INDEX_KINDS)
    if kind in INDEX_KINDS:
        assert index is not None
        return f"{kind} {_change_index(index, kind, draw)}"
    path = draw.choice(files)
    data = bytearray(path.read_bytes())
    at = draw.randrange(64 if kind == "flip in the head" else len(data))
    if kind.startswith("flip"):
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif kind in ("truncate", "empty"):
        del data[at if kind == "truncate" else 0 :]
    elif kind == "grown":
        data += draw.randbytes(40)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind != "gone":
        path.write_bytes(data)
    return f"{kind} {path.name} {at}"


def _change_index(path: Path, kind: str, draw: random.Random) -> Any:
    tree = json.loads(path.read_text())
    *above, key = draw.choice(list(_places(tree)))
    parent = tree
    for part in above:
        parent = parent[part]
    if kind == "missing":
        del parent[key]
    else:
        parent[key] = "@@" if kind == "deep" else draw.choice(VALUES)
    path.write_text(json.dumps(tree).replace('"@@"', "[" * 50_000 + "]" * 50_000))
    return [*above, key]


def examine(good: Path, place: Path, seed: int) -> str:
    """What came of a corpus that was changed as `seed` says; fails where the reader does what it must not."""
    draw = random.Random(seed)
    name = draw.choice(sorted(WRITERS))
    shutil.rmtree(place / "case", ignore_errors=True)
    shutil.copytree(good / name, place / "case")
    told = f"seed {seed}, {name}: {mutate(place / 'case', draw)}"
    try:
        with watched(inside=place / "case", around=place) as wrong:
            read(place / "case" / "corpus")
    except RopewalkError as error:
        outcome = "refused" if str(place) in str(error) else f"names no file: {error}"
    except (Exception, Hang) as error:
        raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error
    else:
        outcome = "read"
    assert not wrong, f"{told}: opened {wrong}"
    assert outcome in ("read", "refused"), f"{told}: {outcome}"
    return outcome


@pytest.mark.parametrize("seeds", [range(130), pytest.param(range(130, 3130), marks=pytest.mark.slow)], ids=len)
def test_changed_corpora_are_read_or_refused_by_name(good: Path, tmp_path: Path, seeds: range) -> None:
    found = Counter(examine(good, tmp_path, seed) for seed in seeds)
    assert found["refused"] > len(seeds) // 2
    assert found["read"] > len(seeds) // 10


@pytest.mark.parametrize("name", WRITERS)
def test_unchanged_ones_are_read(good: Path, name: str) -> None:
    assert read(good / name / "corpus") == [token for document in DOCUMENTS for token in document]


@pytest.mark.parametrize("file", ["../outside.mds", "/etc/passwd", "memory://x", "a//b", "a\0b", "\ud800", ""])
def test_no_file_outside_of_its_folder_is_read_as_a_part_of_a_corpus(tmp_path: Path, file: str) -> None:
    write_mds(tmp_path / "corpus", DOCUMENTS)
    shutil.copy(tmp_path / "corpus" / "shard.00000.mds", tmp_path / "outside.mds")
    index = tmp_path / "corpus" / "index.json"
    tree = json.loads(index.read_text())
    tree["shards"][0]["raw_data"]["basename"] = file
    index.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"index\.json: .*(is no file of its folder|`basename` is)"):
        read(tmp_path / "corpus")


@pytest.mark.parametrize("name", ["mds", "litdata, leaves"])
def test_a_sample_whose_sizes_lead_into_the_next_is_refused(good: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(good / name, tmp_path / "case")
    path = sorted((tmp_path / "case" / "corpus").glob("[cs]*0*"))[0]
    data = bytearray(path.read_bytes())
    begin = int.from_bytes(data[4:8], "little")  # of the first sample: the size of a text, that of its tokens
    assert data[begin] in (5, 6)
    data[begin] += 4
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"{path.name}: its tokens lie outside of their samples"):
        read(tmp_path / "case" / "corpus")


@pytest.mark.parametrize("cell", ["[1, 2.5]", '["a"]', "[[1], [2]]", "[true]", "[-1]", "{}", "[" * 5000, '"12"'])
def test_json_that_holds_no_tokens_is_refused(tmp_path: Path, cell: str) -> None:
    place = write_webdataset(tmp_path / "corpus", [[1, 2]], ending="json")
    file = sorted((tmp_path / "corpus").iterdir())[0]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        member = tarfile.TarInfo("0.json")
        member.size = len(cell)
        archive.addfile(member, io.BytesIO(cell.encode()))
    file.write_bytes(stream.getvalue())
    with pytest.raises(DataError, match=f"{file.name}: a JSON document"):
        read(Path(place))
