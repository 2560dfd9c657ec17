"""Models larger than one device: a rank resumes, changes phase and starts from elsewhere with its own parts alone."""

from __future__ import annotations

import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.config.ranks import ranks
from ropewalk.flow.models import export_model
from ropewalk.load.stalls import Stalls
from ropewalk.model.config import Lora, Model
from ropewalk.model.decoder import build
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import local
from ropewalk.parallel.executor import StepHooks
from ropewalk.parallel.mesh import Mesh, leave
from ropewalk.train.active_phase import ActivePhase
from ropewalk.train.checkpointer import Checkpointer
from ropewalk.train.config import Phase
from ropewalk.train.loop import train
from ropewalk.train.mesh_coordinator import MeshCoordinator
from ropewalk.train.phase_runner import PhaseRunner
from ropewalk.train.settings import read_settings
from tests.parallel.pool import POOL
from tests.parallel.ranked import as_rank
from tests.parallel.resident import Resident, alive_bytes, needs_peaks
from tests.tiny import byte_tokenizer, make_run
from tests.train.runs import in_float64, last_checkpoint, quick, train_until

pytestmark = pytest.mark.xdist_group("pool")

WORLD = 2
SIZES = Model(layers=8, width=256, heads=4, mlp_width=704)
"""6 M numbers in eight blocks: a rank's parameters are 13 MB, its moments 26 MB, two blocks 6 MB."""
SMALL = Model(layers=2, width=16, heads=2, mlp_width=32)
PHASES = (Phase(steps=2), Phase(steps=2, lora=Lora(rank=2, alpha=6.0)), Phase(steps=2, moments="keep"))
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"parallel__shard": 2},
    "tensor": {"parallel__tensor": 2},
    "pipeline": {"parallel__pipeline": 2, "plan__microbatch_size": 1},
}


class Measured(PhaseRunner):
    """A course that tells what memory it takes from the moment on when a phase is built, and what is alive then."""

    memory: Resident
    alive: int

    def _open(self, index: int) -> ActivePhase:
        running = super()._open(index)
        self.alive, self.memory = alive_bytes(), Resident()
        return running


def course_of(run: Path, rank: int, attempt: str) -> tuple[Measured, Checkpointer]:
    settings = read_settings(run)
    mesh = Mesh(settings.planned.phases[0].plan, rank)
    checkpointer = Checkpointer(
        run,
        settings.checkpoint,
        warn=lambda message: None,
        ranks=WORLD,
        place=ranks(),
        attempt=attempt,
        coordinator=MeshCoordinator(mesh.control),
    )
    return Measured(
        settings, checkpointer, device=torch.device("cpu"), step_hooks=StepHooks(), stalls=Stalls(), mesh=mesh
    ), checkpointer


def measured(rank: int, run: Path) -> dict[str, dict[str, int]]:
    """A rank's job: the bytes that it takes while it begins with the weights of a Hugging Face directory, resumes, and
    goes on to the next phase."""
    with as_rank(rank, WORLD):
        phase_runner, checkpointer = course_of(run, rank, "first")
        phase_runner.restore()
        started = figures(phase_runner)
        step(phase_runner)
        checkpointer.save(phase_runner.state())
        checkpointer.close()
        phase_runner.close()
        del phase_runner, checkpointer

        phase_runner, checkpointer = course_of(run, rank, "second")
        phase_runner.restore()
        found = {"starting": started, "resuming": figures(phase_runner)}
        step(phase_runner)
        checkpointer.save(phase_runner.state(ended=True))
        checkpointer.settle()
        phase_runner.advance()
        found["next phase"] = figures(phase_runner)
        assert phase_runner.running
        assert phase_runner.running.phase.index == 1
        checkpointer.close()
        phase_runner.close()
        return found


def step(phase_runner: PhaseRunner) -> None:
    assert phase_runner.running
    phase_runner.running.executor.step(phase_runner.running.data.loader.next(4), lr=1e-3)
    phase_runner.at.step, phase_runner.at.phase_step = phase_runner.at.step + 1, phase_runner.at.phase_step + 1


def figures(phase_runner: Measured) -> dict[str, int]:
    assert phase_runner.running
    growth = phase_runner.memory.growth()
    executor = phase_runner.running.executor
    return {
        "growth": growth,
        "alive": phase_runner.alive,
        "parameters": sum(tensor.nbytes for tensor in local(executor.model_state()).values()),
        "moments": sum(tensor.nbytes for tensor in local(executor.optimizer_state()).values()),
    }


def measured_run(folder: Path, model: Model) -> Path:
    """A run of two phases under ZeRO-3 that starts from a Hugging Face directory."""
    first = make_run(folder, model=model)
    spec = read_settings(first).model(0)
    save(first / "checkpoints", state_of(spec))
    export_model(first, folder / "exported")
    shutil.rmtree(first)
    return make_run(
        folder,
        model=model,
        checkpoint=Checkpoints(save_every_steps=1, keep_last=2, write="blocking"),
        parallel__shard=WORLD,
        train__steps=None,
        train__phases=(Phase(steps=2), Phase(steps=2)),
        train__start_from=str(folder / "exported"),
    )


def state_of(spec: Spec) -> State:
    """Of a run that has done nothing yet."""
    weights, tokenizer = build(spec, seed=1).state_dict(), byte_tokenizer().to_str().encode()
    return State(step=1, tokens=0, seed=3, spec=spec, data={}, model=weights, optimizer={}, tokenizer=tokenizer)


@needs_peaks
def test_a_rank_starts_resumes_and_changes_phase_with_its_state_and_two_groups(tmp_path: Path) -> None:
    small, run = (measured_run(tmp_path / name, model) for name, model in (("small", SMALL), ("large", SIZES)))
    POOL.run(measured, small, world=WORLD)  # what libraries take when they are first used
    spec = read_settings(run).model(0)
    groups = 2 * sum(4 * prod(shape) for name, shape in spec.shapes().items() if name.startswith("blocks.0."))
    files = sum(path.stat().st_size for path in (tmp_path / "large" / "exported").glob("*.safetensors"))
    for rank in POOL.run(measured, run, world=WORLD):
        for what, found in rank.items():
            # Of a Hugging Face directory's files the pages that were read are mapped: the system's to take back.
            mapped = files if what == "starting" else 0
            assert found["growth"] <= 1.2 * (found["moments"] + groups) + mapped, what
            # Nothing of the phase before is left when the next one is built, but the buffer of the last save.
            saved = found["parameters"] + found["moments"] if what == "next phase" else 0
            assert found["alive"] <= 1.2 * (found["parameters"] + groups) + saved, what


def trained(rank: int, run: Path, world: int, stop: int = 0) -> None:
    """A rank's job: training in float64, once stopped as by a kill where `stop` says so."""
    with as_rank(rank, world) as patch:
        quick(patch)
        in_float64(patch)
        if stop:
            train_until(run, stop)
            leave()  # who is killed leaves its world in another way
        else:
            train(run)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(load(last_checkpoint(run)).model)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A Hugging Face directory, and the weights that three phases make of it on one device."""
    folder = tmp_path_factory.mktemp("one")
    first = make_run(folder / "first", train__steps=2)
    POOL.run(trained, first, 1, world=1)
    export_model(first, folder / "exported")
    run = make_run(folder, train__steps=None, train__phases=PHASES, train__start_from=str(folder / "exported"))
    POOL.run(trained, run, 1, world=1)
    return folder / "exported", weights(run)


@pytest.mark.parametrize("name", PLANS)
def test_phases_and_starts_of_every_plan_are_those_of_one_device(
    name: str, one_device: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    start, expected = one_device
    settings = {"train__steps": None, "train__phases": PHASES, "train__start_from": str(start)}
    run = make_run(tmp_path, **settings, **PLANS[name])
    POOL.run(trained, run, 2, 3, world=2)  # in the middle of the second phase
    POOL.run(trained, run, 2, world=2)
    found = weights(run)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        # AdamW lets the rounding of very small gradients grow; a wrong part would differ by 1e-2.
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-9)
