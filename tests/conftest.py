"""Which test worker gets which test: those that share the pool of processes (tests/parallel/pool.py) all go to one, and
so do those of a file that makes something for all of its tests, or whose kernels each worker would compile.

pytest-xdist's own `--dist loadgroup` does this by the mark `xdist_group`; with pytest 9.2 it no longer sees the mark,
since a test's name can no longer be changed after the fact. Here the mark is read from the file.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# The same examples in every run, however long one takes: what passes here passes elsewhere.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

WITH_POWER = ("tests/train/", "tests/flow/", "tests/cli/", "tests/evaluate/")
"""Folders whose tests kill processes at most: what was written stays without `os.fsync`, whose calls in this process do
nothing there. That files are synchronized is for tests/checkpoint and tests/prepare, which enumerate power cuts."""
SYNC = os.fsync
ROOT = Path(__file__).parents[1]
MARK = 'xdist_group("pool")'
COMPILED = ("tests/prepare/", "tests/load/")
"""Folders whose tests compile kernels in a fresh clone, up to eleven seconds each."""
MADE_ONCE = ('scope="module"', "@functools.cache")
"""What a file makes once in each worker that gets one of its tests."""
MOST_WORKERS = 16
"""A worker takes a gigabyte, and the tests of the pool last as long with more."""


class PoolTogether(LoadScopeScheduling):
    """Every test by itself, those of the pool as one, and those of a file that shares what it makes."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        text = _text(file)
        if MARK in text:
            return "pool"
        together = file.startswith(COMPILED) or any(mark in text for mark in MADE_ONCE)
        return file if together else nodeid


@functools.cache
def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PoolTogether:
    return PoolTogether(config, log)


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: the cores that this process may use, which need not be all of the machine's."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


class Frozen:
    """Keeps modules and collected tests out of the sight of the garbage collector.

    They are a million objects that stay, and every training ends with a collection: half a second each time.
    """

    MANY = 100
    """Modules that are imported on the way before they are kept out too."""

    def __init__(self) -> None:
        self._modules = 0

    def pytest_collection_finish(self) -> None:
        self._freeze()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if len(sys.modules) > self._modules + self.MANY:
            self._freeze()

    def _freeze(self) -> None:
        gc.collect()
        gc.freeze()
        self._modules = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    os.fsync = (lambda _: None) if item.nodeid.startswith(WITH_POWER) else SYNC


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Frozen())
