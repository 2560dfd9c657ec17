"""Four ranks on NCCL, one of which is killed again and again: the run ends with the bits of an undisturbed one.

Ranks share the first GPU, each as a machine of its own (tests/parallel/pool.py says how), without MPS: its server may
not survive a client that is killed inside a kernel.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ropewalk.base.errors import PeerFailed
from tests.flow.tiny import write_tiny
from tests.parallel.pool import NCCL, own_host

from .elastic import trained_identity
from .ranks import launch, torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("pool"),
]

WORLD, STEPS = 4, 24
SETTINGS = (
    "plan.device=cuda",
    "plan.compile=off",
    "plan.deterministic=true",
    "parallel.exact=true",
    "parallel.shard=2",
    "parallel.replicate=2",
    f"train.steps={STEPS}",
)


def on_one_gpu(rank: int, world: int, port: int) -> dict[str, str]:
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
    return torchrun(rank, world, port) | node | own_host(rank) | {"CUDA_MPS_PIPE_DIRECTORY": "no-server"}


def test_five_kills_change_no_bit(tmp_path: Path) -> None:
    NCCL.close()
    undisturbed, disturbed = tmp_path / "a", tmp_path / "b"
    for folder in (undisturbed, disturbed):
        write_tiny(folder)
    assert [rank.status for rank in launch(undisturbed, on_one_gpu, *SETTINGS, world=WORLD)] == [0] * WORLD
    draw = random.Random(5)
    for step in sorted(draw.sample(range(1, STEPS), 5)):
        victim = draw.randrange(WORLD)
        ended = launch(disturbed, on_one_gpu, *SETTINGS, world=WORLD, accidents={f"{victim}-{step}": ""})
        statuses = [rank.status for rank in ended]
        assert statuses.pop(victim) == -9, ended[victim].err
        assert statuses == [PeerFailed.exit_code] * (WORLD - 1), "\n".join(rank.err for rank in ended)
    last = launch(disturbed, on_one_gpu, *SETTINGS, world=WORLD)
    assert [rank.status for rank in last] == [0] * WORLD, last
    assert trained_identity(disturbed) == trained_identity(undisturbed)
