"""Ranks from the environments of three launchers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import ConfigError
from ropewalk.config.ranks import Ranks, StoreAddress, hosts, ranks, store_address

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[07-08],big3",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
AT_SLURMS_FIRST_NODE = "tcp://gpu07:23456"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Ranks()),
        (TORCHRUN, Ranks(3, 8, 1, "env://", "torchrun", local_world=2, node=1, restart=4, head="node1")),
        (SLURM, Ranks(6, 11, 2, AT_SLURMS_FIRST_NODE, "slurm", local_world=4, node=1, restart=2, head="gpu07")),
        (OPEN_MPI, Ranks(5, 6, 2, "mpi://", "mpi", local_world=3)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, Ranks()),
    ],
)
def test_each_launcher_is_recognised(environment: dict[str, str], expected: Ranks) -> None:
    assert ranks(environment) == expected


def test_a_launcher_inside_a_slurm_job_is_believed_before_slurm() -> None:
    assert ranks(SLURM | TORCHRUN).launcher == "torchrun"
    assert ranks(SLURM | OPEN_MPI).launcher == "mpi"


def test_a_batch_script_is_one_process_though_slurm_gives_it_a_rank() -> None:
    script = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert ranks(script) == Ranks()


@pytest.mark.parametrize("environment", [SLURM, OPEN_MPI])
def test_an_address_that_the_user_gives_is_used(environment: dict[str, str]) -> None:
    assert ranks(environment | {"MASTER_ADDR": "elsewhere"}).rendezvous == "env://"


@pytest.mark.parametrize("text", ["", "x", "-1", "1.0"])
def test_a_rank_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f'environment: WORLD_SIZE is "{text}"'):
        ranks(TORCHRUN | {"WORLD_SIZE": text})


def test_this_process_is_asked_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert ranks().rank == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login", ["login"]),
        ("a,b-1,c", ["a", "b-1", "c"]),
        ("node[001-003,7]", ["node001", "node002", "node003", "node7"]),
        ("r[1-2]n[08-10].cluster", [f"r{r}n{n}.cluster" for r in "12" for n in ("08", "09", "10")]),
        ("a[1,3],b,c[5-6]", ["a1", "a3", "b", "c5", "c6"]),
    ],
)
def test_a_node_list_names_its_machines(text: str, expected: list[str]) -> None:
    assert hosts(text) == expected


@settings(deadline=None)
@given(first=st.integers(0, 200), count=st.integers(1, 30), width=st.integers(1, 5))
def test_a_range_of_machines_keeps_its_zeros(first: int, count: int, width: int) -> None:
    names = [f"n{number:0{width}d}" for number in range(first, first + count)]
    text = f"n[{names[0][1:]}-{names[-1][1:]}]"
    assert hosts(text) == names


def test_the_store_of_a_launch_is_where_torch_meets() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "hemp", "MASTER_PORT": "29500"}
    assert store_address(ranks(torchrun), torchrun) == StoreAddress("hemp", 29500, served=False)
    agent = torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert store_address(ranks(agent), agent) == StoreAddress("hemp", 29500, served=True)
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_STEP_NODELIST": "jute[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert store_address(ranks(slurm), slurm) == StoreAddress("jute1", 20007, served=False)
    mpi = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "SIZE", "LOCAL_RANK")}
    assert store_address(ranks(mpi), mpi) is None


def test_a_launch_without_an_address_is_refused() -> None:
    lost = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT are not both set"):
        store_address(ranks(lost), lost)
