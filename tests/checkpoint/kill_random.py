"""Kills a process that saves in the background at random moments, again and again.

Run as `python kill_random.py FOLDER KILLS SEED`. After each kill every listed checkpoint must be whole, none that was
acknowledged may be lost, and the numbers must be those of an undisturbed run: each life goes on from the newest. The
last line says how many kills there were, how many fell into a save, and how far the run came.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch

from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.checkpoint.run_state import State
from ropewalk.model.config import Model
from ropewalk.model.spec import resolve
from ropewalk.train.checkpointer import Checkpointer
from tests.checkpoint.newest import continued, load_newest

SPEC = resolve(Model(width=8, heads=1), vocabulary=3, sequence_length=4)


def update(weight: torch.Tensor, step: int) -> None:
    """One step of a training whose result nobody guesses and everybody can repeat."""
    weight.mul_(0.999).add_(torch.full_like(weight, step).sin_())


def state(step: int, weight: torch.Tensor) -> State:
    return State(
        step=step,
        tokens=step,
        seed=0,
        spec=SPEC,
        data={},
        model={"w": weight},
        optimizer={"exp_avg/w": weight * 2},
        tokenizer=b"{}",
    )


def live(run: Path, acknowledged: int) -> None:
    """Trains for ever, saving each step; tells which steps are durable."""
    checkpointer = Checkpointer(run, Checkpoints(save_every_steps=1, keep_last=2), warn=lambda _: None)
    found = continued(checkpointer)
    checkpointer.retain()
    step, weight = (found.step, found.model["w"].clone()) if found else (0, torch.zeros(64, 64))
    while True:
        checkpointer.fence()
        step += 1
        update(weight, step)
        checkpointer.save(state(step, weight))
        for saved in checkpointer.finished():
            assert saved.error is None, saved.error
            os.write(acknowledged, f"{saved.step}\n".encode())


def main(run: Path, kills: int, seed: int) -> None:
    os.fsync = lambda _: None  # a kill, unlike a power cut, leaves the page cache alone
    torch.set_num_threads(1)
    draw = random.Random(seed)
    reference, at = torch.zeros(64, 64), 0
    inside = 0
    for number in range(kills):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            try:
                live(run, tell)
            finally:
                os._exit(1)
        os.close(tell)
        # Some die before their first save, most in the middle of a later one, however slow the machine is.
        if draw.random() < 0.7:
            select.select([told], [], [], 60)
        time.sleep(draw.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == -signal.SIGKILL, f"kill {number}: the child ended by itself with {status}"
        with os.fdopen(told) as pipe:
            acknowledged = [int(line) for line in pipe if line.endswith("\n")]
        folder = run / "checkpoints"
        inside += bool(list(folder.glob("*.partial")))
        listed = list_checkpoints(folder)
        assert not any(verify_checkpoint(path) for path in listed), f"torn after kill {number}"
        _, found, _ = load_newest(folder)
        newest = found.step if found else 0
        assert newest >= max([at, *acknowledged]), f"kill {number}: step {newest} is left, {acknowledged} were durable"
        while at < newest:
            at += 1
            update(reference, at)
        assert found is None or torch.equal(found.model["w"], reference), f"other bits after kill {number}"
        assert found is None or torch.equal(found.optimizer["exp_avg/w"], reference * 2)
    print(kills, "kills,", inside, "inside a save, step", at)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
