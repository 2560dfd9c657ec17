"""Every plan of the table on NCCL: at its own number of ranks, equal to one device in float64."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.plans import CASES, on_gpu
from tests.parallel.pool import NCCL
from tests.parallel.worlds import Proof, wrong

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("pool"),
]

PROOF = Proof(NCCL)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.plan.world > 1])
def test_plan_on_nccl_is_equal_to_one_device(name: str) -> None:
    """Loss, norm, gradients, weights, moments, scores; and what a plan before it left loads with the same bits."""
    found = PROOF.differences(on_gpu(CASES[name]))
    assert not wrong(found), found
