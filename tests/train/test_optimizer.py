"""Every optimizer equals its paper's formulas, decays what it should, and keeps the state it promises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ropewalk.model.decoder import build
from ropewalk.model.sharding import splits
from ropewalk.model.spec import Spec
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.muon import orthogonal
from ropewalk.train.optim.optimizers import make_optimizer
from ropewalk.train.optim.rule import decays
from ropewalk.train.optim.table import OPTIMIZERS, is_hidden
from tests.tiny import small_spec

MATRICES = ("embedding.weight", "qkv.weight", "out.weight", "up.weight", "down.weight", "head.weight")
OPTIONS = list(itertools.product(("rms", "layer"), ("swiglu", "gelu"), ("rope", "learned"), (True, False)))
# A vocabulary so large that matrices of both layers are stacked.
SPEC = small_spec(position="learned", norm="layer", bias=True, kv_heads=2, tie_embeddings=False, vocabulary=200)
STEPS = 20
BETA1, BETA2, EPSILON, DECAY, MOMENTUM, RATIO = 0.9, 0.95, 1e-8, 0.1, 0.9, 0.5

Parameters = dict[str, nn.Parameter]


def state_bytes(spec: Spec, optimizer: str, **settings: Any) -> int:
    return spec.optimizer_bytes(OPTIMIZERS[optimizer].state_bytes, **settings)


def settings(kind: str) -> Optimizer:
    return Optimizer(
        kind=kind,
        beta1=BETA1,
        beta2=BETA2,
        epsilon=EPSILON,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        rest_lr_ratio=RATIO,
    )


def parameters() -> Parameters:
    """Biases start away from 0, so that their decay would be seen."""
    named = dict(build(SPEC, seed=0, dtype=torch.float64).named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            if name.endswith("bias"):
                parameter += 0.1
    return named


def steps(named: Parameters) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """A learning rate and gradients of very different sizes for each of 20 steps."""
    draw = torch.Generator().manual_seed(5)
    for number in range(STEPS):
        gradients = {
            name: torch.randn(p.shape, generator=draw, dtype=torch.float64) * 10 ** (number % 4 - 2)
            for name, p in named.items()
        }
        yield 1e-2 / (number + 1), gradients


def ours(kind: str) -> Parameters:
    named = parameters()
    optimizer = make_optimizer(named, settings(kind), spec=SPEC)
    for lr, gradients in steps(named):
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
        for name, parameter in named.items():
            parameter.grad = gradients[name]
        optimizer.step()
    return named


class AdamByTorch:
    """torch.optim.AdamW on one parameter."""

    def __init__(self, name: str, weight: Tensor, *, ratio: float = 1.0) -> None:
        self.weight, self.ratio = weight.detach().clone().requires_grad_(), ratio
        decay = DECAY if name.endswith(MATRICES) else 0.0
        self.optimizer = torch.optim.AdamW([self.weight], betas=(BETA1, BETA2), eps=EPSILON, weight_decay=decay)

    def step(self, gradient: Tensor, lr: float, time: int) -> Tensor:
        self.optimizer.param_groups[0]["lr"] = self.ratio * lr
        self.weight.grad = gradient.clone()
        self.optimizer.step()
        return self.weight.detach()


class Adam8ByHand:
    """Dettmers et al. 2022, section 2, a block a row: the nearest of the 256 values, found by trying all of them."""

    @staticmethod
    def values(*, signed: bool) -> Tensor:
        found = [0.0, 1.0]
        for zeros in range(7):  # leading zero bits after the sign; then an indicator, then the fraction
            edges = torch.linspace(0.1, 1.0, 2 ** (6 - zeros + (not signed)) + 1, dtype=torch.float64)
            means = [float(low + high) / 2 * 10**-zeros for low, high in itertools.pairwise(edges)]
            found += means + ([-mean for mean in means] if signed else [])
        assert len(found) == 256
        return torch.tensor(found, dtype=torch.float64)

    def __init__(self, name: str, weight: Tensor) -> None:
        self.x, self.decay = weight.detach().clone(), DECAY if name.endswith(MATRICES) else 0.0
        self.m, self.root = torch.zeros_like(self.x), torch.zeros_like(self.x)

    def step(self, gradient: Tensor, lr: float, time: int) -> Tensor:
        m = BETA1 * self.m + (1 - BETA1) * gradient
        v = BETA2 * self.root**2 + (1 - BETA2) * gradient**2
        step = (m / (1 - BETA1**time)) / ((v / (1 - BETA2**time)) ** 0.5 + EPSILON)
        self.x = self.x - lr * (step + self.decay * self.x)
        self.m = self.nearest(m, self.values(signed=True))
        unsigned = self.values(signed=False)
        self.root = self.nearest(v**0.5, torch.where(unsigned == 0, 2.0, unsigned))  # none is 0 here
        return self.x

    @staticmethod
    def nearest(x: Tensor, values: Tensor) -> Tensor:
        largest = torch.stack([row.abs().max() for row in x]).unsqueeze(1)
        return values[(x / largest).unsqueeze(-1).sub(values).abs().argmin(-1)] * largest


def eight_or_wide(name: str, weight: Tensor) -> Adam8ByHand | AdamByTorch:
    if name.endswith(MATRICES) and name.startswith("blocks."):
        return Adam8ByHand(name, weight)
    return AdamByTorch(name, weight)


class LambByHand:
    """You et al. 2020, algorithm 2, with phi(z) = z; vectors without the ratio."""

    def __init__(self, name: str, weight: Tensor) -> None:
        self.x, self.decay = weight.detach().clone(), DECAY if name.endswith(MATRICES) else 0.0
        self.m, self.v = torch.zeros_like(self.x), torch.zeros_like(self.x)

    def step(self, gradient: Tensor, lr: float, time: int) -> Tensor:
        self.m = BETA1 * self.m + (1 - BETA1) * gradient
        self.v = BETA2 * self.v + (1 - BETA2) * gradient**2
        r = (self.m / (1 - BETA1**time)) / ((self.v / (1 - BETA2**time)) ** 0.5 + EPSILON)
        u = r + self.decay * self.x
        ratio = (self.x**2).sum().sqrt() / (u**2).sum().sqrt() if self.x.dim() == 2 else 1.0
        self.x = self.x - lr * ratio * u
        return self.x


class AdafactorByHand:
    """Shazeer and Stern 2018, algorithms 4 and 5, with sums as printed, and alpha given."""

    def __init__(self, name: str, weight: Tensor) -> None:
        self.x, self.decay = weight.detach().clone(), DECAY if name.endswith(MATRICES) else 0.0
        self.r, self.c, self.v = 0.0, 0.0, 0.0

    def step(self, gradient: Tensor, lr: float, time: int) -> Tensor:
        beta = 1 - time**-0.8
        square = gradient**2 + 1e-30
        if self.x.dim() == 2:
            self.r = beta * self.r + (1 - beta) * square.sum(1)
            self.c = beta * self.c + (1 - beta) * square.sum(0)
            self.v = torch.outer(self.r, self.c) / self.r.sum()
        else:
            self.v = beta * self.v + (1 - beta) * square
        u = gradient / self.v**0.5
        rms = float((u**2).mean() ** 0.5)
        self.x = self.x - lr * u / max(1.0, rms / 1.0) - lr * self.decay * self.x
        return self.x


class MuonByHand:
    """Jordan et al. 2024 with the scaling of Liu et al. 2025; the quintic is applied to the singular values."""

    def __init__(self, name: str, weight: Tensor) -> None:
        self.x, self.momentum = weight.detach().clone(), torch.zeros_like(weight)
        unit = splits(SPEC)[name].parts or (("whole", len(weight)),)
        kinds = [part for part, rows in unit for _ in range(rows)]
        label = [kinds[row % len(kinds)] for row in range(len(weight))]
        self.rows = [torch.tensor([i for i, kind in enumerate(label) if kind == part]) for part, _ in unit]

    def step(self, gradient: Tensor, lr: float, time: int) -> Tensor:
        self.momentum = MOMENTUM * self.momentum + gradient
        ahead = gradient + MOMENTUM * self.momentum
        self.x = self.x * (1 - lr * DECAY)
        for rows in self.rows:
            self.x[rows] -= lr * 0.2 * math.sqrt(max(len(rows), self.x.shape[1])) * self.quintic(ahead[rows])
        return self.x

    @staticmethod
    def quintic(matrix: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        # Momentum is not averaged here, so that its length is 1 / (1 - MOMENTUM) of ours, whose length 1e-7 joins.
        s = s / ((s**2).sum().sqrt() + 1e-7 / (1 - MOMENTUM))
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        return u @ torch.diag(s) @ v


def muon_or_adam(name: str, weight: Tensor) -> MuonByHand | AdamByTorch:
    if name.endswith(MATRICES) and name.startswith("blocks."):
        return MuonByHand(name, weight)
    return AdamByTorch(name, weight, ratio=RATIO)


REFERENCES: dict[str, Callable[[str, Tensor], Any]] = {
    "adamw": AdamByTorch,
    "adamw-8bit": eight_or_wide,
    "lamb": LambByHand,
    "adafactor": AdafactorByHand,
    "muon": muon_or_adam,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_twenty_steps_equal_an_independent_reference(kind: str) -> None:
    start, got = parameters(), ours(kind)
    for name, weight in start.items():
        reference = REFERENCES[kind](name, weight)
        for time, (lr, gradients) in enumerate(steps(start), 1):
            expected = reference.step(gradients[name], lr, time)
        # Relative to the way gone, which is shorter than the weight is long.
        assert (got[name] - expected).norm() <= 1e-6 * (expected - weight).norm(), name


def test_singular_values_come_near_one() -> None:
    draw = torch.Generator().manual_seed(0)
    for shape in ((40, 16), (16, 40), (64, 24)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(3, *shape, generator=draw)))
        assert 0.5 < values.min() <= values.max() < 1.3


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gradient_of_zero_moves_nothing_but_the_decay(kind: str) -> None:
    named = parameters()
    start = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = make_optimizer(named, settings(kind), spec=SPEC)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * group.get("lr_ratio", 1.0)
    optimizer.step()
    for name, parameter in named.items():
        lr = 1e-2 * (RATIO if kind == "muon" and not is_hidden(name, parameter.shape) else 1.0)
        # LAMB scales the decay, its whole step here, to the length of the weight.
        decay = (1.0 if kind == "lamb" else DECAY) if name.endswith(MATRICES) else 0.0
        torch.testing.assert_close(parameter.detach(), start[name] * (1 - lr * decay), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_is_as_large_as_the_spec_says(kind: str) -> None:
    spec = small_spec(width=64, mlp_width=128, vocabulary=500)
    named = dict(build(spec, seed=0).named_parameters())
    optimizer = make_optimizer(named, settings(kind), spec=spec)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [t for each in optimizer.state.values() for name, t in each.items() if name != "step"]
    assert sum(tensor.nbytes for tensor in state) == state_bytes(spec, kind)
    assert all(each["step"] == 1 for each in optimizer.state.values())


def test_the_state_of_adafactor_grows_with_the_root_of_the_weights() -> None:
    small, large = (small_spec(width=width, mlp_width=4 * width, vocabulary=8 * width) for width in (64, 256))
    assert large.parameters() / small.parameters() > 15
    assert state_bytes(large, "adafactor") / state_bytes(small, "adafactor") < 4.1
    assert state_bytes(large, "adafactor") < 0.02 * large.optimizer_bytes(OPTIMIZERS["adamw"].state_bytes)


@pytest.mark.parametrize(("norm", "mlp", "position", "tied"), OPTIONS)
def test_matrices_decay_and_norms_biases_and_positions_do_not(norm: str, mlp: str, position: str, tied: bool) -> None:
    model = build(small_spec(norm=norm, mlp=mlp, position=position, tie_embeddings=tied), seed=0)
    decayed = {name for name, parameter in model.named_parameters() if decays(name, parameter)}
    assert decayed == {name for name, _ in model.named_parameters() if name.endswith(MATRICES)}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_parameter_is_in_one_group_with_its_decay(kind: str) -> None:
    named = parameters()
    groups = make_optimizer(named, settings(kind), spec=SPEC).param_groups
    found = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert found == {id(p): DECAY if name.endswith(MATRICES) else 0.0 for name, p in named.items()}
    assert sum(len(group["params"]) for group in groups) == len(named)


def test_adamw_is_torchs_fused_one_with_the_settings() -> None:
    groups = make_optimizer(parameters(), settings("adamw")).param_groups
    assert all((group["betas"], group["eps"], group["fused"]) == ((0.9, 0.95), 1e-8, True) for group in groups)
