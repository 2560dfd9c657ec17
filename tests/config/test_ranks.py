"""Ranks from the environments of three launchers."""

from __future__ import annotations

import pytest

from ropewalk.base.errors import ConfigError
from ropewalk.config.ranks import Ranks, ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Ranks()),
        (TORCHRUN, Ranks(3, 8, 1)),
        (SLURM, Ranks(0, 4, 0)),
        (OPEN_MPI, Ranks(5, 6, 2)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Ranks()),
    ],
)
def test_each_launcher_is_recognised(environment: dict[str, str], expected: Ranks) -> None:
    assert ranks(environment) == expected


def test_a_launcher_inside_a_slurm_job_is_believed_before_slurm() -> None:
    assert ranks(SLURM | TORCHRUN) == Ranks(3, 8, 1)
    assert ranks(SLURM | OPEN_MPI) == Ranks(5, 6, 2)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.0"])
def test_a_rank_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f'environment: WORLD_SIZE is "{text}"'):
        ranks(TORCHRUN | {"WORLD_SIZE": text})


def test_this_process_is_asked_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert ranks() == Ranks(3, 8, 1)
