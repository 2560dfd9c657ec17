"""The recipe of the quickstart trains to the same loss whatever the plan, through the command line."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import resources
from pathlib import Path

import pytest

from .elastic import Ended, train

PLANS = {
    "replicas": ("--nproc", "2"),
    "zero-3": ("--nproc", "2", "parallel.shard=2"),
    "tensor": ("--nproc", "2", "parallel.tensor=2"),
    "pipeline": ("--nproc", "2", "parallel.pipeline=2"),
    "context": ("--nproc", "2", "parallel.context=2"),
    "mpi": (),
}
MPIRUN = str(Path(sys.executable).parent / "mpirun")
# As many steps as tell a wrong gradient from rounding; Muon's orthogonal matrices enlarge a rounding of 6e-8.
STEPS = ("train.steps=40", "train.validate_every_steps=20", "plan.device=cpu")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "tiny.toml").write_text(resources.files("ropewalk.flow").joinpath("quickstart.toml").read_text())
    return folder, figures(train(folder, "name=alone", *STEPS, "--json"))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_the_quickstart_ends_with_the_loss_of_one_process(plan: str, alone: tuple[Path, dict[str, float]]) -> None:
    if plan == "mpi" and not shutil.which(MPIRUN):
        pytest.skip("needs mpirun")
    before = [MPIRUN, "--oversubscribe", "-n", "2"] if plan == "mpi" else []
    folder, expected = alone
    found = figures(train(folder, f"name={plan}", *STEPS, "--json", *PLANS[plan], before=before, timeout_s=600))
    assert found == pytest.approx(expected, rel=1e-4)


def figures(ended: Ended) -> dict[str, float]:
    assert ended.status == 0, ended.err
    return json.loads(ended.out)
