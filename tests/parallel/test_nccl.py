"""Every plan of the table on NCCL: at its own number of ranks, equal to one device in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.parallel.curves import losses, plan_of
from tests.parallel.plans import CASES, on_gpu
from tests.parallel.pool import NCCL
from tests.parallel.test_compiled_plans import trained_in_float64
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


@pytest.mark.parametrize(
    "name", ["tensor 2", "tensor 2 with sequence", "ring 2", "ulysses 2", "ZeRO-3 over 2 x tensor 2"]
)
def test_compiled_plan_on_nccl_is_equal_to_one_that_is_not(name: str) -> None:
    """In float64: losses and gradient norms, what was sent, and one graph."""
    each = on_gpu(CASES[name])
    plain = NCCL.run(trained_in_float64, each, False, world=each.plan.world)
    compiled = NCCL.run(trained_in_float64, each, True, world=each.plan.world, timeout_s=400)
    for (mine, sent, breaks), (theirs, expected, _) in zip(compiled, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-11)
        assert sent == expected
        assert not breaks


@pytest.mark.parametrize(
    "settings",
    [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"context": 2}, {"context": 2, "context_method": "ulysses"}],
    ids=str,
)
def test_compiled_plan_on_nccl_learns_as_one_that_is_not_in_bfloat16(settings: dict[str, object]) -> None:
    plan = plan_of(settings, device="cuda")
    assert plan.compile, "nothing speaks against compiled blocks"
    plain = NCCL.run(losses, dataclasses.replace(plan, compile=False), 128, 10, world=2, timeout_s=200)
    for mine, theirs in zip(NCCL.run(losses, plan, 128, 10, world=2, timeout_s=400), plain, strict=True):
        assert mine == pytest.approx(theirs, rel=0.01)
