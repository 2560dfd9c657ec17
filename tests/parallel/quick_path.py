"""Loss and gradients of a first step, compiled and with every kernel that fits, beside plain PyTorch in float64."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from ropewalk.load.batch import Batch
from ropewalk.model.config import Model
from ropewalk.model.decoder import build
from ropewalk.model.loss import token_losses
from ropewalk.model.spec import resolve
from ropewalk.parallel.apply import apply
from ropewalk.plan.forecast import Precision
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optimizer import make_optimizer

SHAPES = {
    "llama": Model(layers=2, width=128, heads=2, kv_heads=1, hidden=384),
    "gpt-2": Model(
        layers=2, width=128, heads=2, mlp="gelu-tanh", norm="layer", bias=True, position="learned", tied=True
    ),
}


def quick_gradients(
    name: str, precision: Precision, *, device: Literal["cpu", "cuda"]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a first step as training makes it: compiled, with every kernel that fits."""
    spec = resolve(SHAPES[name], vocabulary=512, sequence_length=64)
    plan = Plan(device=device, precision=precision, batch_rows=8, microbatch_rows=8, compile=True)
    found: dict[str, torch.Tensor] = {}
    made = apply(plan, build(spec, seed=0, device=device), None, lambda p, _: make_optimizer(p, Optimizer()))
    made.points.on_gradients.append(lambda gradients: found.update({k: v.double().cpu() for k, v in gradients.items()}))
    loss = made.step(longer_batch(), lr=0.0).loss.item()
    return loss, found


def plain_gradients(name: str, *, seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by plain PyTorch in float64."""
    spec, rows = resolve(SHAPES[name], vocabulary=512, sequence_length=64), longer_batch()
    model = build(spec, seed=seed).double()
    losses = token_losses(model(rows.tokens).flatten(0, 1), model.head_weight, rows.targets.flatten())
    losses.mean().backward()
    return losses.mean().item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def longer_batch() -> Batch:
    return Batch.of_rows(torch.randint(0, 512, (8, 65), generator=torch.Generator().manual_seed(0)))


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(((found[name] - wanted).norm() / wanted.norm()).item() for name, wanted in expected.items())


def check_float32(name: str, device: Literal["cpu", "cuda"]) -> None:
    """Equal but for rounding."""
    (loss, found), (expected_loss, expected) = quick_gradients(name, "fp32", device=device), plain_gradients(name)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert distance(found, expected) < 1e-5


def check_bfloat16(name: str, precision: Precision, device: Literal["cpu", "cuda"]) -> None:
    """Nearer to each other than two seeds are."""
    (loss, found), (expected_loss, expected) = quick_gradients(name, precision, device=device), plain_gradients(name)
    other_loss, other = plain_gradients(name, seed=1)
    assert abs(loss - expected_loss) < abs(other_loss - expected_loss)
    assert distance(found, expected) < 0.1 * distance(other, expected)
