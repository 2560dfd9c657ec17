"""Bar of the format: of random single-bit flips every one is found, in the right file, tensor and range of bytes."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path

import pytest
import torch

from ropewalk.base.errors import DataError, StorageError
from ropewalk.checkpoint import shard_file
from ropewalk.checkpoint.disk import LocalDisk
from ropewalk.checkpoint.format import read_checkpoint_manifest, verify_checkpoint
from ropewalk.checkpoint.read.load import CheckpointReader, load
from ropewalk.checkpoint.read.reshard import reshard
from ropewalk.checkpoint.run_state import as_bytes, manifest_of
from ropewalk.checkpoint.write.persist import Persister
from ropewalk.checkpoint.write.save import save
from ropewalk.checkpoint.write.snapshot import Stager
from tests.checkpoint.newest import load_newest
from tests.checkpoint.test_background import parts_of
from tests.checkpoint.test_background import state as buffered
from tests.checkpoint.test_checkpoint import identical, state

RANGE = re.compile(r"bytes (\d+) to (\d+)(?: \((.*?)\))? are not")
FLIPS = [pytest.param(200, id="200"), pytest.param(1000, id="1000", marks=pytest.mark.slow)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints of steps 5 and 9, the second written by four ranks, in chunks so small that files have many."""
    monkeypatch.setattr(shard_file, "CHUNK_BYTES", 64)
    save(tmp_path, state(5))
    reshard(save(tmp_path / "one", state(9)), tmp_path, mesh=(2, 2))
    return tmp_path


@pytest.mark.parametrize("flips", FLIPS)
def test_every_flip_in_every_region_of_every_file_is_found_and_an_older_copy_is_taken(folder: Path, flips: int) -> None:
    path = folder / "step-00000009"
    manifest, draw = read_checkpoint_manifest(path), random.Random(1)
    places = [(file, region) for file in sorted(path.iterdir()) for region in regions(file)]
    assert len({file for file, _ in places}) == 2 * 4 + 2
    for number in range(flips):
        file, region = places[number % len(places)]
        whole = file.read_bytes()
        position, bit = draw.choice(region), 1 << draw.randrange(8)
        file.write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
        (wrong,) = verify_checkpoint(path)
        assert wrong.startswith(f"{file}: damaged checkpoint"), (file, position, bit)
        if file.name != "manifest.json":
            begin, end, names = found(wrong)
            assert begin <= position < end <= begin + 64
            owners = {n for n, (first, last) in manifest.byte_ranges(file.name).items() if first <= position < last}
            assert owners <= names
        needed = file.suffix != ".safetensors" or bool(owners)
        if needed:
            with pytest.raises(DataError, match=re.escape(file.name)):
                load(path)
        else:
            # The header of a file: our reader goes by the manifest and does not look at it, or meets its chunk.
            with contextlib.suppress(DataError):
                assert identical(load(path), state(9))
        if number % 50 == 0 and needed:
            older, taken, told = load_newest(folder)
            assert older == folder / "step-00000005"
            assert taken
            assert identical(taken, state(5))
            assert file.name in told[0]
        file.write_bytes(whole)
    assert verify_checkpoint(path) == []


def regions(file: Path) -> list[range]:
    """The parts of a file in which a flip might go unnoticed for reasons of their own."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return [range(size // 2), range(size // 2, size)]
    length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    return [part for part in (range(8), range(8, length), range(length, size)) if part]


def found(message: str) -> tuple[int, int, set[str]]:
    hit = RANGE.search(message)
    assert hit, message
    return int(hit[1]), int(hit[2]), set((hit[3] or "").removesuffix(" ...").split(", "))


def test_a_reader_that_wants_one_tensor_meets_the_flips_of_that_one_alone(folder: Path) -> None:
    path = folder / "step-00000005"
    file = path / "model.safetensors"
    manifest = read_checkpoint_manifest(path)
    begin, end = manifest.byte_ranges(file.name)["model/turned"]
    data = bytearray(file.read_bytes())
    data[(begin + end) // 2] ^= 16
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"model/turned"):
        CheckpointReader(path).tensor("model", "turned")
    assert torch.equal(CheckpointReader(path).tensor("optimizer", "step/embedding.weight"), torch.tensor(4.0))


@pytest.mark.parametrize("flips", [pytest.param(50, id="50"), pytest.param(1000, id="1000", marks=pytest.mark.slow)])
def test_every_flip_in_the_staging_buffer_is_found_before_it_is_committed(tmp_path: Path, flips: int) -> None:
    """From the hash that follows the copy until the bytes are written; the hash is not of the source."""

    class Flips(LocalDisk):
        def make_folder(self, path: Path) -> None:
            super().make_folder(path)
            group = draw.choice(["model", "optimizer"])
            part = draw.choice(snapshot.parts[group])
            hit.append(f"{group}/{part.name}")
            data = torch.frombuffer(as_bytes(part.local), dtype=torch.uint8)
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)

    draw, hit, live = random.Random(2), [], buffered(1)
    stager, persister = Stager(), Persister(Flips())
    for _ in range(flips):
        snapshot = stager.take(parts_of(live))
        assert snapshot
        snapshot.wait_copied()
        persister.submit(tmp_path, manifest_of(live), snapshot, tokenizer=b"{}")
        persister.drain()
        (saved,) = persister.finished()
        assert isinstance(saved.error, StorageError)
        assert str(saved.error).startswith(f"{hit[-1]}: the copy in memory changed")
        assert list(tmp_path.iterdir()) == []
    persister.close()
    stager.close()
