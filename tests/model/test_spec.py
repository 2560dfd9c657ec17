"""The spec says what the modules build, and counts what they compute."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.utils.flop_counter import FlopCounterMode

from ropewalk.model.config import Model
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.loss import token_losses
from ropewalk.model.spec import resolve

from .specs import small, specs


@settings(max_examples=60, deadline=None)
@given(spec=specs())
def test_shapes_are_those_of_the_modules(spec):
    with torch.device("meta"):
        model = Decoder(spec)
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert spec.shapes() == built
    assert spec.parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_unset_sizes_follow_the_documented_rules():
    assert resolve(Model(width=256), vocabulary=100, sequence_length=8).hidden == 704
    assert resolve(Model(width=256, mlp="gelu"), vocabulary=100, sequence_length=8).hidden == 1024
    assert resolve(Model(width=256, heads=8), vocabulary=100, sequence_length=8).kv_heads == 8


def explicit(layer, q_BHTD, k_BGTD, v_BGTD):
    """Attention as two matrix products over all T x T pairs, the convention of PaLM."""
    groups = q_BHTD.shape[1] // k_BGTD.shape[1]
    k_BHTD, v_BHTD = (x.repeat_interleave(groups, 1) for x in (k_BGTD, v_BGTD))
    return (q_BHTD @ k_BHTD.transpose(-1, -2)).softmax(-1) @ v_BHTD


def no_products(layer, q_BHTD, k_BGTD, v_BGTD):
    """No attention: what is left are the products with parameters. Every input keeps its gradient."""
    groups = q_BHTD.shape[1] // k_BGTD.shape[1]
    return q_BHTD + (k_BGTD + v_BGTD).repeat_interleave(groups, 1)


def counted(spec, attend) -> int:
    """FLOPs of forward and backward over two full rows, as PyTorch counts them."""
    model = build(spec, seed=0)
    tokens = torch.zeros(2, spec.sequence_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        hidden = model(tokens, attend=attend).flatten(0, 1)
        token_losses(hidden, model.head_weight, tokens.flatten()).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_flops_equal_those_that_torch_counts(kv_heads, mlp):
    spec = small(kv_heads=kv_heads, mlp=mlp)
    tokens = 2 * spec.sequence_length
    assert counted(spec, no_products) == 6 * spec.matmul_parameters() * tokens
    assert counted(spec, explicit) == spec.flops_per_token("full") * tokens


def test_causal_flops_count_attended_pairs():
    spec = small()
    pairs = spec.sequence_length * (spec.sequence_length + 1) // 2
    # A pair costs two products of 2 D FLOPs a head, three times over (forward, two gradients).
    attention = 12 * spec.layers * spec.heads * spec.head_size * pairs
    row = spec.flops_per_token("causal") * spec.sequence_length
    assert row == 6 * spec.matmul_parameters() * spec.sequence_length + attention
