"""Loss and gradients of a first step, compiled and with every kernel that fits, beside plain PyTorch in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal
from unittest import mock

import pytest
import torch

from ropewalk.load.batch import Batch
from ropewalk.model import fp8
from ropewalk.model.config import Model
from ropewalk.model.decoder import build
from ropewalk.model.loss import token_losses
from ropewalk.model.spec import Spec, resolve
from ropewalk.parallel.apply import apply
from ropewalk.parallel.kernels import kernel_choice as kernels
from ropewalk.plan.forecast import Precision
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer

Narrow = Precision | Literal["fp8 by rows"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    model: Model
    vocabulary: int = 512
    length: int = 64
    rows: int = 8
    plain_device: str = "cpu"
    """Where plain PyTorch computes."""

    @property
    def spec(self) -> Spec:
        return resolve(self.model, vocabulary=self.vocabulary, sequence_length=self.length)

    @property
    def batch(self) -> Batch:
        size, draw = (self.rows, self.length + 1), torch.Generator().manual_seed(0)
        return Batch.of_rows(torch.randint(0, self.vocabulary, size, generator=draw))


LLAMA = Model(layers=2, width=128, heads=2, kv_heads=1, mlp_width=384)
GPT_2 = Model(
    layers=2, width=128, heads=2, mlp="gelu-tanh", norm="layer", bias=True, position="learned", tie_embeddings=True
)
SHAPES = {
    "llama": Shape(model=LLAMA),
    "gpt-2": Shape(model=GPT_2),
    # The layers of 350M and of 1.3B, with their rows: what is chosen for a shape is right for it, too.
    "gpt-2 of width 1024": Shape(
        model=replace(GPT_2, width=1024, heads=16), vocabulary=50304, length=2048, rows=32, plain_device="cuda"
    ),
    "llama of width 2048": Shape(
        model=Model(layers=2, width=2048, heads=16, mlp_width=5632, tie_embeddings=False),
        vocabulary=32000,
        length=2048,
        rows=16,
        plain_device="cuda",
    ),
}
SMALL = ("llama", "gpt-2")
LARGE = tuple(name for name in SHAPES if name not in SMALL)


def quick_gradients(
    shape: Shape, precision: Precision, *, device: Literal["cpu", "cuda"]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a first step as training makes it: compiled, with every kernel that fits."""
    plan = Plan(
        device=device,
        precision=precision,
        batch_size=shape.rows,
        microbatch_size=shape.rows,
        compile=True,
        fp8="all",
    )
    found: dict[str, torch.Tensor] = {}
    made = apply(plan, build(shape.spec, seed=0, device=device), None, lambda p, _: make_optimizer(p, Optimizer()))
    made.hooks.on_gradients.append(lambda gradients: found.update({k: v.double().cpu() for k, v in gradients.items()}))
    loss = made.step(shape.batch, lr=0.0).loss.item()
    return loss, found


def plain_gradients(shape: Shape, *, seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by plain PyTorch in float64, which no kernel of ours takes; a few rows at a time."""
    batch = shape.batch.to(torch.device(shape.plain_device))
    model = build(shape.spec, seed=seed, device=shape.plain_device).double()
    loss = 0.0
    for rows in batch.split(4):
        losses = token_losses(model(rows.tokens).flatten(0, 1), model.head_weight, rows.targets.flatten())
        mean = losses.sum() / batch.tokens.numel()
        mean.backward()
        loss += mean.item()
    return loss, {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(((found[name] - wanted).norm() / wanted.norm()).item() for name, wanted in expected.items())


def check_float32(name: str, device: Literal["cpu", "cuda"]) -> None:
    """Equal but for rounding."""
    shape = SHAPES[name]
    (loss, found), (expected_loss, expected) = quick_gradients(shape, "fp32", device=device), plain_gradients(shape)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert distance(found, expected) < 1e-5


def check_narrow(name: str, precision: Narrow, device: Literal["cpu", "cuda"]) -> None:
    """Nearer to each other than two seeds are."""
    shape, ways = SHAPES[name], {}
    if precision == "fp8 by rows":
        precision, ways = "fp8", {"fp8": fp8.product_by_rows}
    with mock.patch.dict(kernels.IN_8_BITS, ways):
        loss, found = quick_gradients(shape, precision, device=device)
    expected_loss, expected = plain_gradients(shape)
    other_loss, other = plain_gradients(shape, seed=1)
    assert abs(loss - expected_loss) < abs(other_loss - expected_loss)
    assert distance(found, expected) < (0.3 if precision == "fp8" else 0.1) * distance(other, expected)
