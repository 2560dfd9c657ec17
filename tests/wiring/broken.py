"""Mechanisms that are no setting, each broken in one place, with the test that must notice.

A pytest plugin: `pytest -p tests.wiring.broken --break NAME TEST`; `benchmarks/mutate.py --named` runs them all.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Break:
    """What stands in the place of what, and which test fails then."""

    target: str
    """`module:name` or `module:Class.name`."""
    instead: Callable[[Any], Any]
    """Made of the real one."""
    test: str


def _says(value: Any) -> Callable[[Any], Any]:
    return lambda real: lambda *_, **__: value


def _with(name: str, value: Any) -> Callable[[Any], Any]:
    """The real one, one argument of which is always the same."""
    return lambda real: lambda *args, **options: real(*args, **{**options, name: value})


def _unblocked(real: Any) -> Any:
    return lambda self: [dataclasses.replace(saved, blocked_s=0.0) for saved in real(self)]


def _drained(real: Any) -> Any:
    def submit(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self.drain()

    return submit


KEYS = "tests/test_recipe_keys.py::test_another_value_makes_a_difference"
BROKEN = {
    "regular saves are never due": Break(
        *("ropewalk.train.save_interval:Interval.due", _says(False)),
        test="tests/train/test_training.py::test_hooks_are_called_at_their_moments",
    ),
    "stalls of saves are told as 0": Break(
        *("ropewalk.checkpoint.write.persist:Persister.finished", _unblocked),
        test="tests/train/test_saving.py::test_a_save_that_training_waits_for_is_told_as_a_stall",
    ),
    "background saves block": Break(
        *("ropewalk.checkpoint.write.persist:Persister.submit", _drained),
        test="tests/train/test_saving.py::test_training_goes_on_while_a_save_is_written",
    ),
    "one thread writes checkpoints": Break(
        "ropewalk.train.checkpointer:Persister", _with("threads", 1), test=f"{KEYS}[checkpoint.threads]"
    ),
    "carriage returns stay": Break(
        *("ropewalk.prepare.normalise:_with_newlines", lambda real: lambda raw: (raw, real(raw)[1])),
        test="tests/prepare/test_normalise.py",
    ),
    "the rate of the store is the cold rate": Break(
        *("ropewalk.load.probe:store_rate", lambda real: lambda cold, warm: cold),
        test="tests/load/test_probe.py::test_the_store_is_what_is_left_of_the_cold_rate",
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--break", default="", dest="broken", help="what is to be broken")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("broken")
    if not name:
        return
    module, _, path = BROKEN[name].target.partition(":")
    owner: Any = importlib.import_module(module)
    *within, last = path.split(".")
    for part in within:
        owner = getattr(owner, part)
    setattr(owner, last, BROKEN[name].instead(getattr(owner, last)))
