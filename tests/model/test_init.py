"""First values: their spread, and that they depend on (seed, name) alone."""

from __future__ import annotations

import math

import pytest
import torch

from ropewalk.model import init
from ropewalk.model.decoder import build
from ropewalk.model.init import initial_value, initial_values
from ropewalk.model.init_laws import STD

from .specs import small

LARGE = small(
    layers=3, width=128, heads=8, mlp_width=256, vocabulary=600, position="learned", norm="layer", tie_embeddings=False
)


def test_spread_by_kind():
    for name, value in build(LARGE, seed=0).named_parameters():
        if name.endswith("norm.weight"):
            assert (value == 1).all()
        elif name.endswith(".bias"):
            assert (value == 0).all()
        else:
            writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            expected = STD / math.sqrt(6) if writes_residual else STD
            count = value.numel()
            # Five standard errors of a Gaussian's mean and deviation.
            assert abs(value.mean()) < 5 * expected / math.sqrt(count)
            assert abs(value.std() / expected - 1) < 5 / math.sqrt(2 * count)


def test_values_do_not_depend_on_order_or_company():
    model = build(LARGE, seed=4)
    for name, value in reversed(list(model.named_parameters())):
        torch.manual_seed(hash(name) % 1000)
        assert torch.equal(initial_value(name, tuple(value.shape), LARGE, seed=4), value)


@pytest.mark.parametrize("ahead", [1, 100_000, 1 << 30])
def test_values_drawn_side_by_side_come_in_order_and_are_the_same(ahead, monkeypatch):
    monkeypatch.setattr(init, "AHEAD_NUMEL", ahead)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shapes = LARGE.shapes()
    drawn = list(initial_values(shapes, LARGE, seed=4))
    assert [name for name, _ in drawn] == list(shapes)
    assert all(torch.equal(value, initial_value(name, shapes[name], LARGE, seed=4)) for name, value in drawn)


def test_streams_differ_by_name_and_seed():
    shape = (64, 64)
    drawn = [
        initial_value(f"blocks.{layer}.mlp.up.weight", shape, LARGE, seed=seed).flatten()
        for layer in (0, 1)
        for seed in (0, 1)
    ]
    correlations = torch.corrcoef(torch.stack(drawn)) - torch.eye(4)
    # Five standard errors of a correlation over 4096 pairs.
    assert correlations.abs().max() < 5 / 64


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_hold_the_same_values(dtype):
    plain = dict(build(LARGE, seed=2).named_parameters())
    for name, value in build(LARGE, seed=2, dtype=dtype).named_parameters():
        assert torch.equal(value, plain[name].to(dtype))
