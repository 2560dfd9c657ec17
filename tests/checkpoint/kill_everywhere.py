"""Kills save and retain at every labelled point in turn; whatever is listed afterwards must be whole.

Run as `python kill_everywhere.py FOLDER`; prints the number of points. Every attempt is a fork of this process, which
is much faster than a new interpreter for each. Nothing is fsynced: a kill, unlike a power cut, leaves the page cache
alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.checkpoint.policy.retention import retain
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.model.config import Model
from ropewalk.model.spec import resolve
from tests.checkpoint.newest import load_newest


def state(step: int) -> State:
    weight = torch.full((3, 4), float(step))
    spec = resolve(Model(width=8, heads=1), vocabulary=3, sequence_length=4)
    return State(
        step=step,
        tokens=step,
        seed=0,
        spec=spec,
        data={},
        model={"w": weight},
        optimizer={"exp_avg/w": weight},
        tokenizer=b"{}",
    )


def attempt(folder: Path, *, kill_at: int) -> bool:
    """Saves steps 2, 3, and 3 again, keeping two, in a child killed at point `kill_at` (0: never); whether it lived."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, _: tuple[object, ...]) -> None:
            nonlocal seen
            if event == "ropewalk.point":
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        for step in (2, 3, 3):
            save(folder, state(step))
            retain(folder, keep_last=2)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise SystemExit(f"kill at {kill_at}: exit status {status}")
    return status == 0


def main(folder: Path) -> None:
    os.fsync = lambda _: None
    torch.set_num_threads(1)
    point, lived = 0, False
    while not lived:
        point += 1
        shutil.rmtree(folder, ignore_errors=True)
        for step in (0, 1):
            save(folder, state(step))
        lived = attempt(folder, kill_at=point)
        listed = list_checkpoints(folder)
        assert [verify_checkpoint(path) for path in listed] == [[]] * len(listed), f"torn at point {point}"
        found = load_newest(folder)[1]
        assert found is not None, f"nothing left at point {point}"
        assert found.step >= 1, f"the previous one is lost at point {point}"
        assert torch.equal(found.model["w"], state(found.step).model["w"])
        # The next process carries on as if nothing had happened and leaves nothing behind.
        assert attempt(folder, kill_at=0)
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["latest.json", "step-00000002", "step-00000003"], f"{names} after a kill at point {point}"
    print(point - 1, "points")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
