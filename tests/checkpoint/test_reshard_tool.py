"""`reshard` writes what other ranks would have written, and says the same state."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import StorageError
from ropewalk.checkpoint.format import read_checkpoint_manifest, verify_checkpoint
from ropewalk.checkpoint.read import reshard as module
from ropewalk.checkpoint.read.load import CheckpointReader, load
from ropewalk.checkpoint.read.reshard import region_of, reshard
from ropewalk.checkpoint.write.save import save
from tests.checkpoint.test_checkpoint import identical, state

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)


@given(shape=shapes, mesh=meshes)
def test_the_parts_of_all_ranks_hold_every_number_once(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    counts = torch.zeros(shape, dtype=torch.int64)
    for rank in range(math.prod(mesh)):
        region = region_of(shape, mesh=mesh, rank=rank)
        if region is not None:
            counts[tuple(slice(o, o + s) for o, s in zip(region.offset, region.shape, strict=True))] += 1
    assert (counts == 1).all()


@given(side=st.integers(1, 40), ranks=st.integers(1, 9))
def test_the_parts_are_those_of_torch_chunk(side: int, ranks: int) -> None:
    ours = [region_of((side,), mesh=(ranks,), rank=rank) for rank in range(ranks)]
    theirs = [part.tolist() for part in torch.arange(side).chunk(ranks)]
    mine = [list(range(region.offset[0], region.offset[0] + region.shape[0])) for region in ours if region is not None]
    assert mine == theirs


@pytest.mark.parametrize("mesh", [(1,), (2,), (4,), (2, 4), (8, 1), (3, 3)], ids=str)
def test_a_resharded_checkpoint_holds_the_same_state(
    tmp_path: Path, mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 20)  # a row of the 6 x 4 tensor is 16 bytes
    path = save(tmp_path / "one", state())
    made = reshard(path, tmp_path / "many", mesh=mesh)
    assert identical(load(made), state())
    assert verify_checkpoint(made) == []
    assert read_checkpoint_manifest(made).world == math.prod(mesh)
    back = reshard(made, tmp_path / "back", mesh=(1,))
    assert {p.name: p.read_bytes() for p in back.iterdir()} == {p.name: p.read_bytes() for p in path.iterdir()}


def test_what_comes_back_altered_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "one", state())
    other = state()
    other.model["embedding.weight"][0, 0] += 1
    with pytest.raises(StorageError, match=r"model/embedding\.weight differs from the source"):
        module._compare(CheckpointReader(path), CheckpointReader(save(tmp_path / "two", other)))
