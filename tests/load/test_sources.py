"""Lines of tokens that have to be read, and damage that is skipped."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fsspec
import numpy as np
import numpy.typing as npt
import pytest

from ropewalk.base.errors import DataError
from ropewalk.load import loader as loader_module
from ropewalk.load.config import Packing
from ropewalk.load.foresight import Foresight
from ropewalk.load.loader import Loader
from ropewalk.load.sources import Damage, LocalShards, Part, TokenSource, open_source
from ropewalk.store.items import Fetch, Item
from ropewalk.store.manifest import ShardEntry, read_manifest, write_manifest
from ropewalk.store.origin import Origin
from ropewalk.store.shards import Counts, Tokens
from tests.load.slowly import numbered, write

LENGTH = 8
PACKINGS: tuple[Packing, ...] = ("windows", "best-fit")
SIZES = {"a": [[3, 20, 1, 7], [9, 2, 30, 5, 5, 16]], "b": [[12, 4, 25], [17, 1, 6]]}
NAMES = ("tokens", "targets", "weight", "positions", "documents")


@pytest.fixture
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read ahead of the reader has tests of its own; the source here has no store to be read from."""
    monkeypatch.setattr(Foresight, "begin", lambda *_, row, announce: None)


class ReadSource:
    """A source as one behind a URL is: nothing is mapped, ranges are read; those in `broken` cannot be."""

    def __init__(self, local: TokenSource, broken: range = range(0)) -> None:
        parts = local.mapped() or ()
        self.lengths = local.lengths
        self.damage: list[Damage] = []
        self._line = np.concatenate([part.tokens for part in parts])
        self._counts = np.concatenate([_counts(part) for part in parts])
        self._broken = broken

    def mapped(self) -> None:
        return None

    def needs(self, begin: npt.NDArray[np.int64], count: npt.NDArray[np.int32]) -> list[Item]:
        return [Item("memory", int(b), int(b + c)) for b, c in zip(begin, count, strict=True)]

    def read(self, begin: npt.NDArray[np.int64], count: npt.NDArray[np.int32]) -> Tokens:
        for first, size in zip(begin.tolist(), count.tolist(), strict=True):
            if first < self._broken.stop and self._broken.start < first + size:
                raise DataError(f"store: bytes of tokens {first} to {first + size} are not what was written")
        return self._ranges(self._line, begin, count)

    def counts(self, begin: npt.NDArray[np.int64], count: npt.NDArray[np.int32]) -> Counts | None:
        return self._ranges(self._counts, begin, count)

    @staticmethod
    def _ranges(line: npt.NDArray, begin: npt.NDArray[np.int64], count: npt.NDArray[np.int32]) -> npt.NDArray:
        return np.concatenate([line[:0], *(line[b : b + c] for b, c in zip(begin, count, strict=True))])


def _counts(part: Part) -> npt.NDArray[np.bool_]:
    if part.bits is None:
        return np.ones(len(part.tokens), bool)
    return np.unpackbits(part.bits, bitorder="little")[: len(part.tokens)].view(np.bool_)


def make(folder: Path, packing: Packing, **arguments: object) -> Loader:
    return Loader(folder, sequence_length=LENGTH, batch_size=4, seed=2, packing=packing, **arguments)  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_ahead")
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("read", [("a",), ("b",), ("a", "b")])
def test_what_is_read_makes_the_same_batches_as_what_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: Packing, read: tuple[str, ...]
) -> None:
    folder = write(tmp_path, numbered(SIZES, masked=True), a=1.0, b=2.0)
    mapped = make(folder, packing)

    def opened(
        folder: Path,
        entries: list[ShardEntry],
        *,
        verify: bool,
        skip: bool = False,
        fetch: Fetch | None = None,
        origin: Origin | None = None,
        coordinated: None = None,
    ) -> TokenSource:
        local = open_source(folder, entries, verify=verify, skip=skip)
        return ReadSource(local) if entries[0].source in read else local

    monkeypatch.setattr(loader_module, "open_source", opened)
    fetched = make(folder, packing, threads=2)
    for _ in range(20):
        one, other = mapped.next(), fetched.next()
        assert all(getattr(one, name).tolist() == getattr(other, name).tolist() for name in NAMES)
    rows = mapped.order.rows(0, 8)
    ranges = {
        (int(b), int(b + t + 1))
        for s, b, t in zip(rows.source, rows.begin, rows.targets, strict=True)
        if mapped.order.names[s] in read
    }
    assert {(item.start, item.stop) for item in fetched.needs(0, 8)} == ranges
    assert mapped.needs(0, 8) == []
    mapped.close()
    fetched.close()


def damage(folder: Path, file: str, offset: int) -> None:
    data = bytearray((folder / file).read_bytes())
    data[offset] ^= 0xFF
    (folder / file).write_bytes(data)


def large(folder: Path) -> Path:
    """One source of two shards of several chunks; token i + 1 of the line has the value i % 60,000 + 1."""
    documents = [3000] * 500
    sources = numbered({"a": [documents, [50, 60]]})
    for shard in sources["a"]:
        for number, text in enumerate(shard):
            first = 3000 * number
            text.tokens[:] = [(first + i) % 60_000 + 1 for i in range(len(text.tokens))]
    return write(folder, sources)


def test_damage_stops_the_run_and_names_shard_bytes_and_documents(tmp_path: Path) -> None:
    folder = large(tmp_path)
    damage(folder, "a-train-00000.tokens", 1_500_000)
    with pytest.raises(DataError, match=r"a-train-00000\.tokens.*bytes 1048576 to 2097152 .*documents? "):
        make(folder, "windows")


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_touches_damage_is_read_as_nothing_and_told(tmp_path: Path, packing: Packing) -> None:
    folder = large(tmp_path)
    whole = make(folder, packing, verify=False)
    damage(folder, "a-train-00000.tokens", 1_500_000)
    loader = make(folder, packing, on_damage="skip")
    (warning,) = loader.take_warnings()
    assert "a-train-00000.tokens: bytes 1048576 to 2097152 are not what was written" in warning
    assert loader.take_warnings() == []
    bad = range((1 << 20) // 2, (2 << 20) // 2)
    blank = 0
    for first in range(0, 4000, 400):
        rows = loader.order.rows(first, 400)
        batch, right = loader.batch(first, 400), whole.batch(first, 400)
        for number in range(400):
            place = 0
            for piece in range(rows.starts[number], rows.starts[number + 1]):
                begin, length, targets = (int(a[piece]) for a in (rows.begin, rows.length, rows.targets))
                here = slice(place, place + length)
                touches = begin < bad.stop and bad.start <= begin + targets
                blank += touches
                assert batch.weight[number, here].tolist() == (
                    [0.0] * length if touches else right.weight[number, here].tolist()
                )
                expected = [0] * length if touches else right.tokens[number, here].tolist()
                assert batch.tokens[number, here].tolist() == expected
                place += length
    assert blank > 100
    rows = loader.order.rows(0, 400)
    touching = (rows.begin < bad.stop) & (rows.begin + rows.targets >= bad.start)
    assert loader.take(400).filled == rows.length[~touching].sum()
    loader.close()
    whole.close()


def test_damage_behind_an_address_is_skipped_as_that_of_a_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Origin, "_wait", lambda *_: None)  # between attempts
    folder = large(tmp_path)
    damage(folder, "a-train-00000.tokens", 1_500_000)
    mapped = make(folder, "windows", on_damage="skip")
    manifest, store = read_manifest(folder), fsspec.filesystem("memory")
    shards = []
    for shard in manifest.shards:
        store.pipe(f"/skipped/{shard.file}", (folder / shard.file).read_bytes())
        shards.append(dataclasses.replace(shard, file=f"memory://skipped/{shard.file}"))
    write_manifest(folder, dataclasses.replace(manifest, shards=tuple(shards)))
    fetched = make(folder, "windows", on_damage="skip")
    for _ in range(10):
        one, other = mapped.next(200), fetched.next(200)
        assert all(getattr(one, name).tolist() == getattr(other, name).tolist() for name in NAMES)
        assert mapped.filled == fetched.filled
    (told,) = fetched.take_warnings()
    assert "bytes 1048576 to 2097152" in told
    for each in (mapped, fetched):
        each.close()


def test_a_shard_with_a_damaged_index_counts_for_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, numbered(SIZES))
    damage(folder, "b-train-00001.tokens", 2)
    source = LocalShards(folder, entries(folder, "b"), verify=True, skip=True)
    assert [(each.begin, each.end) for each in source.damage] == [(41, 65)]


def test_a_shard_whose_documents_cannot_be_told_apart_stops_the_run(tmp_path: Path) -> None:
    folder = write(tmp_path, numbered(SIZES))
    # 24 tokens of 2 bytes, aligned to 64; then the offsets: the second one is no longer between its neighbours.
    damage(folder, "b-train-00001.tokens", 64 + 8 + 4)
    with pytest.raises(DataError, match=r"b-train-00001\.tokens.*cannot be told apart"):
        LocalShards(folder, entries(folder, "b"), verify=True, skip=True)


@pytest.mark.usefixtures("nothing_ahead")
@pytest.mark.parametrize("packing", PACKINGS)
def test_damage_found_while_reading_is_skipped_piece_by_piece_or_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: Packing
) -> None:
    folder = write(tmp_path, numbered({"a": SIZES["a"]}))
    broken = range(30, 33)

    def opened(
        folder: Path,
        entries: list[ShardEntry],
        *,
        verify: bool,
        skip: bool = False,
        fetch: Fetch | None = None,
        origin: Origin | None = None,
        coordinated: None = None,
    ) -> TokenSource:
        return ReadSource(open_source(folder, entries, verify=verify, skip=skip), broken)

    whole = make(folder, packing)
    monkeypatch.setattr(loader_module, "open_source", opened)
    skipping, strict = make(folder, packing, on_damage="skip"), make(folder, packing)
    rows = sum(whole.order.source_rows.values())
    batch, right = skipping.batch(0, rows), whole.batch(0, rows)
    lost = (batch.tokens != right.tokens).nonzero()
    assert 0 < len(lost) < 40
    assert (batch.tokens[lost[:, 0], lost[:, 1]] == 0).all()
    assert set(range(31, 34)) & set(right.tokens.flatten().tolist())
    assert not set(range(31, 34)) & set(batch.tokens.flatten().tolist())
    assert any("store: bytes of tokens" in warning for warning in skipping.take_warnings())
    with pytest.raises(DataError, match="not what was written"):
        strict.batch(0, rows)
    for each in (whole, skipping, strict):
        each.close()


def entries(folder: Path, source: str) -> list[ShardEntry]:
    return read_manifest(folder).shards_of("train", source)
