"""Kills one of several processes that save one state together, at random moments, then the others; again and again.

Run as `python kill_ranks.py FOLDER WORLDS KILLS SEED`, WORLDS like `2,4`: each launch has another number of ranks. A
matrix is split by rows, its moment by columns, and a bias is held by all. After each kill every listed checkpoint must
be whole, none that rank 0 acknowledged may be lost, and the numbers must be those of an undisturbed run. Ranks meet by
files, as training ranks meet in their collectives. The last line says how many kills there were, how many left a
checkpoint half written, and how far the run came.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.checkpoint.run_state import State
from ropewalk.config.ranks import Ranks
from ropewalk.model.config import Model
from ropewalk.model.spec import resolve
from ropewalk.parallel.placement import LocalShard
from ropewalk.train.checkpointer import Checkpointer
from tests.checkpoint.meeting import Files
from tests.checkpoint.newest import continued, load_newest
from tests.checkpoint.placements import placed

SPEC = resolve(Model(width=8, heads=1), vocabulary=3, sequence_length=4)
SIDE = 64


def update(weight: torch.Tensor, step: int) -> None:
    """One step of a training whose result nobody guesses and everybody can repeat."""
    weight.mul_(0.999).add_(torch.full_like(weight, step).sin_())


def part(local: torch.Tensor, rank: int, world: int, dimension: int) -> LocalShard:
    """A rank's share of a square matrix."""
    return LocalShard(local, placed((SIDE, SIDE), (world,), (dimension,), rank))


def live(run: Path, launch: str, rank: int, world: int, acknowledged: int) -> None:
    """One rank, which trains for ever and saves each step; rank 0 tells which steps are durable."""
    coordinator = Files(run / "meetings" / launch, rank, world)
    checkpointer = Checkpointer(
        run,
        Checkpoints(save_every_steps=1, keep_last=2),
        warn=lambda _: None,
        ranks=world,
        place=Ranks(rank, world, rank),
        attempt=launch,
        coordinator=coordinator,
    )
    found = continued(checkpointer)
    step = found.step if found else 0
    assert coordinator.broadcast(step) == step, "ranks go on from different steps"
    whole = found.model["w"].clone() if found else torch.zeros(SIDE, SIDE)
    checkpointer.retain()
    rows = whole.chunk(world, 0)[rank].clone()
    columns = whole.chunk(world, 1)[rank].clone()
    while True:
        coordinator.barrier()
        checkpointer.fence()
        step += 1
        update(rows, step)
        update(columns, step)
        checkpointer.save(
            State(
                step=step,
                tokens=step,
                seed=0,
                spec=SPEC,
                data={},
                model={
                    "w": part(rows, rank, world, 0),
                    "bias": torch.full((5,), float(step)),
                },
                optimizer={"exp_avg/w": part(columns * 2, rank, world, 1)},
                tokenizer=b"{}",
            )
        )
        for saved in checkpointer.finished():
            assert saved.error is None, saved.error
            if rank == 0:
                os.write(acknowledged, f"{saved.step}\n".encode())


def launch(run: Path, name: str, world: int) -> tuple[list[int], int]:
    """Begins the processes of a launch; their ids, and where rank 0 tells what is durable."""
    told, tell = os.pipe()
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os.close(told)
            try:
                live(run, name, rank, world, tell)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    os.close(tell)
    return children, told


def strike(children: list[int], told: int, draw: random.Random, number: int) -> None:
    """Kills one rank and, a moment later, the others: what is left of a launch is ended by whoever began it."""
    # Some die before their first save, most in the middle of a later one, however slow the machine is.
    if draw.random() < 0.8:
        select.select([told], [], [], 60)
    time.sleep(draw.uniform(0.0, 0.12))
    first = draw.randrange(len(children))
    os.kill(children[first], signal.SIGKILL)
    time.sleep(draw.choice([0.0, 0.005, 0.05]))
    for child in children[:first] + children[first + 1 :]:
        os.kill(child, signal.SIGKILL)
    for child in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == -signal.SIGKILL, f"kill {number}: a rank ended by itself with {status}"


def main(run: Path, worlds: list[int], kills: int, seed: int) -> None:
    os.fsync = lambda _: None  # a kill, unlike a power cut, leaves the page cache alone
    torch.set_num_threads(1)
    draw = random.Random(seed)
    reference, at, inside = torch.zeros(SIDE, SIDE), 0, 0
    folder = run / "checkpoints"
    for number, world in zip(range(kills), itertools.cycle(worlds), strict=False):
        children, told = launch(run, f"launch-{number}", world)
        strike(children, told, draw, number)
        with os.fdopen(told) as pipe:
            acknowledged = [int(line) for line in pipe if line.endswith("\n")]
        shutil.rmtree(run / "meetings")
        inside += bool(list(folder.glob("*.partial")))
        assert not any(verify_checkpoint(path) for path in list_checkpoints(folder)), f"torn after kill {number}"
        _, found, _ = load_newest(folder)
        newest = found.step if found else 0
        assert newest >= max([at, *acknowledged]), f"kill {number}: step {newest} is left, {acknowledged} were durable"
        while at < newest:
            at += 1
            update(reference, at)
        if found:
            assert torch.equal(found.model["w"], reference), f"other bits after kill {number}"
            assert torch.equal(found.optimizer["exp_avg/w"], reference * 2), f"other moments after kill {number}"
            assert torch.equal(found.model["bias"], torch.full((5,), float(newest)))
    print(kills, "kills,", inside, "inside a save, step", at)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(world) for world in sys.argv[2].split(",")], int(sys.argv[3]), int(sys.argv[4]))
