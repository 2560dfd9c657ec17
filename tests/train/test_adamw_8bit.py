"""Moments in eight bits: the codes are the nearest ones, and what a GPU computes is what the rule says."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ropewalk.train.config import Optimizer
from ropewalk.train.optim.adamw import Adam
from ropewalk.train.optim.adamw_8bit import Adam8, decode, encode, middles, table, zero_code
from ropewalk.train.optim.optimizers import make_optimizer

CPU = torch.device("cpu")


def values(*, signed: bool) -> Tensor:
    return table(signed=signed, dtype=torch.float64, device=CPU)


@pytest.mark.parametrize("signed", [False, True])
def test_a_table_rises_through_zero_to_one_in_seven_decades(signed: bool) -> None:
    found = values(signed=signed).tolist()
    assert len(found) == 256
    assert found == sorted(set(found))
    assert found[zero_code(signed=signed)] == 0.0
    assert found[-1] == 1.0
    smallest = min(abs(value) for value in found if value)
    assert 1e-7 < smallest < 1e-6
    # Half of the codes of each sign are in the first decade, a quarter in the next, ...
    per_decade = [sum(10.0 ** (-k - 1) < value < 10.0**-k for value in found) for k in range(7)]
    assert per_decade == [(1 if signed else 2) * 2 ** (6 - k) for k in range(7)]


@settings(max_examples=200, deadline=None)
@given(row=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20), signed=st.booleans())
def test_a_code_is_the_nearest_of_all(row: list[float], signed: bool) -> None:
    x = torch.tensor([row], dtype=torch.float64)
    x = x if signed else x.abs()
    scale = x.abs().amax(1, keepdim=True)
    found = decode(encode(x, scale, signed=signed), scale, signed=signed)
    choices = values(signed=signed) * scale[0]
    for number, kept in zip(x[0].tolist(), found[0].tolist(), strict=True):
        least = float((choices - number).abs().min())
        if number and not signed:
            least = float((choices[1:] - number).abs().min())  # what divides does not become 0
            assert kept > 0
        assert abs(kept - number) <= least * (1 + 1e-9) + 1e-300


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 3e-5, 1.0, 7e8])
def test_what_was_decoded_has_the_same_codes_again(signed: bool, scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8).unsqueeze(0)
    scales = torch.full((1, 1), scale)
    assert torch.equal(encode(decode(codes, scales, signed=signed), scales, signed=signed), codes)


def test_a_row_of_zeros_stays_zero() -> None:
    x, scale = torch.zeros(2, 5), torch.zeros(2, 1)
    for signed in (False, True):
        codes = encode(x, scale, signed=signed)
        assert (codes == zero_code(signed=signed)).all()
        assert (decode(codes, scale, signed=signed) == 0).all()


def matrices(device: str) -> dict[str, nn.Parameter]:
    """Rows shorter and longer than a block of the kernel, and parameters that keep wide moments."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "blocks.0.mlp.up.weight": (40, 64),
        "blocks.0.mlp.down.weight": (64, 1500),
        "blocks.1.mlp.down.weight": (7, 3000),
        "embedding.weight": (100, 64),
        "blocks.0.mlp_norm.weight": (64,),
    }
    return {name: nn.Parameter(torch.randn(shape, generator=draw).to(device)) for name, shape in shapes.items()}


def step(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], *, number: int, left_out: bool) -> None:
    draw = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    for parameter in named.values():
        sizes = 10.0 ** torch.randint(-5, 2, parameter.shape, generator=draw)
        gradient = torch.randn(parameter.shape, generator=draw) * sizes
        parameter.grad = (gradient * float("nan") if left_out else gradient).to(parameter.device)
    found_inf = torch.tensor(float(left_out), device=next(iter(named.values())).device)
    vars(optimizer).update(found_inf=found_inf, grad_scale=None)
    optimizer.step()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="wants a GPU or TRITON_INTERPRET=1",
)
@pytest.mark.parametrize("signed", [False, True])
def test_the_kernel_finds_the_nearest_code_of_every_number_that_lies_between_two(signed: bool) -> None:
    """Moments without a past (both betas 0) are the gradient and its size: encoded by the kernel as by the rule."""
    pytest.importorskip("triton")
    from ropewalk.train.kernels.adamw_8bit import update_

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    between = middles(signed=signed, dtype=torch.float32, device=CPU)
    around = torch.cat([between, between.nextafter(torch.tensor(2.0)), between.nextafter(torch.tensor(-2.0))])
    draw = torch.Generator().manual_seed(0)
    spread = 10.0 ** (-9 * torch.rand(3000, generator=draw)) * torch.randn(3000, generator=draw).sign()
    gradient = torch.cat([around, spread, torch.tensor([0.0, 1.0, 1e-30, -1.0])]).unsqueeze(0)
    gradient = (gradient if signed else gradient.abs()).clamp(-1, 1).to(device)
    rule = Adam8(adam=Adam(beta1=0.0, beta2=0.0, epsilon=1e-8))
    weight, one = torch.zeros_like(gradient), torch.ones((), device=device)
    moments = rule.begin(weight)
    update_(weight, gradient, moments, one.repeat(2), one - 1, one, adam=rule.adam, lr=0.0, decay=0.0)
    found = moments["mean_code" if signed else "root_code"]
    wide = gradient if signed else gradient.square().sqrt()  # 0 where the square is too small for a number
    off = (found.int() - encode(wide, one.view(1, 1), signed=signed).int()).abs()[0]
    assert not off[len(around) :].any()
    # The root of a square may be the next number, which matters here alone.
    assert off[: len(around)].max() <= (0 if signed else 1)
    assert found.unique().numel() == 256


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_kernels_take_the_steps_of_the_rules() -> None:
    here, there = matrices("cpu"), matrices("cuda")
    optimizers = [make_optimizer(named, Optimizer(kind="adamw-8bit")) for named in (here, there)]
    for number, left_out in enumerate([False, False, True, False, False]):
        for optimizer, named in zip(optimizers, (here, there), strict=True):
            step(optimizer, named, number=number, left_out=left_out)
    for name in here:
        torch.testing.assert_close(there[name].cpu(), here[name], rtol=1e-5, atol=1e-6)
        wanted, found = (o.state[named[name]] for o, named in zip(optimizers, (here, there), strict=True))
        assert wanted.keys() == found.keys()
        assert float(found["step"]) == 4
        for moment, expected in wanted.items():
            got = found[moment].cpu()
            if moment.endswith("_code"):
                # A number between two codes may round the other way after another order of operations.
                off = (got.int() - expected.int()).abs()
                assert off.max() <= 1
                assert (off > 0).float().mean() < 1e-3, (name, moment)
            else:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_left_out_changes_no_bit_and_equal_steps_give_equal_bits() -> None:
    runs = [matrices("cuda") for _ in range(2)]
    optimizers = [make_optimizer(named, Optimizer(kind="adamw-8bit")) for named in runs]

    def bits(which: int) -> list[bytes]:
        states = [t for state in optimizers[which].state.values() for t in state.values()]
        return [t.detach().cpu().numpy().tobytes() for t in [*runs[which].values(), *states]]

    for number, (optimizer, named) in itertools.product(range(3), zip(optimizers, runs, strict=True)):
        step(optimizer, named, number=number, left_out=False)
    before = bits(0)
    assert before == bits(1)
    step(optimizers[0], runs[0], number=9, left_out=True)
    assert before == bits(0)
