"""What any number of ranks wrote in any layout is read in any other, bit for bit.

A rank is this process with a group in which it claims to be that rank: each holds its own parts and none needs to
talk to another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from ropewalk.base.errors import DataError, StorageError
from ropewalk.checkpoint.commit import Attempt
from ropewalk.checkpoint.format import verify_checkpoint
from ropewalk.checkpoint.read.load import CheckpointReader, load
from ropewalk.checkpoint.regions import Region, whole_region
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from tests.tiny import small_spec

Layout = tuple[tuple[int, ...], dict[str, tuple[Placement, ...]]]
"""Sides of the mesh, and how each tensor lies on it."""

WHOLE = {
    "matrix": torch.arange(7 * 12, dtype=torch.float32).reshape(7, 12),
    "vector": torch.arange(5, dtype=torch.bfloat16),
    "cube": torch.arange(8 * 6 * 10, dtype=torch.int16).reshape(8, 6, 10),
    "step": torch.tensor(3.0),
}
R = Replicate()
LAYOUTS: dict[str, Layout] = {
    "one": ((1,), {"matrix": (R,), "vector": (R,), "cube": (R,)}),
    "rows of 2": ((2,), {"matrix": (Shard(0),), "vector": (Shard(0),), "cube": (Shard(2),)}),
    "columns of 4": ((4,), {"matrix": (Shard(1),), "vector": (R,), "cube": (Shard(1),)}),
    "8 rows, more ranks than rows": ((8,), {"matrix": (Shard(0),), "vector": (Shard(0),), "cube": (Shard(0),)}),
    "2 x 4": ((2, 4), {"matrix": (Shard(0), Shard(1)), "vector": (R, Shard(0)), "cube": (Shard(2), Shard(0))}),
    "4 x 2, repeated": ((4, 2), {"matrix": (R, Shard(0)), "vector": (R, R), "cube": (Shard(0), R)}),
}


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def parts(layout: Layout, rank: int, source: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """What `rank` holds: its parts of `source`, or zeros."""
    sides, placements = layout
    if dist.is_initialized():
        dist.destroy_process_group()
    world = torch.Size(sides).numel()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", sides)
    held: dict[str, torch.Tensor] = {}
    for name, tensor in WHOLE.items():
        if name not in placements:
            held[name] = (source or {name: torch.zeros_like(tensor)})[name].clone()
            continue
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements[name])
        local = torch.zeros(shape, dtype=tensor.dtype)
        if source:
            local = source[name][tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))].clone()
        held[name] = DTensor.from_local(
            local, mesh, placements[name], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
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
            model=parts(layout, rank, WHOLE),
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
            filled, expected = parts(layout, rank, None), parts(layout, rank, WHOLE)
            CheckpointReader(path).into("model", filled)
            for name, tensor in filled.items():
                same = torch.equal(_local(tensor), _local(expected[name]))
                assert same, f"{name} of rank {rank}, {source} -> {target}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


def test_another_type_or_shape_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, LAYOUTS["one"])
    for wrong in (torch.zeros(7, 12, dtype=torch.float64), torch.zeros(12, 7)):
        with pytest.raises(DataError, match=r"model/matrix holds \('float32', \(7, 12\)\)"):
            CheckpointReader(path).into("model", {"matrix": wrong})
    with pytest.raises(DataError, match="model/other holds nothing"):
        CheckpointReader(path).into("model", {"other": torch.zeros(1)})


def test_a_rank_that_does_not_come_leaves_no_checkpoint(tmp_path: Path) -> None:
    layout = LAYOUTS["rows of 2"]
    state = State(
        step=7,
        tokens=0,
        seed=0,
        spec=small_spec(),
        data={},
        model=parts(layout, 0, WHOLE),
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
