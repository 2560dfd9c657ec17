"""Every Triton kernel against its plain twin: on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch
import torch.nn.functional as F

from ropewalk.model import fp8, heads, loss, modules, norms
from ropewalk.model import matmul as products
from ropewalk.model.decoder import build
from ropewalk.model.feed_forward import gated_plainly, gelu_plainly
from tests.tiny import small_spec

pytest.importorskip("triton")
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (interpreted or torch.cuda.is_available()), reason="wants a GPU or TRITON_INTERPRET=1"),
]
DEVICE = "cpu" if interpreted else "cuda"
TYPES = [torch.float32] if interpreted else [torch.float32, torch.bfloat16]


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def near(got, want, dtype, *, atol=2e-6, rtol=2e-6):
    """`want` is computed in float32 from the same inputs: only the rounding of the result may differ."""
    torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=rtol if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocabulary", [37, 5000])
def test_cross_entropy(dtype, vocabulary):
    from ropewalk.model.kernels.cross_entropy import losses_and_gradient_

    logits = 3 * draw(19, vocabulary, dtype=dtype)
    targets, weights = torch.arange(19, device=DEVICE), draw(19).abs()
    fused, plain = logits.clone(), logits.float()
    near(losses_and_gradient_(fused, targets, weights), loss.losses_and_gradient_(plain, targets, weights), dtype)
    near(fused, plain, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_scaled(dtype):
    from ropewalk.model.kernels.cross_entropy import scaled

    x, by = draw(3, 5000, dtype=dtype), draw(1)[0] + 3
    for out in {torch.float32, dtype}:
        found = scaled(x, by, out)
        assert found.dtype == out
        near(found, x.float() * by, out)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_swiglu(dtype, chunk):
    from ropewalk.model.kernels.swiglu import swiglu, swiglu_backward

    inner, gradient = draw(3, 9, 6 * chunk, dtype=dtype), draw(3, 9, 3 * chunk, dtype=dtype)
    wide = inner.float().requires_grad_()
    plain = gated_plainly(wide, F.silu, chunk=chunk)
    near(swiglu(inner, chunk), plain, dtype)
    near(swiglu_backward(inner, gradient, chunk), torch.autograd.grad(plain, wide, gradient.float())[0], dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_gelu(dtype, tanh, biased):
    from ropewalk.model.kernels.gelu import gelu, gelu_backward

    inner, gradient = draw(3, 90, 300, dtype=dtype), draw(3, 90, 300, dtype=dtype)
    bias = draw(300, dtype=dtype) if biased else None
    wide = [each.float().requires_grad_() for each in (inner, bias) if each is not None]
    plain = gelu_plainly(wide[0], wide[1] if biased else None, tanh=tanh)
    # Far below zero 1 + tanh rounds to 0 in float32, the sigmoid of the kernel does not.
    torch.testing.assert_close(
        gelu(inner, bias, tanh).float(), plain, atol=4e-6, rtol=2e-6 if dtype == torch.float32 else 0.01
    )
    by_inner, parts = gelu_backward(inner, bias, gradient, tanh)
    expected = torch.autograd.grad(plain, wide, gradient.float())
    near(
        by_inner, expected[0], dtype, atol=4e-6, rtol=2e-6 if interpreted else 4e-6
    )  # a GPU's exponential is not exact
    assert parts.shape[1] == (300 if biased else 0)
    if biased:
        torch.testing.assert_close(parts.sum(0), expected[1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("passes", [True, False])
def test_norms(dtype, centred, passes):
    from ropewalk.model.kernels.fused_norms import norm, norm_backward

    made = norms.LayerNorm(300) if centred else norms.RmsNorm(300, eps=1e-6)
    with torch.no_grad():
        made.to(DEVICE).weight.copy_(draw(300) + 1)
    x, by_norm = 2 * draw(3, 250, 300, dtype=dtype) + 1, draw(3, 250, 300, dtype=dtype)
    by_stream = draw(3, 250, 300, dtype=dtype).flip(0) if passes else None
    wide = x.float().requires_grad_()
    plain = norms.normed_plainly(wide, made)
    bias = made.bias if centred else None
    stream, out, means, scales = norm(x, None, None, made.weight, bias, made.eps, dtype)
    assert not stream.numel()
    near(out, plain, dtype)
    expected = torch.autograd.grad(plain, [wide, *made.parameters()], by_norm.float())
    by_x = expected[0] + (by_stream.float() if passes else 0)
    for shifted, streams in itertools.product((False, True), {False, passes}):
        found, parts = norm_backward(x, made.weight, means, scales, by_norm, by_stream, shifted, streams)
        near(found, by_x, dtype)
        sums = [*expected[1:], *([by_x.sum((0, 1))] if shifted else [])]
        sums += [by_stream.float().sum((0, 1))] if streams else []
        for got, want in zip(parts.sum(1), sums, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("centred", [True, False])
def test_norm_of_a_sum(dtype, centred):
    """A stream may be wider than what a branch adds to it."""
    from ropewalk.model.kernels.fused_norms import norm

    made = norms.LayerNorm(300) if centred else norms.RmsNorm(300, eps=1e-6)
    made.to(DEVICE)
    x, added = 2 * draw(3, 50, 300) + 1, draw(3, 50, 300, dtype=dtype).flip(0)
    bias = made.bias if centred else None
    for stream, shift in itertools.product({torch.float32, dtype}, (None, draw(300, dtype=dtype))):
        total = x.to(stream).float() + added.float() + (0 if shift is None else shift.float())
        found = norm(x.to(stream), added, shift, made.weight, bias, made.eps, dtype)
        assert found[0].dtype == torch.promote_types(stream, dtype)
        torch.testing.assert_close(found[0], total.to(found[0].dtype), rtol=0, atol=0)
        near(found[1], norms.normed_plainly(found[0].float(), made), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("groups", "group_heads", "size"), [(2, 3, 32), (3, 5, 64)])
def test_heads(dtype, groups, group_heads, size):
    from ropewalk.model.kernels.rotated_heads import rotated, rotated_backward

    fused = draw(2, 21, groups * group_heads * size, dtype=dtype)
    angles = draw(2, 1, 21, size // 2)
    angles = (angles.cos(), angles.sin())
    wide = fused.float().requires_grad_()
    plain = heads.split_heads(wide, group_heads=group_heads, head_size=size)
    plain = (heads.rotate(plain[0], angles), heads.rotate(plain[1], angles), plain[2])
    found = rotated(fused, *angles, group_heads, size)
    for got, want in zip(found, plain, strict=True):
        near(got.transpose(1, 2), want, dtype)
    # Attention hands gradients back in another order of dimensions.
    gradients = [torch.randn_like(part, memory_format=torch.contiguous_format) for part in plain]
    back = rotated_backward(*(part.transpose(1, 2) for part in gradients), *angles, group_heads)
    torch.testing.assert_close(back, torch.autograd.grad(plain, wide, gradients)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("groups", "group_heads", "size"), [(2, 3, 32), (3, 5, 64)])
def test_heads_turned_where_the_product_is(dtype, groups, group_heads, size):
    x, weight = draw(2, 21, 48, dtype=dtype), draw(groups * group_heads * size, 48, dtype=dtype)
    angles = draw(2, 1, 21, size // 2)
    sizes, angles = {"group_heads": group_heads, "head_size": size}, (angles.cos(), angles.sin())
    leaves, wide = ([each.to(t).requires_grad_() for each in (x, weight)] for t in (dtype, torch.float32))
    plain = heads.split_heads(torch.nn.functional.linear(*wide), **sizes)
    plain = (heads.rotate(plain[0], angles), heads.rotate(plain[1], angles), plain[2])
    found = heads.rotated_projection(*leaves, angles, **sizes)
    close = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.5, "rtol": 0.02}
    for got, want in zip(found, plain, strict=True):
        torch.testing.assert_close(got.float(), want, **close)
    gradients = [torch.randn_like(part, memory_format=torch.contiguous_format).to(dtype) for part in plain]
    by_leaves = torch.autograd.grad(found, leaves, gradients)
    by_wide = torch.autograd.grad(plain, wide, [each.float() for each in gradients])
    for got, want in zip(by_leaves, by_wide, strict=True):
        torch.testing.assert_close(got.float(), want, **close)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("groups", "group_heads", "size"), [(2, 3, 32), (3, 5, 64)])
def test_heads_with_a_bias(dtype, groups, group_heads, size):
    fused = draw(2, 300, groups * group_heads * size, dtype=dtype)
    plain = heads.split_heads(fused, group_heads=group_heads, head_size=size)
    # Attention hands gradients back in another order of dimensions.
    gradients = [torch.randn_like(part, memory_format=torch.contiguous_format) for part in plain]
    leaf, bias = fused.clone().requires_grad_(), draw(fused.shape[-1]).requires_grad_()
    found = heads.split_biased_heads(leaf, bias, group_heads=group_heads, head_size=size)
    assert all(torch.equal(got, want) for got, want in zip(found, plain, strict=True))
    by_fused, by_bias = torch.autograd.grad(found, [leaf, bias], gradients)
    wide = fused.float().requires_grad_()
    parts = heads.split_heads(wide, group_heads=group_heads, head_size=size)
    (expected,) = torch.autograd.grad(parts, wide, [each.float() for each in gradients])
    assert torch.equal(by_fused.float(), expected)
    torch.testing.assert_close(by_bias, expected.sum((0, 1)), atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(interpreted, reason="the interpreter rounds to 8 bits otherwise")
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
def test_rounding(dtype, by_rows):
    from ropewalk.model.kernels.rounding import both_orders

    x = draw(200, 300, dtype=torch.bfloat16)
    row_scale = x.abs().amax(1, keepdim=True).float() / torch.finfo(dtype).max
    scale = row_scale.amax()
    scales = (row_scale if by_rows else scale, scale)
    for got, want in zip(both_orders(x, *scales, dtype), fp8.both_orders_plainly(x, *scales, dtype), strict=True):
        # A quotient that ends in the middle between two numbers may go either way.
        assert (got.float() == want.float()).float().mean() > 0.999


@pytest.mark.parametrize("adds", [False, True], ids=["the norm adds", "the product adds"])
@pytest.mark.parametrize("kind", [{}, {"bias": True, "mlp": "gelu", "norm": "layer", "position": "learned"}])
def test_a_block_with_residual_sums_inside_products(kind, adds, monkeypatch):
    spec = small_spec(width=64, mlp_width=128, heads=2, layers=1, sequence_length=16, **kind)
    model = build(spec, seed=0, device=DEVICE)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.1 * draw(*parameter.shape).roll(number)
    tokens = torch.arange(32, device=DEVICE).view(2, 16) % spec.vocabulary
    gradient = draw(2, 16, 64)
    exact = copy.deepcopy(model).double()
    expected, wanted = exact(tokens), [*exact.parameters()]
    by_exact = torch.autograd.grad(expected, wanted, gradient.double(), allow_unused=True)
    for module in (norms, modules):
        monkeypatch.setattr(module, "has_norm_kernel", lambda x, norm: x.dtype != torch.float64)
    for each in model.modules():
        if isinstance(each, modules.Linear):
            each.product, each.bare = products.product, adds
    found = model(tokens)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-5)
    by_found = torch.autograd.grad(found, [*model.parameters()], gradient, allow_unused=True)
    for got, want in zip(by_found, by_exact, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want.float(), atol=1e-4, rtol=1e-4)
