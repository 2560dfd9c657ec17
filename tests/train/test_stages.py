"""A pipeline whose stages take uneven times is cut anew: measured, proposed, written, and trained on as if it never
had been cut otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ropewalk.base.events import EventLog, read_events
from ropewalk.model.modules import Block
from ropewalk.parallel import pipeline
from ropewalk.parallel.executor import Executor
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.forecast import memory
from ropewalk.plan.plan import PhasePlan, Planned, load_plan, save_plan
from ropewalk.train.hooks.pipeline_balance import LEAST_STEPS, PipelineBalance
from tests.parallel.plans import Case, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import RATE, Arrays, batches, gathered, start

pytestmark = pytest.mark.xdist_group("pool")

BEFORE, AFTER = 2 * LEAST_STEPS, 2
"""Steps until the pipeline is cut anew, and then. The first half of those before warms up."""


def planned(cut: Case) -> Planned:
    needs = memory(cut.spec, rows=1, precision="fp32")
    phase = PhasePlan(plan=cut.plan, spec=cut.spec, memory=needs, steps=BEFORE + AFTER, tokens=0)
    return Planned(phases=(phase,))


@dataclasses.dataclass(slots=True)
class Clock:
    """Stands for `time`: a block takes `block_s` and nothing else takes any time, however busy the machine is."""

    block_s: float
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def run_block(self, block: Block, x: Tensor, forward: Callable[[Block, Tensor], Tensor]) -> Tensor:
        self.now += self.block_s
        return forward(block, x)


def until_cut_anew(rank: int, cut: Case, run: Path, block_s: list[float]) -> tuple[Arrays, Arrays, list[str]]:
    """Some steps on ranks of these speeds and two looks at the stages; (weights, moments) and what was said."""
    clock, real = Clock(block_s[rank]), pipeline.time
    pipeline.time = clock  # type: ignore[assignment]
    try:
        return watched(rank, cut, run, clock)
    finally:
        pipeline.time = real  # type: ignore[assignment]


def watched(rank: int, cut: Case, run: Path, clock: Clock) -> tuple[Arrays, Arrays, list[str]]:
    mesh = Mesh(cut.plan, rank)
    executor, _ = start(cut, mesh)
    executor.model.run_block = clock.run_block
    said: list[str] = []
    with EventLog(run, rank=rank) as events:
        watch = PipelineBalance(run, planned(cut), mesh.control, events=events, say=said.append if rank == 0 else None)
        for step, batch in enumerate(batches(cut.spec, BEFORE), start=1):
            executor.step(batch, lr=RATE)
            if step % LEAST_STEPS == 0:
                watch.look(executor, phase=0, step=step)
    return gathered(executor.model_state()), gathered(executor.optimizer_state()), said


def afterwards(rank: int, cut: Case, state: tuple[Arrays, Arrays]) -> list[float]:
    """The losses of the steps that follow, from the whole state that others left."""
    executor, _ = start(cut, Mesh(cut.plan, rank))
    executor.load_state(*({name: torch.from_numpy(array) for name, array in part.items()} for part in state))
    return losses(executor, cut)


def losses(executor: Executor, cut: Case) -> list[float]:
    rows = batches(cut.spec, BEFORE + AFTER)[BEFORE:]
    return [float(executor.step(batch, lr=RATE).loss) for batch in rows]


def joined(parts: list[Arrays]) -> Arrays:
    return {name: array for part in parts for name, array in part.items()}


def test_slow_stage_gets_fewer_layers_and_training_goes_on(tmp_path: Path) -> None:
    cut = case("pipeline 2", "deep", pipeline=2, resplit=True)
    save_plan(tmp_path, planned(cut))
    found = POOL.run(until_cut_anew, cut, tmp_path, [0.01, 0.05], world=2)
    stages = load_plan(tmp_path).phases[0].plan.stages
    assert stages == ((0, 1, 2), (3,))
    assert "better cut as 3 + 1: takes effect when the run continues" in found[0][2][0]
    (event,) = [e for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "stages_resplit"]
    assert (event["layers"], event["better"], event["kept"]) == ([2, 2], [3, 1], True)
    assert event["seconds"] == pytest.approx([8 * 2 * 0.01, 8 * 2 * 0.05])  # microbatches, blocks

    state = joined([weights for weights, _, _ in found]), joined([moments for _, moments, _ in found])
    anew = dataclasses.replace(cut, plan=dataclasses.replace(cut.plan, stages=stages))
    alone = case("one process", "deep")
    (as_before,) = POOL.run(afterwards, alone, state, world=1)
    for rank in POOL.run(afterwards, anew, state, world=2):
        assert rank == pytest.approx(as_before, abs=1e-12)


def test_without_the_option_it_is_said_and_not_done(tmp_path: Path) -> None:
    cut = case("pipeline 2", "deep", pipeline=2)
    save_plan(tmp_path, planned(cut))
    (*_, said), (*_, unheard) = POOL.run(until_cut_anew, cut, tmp_path, [0.05, 0.01], world=2)
    assert load_plan(tmp_path) == planned(cut)
    assert len(said) == 1
    assert "better cut as 1 + 3: `parallel.resplit = true` does that" in said[0]
    assert unheard == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_time_of_a_stage_on_a_gpu_is_that_of_its_kernels() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    busy = pipeline.StageTimer(x.device)
    for stage, times in ((0, 5), (1, 50)):
        for _ in range(20):  # the first ones warm up
            with busy.counting(stage):
                for _ in range(times):
                    x @ x
    torch.cuda.synchronize()
    seconds = busy.take()
    assert 0 < seconds[0] < seconds[1]
    assert busy.take() == {}
