"""What any number of ranks wrote in any layout is read in any other, bit for bit.

Each rank is played by this process: a rank holds its own shards, and none needs to talk to another.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError, StorageError
from ropewalk.checkpoint.commit import Attempt
from ropewalk.checkpoint.format import verify_checkpoint
from ropewalk.checkpoint.read.load import CheckpointReader, load
from ropewalk.checkpoint.regions import Region, whole_region
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.parallel.placement import LocalShard
from tests.checkpoint.placements import placed
from tests.tiny import small_spec

Layout = tuple[tuple[int, ...], dict[str, tuple[int | None, ...]]]
"""Sides of the mesh, and by tensor the dimension that each mesh axis splits; None: replicated."""

WHOLE = {
    "matrix": torch.arange(7 * 12, dtype=torch.float32).reshape(7, 12),
    "vector": torch.arange(5, dtype=torch.bfloat16),
    "cube": torch.arange(8 * 6 * 10, dtype=torch.int16).reshape(8, 6, 10),
    "step": torch.tensor(3.0),
}
LAYOUTS: dict[str, Layout] = {
    "one": ((1,), {"matrix": (None,), "vector": (None,), "cube": (None,)}),
    "rows of 2": ((2,), {"matrix": (0,), "vector": (0,), "cube": (2,)}),
    "columns of 4": ((4,), {"matrix": (1,), "vector": (None,), "cube": (1,)}),
    "8 rows, more ranks than rows": ((8,), {"matrix": (0,), "vector": (0,), "cube": (0,)}),
    "2 x 4": ((2, 4), {"matrix": (0, 1), "vector": (None, 0), "cube": (2, 0)}),
    "4 x 2, repeated": ((4, 2), {"matrix": (None, 0), "vector": (None, None), "cube": (0, None)}),
}


def parts(layout: Layout, rank: int) -> dict[str, torch.Tensor | LocalShard]:
    """What `rank` holds: its shards, and all of a tensor that the layout does not name."""
    mesh, dims = layout
    held: dict[str, torch.Tensor | LocalShard] = dict(WHOLE)
    for name in dims:
        placement = placed(tuple(WHOLE[name].shape), mesh, dims[name], rank)
        held[name] = LocalShard(placement.take(WHOLE[name]).clone(), placement)
    return held


def saved(folder: Path, layout: Layout) -> Path:
    world = torch.Size(layout[0]).numel()
    # Rank 0 comes last: it waits for the others.
    for rank in reversed(range(world)):
        state = State(
            step=7,
            tokens=0,
            seed=0,
            spec=small_spec(),
            data={},
            model=parts(layout, rank),
            optimizer={},
            tokenizer=b"{}",
        )
        path = save(folder, state, attempt=Attempt(rank=rank, world=world, name="test", timeout_s=1))
    return path


@pytest.mark.parametrize("source", LAYOUTS)
def test_what_one_layout_wrote_every_other_reads(tmp_path: Path, source: str) -> None:
    path = saved(tmp_path, LAYOUTS[source])
    assert verify_checkpoint(path) == []
    for name, tensor in load(path).model.items():
        assert torch.equal(tensor, WHOLE[name]), name
        assert tensor.dtype == WHOLE[name].dtype
    for target, layout in LAYOUTS.items():
        for rank in range(torch.Size(layout[0]).numel()):
            expected = {name: part for name, part in parts(layout, rank).items() if isinstance(part, LocalShard)}
            read = CheckpointReader(path).shards(
                "model", lambda _, name, shape, of=expected: of[name].placement if name in of else None
            )
            assert read.keys() == expected.keys()
            for name, part in read.items():
                assert torch.equal(part.local, expected[name].local), f"{name} of rank {rank}, {source} -> {target}"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_is_read_as_the_slice_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    reader = _reader(tmp_path_factory)
    name = data.draw(st.sampled_from(list(WHOLE)))
    tensor = WHOLE[name]
    begins = [data.draw(st.integers(0, side - 1)) for side in tensor.shape]
    ends = [data.draw(st.integers(b + 1, side)) for b, side in zip(begins, tensor.shape, strict=True)]
    region = Region(tuple(begins), tuple(e - b for b, e in zip(begins, ends, strict=True)))
    wanted = tensor[tuple(itertools.starmap(slice, zip(begins, ends, strict=True)))]
    assert torch.equal(reader.tensor("model", name, region), wanted)


def _reader(factory: pytest.TempPathFactory) -> CheckpointReader:
    folder = factory.getbasetemp() / "boxes"
    path = folder / "step-00000007"
    return CheckpointReader(path if path.exists() else saved(folder, LAYOUTS["2 x 4"]))


def test_only_the_chunks_that_hold_a_box_are_read(tmp_path: Path) -> None:
    big = torch.arange(6 << 20, dtype=torch.float32).reshape(-1, 1024)
    state = State(
        step=1, tokens=0, seed=0, spec=small_spec(), data={}, model={"big": big}, optimizer={}, tokenizer=b"{}"
    )
    path = save(tmp_path, state)
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    first = Region((0, 0), (1024, 1024))
    assert torch.equal(CheckpointReader(path).tensor("model", "big", first), big[:1024])
    with pytest.raises(DataError, match=r"bytes 25165824 to \d+ \(model/big\) are not what was written"):
        CheckpointReader(path).tensor("model", "big")


def test_a_rank_that_does_not_come_leaves_no_checkpoint(tmp_path: Path) -> None:
    layout = LAYOUTS["rows of 2"]
    state = State(
        step=7,
        tokens=0,
        seed=0,
        spec=small_spec(),
        data={},
        model=parts(layout, 0),
        optimizer={},
        tokenizer=b"{}",
    )
    with pytest.raises(StorageError, match="rank 1 did not write its shard"):
        save(tmp_path, state, attempt=Attempt(rank=0, world=2, name="test", timeout_s=0.05))
    assert list(tmp_path.iterdir()) == []


def test_meeting_boxes_count_the_numbers_that_both_hold() -> None:
    a, b = Region((1, 2), (4, 5)), Region((3, 0), (4, 4))
    points = [
        set(
            itertools.product(
                range(x.offset[0], x.offset[0] + x.shape[0]), range(x.offset[1], x.offset[1] + x.shape[1])
            )
        )
        for x in (a, b)
    ]
    meet = a.intersect(b)
    assert meet is not None
    assert meet.size == len(points[0] & points[1])
    assert a.intersect(Region((5, 0), (1, 9))) is None
    assert whole_region(()).size == 1
