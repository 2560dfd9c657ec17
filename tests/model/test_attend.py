"""Ways to attend that must agree."""

from __future__ import annotations

import pytest
import torch

from ropewalk.model import cpu_attention
from ropewalk.model.attend import CausalAttend, MaskedAttend, TiledAttend, additive_mask, attend_for, causal

from .specs import small

ROWS, LENGTH = 2, 160


def heads(spec):
    draw = torch.Generator().manual_seed(0)
    shapes = [(ROWS, count, LENGTH, spec.head_size) for count in (spec.heads, spec.kv_heads, spec.kv_heads)]
    return [torch.randn(shape, generator=draw) for shape in shapes]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "changes",
    [
        {"documents": "separate"},
        {"window": 20},
        {"position": "alibi"},
        {"position": "alibi", "documents": "separate", "window": 13},
    ],
    ids=str,
)
def test_tiles_leave_out_what_the_mask_hides_and_nothing_else(changes):
    spec = small(sequence_length=LENGTH, **changes)
    documents_BT = (torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.05).int().cumsum(1)
    masked = MaskedAttend(spec, documents_BT=documents_BT if spec.documents == "separate" else None)
    tiled = attend_for(spec, documents_BT=documents_BT, tiles=True)
    assert isinstance(tiled, TiledAttend)
    torch.testing.assert_close(tiled(*heads(spec)), masked(*heads(spec)), atol=2e-6, rtol=1e-5)


def test_a_kernel_that_cannot_gives_way_to_the_next():
    """There is no cuDNN on a CPU."""
    spec = small(sequence_length=LENGTH)
    chosen = attend_for(spec, kernel="cudnn")
    assert isinstance(chosen, CausalAttend)
    torch.testing.assert_close(chosen(*heads(spec)), causal(*heads(spec)), atol=2e-6, rtol=1e-5)


def mask_and_heads(changes, *, rows, dtype):
    spec = small(**{"width": 96, "heads": 6, "sequence_length": LENGTH, **changes})
    documents_BT = (torch.rand(rows, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.05).int().cumsum(1)
    separate = spec.documents == "separate"
    every_T = torch.arange(LENGTH)
    mask = additive_mask(
        spec,
        every_T,
        every_T,
        heads=range(spec.heads),
        dtype=dtype,
        documents_BT=documents_BT if separate else None,
    )
    draw = torch.Generator().manual_seed(0)
    shapes = [(rows, LENGTH, count, spec.head_size) for count in (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads)]
    made = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
    return mask, [x.transpose(1, 2).requires_grad_() for x in made[:3]], made[3].transpose(1, 2)


@pytest.mark.parametrize("tile_bytes", [1, 4 * 8 * 128 * LENGTH, 13 * 8 * 128 * LENGTH, 1 << 30])
@pytest.mark.parametrize(
    "changes",
    [
        {"kv_heads": 6},
        {"kv_heads": 1},
        {"kv_heads": 3, "position": "alibi"},
        {"documents": "separate"},
        {"window": 20},
        {"position": "alibi"},
        {"position": "alibi", "documents": "separate", "window": 13},
    ],
    ids=str,
)
def test_tiles_on_a_cpu_are_torchs_attention_however_they_are_cut(changes, tile_bytes, monkeypatch):
    """One head at a time, some heads of a row, some rows, all at once; the last tile has 32 queries."""
    monkeypatch.setattr(cpu_attention, "TILE_BYTES", tile_bytes)
    mask, qkv, grad = mask_and_heads(changes, rows=3, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True)
    made = cpu_attention.attend_in_tiles(*qkv, None if mask.dim() == 2 and "window" not in changes else mask)
    assert made.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(made, expected, atol=1e-13, rtol=1e-12)
    pairs = zip(torch.autograd.grad(made, qkv, grad), torch.autograd.grad(expected, qkv, grad), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, atol=1e-13, rtol=1e-12)


def test_bfloat16_on_a_cpu_is_about_as_near_to_the_truth_as_torchs_kernel():
    _, qkv, grad = mask_and_heads({"kv_heads": 6}, rows=2, dtype=torch.bfloat16)

    def both_passes(function, inputs):
        out = function(*inputs)
        return torch.cat([out.flatten(), *(x.flatten() for x in torch.autograd.grad(out, inputs, grad.to(out.dtype)))])

    wide = [x.detach().double().requires_grad_() for x in qkv]
    truth = both_passes(causal, wide)

    def error(function):
        return ((both_passes(function, qkv).double() - truth).norm() / truth.norm()).item()

    torchs = error(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert error(causal) < 2 * torchs < 0.01


def test_the_operator_of_a_cpu_is_what_torch_expects_of_one():
    _, (q, k, v), _ = mask_and_heads({"kv_heads": 3}, rows=2, dtype=torch.float64)
    torch.library.opcheck(cpu_attention._forward, (q, k, v, None))
