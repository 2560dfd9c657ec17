"""Threads that save have a lower priority than the one that trains."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.write.task_graph import NICE, lower_priority
from ropewalk.train.checkpointer import Checkpointer
from tests.checkpoint.test_background import state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities by thread")


def nice_of(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_a_thread_gives_way_and_its_process_does_not() -> None:
    seen: list[int] = []

    def work() -> None:
        lower_priority()
        lower_priority()
        seen.append(nice_of(threading.get_native_id()))

    before = nice_of(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [max(NICE, before)]
    assert nice_of(0) == before


def test_hashing_and_writing_give_way_and_copying_does_not(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, Checkpoints(), warn=pytest.fail)
    checkpointer.save(state(1))
    checkpointer.settle()
    nice = {
        thread.name.partition("_")[0]: nice_of(thread.native_id)
        for thread in threading.enumerate()
        if thread.native_id and thread.name.partition("_")[0] in ("persist", "hash", "snapshot")
    }
    checkpointer.close()
    usual = nice_of(0)
    assert nice == {"persist": max(NICE, usual), "hash": max(NICE, usual), "snapshot": usual}
