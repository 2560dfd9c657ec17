"""The ways to isolate that work on this machine."""

from __future__ import annotations

import functools

import pytest

from ropewalk.evaluate.sandbox.execution import run_program
from ropewalk.evaluate.sandbox.isolation import TRIAL, Isolation, SandboxChoice, available
from ropewalk.evaluate.sandbox.program import Limits

PROTECTING: tuple[SandboxChoice, ...] = ("bubblewrap", "namespaces")


@functools.cache
def reason_against(name: SandboxChoice) -> str:
    """Why that isolation does not work here; empty if it does."""
    found = available(name)
    if isinstance(found, str):
        return found
    verdict = run_program(TRIAL, found, Limits())
    return "" if verdict.kind == "pass" else verdict.detail or verdict.kind


def isolation(name: SandboxChoice) -> Isolation:
    """That isolation; the test is skipped where it does not work."""
    if reason := reason_against(name):
        pytest.skip(f"{name} does not work here: {reason}")
    found = available(name)
    assert isinstance(found, Isolation)
    return found


def any_isolation() -> Isolation:
    """The first that works."""
    return isolation(next((name for name in PROTECTING if not reason_against(name)), PROTECTING[-1]))
