"""Every Triton kernel against its plain twin: on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from ropewalk.model import fp8, heads, loss
from ropewalk.model.gated import gated_plainly

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


def near(got, want, dtype):
    """`want` is computed in float32 from the same inputs: only the rounding of the result may differ."""
    torch.testing.assert_close(got.float(), want.float(), atol=2e-6, rtol=2e-6 if dtype == torch.float32 else 0.01)


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
@pytest.mark.parametrize("chunk", [64, 128])
def test_swiglu(dtype, chunk):
    from ropewalk.model.kernels.swiglu import swiglu, swiglu_backward

    inner, gradient = draw(3, 9, 6 * chunk, dtype=dtype), draw(3, 9, 3 * chunk, dtype=dtype)
    wide = inner.float().requires_grad_()
    plain = gated_plainly(wide, F.silu, chunk=chunk)
    near(swiglu(inner, chunk), plain, dtype)
    near(swiglu_backward(inner, gradient, chunk), torch.autograd.grad(plain, wide, gradient.float())[0], dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("groups", "group_heads", "size"), [(2, 3, 32), (3, 5, 64)])
def test_heads(dtype, groups, group_heads, size):
    from ropewalk.model.kernels.heads import turned, turned_back

    fused = draw(2, 5, groups * group_heads * size, dtype=dtype)
    angles = draw(2, 1, 5, size // 2)
    turn = (angles.cos(), angles.sin())
    wide = fused.float().requires_grad_()
    plain = heads.split_heads(wide, group_heads=group_heads, head_size=size)
    plain = (heads.rotate(plain[0], turn), heads.rotate(plain[1], turn), plain[2])
    found = turned(fused, *turn, group_heads, size)
    for got, want in zip(found, plain, strict=True):
        near(got.transpose(1, 2), want, dtype)
    # Attention hands gradients back in another order of dimensions.
    gradients = [torch.randn_like(part, memory_format=torch.contiguous_format) for part in plain]
    back = turned_back(*(part.transpose(1, 2) for part in gradients), *turn, group_heads)
    torch.testing.assert_close(back, torch.autograd.grad(plain, wide, gradients)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(interpreted, reason="the interpreter rounds to 8 bits otherwise")
@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
def test_rounding(dtype):
    from ropewalk.model.kernels.rounding import both_orders

    x = draw(200, 300, dtype=torch.bfloat16)
    scale = x.abs().amax().float() / torch.finfo(dtype).max
    for got, want in zip(both_orders(x, scale, dtype), fp8.both_orders_plainly(x, scale, dtype), strict=True):
        # A quotient that ends in the middle between two numbers may go either way.
        assert (got.float() == want.float()).float().mean() > 0.999
