"""A profile: where the time of a step goes, and a run that does not notice."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.base.files import read_json
from ropewalk.load.batch import Batch
from ropewalk.parallel.labels import PREFIX, label
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.hooks.profiler import Profiler
from ropewalk.train.loop import train
from ropewalk.train.measure.trace import step_time
from ropewalk.train.training_run import TrainingRun
from tests.tiny import make_run
from tests.train.runs import Stop, StopAfter, final_files, quick, train_until

ALWAYS = ["data wait", "copy", "forward", "loss", "backward", "clip and guard", "update"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


def train_profiled(run: Path, *others: Hook, steps: int = 5) -> tuple[dict[str, float], dict[str, Any] | None]:
    """The figures of the training, and the table of its profile."""
    profiler = Profiler(steps)
    return train(run, hooks=[profiler, *others]), profiler.table


def profiled(run: Path, *, steps: int = 5) -> dict[str, Any]:
    _, made = train_profiled(run, steps=steps)
    table = read_json(run / "profile" / "table.json", what="table")
    assert json.loads(json.dumps(made)) == table
    return table


def spans(run: Path) -> list[tuple[str, float, float]]:
    """Our labels in the trace, as name, start and end."""
    events = json.loads((run / "profile" / "trace.json").read_text())["traceEvents"]
    ours = [event for event in events if event["name"].startswith(PREFIX) and event["cat"] == "user_annotation"]
    return sorted(((event["name"], event["ts"], event["ts"] + event["dur"]) for event in ours), key=lambda one: one[1])


def test_a_profile_has_its_steps_and_parts_that_add_up_to_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__layer_stats_every_steps=4, train__log_every_steps=5)
    table = profiled(run)
    assert (table["format"], table["first_step"], table["last_step"], table["steps"]) == (1, 3, 7, 5)
    calls = {part["part"]: part["calls"] for part in table["parts"]}
    # Steps 3 to 7 in microbatches of 2 of 4 rows; logged after 5, saved after 3 and 6, validated and measured after 4.
    once = dict.fromkeys(("data wait", "copy", "clip and guard", "update", "other"), 1.0)
    twice = dict.fromkeys(("forward", "loss", "backward"), 2.0)
    assert calls == once | twice | {"log": 0.2, "save": 0.4, "validate": 0.2, "layers": 0.2}
    assert sum(part["host_ms"] for part in table["parts"]) == pytest.approx(table["step_ms"], rel=1e-9)
    assert sum(part["share"] for part in table["parts"]) == pytest.approx(1, rel=1e-9)
    # By construction `other` is the rest; it is one only if no part is counted twice.
    assert all(0 <= part["share"] <= 1 for part in table["parts"])
    assert all(part["device_ms"] is None for part in table["parts"])
    assert table["device_busy_ms"] is None


def test_labels_lie_beside_each_other(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__layer_stats_every_steps=1)
    profiled(run)
    found = spans(run)
    assert {name.removeprefix(PREFIX) for name, _, _ in found} >= {*ALWAYS, "layers"}
    assert all(before[2] <= after[1] for before, after in itertools.pairwise(found))


def test_operators_are_torch_s_own_the_longest_first(tmp_path: Path) -> None:
    operators = profiled(make_run(tmp_path))["operators"]
    times = [operator["host_ms"] for operator in operators]
    assert times == sorted(times, reverse=True)
    # Which of them is long enough to be named is a matter of moments.
    assert any(operator["name"].startswith("aten::") for operator in operators)
    assert not any(operator["name"].startswith((PREFIX, "ProfilerStep")) for operator in operators)


@pytest.mark.parametrize("steps", [1, 5, 100])
def test_a_profiled_run_ends_with_the_bits_of_one_that_is_not(tmp_path: Path, steps: int) -> None:
    run, other = make_run(tmp_path / "profiled"), make_run(tmp_path / "plain")
    figures, _ = train_profiled(run, steps=steps)
    assert figures == train(other)
    assert final_files(run) == final_files(other)


@pytest.mark.parametrize(("done", "first", "last"), [(4, 6, 8), (7, 8, 8)])
def test_with_few_steps_left_those_are_profiled_and_the_last_at_least(
    tmp_path: Path, done: int, first: int, last: int
) -> None:
    run = make_run(tmp_path)
    train_until(run, done)
    table = profiled(run)
    assert (table["first_step"], table["last_step"]) == (first, last)


def test_a_finished_run_has_no_step_to_profile(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run)
    assert train_profiled(run)[1] is None
    assert not (run / "profile").exists()


def test_an_error_in_a_profiled_step_leaves_no_profiler_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(Stop):
        train_profiled(run, StopAfter(5))
    assert label("log") is label("save"), "the profiler is still running"
    # Steps 3 to 5 were made; what began of step 6 is no step.
    table = read_json(run / "profile" / "table.json", what="table")
    assert (table["first_step"], table["last_step"], table["steps"]) == (3, 5, 3)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_error_before_a_whole_step_was_profiled_is_the_error_that_is_seen(tmp_path: Path, step: int) -> None:
    class Fail(Hook):
        def on_batch(self, run: TrainingRun, batch: Batch) -> Batch:
            if run.step + 1 == step:
                raise Stop
            return batch

    run = make_run(tmp_path)
    with pytest.raises(Stop):
        train_profiled(run, Fail())
    assert label("log") is label("save"), "the profiler is still running"
    assert not (run / "profile").exists()


def test_what_a_gpu_does_counts_to_the_part_that_asked_for_it() -> None:
    def span(
        category: str, name: str, start: float, length: float, *, thread: int = 1, launch: int = 0
    ) -> dict[str, Any]:
        args = {"correlation": launch}
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": thread, "args": args}

    forward, backward, update = (PREFIX + part for part in ("forward", "backward", "update"))
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            span("user_annotation", "ProfilerStep#2", 0, 1000),
            span("user_annotation", "ProfilerStep#3", 1000, 1000),
            span("user_annotation", "ProfilerStep#4", 2000, 10),
            span("user_annotation", forward, 100, 200),
            span("user_annotation", backward, 400, 300),
            span("user_annotation", update, 800, 100),
            span("user_annotation", forward, 1100, 400),
            span("user_annotation", update, 1600, 100),
            span("gpu_user_annotation", forward, 150, 5000),
            span("cpu_op", "linear", 120, 100),
            span("cpu_op", "mm", 140, 40),
            span("cuda_runtime", "cudaLaunchKernel", 150, 5, launch=1),
            # The backward pass runs on a thread of its own.
            span("cpu_op", "mm", 430, 60, thread=2),
            span("cuda_driver", "cuLaunchKernel", 450, 5, thread=2, launch=2),
            span("cuda_runtime", "cudaMemcpyAsync", 350, 5, launch=3),
            span("cpu_op", "mm", 1100, 50),
            span("cuda_runtime", "cudaLaunchKernel", 1100, 5, launch=4),
            # Asked for in `forward`, done while `backward` begins, and beside work of another stream.
            span("kernel", "gemm", 500, 400, launch=1),
            span("kernel", "gemm", 950, 100, launch=2),
            span("gpu_memcpy", "copy", 800, 50, launch=3),
            span("kernel", "gemm", 1000, 600, launch=4),
            # Asked for before the first step.
            span("kernel", "gemm", 5, 100, launch=5),
        ]
    }
    found = step_time(trace)
    assert (found.steps, found.step_ms) == (2, 1.0)
    # 500 to 900, 950 to 1050 and on to 1600.
    assert found.device_busy_ms == pytest.approx(1.05 / 2)
    rows = [(part.part, part.calls, part.host_ms, part.device_ms) for part in found.parts]
    assert rows == [
        ("forward", 1.0, pytest.approx(0.3), pytest.approx(0.5)),
        ("backward", 0.5, pytest.approx(0.15), pytest.approx(0.05)),
        ("update", 1.0, pytest.approx(0.1), 0.0),
        ("other", 1.0, pytest.approx(0.45), pytest.approx(0.025)),
    ]
    assert [(one.name, one.calls, one.host_ms, one.device_ms) for one in found.operators] == [
        ("mm", 1.5, pytest.approx(0.075), pytest.approx(0.55)),
        ("linear", 0.5, pytest.approx(0.03), 0.0),
    ]


def test_a_label_is_nothing_without_a_profiler() -> None:
    assert label("forward") is label("backward")
    with torch.profiler.profile() as profiler, label("forward"):
        torch.ones(1)
    assert PREFIX + "forward" in {event.key for event in profiler.key_averages()}
