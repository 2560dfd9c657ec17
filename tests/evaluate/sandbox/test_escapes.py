"""No attempt to escape gets anything, and each gets the right verdict."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from ropewalk.evaluate.sandbox.escapes import ESCAPES
from ropewalk.evaluate.sandbox.execution import run_program
from ropewalk.evaluate.sandbox.isolation import SandboxChoice, available
from ropewalk.evaluate.sandbox.judging import Judge
from ropewalk.evaluate.sandbox.program import Limits, Program

from .isolations import PROTECTING, any_isolation, isolation, reason_against

ROOT = Path(__file__).parents[3]
TIGHT = Limits(cpu_s=1, wall_s=4.0, memory_bytes=256 << 20)
OFTEN = ("fork bomb", "sleep", "a daemon that outlives it", "filling the disk", "memory of many processes")
both = pytest.mark.parametrize("name", PROTECTING)


def first_that_works() -> str:
    return next((name for name in PROTECTING if not reason_against(name)), "")


def wrong_verdicts(name: SandboxChoice, names: set[str]) -> dict[str, object]:
    chosen = [each for each in ESCAPES if each.name in names]
    found = Judge(sandbox=name, limits=TIGHT, workers=8).verdicts([each.program for each in chosen])
    return {each.name: got for each, got in zip(chosen, found, strict=True) if got.kind not in each.verdicts}


@both
def test_attempts_to_escape_are_contained_with_the_right_verdict(name: SandboxChoice) -> None:
    """All of them in the isolation that `auto` takes; those that look around, and a few others, in the second."""
    isolation(name)
    every = {each.name for each in ESCAPES}
    some = {each.name for each in ESCAPES if each.verdicts == ("pass",)} | {*OFTEN}
    assert wrong_verdicts(name, every if name == first_that_works() else some) == {}


@pytest.mark.slow
@both
def test_every_attempt_is_contained_in_every_isolation(name: SandboxChoice) -> None:
    isolation(name)
    assert wrong_verdicts(name, {each.name for each in ESCAPES}) == {}


def test_there_are_attempts_of_every_kind() -> None:
    assert len({each.name for each in ESCAPES}) == len(ESCAPES) >= 50
    assert {kind for each in ESCAPES for kind in each.verdicts} == {"pass", "fail", "timeout"}


LOOK = """
import os, socket
def look(port, name, path):
    found = []
    for family, address in ((socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, "\\0" + name)):
        try:
            one = socket.socket(family)
            one.settimeout(2)
            one.connect(address)
            found.append(f"socket {family:d}")
        except OSError:
            pass
    try:
        found.append(open(path).read())
        open(path, "w").write("changed")
    except OSError:
        pass
    return found
"""


@pytest.mark.parametrize("name", ["bubblewrap", "namespaces", "none"])
def test_servers_and_files_of_this_machine_are_out_of_reach_except_without_a_sandbox(
    name: SandboxChoice, tmp_path: Path
) -> None:
    found = available("none") if name == "none" else isolation(name)
    secret, abstract = tmp_path / "secret", f"ropewalk-test-{os.getpid()}-{name}"
    secret.write_text("token")
    secret.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0" + abstract)
        unix.listen()
        call = f"look({tcp.getsockname()[1]}, {abstract!r}, {str(secret)!r})"
        reached = name == "none"
        expected = [f"socket {socket.AF_INET:d}", f"socket {socket.AF_UNIX:d}", "token"] if reached else []
        verdict = run_program(
            Program(source=LOOK, tests=f"assert {call} == {expected}, {call}\n", names=("look",)), found, Limits()
        )  # type: ignore[arg-type]
    assert verdict.kind == "pass", verdict
    assert secret.read_text() == ("changed" if reached else "token")


def processes_with(mark: str) -> list[int]:
    """Processes of this machine whose command line contains `mark`."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in line:
                found.append(int(folder.name))
    return found


def gone(mark: str) -> bool:
    while processes_with(mark):
        time.sleep(0.01)
    return True


STAYS = """
import os, time
def stay():
    if os.fork() == 0:
        os.setsid()
        os.fork()
    time.sleep(1000)
"""
MARK = (64 << 20) + 2 * os.getpid()
"""Seen in command lines, and no other run's."""
HOLDS = "def stay():\n    return range(1 << 62)\n"


@both
@pytest.mark.parametrize("source", [STAYS, HOLDS], ids=["daemons", "harness busy in C"])
def test_no_process_outlives_a_program_that_runs_out_of_time(name: SandboxChoice, source: str) -> None:
    limits = Limits(cpu_s=1, wall_s=0.7, disk_bytes=MARK)
    program = Program(source=source, tests="sum(stay())\n", names=("stay",))
    assert run_program(program, isolation(name), limits).kind == "timeout"
    assert gone(f"disk_bytes={MARK}")


@both
def test_no_process_outlives_us(name: SandboxChoice) -> None:
    isolation(name)
    code = f"""
        from ropewalk.evaluate.sandbox.execution import run_program
        from ropewalk.evaluate.sandbox.isolation import available
        from ropewalk.evaluate.sandbox.program import Limits, Program
        program = Program(source={STAYS!r}, tests="stay()", names=("stay",))
        run_program(program, available({name!r}), Limits(wall_s=100.0, disk_bytes={MARK + 1}))
    """
    started = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT)
    while len(processes_with(f"disk_bytes={MARK + 1}")) < 4:  # also a harness, the program, and a daemon
        time.sleep(0.01)
        assert started.poll() is None
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert gone(f"disk_bytes={MARK + 1}")


def test_programs_that_run_together_do_not_share_their_processes() -> None:
    """Each may have as many as the limit says, whatever the others do."""
    found, limits = any_isolation(), Limits(processes=12)
    source = """
import threading
def start(count):
    ready = threading.Barrier(count + 1)
    for _ in range(count):
        threading.Thread(target=ready.wait, daemon=True).start()
    ready.wait(5)
    return "started"
"""
    program = Program(source=source, tests='assert start(8) == "started"\n', names=("start",))
    verdicts = []
    threads = [threading.Thread(target=lambda: verdicts.append(run_program(program, found, limits))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [verdict.kind for verdict in verdicts] == ["pass"] * 3
