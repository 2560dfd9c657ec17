"""Saving for ever takes no more memory, files or shared memory than saving ten times."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.run_state import State
from ropewalk.train.checkpointer import Checkpointer
from tests.tiny import small_spec

WARM_UP = 15
PAGE = os.sysconf("SC_PAGE_SIZE")


def used() -> dict[str, int]:
    shared = Path("/dev/shm")
    return {
        "resident bytes": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "shared": sum(f"{os.getpid()}" in path.name for path in shared.iterdir()) if shared.is_dir() else 0,
    }


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("saves", [pytest.param(50, id="50"), pytest.param(500, id="500", marks=pytest.mark.slow)])
def test_memory_files_and_threads_stay_flat(tmp_path: Path, saves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    weights = {f"w{number}": torch.zeros(256, 1024) for number in range(8)}  # 8 MiB
    checkpointer = Checkpointer(tmp_path, Checkpoints(save_every_steps=1), warn=pytest.fail)
    before: dict[str, int] = {}
    for step in range(1, saves + 1):
        checkpointer.fence()
        weights["w0"].fill_(step)
        checkpointer.save(
            State(step=step, tokens=0, seed=0, spec=small_spec(), data={}, model=weights, optimizer={}, tokenizer=b"{}")
        )
        checkpointer.finished()
        if step == WARM_UP:
            checkpointer.settle()
            before = used()
    checkpointer.settle()
    after = used()
    checkpointer.close()
    growth = after.pop("resident bytes") - before.pop("resident bytes")
    # On a slow disk a buffer or two more come late; saves that leaked their 8 MiB would have taken 280 MiB or more.
    assert growth < 32 << 20, f"{growth} bytes more after {saves - WARM_UP} saves"
    # What a save leaks is there 35 times. A few more or fewer are what other tests of this process left and take back.
    grown = {name: (before[name], count) for name, count in after.items() if count > before[name] + 5}
    assert not grown, f"before and after {saves - WARM_UP} saves: {grown}"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3
