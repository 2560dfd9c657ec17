"""Small shards of states for the tests of the tiers: ranks hold rows of two matrices."""

from __future__ import annotations

from pathlib import Path

import torch

from ropewalk.checkpoint.commit import Attempt
from ropewalk.checkpoint.regions import Region
from ropewalk.checkpoint.run_state import State, TensorShard, manifest_of
from ropewalk.checkpoint.tiers.memory_tier import MemoryTier
from ropewalk.checkpoint.tiers.tier import ShardKey
from ropewalk.checkpoint.write.save import write_tensor_files
from tests.tiny import small_spec

ROWS, COLUMNS = 24, 5


def state(step: int, *, rows: int = ROWS) -> State:
    """A state that says its step."""
    draw = torch.Generator().manual_seed(step)
    return State(
        step=step,
        tokens=step,
        seed=0,
        spec=small_spec(),
        data={"row": step},
        model={"w": torch.randn(rows, COLUMNS, generator=draw)},
        optimizer={"exp_avg/w": torch.randn(rows, COLUMNS, generator=draw)},
        tokenizer=b'{"a": 1}',
    )


def parts_of(of: State, *, rank: int, world: int) -> dict[str, list[TensorShard]]:
    """What rank `rank` of `world` holds: its share of the rows."""

    def part(name: str, tensor: torch.Tensor) -> TensorShard:
        rows = tensor.shape[0] // world
        region = Region((rank * rows, 0), (rows, tensor.shape[1]))
        return TensorShard(name, tuple(tensor.shape), region, tensor[rank * rows : (rank + 1) * rows].clone())

    return {
        group: [part(name, tensor) for name, tensor in tensors.items()]
        for group, tensors in (("model", of.model), ("optimizer", of.optimizer))
    }


def keep(
    memory: MemoryTier,
    step: int,
    *,
    rank: int = 0,
    world: int = 1,
    attempt: str = "a",
    run: str = "run",
    rows: int = ROWS,
) -> ShardKey:
    """Puts a rank's shard of a step into memory."""
    key = ShardKey(run=run, step=step, rank=rank, world=world, attempt=attempt)
    of = state(step, rows=rows)
    parts = parts_of(of, rank=rank, world=world)
    memory.keep(
        key,
        manifest_of(of),
        size=2 * rows * COLUMNS * 4 // world,
        write=lambda place, disk: write_tensor_files(
            place, parts, tokenizer=of.tokenizer, disk=disk, attempt=Attempt(rank=rank, world=world)
        ),
    )
    return key


def same(left: State, right: State) -> bool:
    """Whether two states have the same bits."""
    return (
        left.step == right.step
        and left.data == right.data
        and all(torch.equal(left.model[name], right.model[name]) for name in right.model)
        and all(torch.equal(left.optimizer[name], right.optimizer[name]) for name in right.optimizer)
    )


def flip(path: Path, *, bit: int) -> None:
    """Turns one bit of a file over."""
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)
