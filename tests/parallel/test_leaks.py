"""What an executor held is freed when it is gone."""

from __future__ import annotations

import gc
import os

import pytest

from tests.parallel.plans import CASES
from tests.parallel.pool import POOL
from tests.parallel.worlds import Proof

pytestmark = pytest.mark.xdist_group("pool")


def threads_left(rank: int) -> int:
    gc.collect()
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
@pytest.mark.parametrize("name", ["replicate 2", "ZeRO-3 over 2"])
def test_threads_of_process_groups_end_with_the_executor(name: str) -> None:
    """A group that something still holds keeps three threads for good. Torch and Python start some of their own when
    they first need them."""
    proof = Proof()
    proof.differences(CASES[name])
    before = POOL.run(threads_left, world=2)
    for _ in range(3):
        proof.differences(CASES[name])
    after = POOL.run(threads_left, world=2)
    assert all(now < then + 3 for now, then in zip(after, before, strict=True)), (before, after)
