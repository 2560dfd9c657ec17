"""The MPI backend under real `mpirun`s: collectives equal numpy's, training steps equal gloo's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ropewalk.base.errors import MissingPackage, UserError
from ropewalk.config.ranks import Ranks
from ropewalk.config.threads import YIELD
from ropewalk.parallel import mpi
from ropewalk.parallel.comm import Group
from tests.parallel.mpi_worker import gradient_steps
from tests.parallel.pool import POOL

pytestmark = pytest.mark.xdist_group("pool")

ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
# A container's only user is often root; test machines have fewer cores than ranks.
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1", YIELD: "1"}
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="needs the packages openmpi and mpi4py")


def mpirun(count: int, *command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What `mpirun -n COUNT python COMMAND` did."""
    words = [str(MPIRUN), "--oversubscribe", "-n", str(count), sys.executable, *command]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def told_by(count: int, backend: str) -> list[dict]:
    done = mpirun(count, "-m", "tests.parallel.mpi_worker", backend)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def steps_on_gloo(rank: int, world: int) -> list[float]:
    import torch.distributed as dist

    return gradient_steps(Group("world", range(world), rank, dist.group.WORLD))


@needs_mpirun
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives_over_mpi_are_numpys_and_steps_those_of_gloo(world: int) -> None:
    told = told_by(world, "mpi")
    assert [rank["wrong"] for rank in told] == [[]] * world
    assert {rank["backend"] for rank in told} == {mpi.NAME}
    on_gloo = POOL.run(steps_on_gloo, world, world=world)
    assert all(rank["weights"] == pytest.approx(on_gloo[0], abs=1e-14) for rank in told)


@needs_mpirun
def test_processes_of_mpirun_meet_without_an_address_on_another_backend_too() -> None:
    told = told_by(2, "gloo")
    assert {rank["backend"] for rank in told} == {"gloo"}
    assert [rank["wrong"] for rank in told] == [[], []]


@needs_mpirun
def test_a_process_that_fails_ends_the_others_with_its_status() -> None:
    job = """
import sys
from ropewalk.config.ranks import ranks
from ropewalk.parallel import mpi
mpi.register(ranks())
store = mpi.meet()
if ranks().rank == 1:
    sys.exit(2)
mpi._mpi().COMM_WORLD.Barrier()
"""
    assert mpirun(2, "-c", job).returncode == 2


@needs_mpirun
def test_processes_that_mpirun_did_not_start_are_told_how_to() -> None:
    with pytest.raises(UserError, match=r"process 0 of 1, not 1 of 2; start it with `mpirun -n 2 ropewalk train"):
        mpi.register(Ranks(rank=1, world=2))


def test_the_absence_of_mpi4py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingPackage, match=r"needs the package `mpi4py`; install it .*\[mpi\]"):
        mpi.register(Ranks())
