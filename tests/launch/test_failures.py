"""When one rank fails, all end.

The time from the end of the first process to the end of the last is printed, not asserted: a second or two here, where
most of it is the moment that a process lingers for its launcher; ten are promised.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ropewalk.base.errors import PeerFailed
from ropewalk.base.rendezvous import Rendezvous
from ropewalk.train import __main__ as worker
from ropewalk.train import loop
from tests.flow.tiny import write_tiny
from tests.tiny import make_run

from .ranks import Environment, launch, mpirun, srun, torchrun

WORLD = 3


@pytest.mark.parametrize(
    "environment", [torchrun, *(pytest.param(each, marks=pytest.mark.slow) for each in (srun, mpirun))]
)
def test_a_setting_that_rank_0_refuses_ends_all_ranks_with_its_message(
    environment: Environment, tmp_path: Path
) -> None:
    write_tiny(tmp_path)
    ended = launch(tmp_path, environment, "parallel.tensor=2", world=WORLD)
    assert [rank.status for rank in ended] == [2] * WORLD
    message = ended[0].err.strip().splitlines()[-1]
    assert "3 processes" in message or "3 ranks" in message
    for rank in ended[1:]:
        assert f"rank 0 on {socket.gethostname()} failed first: " in rank.err
        assert message in rank.err
        assert "Traceback" not in rank.err


@pytest.mark.parametrize(
    ("accident", "said"),
    [
        pytest.param("a strand broke", "failed first after step 3: ValueError: a strand broke", id="raises"),
        pytest.param("", "failed first: it ended without a word", id="killed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_in_training_ends_the_others_with_the_first_error(
    accident: str, said: str, tmp_path: Path
) -> None:
    write_tiny(tmp_path)
    ended = launch(tmp_path, torchrun, "train.batch_size=3", world=WORLD, accidents={"1-3": accident})
    assert ended[1].status == (1 if accident else -9)
    for rank in (ended[0], ended[2]):
        assert rank.status == PeerFailed.exit_code, rank.err
        assert f"rank 1 on {socket.gethostname()} {said}" in rank.err
        assert "Traceback" not in rank.err


def test_a_worker_of_a_team_reports_the_failure_of_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(loop, "train", lambda run, *, rendezvous, **_: given.append(rendezvous))
    assert worker.main([str(make_run(tmp_path))]) == 0
    assert isinstance(given[0], Rendezvous)
