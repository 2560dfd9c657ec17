"""Models larger than one device: a rank resumes, changes phase and starts from elsewhere with its own parts alone."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.tensors import load
from ropewalk.config.ranks import ranks
from ropewalk.flow.models import export_model
from ropewalk.load.stalls import Stalls
from ropewalk.model.config import Lora, Model
from ropewalk.parallel.apply import local
from ropewalk.parallel.executor import Points
from ropewalk.parallel.mesh import Mesh, leave
from ropewalk.train.config import Phase
from ropewalk.train.course import Course
from ropewalk.train.keeping import Keeper
from ropewalk.train.loop import train
from ropewalk.train.phase import Running
from ropewalk.train.settings import read_settings
from ropewalk.train.together import MeshTogether
from tests.parallel.pool import POOL
from tests.parallel.ranked import as_rank
from tests.parallel.resident import Resident, alive_bytes, needs_peaks
from tests.tiny import make_run
from tests.train.runs import in_float64, last_checkpoint, quick, train_until

pytestmark = pytest.mark.xdist_group("pool")

WORLD = 2
SIZES = Model(layers=8, width=256, heads=4, mlp_width=704)
"""6 M numbers in eight blocks: a rank's parameters are 13 MB, its moments 26 MB, two blocks 6 MB."""
PHASES = (Phase(steps=2), Phase(steps=2, lora=Lora(rank=2, alpha=6.0)), Phase(steps=2, moments="keep"))
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"parallel__shard": 2},
    "tensor": {"parallel__tensor": 2},
    "pipeline": {"parallel__pipeline": 2, "plan__microbatch_size": 1},
}


class Measured(Course):
    """A course that tells what memory it takes from the moment on when a phase is built, and what is alive then."""

    memory: Resident
    alive: int

    def _open(self, index: int) -> Running:
        running = super()._open(index)
        self.alive, self.memory = alive_bytes(), Resident()
        return running


def course_of(run: Path, rank: int, attempt: str) -> tuple[Measured, Keeper]:
    settings = read_settings(run)
    mesh = Mesh(settings.planned.phases[0].plan, rank)
    keeper = Keeper(
        run,
        settings.checkpoint,
        warn=lambda message: None,
        ranks=WORLD,
        place=ranks(),
        attempt=attempt,
        together=MeshTogether(mesh.control),
    )
    return Measured(settings, keeper, device=torch.device("cpu"), points=Points(), stalls=Stalls(), mesh=mesh), keeper


def measured(rank: int, run: Path) -> dict[str, dict[str, int]]:
    """A rank's job: the bytes that it takes while it resumes, and while it goes on to the next phase."""
    with as_rank(rank, WORLD):
        course, keeper = course_of(run, rank, "first")
        course.restore()
        step(course)
        keeper.save(course.state())
        keeper.close()
        course.close()
        del course, keeper

        course, keeper = course_of(run, rank, "second")
        course.restore()
        found = {"resuming": figures(course)}
        step(course)
        keeper.save(course.state(ended=True))
        keeper.settle()
        course.advance()
        found["next phase"] = figures(course)
        assert course.running
        assert course.running.phase.index == 1
        keeper.close()
        course.close()
        return found


def step(course: Course) -> None:
    assert course.running
    course.running.executor.step(course.running.data.loader.next(4), lr=1e-3)
    course.at.step, course.at.phase_step = course.at.step + 1, course.at.phase_step + 1


def figures(course: Measured) -> dict[str, int]:
    assert course.running
    growth = course.memory.growth()
    executor = course.running.executor
    return {
        "growth": growth,
        "alive": course.alive,
        "parameters": sum(tensor.nbytes for tensor in local(executor.model_state()).values()),
        "moments": sum(tensor.nbytes for tensor in local(executor.optimizer_state()).values()),
    }


@needs_peaks
def test_a_rank_resumes_and_changes_phase_with_its_state_and_two_groups(tmp_path: Path) -> None:
    phases = (Phase(steps=2), Phase(steps=2))
    settings: dict[str, Any] = {"parallel__shard": WORLD, "train__steps": None, "train__phases": phases}
    blocking = Checkpoints(save_every_steps=1, keep_last=2, write="blocking")
    small = make_run(tmp_path / "small", checkpoint=blocking, **settings)
    POOL.run(measured, small, world=WORLD)  # what libraries take when they are first used
    run = make_run(tmp_path, checkpoint=blocking, model=SIZES, **settings)
    spec = read_settings(run).model(0)
    groups = 2 * sum(4 * prod(shape) for name, shape in spec.shapes().items() if name.startswith("blocks.0."))
    for rank in POOL.run(measured, run, world=WORLD):
        for what, found in rank.items():
            assert found["growth"] <= 1.2 * (found["moments"] + groups), what
            # Nothing of the phase before is left when the next one is built, but the buffer of the last save.
            saved = 0 if what == "resuming" else found["parameters"] + found["moments"]
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
