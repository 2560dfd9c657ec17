"""The step profiler: timing, windows of a run, traces, and the steps of `profile` and `bench train`."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.plan.plan import Plan
from ropewalk.plan.roofline import KINDS
from ropewalk.train.config import Optimizer
from ropewalk.train.measure.hf_baseline import transformers_model, transformers_step
from ropewalk.train.measure.step_benchmark import DOCUMENT_TOKENS, own_step, random_batch
from ropewalk.train.measure.step_profiler import (
    MIN_STEPS,
    WARMUP_STEPS,
    StepWindow,
    TraceRecorder,
    profile_steps,
    save_trace,
    scale_times,
    time_steps_for,
)
from ropewalk.train.measure.trace import kind_times, step_time
from tests.tiny import small_spec

CPU = torch.device("cpu")
PLAN = Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=2, sequence_length=12)

times = st.fixed_dictionaries({kind: st.floats(0.01, 1e3) for kind in KINDS})


@given(times, st.floats(0.01, 1e4), st.booleans())
def test_scaled_times_add_up_to_the_step(found: dict, step_ms: float, on_gpu: bool) -> None:
    made = scale_times(found, step_ms=step_ms, on_gpu=on_gpu)
    assert sum(made.values()) == pytest.approx(step_ms)
    assert min(made.values()) >= 0


def test_a_profiler_makes_a_gpu_idle_and_not_slower() -> None:
    found = dict.fromkeys(KINDS, 2.0)
    assert scale_times(found, step_ms=11.0, on_gpu=True) == {**found, "idle": 1.0}
    assert scale_times(found, step_ms=5.0, on_gpu=False) == {**dict.fromkeys(KINDS, 1.0), "idle": 0.0}


@given(st.integers(1, 20), st.integers(1, 20))
def test_a_window_records_after_the_warm_up_and_at_least_the_last_step(steps: int, remaining: int) -> None:
    window = StepWindow(steps)
    assert not window.is_open, "before it is placed"
    window.place(remaining=remaining)
    recorded = []
    for number in range(1, remaining + 1):
        recorded += [number] if window.is_open else []
        window.step_ended()
    first = min(WARMUP_STEPS + 1, remaining)
    assert recorded == list(range(first, min(first + steps, remaining + 1)))
    assert window.recorded == len(recorded)
    assert not window.left


def test_a_timing_by_seconds_has_its_steps_without_the_warm_up() -> None:
    numbers = itertools.count()
    times = time_steps_for(lambda: torch.tensor(float(next(numbers))), seconds=0.0)
    assert len(times.seconds) == MIN_STEPS
    assert times.loss == WARMUP_STEPS + MIN_STEPS - 1


def test_labels_and_op_classes_of_one_trace_add_up_to_the_same_step(tmp_path: Path) -> None:
    step = own_step(small_spec(), PLAN, device=CPU, optimizer=Optimizer(), clip_norm=1.0)
    traces: list[dict[str, Any]] = []
    recorder = TraceRecorder(
        device=CPU, warmup=1, steps=2, on_trace=lambda profiler: traces.append(save_trace(profiler, tmp_path / "trace"))
    )
    for _ in range(3):
        step()
        recorder.step_ended()
    recorder.close()
    (trace,) = traces
    parts, classes = step_time(trace), kind_times(trace)
    assert parts.steps == 2
    assert sum(part.host_ms for part in parts.parts) == pytest.approx(parts.step_ms)
    assert sum(classes.values()) == pytest.approx(parts.step_ms)
    labelled = {part.part: part.host_ms for part in parts.parts}
    assert classes["loss"] >= labelled["loss"] > 0
    assert classes["optimizer"] == pytest.approx(labelled["clip and guard"] + labelled["update"])


def test_every_kind_of_work_is_found_in_a_step_of_ours() -> None:
    step = own_step(small_spec(), PLAN, device=CPU, optimizer=Optimizer(), clip_norm=1.0)
    before = step().item()
    found = profile_steps(step, device=CPU, steps=2)
    assert found.loss < before, "the steps train"
    assert sum(found.kinds.values()) == pytest.approx(found.step_ms)
    assert {kind for kind, ms in found.kinds.items() if ms > 0} == set(KINDS) - {"idle"}
    assert found.memory_bytes > 0


@pytest.mark.parametrize("settings", [{}, {"position": "learned", "norm": "layer", "mlp": "gelu-tanh", "bias": True}])
def test_a_peer_trains_a_model_of_the_same_size(settings: dict[str, object]) -> None:
    """Llama and GPT-2 in transformers: the same number of weights, a loss near that of a guess, and it falls."""
    spec = small_spec(**settings)
    assert sum(parameter.numel() for parameter in transformers_model(spec).parameters()) == spec.parameters()
    step = transformers_step(spec, PLAN, device=CPU, optimizer=Optimizer(), clip_norm=1.0, compiled=False)
    losses = [step().item() for _ in range(3)]
    assert losses[0] == pytest.approx(torch.tensor(61.0).log().item(), abs=0.3)
    assert losses[2] < losses[0]


def test_rows_of_a_spec_that_separates_documents_have_several() -> None:
    separate, ignored = (
        random_batch(small_spec(sequence_length=4000, documents=kind), rows=8, device=CPU).documents
        for kind in ("separate", "ignore")
    )
    assert not ignored.any()
    assert 4000 / DOCUMENT_TOKENS / 2 < (separate[:, -1] - separate[:, 0]).float().mean() < 4000 / DOCUMENT_TOKENS * 2
    assert (separate.diff() >= 0).all()


def test_more_microbatches_give_the_same_step() -> None:
    made = [
        own_step(
            small_spec(),
            dataclasses.replace(PLAN, microbatch_size=rows),
            device=CPU,
            optimizer=Optimizer(),
            clip_norm=1.0,
        )
        for rows in (1, 4)
    ]
    losses = [[step().item() for _ in range(2)] for step in made]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
