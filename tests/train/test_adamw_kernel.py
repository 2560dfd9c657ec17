"""The kernel of AdamW against its rule: on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

from ropewalk.train.optim.adamw import Adam

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
        reason="wants a GPU or TRITON_INTERPRET=1",
    ),
]
ADAM = Adam(beta1=0.9, beta2=0.95, epsilon=1e-8)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NARROW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""The interpreter does not know bfloat16."""


def stepped(*, left_out: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What the kernel and the rule make of the same weights, moments and narrow gradients in their third step."""
    from ropewalk.train.kernels.adamw import update_

    draw = torch.Generator().manual_seed(0)
    weight, mean, square = (torch.randn(3000, generator=draw).to(DEVICE) for _ in range(3))
    # Sizes as gradients have them, zeros and the largest among them.
    gradient = (torch.randn(3000, generator=draw) * 10.0 ** torch.linspace(-12, 4, 3000)).to(DEVICE, NARROW)
    gradient[:10] = 0
    moments = {"exp_avg": 1e-2 * mean, "exp_avg_sq": 1e-4 * square.square()}
    scale, step = torch.tensor(3.0, device=DEVICE), torch.tensor(3.0, device=DEVICE)
    narrow = gradient.float() / scale
    direction, expected = ADAM.direction(narrow.double(), {k: v.double() for k, v in moments.items()}, step=step)
    expected["weight"] = weight.double() * (1 - 0.1) - direction
    found = {name: moment.clone() for name, moment in moments.items()}
    new, rounded = weight.clone(), torch.zeros_like(gradient)
    starts = torch.tensor([1 - 0.9**3, 1 - 0.95**3], device=DEVICE)
    skip = torch.tensor(float(left_out), device=DEVICE)
    update_(new, gradient, found, starts, skip, scale, adam=ADAM, lr=1.0, decay=0.1, rounded=rounded)
    return {"weight": new, "rounded": rounded, **found}, expected if not left_out else {"weight": weight, **moments}


def test_a_step_is_that_of_the_rule_in_float64() -> None:
    pytest.importorskip("triton")
    found, expected = stepped(left_out=False)
    assert torch.equal(found.pop("rounded"), found["weight"].to(NARROW))
    for name, wanted in expected.items():
        # Weights and directions are about 1, and what is left of their difference is as exact as they.
        torch.testing.assert_close(found[name].double(), wanted.double(), rtol=1e-6, atol=1e-6)


def test_a_step_that_is_left_out_changes_nothing() -> None:
    pytest.importorskip("triton")
    found, before = stepped(left_out=True)
    assert not found.pop("rounded").any()
    assert all(torch.equal(found[name], before[name]) for name in before)
