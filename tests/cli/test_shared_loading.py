"""Loading as the command line starts it: runs that unpack their data for each other, sequences drawn by their loss."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.events import events_path, read_events, steps
from ropewalk.load.cache.config import Cache
from ropewalk.load.loader import Loader

from .conftest import Call

STAGED = ("prepare.compression=zstd", "load.cache.staging=staging", "load.cache.jobs=2")


def staging_of(run: Path) -> dict[str, Any]:
    """What a run did in the staging area."""
    (event,) = [event for event in read_events(events_path(run)) if event["kind"] == "load_cached"]
    return dict(event["staging"])


def test_a_run_takes_what_another_job_has_unpacked(tiny: Path, call: Call) -> None:
    prepared = json.loads(call("prepare", "tiny.toml", STAGED[0], "--json").out)["folder"]
    pieces = len(list(Path(prepared).glob("*-train-*.tokens")))
    other = Loader(
        Path(prepared),
        sequence_length=32,
        batch_size=4,
        seed=7,
        cache=Cache(staging="staging", jobs=2, job=1),
    )
    other.next()
    until = time.monotonic() + 60
    while other.cache_counts()["staging"]["prepared"] < pieces and time.monotonic() < until:
        time.sleep(0.01)
    ended = call("train", "tiny.toml", *STAGED, "load.cache.job=0")
    other.close()
    assert ended.status == 0, ended.err
    counts = staging_of(Path("runs/tiny"))
    assert (counts["taken"], counts["prepared"], counts["alone"]) == (pieces, 0, 0)


def test_staging_for_shards_that_are_mapped_is_refused_with_a_remedy(tiny: Path, call: Call) -> None:
    ended = call("train", "tiny.toml", *STAGED[1:])
    assert ended.status == 2
    assert "load.cache.staging" in ended.err
    assert 'set `prepare.compression = "zstd"`' in ended.err


def test_hit_rates_are_in_summary_and_report_next_to_those_of_uniform_reading(tiny: Path, call: Call) -> None:
    settings = ("memory_bytes=2000", "package_bytes=500", "package_memory_bytes=500", "draws=12")
    ended = call("run", "tiny.toml", *(f"load.importance.{setting}" for setting in settings))
    assert ended.status == 0, ended.err
    told = json.loads(Path("runs/tiny/summary.json").read_text())["importance"]
    assert told["asked"] >= 24
    assert 0 < told["uniform_hit_rate"] < 1
    page = Path("runs/tiny/report.html").read_text()
    assert "Cache hit rate" in page
    assert "each once per epoch" in page


@pytest.mark.slow
def test_two_runs_started_together_unpack_each_piece_once(tiny: Path, call: Call) -> None:
    assert call("prepare", "tiny.toml", STAGED[0]).status == 0
    words = [sys.executable, "-m", "ropewalk", "train", "tiny.toml", *STAGED, "train.steps=20"]
    runs = [subprocess.Popen([*words, f"name=job{job}", f"load.cache.job={job}"]) for job in range(2)]
    assert [run.wait(300) for run in runs] == [0, 0]
    counts = [staging_of(Path(f"runs/job{job}")) for job in range(2)]
    # A run that ends before the other has begun has nobody to prepare for.
    assert sum(each["prepared"] for each in counts) == sum(each["taken"] for each in counts)
    assert sum(each["prepared"] + each["alone"] for each in counts) <= 4


@pytest.mark.slow
def test_a_run_that_is_killed_holds_the_other_not_up(tiny: Path, call: Call) -> None:
    assert call("prepare", "tiny.toml", STAGED[0]).status == 0
    words = [sys.executable, "-m", "ropewalk", "train", "tiny.toml", *STAGED]
    gone = subprocess.Popen([*words, "train.steps=100000", "name=gone", "load.cache.job=1"])
    until = time.monotonic() + 120
    while not events_path(Path("runs/gone")).exists() or not steps(list(read_events(events_path(Path("runs/gone"))))):
        assert time.monotonic() < until
        time.sleep(0.1)
    gone.kill()
    gone.wait()
    ended = call("train", "tiny.toml", *STAGED, "load.cache.job=0")
    assert ended.status == 0, ended.err
    counts = staging_of(Path("runs/tiny"))
    assert counts["taken"] + counts["prepared"] + counts["alone"] > 0
