"""A timeline shows every collective of a step, and the events of a run say who waited for whom."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.base.events import Event, events_path, read_events
from ropewalk.parallel.comm import Moment, Traffic, alone
from ropewalk.parallel.executor import StepResult
from ropewalk.parallel.labels import LabelSpan
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.hooks.metrics import Meter, all_ranks
from ropewalk.train.hooks.timeline import ALL, FOLDER, TimelineStep, merged, trace
from ropewalk.train.loop import train
from ropewalk.train.measure.step_profiler import WARMUP_STEPS
from ropewalk.train.settings import read_settings
from ropewalk.train.training_run import TrainingRun
from tests.parallel.pool import POOL
from tests.parallel.ranked import as_rank
from tests.tiny import make_run
from tests.train.test_training import documented_fields

pytestmark = pytest.mark.xdist_group("pool")

STEPS = 2
LATE_S = 0.1
SHOWN = [WARMUP_STEPS + 1, WARMUP_STEPS + 2]
REPLICAS = "replicate+context"


class Late(Hook):
    """Makes every step of a rank last at least `LATE_S`, however quick the machine is."""

    def on_gradients(self, run: TrainingRun, gradients: Any) -> None:
        time.sleep(LATE_S)


def trained(rank: int, run: Path, late: int | None = None) -> None:
    with as_rank(rank, 2):
        train(run, hooks=[Late()] if rank == late else [])


def two_processes(folder: Path, late: int | None = None, **settings: Any) -> Path:
    run = make_run(folder, parallel__replicate=2, plan__microbatch_size=1, train__timeline_steps=STEPS, **settings)
    POOL.run(trained, run, late, world=2)
    return run


def shown(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return found


def told(run: Path, kind: str, *, rank: int = 0) -> list[Event]:
    return [event for event in read_events(events_path(run, rank=rank)) if event["kind"] == kind]


def buckets(sizes: list[int], least: int) -> int:
    """Sums that are made when gradients travel as soon as there are `least` bytes of them."""
    count, filled = 0, least
    for size in sizes:
        if filled >= least:
            count, filled = count + 1, 0
        filled += size
    return count


@pytest.mark.parametrize("bucket_bytes", [0, 6000, 1 << 25])
def test_all_reduces_of_a_step_follow_the_fusion_threshold(bucket_bytes: int, tmp_path: Path) -> None:
    run = two_processes(tmp_path, train__steps=5, parallel__bucket_bytes=bucket_bytes)
    sizes = [4 * torch.Size(shape).numel() for shape in read_settings(run).planned.phases[0].spec.shapes().values()]
    begun = [event for event in shown(run / FOLDER / "rank-00001.json") if event["ph"] == "b"]
    sums = [event["args"] for event in begun if (event["cat"], event["name"]) == (REPLICAS, "all_reduce")]
    expected = buckets(sizes[::-1], bucket_bytes)
    assert Counter(sum_["step"] for sum_ in sums) == dict.fromkeys(SHOWN, expected)
    # Of two ranks, each sends half of every gradient twice.
    assert sum(sum_["bytes"] for sum_ in sums) == STEPS * sum(sizes)


def test_the_file_of_all_ranks_shows_their_steps_side_by_side(tmp_path: Path) -> None:
    run = two_processes(tmp_path, train__steps=5)
    everything = shown(run / FOLDER / ALL)
    steps = [event for event in everything if event.get("cat") == "steps"]
    assert [(event["pid"], event["name"]) for event in steps] == [(r, f"step {s}") for r in (0, 1) for s in SHOWN]
    # The ranks sum the gradients of a step together: each begins it before the other ends it.
    for first, second in zip(steps[:STEPS], steps[STEPS:], strict=True):
        assert first["ts"] < second["ts"] + second["dur"]
        assert second["ts"] < first["ts"] + first["dur"]
    parts = {event["name"] for event in everything if event.get("cat") == "parts"}
    assert {"data wait", "forward", "loss", "backward", "clip and guard", "update", "log"} <= parts
    assert {event["args"]["name"] for event in everything if event["name"] == "process_name"} == {"rank 0", "rank 1"}


def test_a_run_that_ends_before_its_timeline_writes_what_there_is(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__timeline_steps=50, train__steps=4)
    train(run)
    steps = [event["name"] for event in shown(run / FOLDER / ALL) if event.get("cat") == "steps"]
    assert steps == ["step 3", "step 4"]


def test_a_run_without_a_timeline_writes_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__steps=3)
    train(run)
    assert not (run / FOLDER).exists()


def test_a_trace_keeps_collectives_that_overlap_apart() -> None:
    step = TimelineStep(
        7,
        10.0,
        11.0,
        [LabelSpan("forward", 10.0, 10.25)],
        [Moment("g", "send", 8, 10.1, 10.9), Moment("g", "send", 4, 10.2, 10.8)],
    )
    found = trace([step], rank=3, zero=10.0)["traceEvents"]
    spans = {(e["id"], e["ph"]): e["ts"] for e in found if e["ph"] in "be"}
    assert sorted(spans.values()) == [1e5, 2e5, 8e5, 9e5]
    assert len({name for name, _ in spans}) == 2
    (forward,) = [e for e in found if e["name"] == "forward"]
    assert (forward["ts"], forward["dur"], forward["pid"]) == (0.0, 250_000.0, 3)


def test_files_of_ranks_that_are_gone_are_not_shown(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank-{rank:05d}.json").write_text(json.dumps({"traceEvents": [{"pid": rank}]}))
    assert merged(tmp_path, ranks=2)["traceEvents"] == [{"pid": 0}, {"pid": 1}]


def test_the_figures_of_all_ranks_are_told_and_the_longest_named(tmp_path: Path) -> None:
    run = two_processes(tmp_path, late=1, train__steps=4, train__log_every_steps=2)
    events = told(run, "ranks")
    own = [told(run, "step", rank=rank) for rank in (0, 1)]
    assert [event["step"] for event in events] == [2, 4]
    for at, event in enumerate(events):
        assert set(event) - {"format", "time", "rank", "kind"} == documented_fields()["ranks"]
        for field in ("busy_s", "data_wait_s", "exposed_s"):
            assert event[field] == pytest.approx([steps[at][field] for steps in own], abs=1e-9)
        assert event["slowest_rank"] == event["busy_s"].index(max(event["busy_s"]))
        assert event["busy_s"][1] > LATE_S
    assert told(run, "ranks", rank=1) == []


def test_a_step_says_what_its_rank_sent_and_how_long_it_waited(tmp_path: Path) -> None:
    run = two_processes(tmp_path, train__steps=6, train__log_every_steps=3, train__validate_every_steps=1)
    spec = read_settings(run).planned.phases[0].spec
    for event in [*told(run, "step"), *told(run, "step", rank=1)]:
        waits = event["data_wait_s"] + event["exposed_s"]
        assert event["busy_s"] == pytest.approx(event["step_s"] - waits, abs=1e-9)
        assert event["sent_bytes"][f"{REPLICAS} all_reduce"] == pytest.approx(4 * spec.parameters())


def test_what_is_sent_while_the_meter_pauses_does_not_count() -> None:
    traffic = Traffic()
    meter = Meter(torch.device("cpu"), peak_flops=None, traffic=traffic)
    traffic.add("g", "send", 10)
    zero = torch.zeros(())
    meter.add(StepResult(zero, zero, zero, zero.int()), tokens=1, flops=1)
    with meter.paused():
        traffic.add("g", "send", 1000)
        traffic.waited_s += 5.0
    record = meter.read(1, tokens=1, lr=0.1)
    assert record["sent_bytes"] == {"g send": 10.0}
    assert record["exposed_s"] == 0.0
    assert traffic.sent == {}


def test_one_rank_is_the_slowest_of_itself() -> None:
    record = {"busy_s": 2.0, "data_wait_s": 1.0, "exposed_s": 0.0}
    expected = {"busy_s": [2.0], "data_wait_s": [1.0], "exposed_s": [0.0], "slowest_rank": 0}
    assert all_ranks(record, alone()) == expected
