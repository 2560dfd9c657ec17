"""Ranks find each other whatever an earlier launch has left behind, and all end with the first failure of any."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ropewalk.base.errors import PeerFailed, UserError
from ropewalk.base.files import write_json
from ropewalk.base.network import connect
from ropewalk.base.rendezvous import PURPOSE, Rendezvous
from tests.hostile import greetings, texts

WORLD = 4
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads have no launcher to linger for."""
    monkeypatch.setattr("ropewalk.base.rendezvous.LINGER_S", 0.05)


@dataclass
class Rank:
    """A rank that is a thread: what it said and how it ended."""

    said: list[str] = field(default_factory=list)
    status: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, status: int) -> None:
        self.status = status
        self.ended.set()


def enter(run: Path, rank: int, ended: Rank, **options: object) -> Rendezvous:
    return Rendezvous(run, rank=rank, world=WORLD, one_host=True, say=ended.said.append, end=ended.end, **options)


@contextlib.contextmanager
def launched(run: Path) -> Iterator[list[tuple[Rendezvous, Rank]]]:
    """All ranks, connected."""
    ranks = [Rank() for _ in range(WORLD)]
    made = [enter(run, rank, ended) for rank, ended in enumerate(ranks)]
    until(lambda: made[0]._link._missing() == [])
    try:
        yield list(zip(made, ranks, strict=True))
    finally:
        for rendezvous in made:
            rendezvous.leave()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def leave_traces(tmp_path: Path, closed_port: int) -> None:
    """The address of a launch that was killed."""
    old = {"host": socket.gethostname(), "addresses": ["127.0.0.1"], "port": closed_port, "token": "old"}
    write_json(tmp_path / ".run.rendezvous.json", old)


@pytest.mark.parametrize("seed", range(4))
def test_everyone_hears_the_first_word_of_rank_0_whoever_comes_first(tmp_path: Path, seed: int) -> None:
    run, draw, heard = tmp_path / "run", random.Random(seed), {}
    with socket.create_server(("127.0.0.1", 0)) as once:
        leave_traces(tmp_path, once.getsockname()[1])

    def attend(rank: int, late_s: float) -> None:
        time.sleep(late_s)
        with enter(run, rank, Rank()) as rendezvous:
            heard[rank] = rendezvous.wait()

    others = [threading.Thread(target=attend, args=(rank, draw.uniform(0, 0.4))) for rank in range(1, WORLD)]
    for other in others:
        other.start()
    time.sleep(draw.uniform(0, 0.4))
    with enter(run, 0, Rank()) as rendezvous:
        assert heard == {}
        rendezvous.announce("train")
        rendezvous.announce("nothing")
        for other in others:
            other.join()
    assert heard == dict.fromkeys(range(1, WORLD), "train")
    assert list(tmp_path.iterdir()) == []


def test_a_process_alone_waits_for_nobody(tmp_path: Path) -> None:
    with Rendezvous(tmp_path / "run", rank=0, world=1) as rendezvous:
        rendezvous.announce("train")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_of_another_launch_and_a_stranger_are_not_let_in(tmp_path: Path) -> None:
    with enter(tmp_path / "run", 0, Rank(), launch="b", timeout_s=0.5) as rendezvous:
        other = enter(tmp_path / "run", 1, Rank(), launch="a", timeout_s=0.5)
        port = json.loads((tmp_path / ".run.rendezvous.json").read_text())["port"]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b'GET / HTTP/1.1\n[1]\n{"rank": 2, "token": "x", "launch": "b", "host": "h", "pid": 1}\n')
            with pytest.raises(UserError, match="ranks 1, 2, 3 of 4 did not arrive within 0 s"):
                rendezvous.announce("train")
        with pytest.raises(UserError, match="belongs to another launch"):
            other.wait()


def test_a_refusal_of_rank_0_reaches_ranks_that_wait_and_ranks_that_come_later(tmp_path: Path) -> None:
    raised: dict[int, PeerFailed] = {}

    def attend(rank: int, late_s: float) -> None:
        time.sleep(late_s)
        with pytest.raises(PeerFailed) as caught, enter(tmp_path / "run", rank, Rank()) as rendezvous:
            rendezvous.wait()
        raised[rank] = caught.value

    others = [threading.Thread(target=attend, args=(rank, rank * 0.3)) for rank in range(1, WORLD)]
    for other in others:
        other.start()
    with pytest.raises(UserError), enter(tmp_path / "run", 0, Rank(), late_s=PATIENCE_S):
        raise UserError("`train.steps` is 0")
    for other in others:
        other.join()
    assert {rank: error.exit_code for rank, error in raised.items()} == dict.fromkeys(range(1, WORLD), 2)
    assert {str(error) for error in raised.values()} == {
        f"rank 0 on {socket.gethostname()} failed first: `train.steps` is 0"
    }


@pytest.mark.parametrize("failing", range(WORLD))
def test_a_rank_that_raises_ends_all_others_with_its_error(tmp_path: Path, failing: int) -> None:
    with launched(tmp_path / "run") as ranks:
        with pytest.raises(ValueError), ranks[failing][0].reporting(lambda: 5):
            raise ValueError("no such thing")
        others = [rank for number, (_, rank) in enumerate(ranks) if number != failing]
        assert all(rank.ended.wait(PATIENCE_S) for rank in others)
    assert [rank.status for rank in others] == [PeerFailed.exit_code] * (WORLD - 1)
    said = f"rank {failing} on {socket.gethostname()} failed first after step 5: ValueError: no such thing"
    assert all(line.endswith(said) for rank in others for line in rank.said)
    assert ranks[failing][1].said == []


def test_the_cause_is_named_and_not_its_consequence_on_another_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cause comes, however slow this machine is.
    monkeypatch.setattr("ropewalk.base.rendezvous.SETTLE_S", PATIENCE_S)
    with launched(tmp_path / "run") as ranks:

        def fail_in_a_collective() -> None:
            with contextlib.suppress(RuntimeError), ranks[1][0].reporting(lambda: 5):
                raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")

        consequence = threading.Thread(target=fail_in_a_collective)
        consequence.start()
        until(lambda: ranks[0][0]._link._suspect is not None)
        with pytest.raises(ValueError), ranks[3][0].reporting(lambda: 5):
            raise ValueError("the cause")
        assert all(ranks[rank][1].ended.wait(PATIENCE_S) for rank in (0, 1, 2))
        consequence.join()
    assert all("rank 3" in line and "the cause" in line for rank in (0, 1, 2) for line in ranks[rank][1].said)


def test_ranks_that_say_goodbye_end_nobody(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as ranks:
        for number in (2, 0, 3, 1):
            with pytest.raises(KeyboardInterrupt), ranks[number][0]:
                raise KeyboardInterrupt
        assert not any(rank.ended.wait(0.1) for _, rank in ranks)


MEMBER = """
import sys, time
from pathlib import Path
from ropewalk.base.network import connect
from ropewalk.base.rendezvous import PURPOSE, Rendezvous
from tests.hostile import greetings, texts
with Rendezvous(Path(sys.argv[1]), rank=int(sys.argv[2]), world=4, one_host=True) as rendezvous:
    if rendezvous.rank: rendezvous.wait()
    else: rendezvous.announce("train")
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_process_ends_all_others_and_a_stopped_one_does_not(tmp_path: Path, killed: int) -> None:
    command = [sys.executable, "-c", MEMBER, str(tmp_path / "run")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(WORLD)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * WORLD
        for signal_number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(ranks[1].pid, signal_number)
            time.sleep(0.3)
        assert [rank.poll() for rank in ranks] == [None] * WORLD
        ranks[killed].kill()
        others = [rank for number, rank in enumerate(ranks) if number != killed]
        for other in others:
            _, words = other.communicate(timeout=PATIENCE_S)
            assert other.returncode == PeerFailed.exit_code
            assert f"rank {killed} on {socket.gethostname()} failed first: it ended without a word" in words
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_stranger_can_neither_report_a_failure_nor_keep_a_rank_out(tmp_path: Path) -> None:
    ranks = [Rank() for _ in range(WORLD)]
    leader = enter(tmp_path / "run", 0, ranks[0])
    file = tmp_path / ".run.rendezvous.json"
    assert file.stat().st_mode & 0o777 == 0o600, "the token is for this user alone"
    port, draw = json.loads(file.read_text())["port"], random.Random(0)
    strangers, nonces = [], greetings(draw, draw.randbytes(48))
    failed = json.dumps({"failed": {"rank": 1, "host": "x", "message": "lie", "status": 1}}).encode() + b"\n"
    for _ in range(400):
        with contextlib.suppress(OSError):
            stranger = socket.create_connection(("127.0.0.1", port))
            stranger.sendall(draw.choice([b"", next(nonces) + failed, failed, b"[" * 5000]))
            strangers.append(stranger)
    members = [enter(tmp_path / "run", rank, ranks[rank]) for rank in range(1, WORLD)]
    leader.announce("train")
    assert [member.wait() for member in members] == ["train"] * (WORLD - 1)
    assert not any(rank.ended.wait(0.1) for rank in ranks)
    for rendezvous in (*members, leader):
        rendezvous.leave()
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_says_nonsense_ends_nobody_but_itself(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as ranks:
        address = json.loads((tmp_path / ".run.rendezvous.json").read_text())
        draw = random.Random(1)
        lines = texts(draw)
        for _ in range(100):
            link = connect(
                ("127.0.0.1", address["port"]), secret=address["token"].encode(), purpose=PURPOSE, timeout_s=60
            )
            with contextlib.suppress(OSError), link:
                link.sendall(next(lines).replace(b"\n", b"") + b"\n" + draw.randbytes(300_000))
        assert not any(rank.ended.wait(0.05) for _, rank in ranks)
