"""Products in 8 bits against float64, with what rounding allows."""

from __future__ import annotations

import pytest
import torch

from ropewalk.model.fp8 import E4M3, E5M2, product, product_by_rows, rounded

# Half a unit in the last place, relative: 3 bits of mantissa, and 2.
HALF_E4M3, HALF_E5M2 = 2.0**-4, 2.0**-3


@pytest.mark.parametrize(("dtype", "half"), [(E4M3, HALF_E4M3), (E5M2, HALF_E5M2)])
def test_a_number_is_off_by_half_a_step_at_most(dtype, half):
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    narrow, rotated, _, scale = rounded(x, dtype)
    error = (narrow.double() * scale - x).abs()
    smallest = torch.finfo(dtype).smallest_normal * scale
    assert (error <= half * x.abs().clamp(min=smallest) * 1.001).all()
    assert torch.equal(rotated.float(), narrow.float().t())
    assert narrow.float().abs().max() == torch.finfo(dtype).max


def test_by_rows_every_row_fills_the_range_and_the_transposed_has_one_scale():
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
    found, whole = rounded(x, E4M3, by_rows=True), rounded(x, E4M3)
    assert (found.narrow_RC.float().abs().amax(1) == torch.finfo(E4M3).max).all()
    error = (found.narrow_RC.double() * found.row_scale - x).abs()
    assert (error <= HALF_E4M3 * x.abs().clamp(min=torch.finfo(E4M3).smallest_normal * found.row_scale) * 1.001).all()
    assert torch.equal(found.scale, whole.scale)
    assert torch.equal(found.transposed_CR.float(), whole.transposed_CR.float())


def test_one_large_token_costs_the_others_no_bits_by_rows():
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 128, generator=draw).bfloat16(), torch.randn(32, 128, generator=draw).bfloat16()
    x[0] *= 1e5
    exact = x.double() @ weight.double().t()
    by_rows, whole = (
        ((way(x, weight, None).double() - exact)[1:].norm() / exact[1:].norm()).item()
        for way in (product_by_rows, product)
    )
    assert by_rows < 0.05 < whole


def test_a_known_scale_is_taken_as_it_is():
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 128, generator=draw).bfloat16(), torch.randn(32, 128, generator=draw).bfloat16()
    weight *= x.abs().amax() / weight.abs().amax()
    scale = x.abs().amax().float() / torch.finfo(E4M3).max
    wanted = product(x, weight, None)
    assert torch.equal(product(x, weight, None, scale=scale), wanted)
    torch.testing.assert_close(product_by_rows(x, weight, None, scale=scale), wanted)


@pytest.mark.parametrize("by_rows", [False, True])
def test_zeros_stay_zeros(by_rows):
    found = rounded(torch.zeros(16, 16), E4M3, by_rows=by_rows)
    assert torch.isfinite(found.row_scale).all()
    assert torch.isfinite(found.scale)
    assert not found.narrow_RC.float().any()
    assert not found.transposed_CR.float().any()


@pytest.mark.parametrize("way", [product, product_by_rows])
@pytest.mark.parametrize("with_bias", [False, True])
def test_results_and_gradients_are_near_those_of_float64(with_bias, way):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4, 64, 128, generator=draw).bfloat16().requires_grad_()
    weight = (torch.randn(256, 128, generator=draw) * 0.02).bfloat16().requires_grad_()
    bias = torch.randn(256, generator=draw).bfloat16().requires_grad_() if with_bias else None
    gradient = torch.randn(4, 64, 256, generator=draw).bfloat16()
    inputs = [x, weight, *([] if bias is None else [bias])]
    y = way(x, weight, bias)
    found = [y, *torch.autograd.grad(y, inputs, gradient)]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = torch.nn.functional.linear(*wide)
    wanted = [expected, *torch.autograd.grad(expected, wide, gradient.double())]
    # Errors of factors are independent: those of a product of rounded numbers are about 2 ** -4.7 and 2 ** -4.1.
    for got, want, tolerance in zip(found, wanted, (0.05, 0.08, 0.08, 0.01), strict=False):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() / want.norm() < tolerance


@pytest.mark.parametrize("way", [product, product_by_rows])
def test_what_is_kept_for_the_backward_pass_has_8_bits(way):
    x = torch.randn(64, 128).bfloat16().requires_grad_()
    weight = torch.randn(256, 128).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        way(x, weight, None)
    assert sum(tensor.nbytes for tensor in kept) == 64 * 128 + 256 * 128 + 2 * 4
