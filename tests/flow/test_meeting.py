"""Processes of a launched world wait for the first one, whatever an earlier launch has left behind."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from ropewalk.base.files import write_json
from ropewalk.config.ranks import Ranks
from ropewalk.flow.meeting import Meeting

WORLD = 4


def attend(run: Path, rank: int, *, late_s: float, heard: dict[int, str]) -> None:
    time.sleep(late_s)
    heard[rank] = Meeting(run, Ranks(rank=rank, world=WORLD)).hear()


@pytest.mark.parametrize("seed", range(4))
def test_everyone_hears_what_the_first_one_says_whoever_comes_first(tmp_path: Path, seed: int) -> None:
    run, draw, heard = tmp_path / "run", random.Random(seed), {}
    leave_traces(tmp_path / ".run.meeting")
    others = [
        threading.Thread(target=attend, args=(run, rank), kwargs={"late_s": draw.uniform(0, 0.4), "heard": heard})
        for rank in range(1, WORLD)
    ]
    for other in others:
        other.start()
    time.sleep(draw.uniform(0, 0.4))
    meeting = Meeting(run, Ranks(world=WORLD))
    assert heard == {}
    meeting.tell("train")
    meeting.tell("nothing")
    for other in others:
        other.join()
    assert heard == dict.fromkeys(range(1, WORLD), "train")


def leave_traces(folder: Path) -> None:
    """Notes and answers of a launch that was killed."""
    for rank in range(1, WORLD):
        write_json(folder / f"note-{rank}.json", {"word": "old"})
        write_json(folder / f"answer-{rank}.json", {"word": "old", "what": "nothing"})


def test_a_process_alone_waits_for_nobody(tmp_path: Path) -> None:
    Meeting(tmp_path / "run", Ranks()).tell("train")
    assert list(tmp_path.iterdir()) == []
