"""A rank reads the chunks that hold its parts and no others, wherever they lie, and every one of them is checked."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.checkpoint import shard_file
from ropewalk.checkpoint.format import list_checkpoints, read_checkpoint_manifest
from ropewalk.checkpoint.read.load import load, needed_chunks
from ropewalk.checkpoint.read.load_latest import restore
from ropewalk.checkpoint.read.reshard import region_of, reshard
from ropewalk.checkpoint.read.tiered_load import DiskSource, RestoreReport
from ropewalk.checkpoint.regions import Region
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.tiers.memory_tier import MemorySource, MemoryTier
from ropewalk.checkpoint.tiers.peer_tier import Peer, PeerServer, PeerSource
from ropewalk.checkpoint.tiers.remote_tier import RemoteSource, RemoteTier
from ropewalk.checkpoint.write.save import save
from ropewalk.parallel.placement import Choose, Placement, Shard
from tests.checkpoint.newest import continued
from tests.checkpoint.shards import flip, keep, state
from tests.checkpoint.test_ranks import Run

ROWS, CHUNK = 240, 256
"""A matrix of 240 x 5 float32 lies in 19 chunks."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "CHUNK_BYTES", CHUNK)


def rows_of_rank(rank: int, world: int) -> Choose:
    """As ZeRO-3 deals: equal shares of the rows of everything."""

    def choose(group: str, name: str, shape: tuple[int, ...]) -> Placement:
        share = SimpleNamespace(rank=rank, size=world)
        return Placement(shape, (Shard(0, (shape[0] // world,) * world, share),), first=True)  # type: ignore[arg-type]

    return choose


def is_part(found: State, whole: State, *, rank: int, world: int) -> bool:
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    return all(
        part.local.equal(tensor[rows])
        for have, want in ((found.model, whole.model), (found.optimizer, whole.optimizer))
        for part, tensor in zip(have.values(), want.values(), strict=True)
    )


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """(File, chunk) of all that is hashed to be checked, as it happens."""
    seen: set[tuple[str, int]] = set()
    wrong = shard_file.ShardFile._wrong

    def counting(self: shard_file.ShardFile, number: int) -> str:
        seen.add((self._path.name, number))
        return wrong(self, number)

    monkeypatch.setattr(shard_file.ShardFile, "_wrong", counting)
    return seen


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40)),
    mesh=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    data=st.data(),
)
@settings(max_examples=15, deadline=None)  # each example syncs a dozen files
def test_needed_chunks_are_those_of_the_rows_that_hold_a_number_of_the_part(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, int], mesh: tuple[int, int], data: st.DataObject
) -> None:
    """Against a walk over every number of the part, in files of any layout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "CHUNK_BYTES", 64)
        folder = tmp_path_factory.mktemp("needs")
        weight = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
        source = State(**{**vars_of(state(1)), "model": {"w": weight}, "optimizer": {"m": weight}})
        manifest = read_checkpoint_manifest(reshard(save(folder / "a", source), folder / "b", mesh=mesh))
    begin = [data.draw(st.integers(0, side - 1)) for side in shape]
    sides = [data.draw(st.integers(1, side - first)) for side, first in zip(shape, begin, strict=True)]
    placement = SimpleNamespace(offset=tuple(begin), local_shape=tuple(sides))
    walked: dict[str, set[int]] = {"tokenizer.json": set(range(len(manifest.files["tokenizer.json"].chunks)))}
    for row, column in itertools.product(*(range(b, b + n) for b, n in zip(begin, sides, strict=True))):
        for piece in manifest.tensors["model"]["w"].pieces:
            r, c = row - piece.offset[0], column - piece.offset[1]
            if 0 <= r < piece.shape[0] and 0 <= c < piece.shape[1]:
                # The whole row of the piece: what is read is one range.
                first = piece.begin + r * piece.shape[1] * 4
                last = first + piece.shape[1] * 4 - 1
                walked.setdefault(piece.file, set()).update(range(first // 64, last // 64 + 1))
    choose = lambda group, name, _: placement if name == "w" else None  # noqa: E731
    found = needed_chunks(manifest, choose, whole_files=["tokenizer.json"])
    assert found == {name: sorted(numbers) for name, numbers in walked.items()}


def vars_of(of: State) -> dict[str, object]:
    return {name: getattr(of, name) for name in of.__slots__}


@pytest.mark.parametrize("written_by", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_checks_its_own_chunks_and_all_ranks_together_check_all(
    tmp_path: Path, touched: set[tuple[str, int]], written_by: int, world: int
) -> None:
    path = save(tmp_path / "a", state(1, rows=ROWS))
    path = reshard(path, tmp_path / "b", mesh=(written_by,)) if written_by > 1 else path
    files = read_checkpoint_manifest(path).files
    everything: set[tuple[str, int]] = set()
    for rank in range(world):
        touched.clear()
        assert is_part(load(path, choose=rows_of_rank(rank, world)), state(1, rows=ROWS), rank=rank, world=world)
        tensors = {(name, number) for name, number in touched if name != "tokenizer.json"}
        part = ROWS // world * 5 * 4
        # Two tensors, each in at most all files; at the rims of each a chunk may hold others' numbers too.
        assert len(tensors) * CHUNK <= 2 * (part + 2 * written_by * CHUNK)
        everything |= touched
    header = {(name, 0) for name in files}
    assert everything | header == {(name, n) for name, entry in files.items() for n in range(len(entry.chunks))}


def box_flip(path: Path, *, row: int) -> Path:
    """Turns a bit of a row of the model's matrix over, in whichever file has it."""
    manifest = read_checkpoint_manifest(path)
    for piece in manifest.tensors["model"]["w"].pieces:
        if 0 <= row - piece.offset[0] < piece.shape[0]:
            flip(path / piece.file, bit=8 * (piece.begin + (row - piece.offset[0]) * 20))
            return path / piece.file
    raise AssertionError


def test_a_flip_in_the_part_is_named_and_one_elsewhere_is_the_affair_of_other_ranks(tmp_path: Path) -> None:
    path = save(tmp_path, state(1, rows=ROWS))
    file = box_flip(path, row=200)
    assert is_part(load(path, choose=rows_of_rank(0, 2)), state(1, rows=ROWS), rank=0, world=2)
    with pytest.raises(DataError, match=rf"{file.name}: damaged checkpoint: bytes \d+ to \d+ \(model/w\)"):
        load(path, choose=rows_of_rank(1, 2))


def test_ranks_fall_back_together_when_the_part_of_one_is_damaged(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path / "checkpoints", state(step, rows=ROWS))
    box_flip(tmp_path / "checkpoints/step-00000020", row=200)  # rank 1's
    run = Run(tmp_path)
    found = run.each(lambda rank: continued(run.keepers[rank], wants=lambda head: rows_of_rank(rank, 2)))
    for rank, one in enumerate(found):
        assert one is not None
        assert is_part(one, state(10, rows=ROWS), rank=rank, world=2)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000010"]
    assert any("(model/w) are not what was written" in line for line in run.told)
    run.close()


def test_no_rank_starts_from_scratch_when_the_part_of_one_is_damaged_everywhere(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", state(10, rows=ROWS))
    box_flip(tmp_path / "checkpoints/step-00000010", row=200)
    run = Run(tmp_path)

    def fails(rank: int) -> str:
        with pytest.raises(DataError, match="no checkpoint is whole") as caught:
            continued(run.keepers[rank], wants=lambda head: rows_of_rank(rank, 2))
        return str(caught.value)

    leading, other = run.each(fails)
    assert "another rank cannot read its shard" in leading
    assert "(model/w) are not what was written" in other
    assert (tmp_path / "checkpoints/step-00000010").exists()
    run.close()


def restored(sources: list, folder: Path, *, rank: int) -> tuple[State, RestoreReport]:
    found, report = restore(sources, scratch=folder / "scratch", choose=rows_of_rank(rank, 4))
    assert found
    return found, report


def at_most() -> int:
    """Bytes of a quarter of two matrices with the rims, and of the tokenizer."""
    return 2 * (ROWS // 4 * 20 + 2 * CHUNK) + 8


@pytest.mark.parametrize("packed_in", [1, 4])
def test_memory_peers_disk_and_store_give_a_part_and_no_more(tmp_path: Path, packed_in: int) -> None:
    whole = state(5, rows=ROWS)
    theirs, secret = MemoryTier(tmp_path / "theirs"), b"0123456789abcdef"
    for rank in range(packed_in):
        keep(theirs, 5, rank=rank, world=packed_in, rows=ROWS)
    path = save(tmp_path / "disk", whole)
    store = RemoteTier(f"file://{tmp_path}/store", "run")
    store.upload(path)
    server = PeerServer(theirs, "127.0.0.1:0", secret=secret, timeout_s=5)
    try:
        places = {
            "memory": MemorySource(theirs, "run"),
            "peer": PeerSource(Peer(server.address, secret=secret, timeout_s=5), "run"),
            "disk": DiskSource(tmp_path / "disk", "run"),
            "remote": RemoteSource(store, "run"),
        }
        for name, place in places.items():
            found, report = restored([place], tmp_path, rank=2)
            assert is_part(found, whole, rank=2, world=4), name
            assert report.bytes <= at_most(), name
            assert found.tokenizer == whole.tokenizer
    finally:
        server.close()


def test_a_damaged_part_comes_from_the_next_place(tmp_path: Path) -> None:
    whole = state(5, rows=ROWS)
    memory = MemoryTier(tmp_path / "memory")
    key = keep(memory, 5, rows=ROWS)
    store = RemoteTier(f"file://{tmp_path}/store", "run")
    store.upload(save(tmp_path / "disk", whole))
    sources = [MemorySource(memory, "run"), RemoteSource(store, "run")]
    box_flip(memory.path(key), row=150)  # of rank 2
    found, report = restored(sources, tmp_path, rank=0)
    assert is_part(found, whole, rank=0, world=4)
    assert report.sources.keys() == {"own memory"}
    found, report = restored(sources, tmp_path, rank=2)
    assert is_part(found, whole, rank=2, world=4)
    assert report.files["model.safetensors"].source.startswith("remote")
    assert any("own memory" in line and "model/w" in line for line in report.damaged)


def test_parts_of_a_mesh_put_together_are_the_whole(tmp_path: Path) -> None:
    path = save(tmp_path, state(1, rows=ROWS))
    whole, made = state(1, rows=ROWS).model["w"], torch.zeros(ROWS, 5)
    for rank in range(6):
        region = region_of((ROWS, 5), mesh=(3, 2), rank=rank)
        assert region
        placement = SimpleNamespace(offset=region.offset, local_shape=region.shape)
        part = load(path, choose=lambda group, name, shape, placement=placement: placement if name == "w" else None)
        made[region.slices(Region((0, 0), (ROWS, 5)))] = part.model["w"].local
        assert part.optimizer == {}
    assert made.equal(whole)
