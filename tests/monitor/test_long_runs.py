"""Runs of very many steps: what the screen and the report say is right, in bounded memory."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.events import read_events, steps
from ropewalk.monitor import stream
from ropewalk.monitor.run_view import read_run
from ropewalk.monitor.stream import EventStream

ROOT = Path(__file__).parent.parent.parent


def line(kind: str, time: float, **fields: Any) -> bytes:
    """An event as `EventLog` writes it."""
    return json.dumps({"format": 1, "time": time, "rank": 0, "kind": kind, **fields}).encode() + b"\n"


def step_line(step: int, *, loss: Any = None, time: float | None = None) -> bytes:
    """About as long as those of a real run."""
    seconds = {f"part_{number}_s": 0.001 * number + step * 1e-9 for number in range(12)}
    return line(
        "step",
        1_760_000_000 + step / 10 if time is None else time,
        step=step,
        tokens=8192 * step,
        loss=2 + 8 / (1 + step) if loss is None else loss,
        lr=3e-4,
        grad_norm=0.7 + step % 7 / 10,
        step_s=0.1 + step % 5 / 100,
        data_wait_s=0.001,
        tokens_per_s=81920.0 - step % 3,
        flops_per_s=1e12,
        mfu=0.4,
        memory_bytes=10**9 + step,
        **seconds,
    )


def write_run(folder: Path, lines: Iterator[bytes]) -> Path:
    (folder / "stages").mkdir(parents=True)
    with open(folder / "events.jsonl", "wb", buffering=1 << 20) as file:
        file.writelines(lines)
    return folder


def history(draw: random.Random, count: int) -> Iterator[bytes]:
    """Steps with validations, saves, restores, repeated and torn lines, in any order that a run may leave."""
    step = 0
    for number in range(count):
        time = 1_760_000_000 + number
        step += 1
        kind = draw.random()
        if kind < 0.02:
            step = draw.randrange(step)
            yield line("restored", time, step=step, path="x")
        elif kind < 0.025:
            step = draw.randrange(step)
            yield line("train_started", time, step=step)
        elif kind < 0.03:
            step = max(0, step - draw.randrange(5))  # goes back without a word
        elif kind < 0.05:
            yield step_line(step)[: draw.randrange(200)] + b"\n"
        elif kind < 0.1:
            yield line(draw.choice(["validation", "saved"]), time, step=step, loss=1.5)
        elif kind < 0.12:
            yield json.dumps({"kind": "step", "step": step, "loss": 1.25, "time": time, "format": 1}).encode() + b"\n"
        else:
            yield step_line(step, loss=draw.choice(["nan", "inf", 3.0, 3.0, 3.0]), time=time)


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_counts_the_steps_that_a_whole_reading_counts(tmp_path: Path, seed: int) -> None:
    run = write_run(tmp_path / "run", history(random.Random(seed), 600))
    events = list(read_events(run / "events.jsonl"))
    read = EventStream(run / "events.jsonl")
    for kind in ("step", "validation"):
        assert read.of(kind) == steps(events, kind)
    saved = steps(events, "saved")
    assert [event["step"] for event in read.of("saved")] == [event["step"] for event in saved[-1:]]
    assert read.lost == tuple(event["step"] for event in steps(events) if isinstance(event["loss"], str))
    assert (read.count, read.first_time, read.last_time) == (len(events), events[0]["time"], events[-1]["time"])


@pytest.mark.parametrize("seed", range(5))
def test_a_thinned_stream_holds_right_steps_and_all_of_the_last(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stream.TRACKED, "step", 150)
    run = write_run(tmp_path / "run", history(random.Random(seed), 3000))
    expected = steps(list(read_events(run / "events.jsonl")))
    read = EventStream(run / "events.jsonl")
    assert read.logged == len(expected)
    found = read.of("step")
    assert len(found) <= 150 + stream.DENSE
    assert found[-stream.DENSE :] == expected[-stream.DENSE :]
    known = {event["step"]: event for event in expected}
    assert all(known[event["step"]] == event for event in found)
    if len(expected) > 150:
        gaps = [b["step"] - a["step"] for a, b in itertools.pairwise(found)]
        assert found[0] == expected[0]
        assert max(gaps) <= 10 * len(expected) / 150


def test_the_memory_for_many_steps_is_that_of_the_steps_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stream.TRACKED, "step", 500)
    count = 20_000
    run = write_run(tmp_path / "run", (step_line(step) for step in range(1, count + 1)))
    tracemalloc.start()
    view = read_run(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Two arrays of 8 bytes a step, which double as they grow, and 600 events; all events would take 40 MB.
    assert peak < 4e6
    last = view.steps[-1]
    assert (last.step, last.memory_bytes, view.logged_steps) == (count, 10**9 + count, count)
    assert math.isclose(view.last_time, 1_760_000_000 + count / 10)


MEASURED = """
import resource, sys
from ropewalk.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert not stop.code, stop.code
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss, which a child inherits from whoever started it.
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak) // 1024, used.ru_utime + used.ru_stime, file=sys.stderr)
"""


@pytest.mark.slow
def test_a_million_steps_are_shown_in_less_than_300_mb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = 1_000_000
    run = write_run(tmp_path / "run", (step_line(step) for step in range(1, count + 1)))
    size = (run / "events.jsonl").stat().st_size
    for verb in ("monitor", "report"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, verb, str(run)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        megabytes, seconds = done.stderr.split()[-2:]
        with capsys.disabled():
            print(f"\n{verb}: {count:,} steps, {size / 1e6:.0f} MB: {megabytes} MB RSS, {float(seconds):.1f} s CPU")
        assert int(megabytes) < 300
        assert verb != "monitor" or "step 1000000" in done.stdout
