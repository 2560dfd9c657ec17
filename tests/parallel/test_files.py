"""Checkpoint files that ranks write together under one plan are read under any other, with the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from ropewalk.checkpoint import shard_file
from ropewalk.checkpoint.commit import Attempt
from ropewalk.checkpoint.format import read_checkpoint_manifest
from ropewalk.checkpoint.read.load import CheckpointReader, load
from ropewalk.checkpoint.regions import Region
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.parallel.mesh import Mesh
from tests.parallel.plans import CASES, Case
from tests.parallel.pool import POOL
from tests.parallel.worlds import RATE, batches, start

pytestmark = pytest.mark.xdist_group("pool")

CHUNK = 64
"""Bytes, where reading is counted: the tensors are small."""

CHAINS = {
    "adamw": [
        "one process, 4 rows a microbatch",
        "tensor 2 with sequence, rich",
        "ZeRO-3 over 4, rich",
        "pipeline 2, zero-bubble",
        "replicate 2 x ZeRO-3 over 4",
        "ZeRO-2 over 2 x pipeline 2",
        "interleaved 2 x replicate 2 x tensor 2",
        "pipeline 2 x ZeRO-3 over 2 x ring 2",
        "ZeRO-3 over 2 x ring 2 x tensor 2",
    ],
    # Moments that are shorter than their parameters.
    "adafactor": [
        "adafactor, replicate 2",
        "adafactor, ZeRO-3 over 4",
        "adafactor, tensor 2",
        "adafactor, pipeline 2 x ZeRO-3 over 2 x tensor 2",
    ],
    # Codes of a byte and scales of rows.
    "adamw-8bit": [
        "adamw-8bit, replicate 2",
        "adamw-8bit, tensor 2",
        "adamw-8bit, ZeRO-3 over 4",
        "adamw-8bit, pipeline 2 x ZeRO-3 over 2 x tensor 2",
    ],
    "muon": ["muon, ZeRO-1 over 2", "muon, pipeline 2 x ZeRO-3 over 2 x tensor 2", "muon, tensor 2"],
    "tie_embeddings": ["one process", "pipeline 2, 1F1B", "ZeRO-3 over 4", "tensor 2 x ulysses 2", "pipeline 2, GPipe"],
}
"""Plans of one model and optimizer: each goes on from the files of the one before it."""


def case_of(name: str) -> Case:
    """A plan of the table; those for `adamw-8bit` are Adafactor's."""
    if not name.startswith("adamw-8bit"):
        return CASES[name]
    return dataclasses.replace(CASES[name.replace("adamw-8bit", "adafactor")], optimizer="adamw-8bit")


def hand_over(
    rank: int, name: str, source: Path | None, target: Path, chunk_bytes: int = shard_file.CHUNK_BYTES
) -> None:
    """Takes the state from `source`, or trains one, and saves it below `target`."""
    case = case_of(name)
    mesh = Mesh(case.plan, rank)
    executor, _ = start(case, mesh)
    if source:
        # Only the parts of this rank are read.
        given = load(source, choose=executor.wants())
        executor.load_state(given.model, given.optimizer)
    else:
        for batch in batches(case.spec, 2):
            executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=RATE)
    state = State(
        step=2,
        tokens=0,
        seed=0,
        spec=case.spec,
        data={},
        model=executor.model_state(),
        optimizer=executor.optimizer_state(),
        tokenizer=b"{}",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "CHUNK_BYTES", chunk_bytes)
        save(target, state, attempt=Attempt(rank=rank, world=case.plan.world))


def read_own(rank: int, name: str, source: Path) -> tuple[int, int, int]:
    """Bytes that a rank reads to go on from `source`, bytes of what it then holds, and the pieces it lies in."""
    case, reader = CASES[name], CheckpointReader(source)
    choose = start(case, Mesh(case.plan, rank))[0].wants()
    held = [part for group in ("model", "optimizer") for part in reader.shards(group, choose).values()]
    pieces = sum(
        Region(piece.offset, piece.shape).intersect(Region(placement.offset, placement.local_shape)) is not None
        for group, entries in reader.manifest.tensors.items()
        for tensor, entry in entries.items()
        if (placement := choose(group, tensor, entry.shape))
        for piece in entry.pieces
    )
    checked = sum(len(opened._checked) for opened in reader._open.values())
    return checked * CHUNK, sum(part.local.nbytes for part in held), pieces


@pytest.mark.parametrize(
    ("writes", "reads"),
    [
        ("ZeRO-3 over 4, rich", "ZeRO-3 over 4, rich"),
        ("one process, 4 rows a microbatch", "ZeRO-3 over 4, rich"),
        ("tensor 2 with sequence, rich", "tensor 2 with sequence, rich"),
        ("pipeline 2, zero-bubble", "pipeline 2, zero-bubble"),
        ("ZeRO-3 over 4, rich", "pipeline 2, zero-bubble"),
    ],
)
def test_a_rank_reads_its_parts_and_the_rims_of_their_chunks(writes: str, reads: str, tmp_path: Path) -> None:
    POOL.run(hand_over, writes, None, tmp_path, CHUNK, world=CASES[writes].plan.world)
    (path,) = tmp_path.glob("step-*[0-9]")
    for read, part, pieces in POOL.run(read_own, reads, path, world=CASES[reads].plan.world):
        assert read <= part + 2 * CHUNK * pieces
        assert read < 0.8 * read_checkpoint_manifest(path).bytes


@pytest.mark.parametrize("chain", CHAINS)
def test_state_goes_through_the_files_of_every_plan_unchanged(chain: str, tmp_path: Path) -> None:
    source: Path | None = None
    for number, name in enumerate(CHAINS[chain]):
        target = tmp_path / str(number)
        POOL.run(hand_over, name, source, target, world=case_of(name).plan.world)
        (path,) = target.glob("step-*[0-9]")
        before, after = load(source or path), load(path)
        assert set(after.model) == set(case_of(name).spec.shapes())
        for kind in ("model", "optimizer"):
            old, new = getattr(before, kind), getattr(after, kind)
            assert old.keys() == new.keys(), name
            assert all(torch.equal(old[key], new[key]) for key in old), name
        source = path
