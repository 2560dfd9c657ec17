"""Time and memory: what takes too much of them is set aside, and the process is as it was."""

from __future__ import annotations

import itertools
import resource
import signal
import threading

import pytest

from ropewalk.prepare.config import Limits
from ropewalk.prepare.readers.caps import capped
from ropewalk.prepare.readers.item import Fault


def spin() -> None:
    for _ in itertools.count():
        pass


def swallow() -> None:
    while True:
        try:
            spin()
        except Exception:
            continue


def recurse() -> None:
    recurse()


@pytest.mark.parametrize("function", [spin, swallow])
def test_what_takes_too_long_is_a_fault(function) -> None:
    with pytest.raises(Fault) as caught:
        capped(Limits(document_s=0.05), function)
    assert (caught.value.rule, caught.value.threshold) == ("too_slow", 0.05)


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_DATA"), reason="the system has no such limit")
def test_what_takes_too_much_memory_is_a_fault() -> None:
    with pytest.raises(Fault, match="too_much_memory"):
        capped(Limits(memory_bytes=100_000_000), lambda: bytes(500_000_000))
    assert len(capped(Limits(memory_bytes=100_000_000), lambda: bytes(10_000_000))) == 10_000_000


def test_what_calls_itself_without_end_is_a_fault() -> None:
    with pytest.raises(Fault, match="too_deep"):
        capped(Limits(), recurse)


def test_limits_are_gone_afterwards() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGPROF)
    assert capped(Limits(), lambda: 5) == 5
    with pytest.raises(Fault):
        capped(Limits(document_s=0.01), spin)
    assert (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGPROF)) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_another_thread_may_read_too() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(capped(Limits(), lambda: 5)))
    thread.start()
    thread.join()
    assert found == [5]
