"""Products in 8 bits against float64, with what rounding allows."""

from __future__ import annotations

import pytest
import torch

from ropewalk.model.fp8 import E4M3, E5M2, product, rounded

# Half a unit in the last place, relative: 3 bits of mantissa, and 2.
HALF_E4M3, HALF_E5M2 = 2.0**-4, 2.0**-3


@pytest.mark.parametrize(("dtype", "half"), [(E4M3, HALF_E4M3), (E5M2, HALF_E5M2)])
def test_a_number_is_off_by_half_a_step_at_most(dtype, half):
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    narrow, turned, scale = rounded(x, dtype)
    error = (narrow.double() * scale - x).abs()
    smallest = torch.finfo(dtype).smallest_normal * scale
    assert (error <= half * x.abs().clamp(min=smallest) * 1.001).all()
    assert torch.equal(turned.float(), narrow.float().t())
    assert narrow.float().abs().max() == torch.finfo(dtype).max


def test_zeros_stay_zeros():
    narrow, _, scale = rounded(torch.zeros(16, 16), E4M3)
    assert torch.isfinite(scale)
    assert not narrow.float().any()


@pytest.mark.parametrize("with_bias", [False, True])
def test_results_and_gradients_are_near_those_of_float64(with_bias):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4, 64, 128, generator=draw).bfloat16().requires_grad_()
    weight = (torch.randn(256, 128, generator=draw) * 0.02).bfloat16().requires_grad_()
    bias = torch.randn(256, generator=draw).bfloat16().requires_grad_() if with_bias else None
    gradient = torch.randn(4, 64, 256, generator=draw).bfloat16()
    inputs = [x, weight, *([] if bias is None else [bias])]
    y = product(x, weight, bias)
    found = [y, *torch.autograd.grad(y, inputs, gradient)]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = torch.nn.functional.linear(*wide)
    wanted = [expected, *torch.autograd.grad(expected, wide, gradient.double())]
    # Errors of factors are independent: those of a product of rounded numbers are about 2 ** -4.7 and 2 ** -4.1.
    for got, want, tolerance in zip(found, wanted, (0.05, 0.08, 0.08, 0.01), strict=False):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() / want.norm() < tolerance


def test_what_is_kept_for_the_backward_pass_has_8_bits():
    x = torch.randn(64, 128).bfloat16().requires_grad_()
    weight = torch.randn(256, 128).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        product(x, weight, None)
    assert sum(tensor.nbytes for tensor in kept) == 64 * 128 + 256 * 128 + 2 * 4
