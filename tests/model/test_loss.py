"""Loss and scores, whole and in chunks."""

from __future__ import annotations

import pytest
import torch

from ropewalk.model import loss
from ropewalk.model.loss import token_losses, token_scores, weighted_loss

VOCABULARY, WIDTH = 50, 8


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(33, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, head, torch.randint(VOCABULARY, (33,), generator=generator)


WEIGHTS = torch.linspace(0, 2, 33, dtype=torch.float64)


def gradients_of(total, *inputs):
    return torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("chunk", [1, 7, 11, 32, 33])
def test_gradients_made_in_the_forward_pass_are_those_of_autograd(problem, monkeypatch, chunk):
    hidden, head, targets = problem
    plain = (token_losses(hidden, head, targets) * WEIGHTS).sum()
    monkeypatch.setattr(loss, "LOGIT_BYTES", 4 * VOCABULARY * chunk)
    fused = weighted_loss(hidden, head, targets, WEIGHTS)
    torch.testing.assert_close(fused, plain, atol=1e-13, rtol=1e-13)
    # A factor, as that of a mean or of a loss scale, reaches both gradients.
    for gradient, wanted in zip(
        gradients_of(fused / 7, hidden, head), gradients_of(plain / 7, hidden, head), strict=True
    ):
        torch.testing.assert_close(gradient, wanted, atol=1e-13, rtol=1e-12)


def test_in_float32_it_is_the_plain_loss_to_1e_6(problem):
    hidden, head, targets = (tensor.detach() for tensor in problem)
    hidden, head = hidden.float().requires_grad_(), head.float().requires_grad_()
    plain = (token_losses(hidden, head, targets) * WEIGHTS.float()).sum()
    fused = weighted_loss(hidden, head, targets, WEIGHTS.float())
    torch.testing.assert_close(fused, plain, atol=0, rtol=1e-6)
    for gradient, wanted in zip(gradients_of(fused, hidden, head), gradients_of(plain, hidden, head), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_gradient_that_nobody_wants_is_not_made(problem, frozen):
    inputs = [tensor.detach().requires_grad_(place != frozen) for place, tensor in enumerate(problem[:2])]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        total = weighted_loss(*inputs, problem[2], WEIGHTS)
    assert [tensor.shape for tensor in kept] == [inputs[1 - frozen].shape]
    plain = (token_losses(*inputs, problem[2]) * WEIGHTS).sum()
    torch.testing.assert_close(
        gradients_of(total, inputs[1 - frozen])[0], gradients_of(plain, inputs[1 - frozen])[0], atol=1e-13, rtol=1e-12
    )


def test_under_autocast_types_are_those_of_the_inputs(problem):
    hidden, head, targets = (tensor.detach() for tensor in problem)
    hidden, head = hidden.float().requires_grad_(), head.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        total = weighted_loss(hidden, head, targets, WEIGHTS.float())
        plain = (token_losses(hidden, head, targets) * WEIGHTS.float()).sum()
    assert total.dtype == torch.float32
    for gradient, wanted in zip(gradients_of(total, hidden, head), gradients_of(plain, hidden, head), strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, wanted, atol=0.02 * wanted.abs().max().item(), rtol=0)


@pytest.mark.parametrize("chunk", [5, 100])
def test_scores_are_those_of_log_softmax(problem, monkeypatch, chunk):
    hidden, head, targets = problem
    monkeypatch.setattr(loss, "LOGIT_BYTES", 4 * VOCABULARY * chunk)
    logits = hidden @ head.T
    targets[:9] = logits.argmax(-1)[:9]
    scores, first = token_scores(hidden, head, targets)
    torch.testing.assert_close(scores, logits.log_softmax(-1)[torch.arange(33), targets])
    assert torch.equal(first, logits.argmax(-1) == targets)
    assert first[:9].all()
    assert not scores.requires_grad


def test_losses_are_the_scores_with_the_sign_turned(problem):
    hidden, head, targets = problem
    torch.testing.assert_close(-token_losses(hidden, head, targets), token_scores(hidden, head, targets)[0])


def test_half_precision_logits_are_summed_in_float32(problem):
    hidden, head, targets = problem
    half = token_losses(hidden.bfloat16(), head.bfloat16(), targets)
    assert half.dtype == torch.float32
    # bfloat16 has 8 bits: logits of about 10 are off by up to 0.04, and the inputs as much again.
    torch.testing.assert_close(half, token_losses(hidden, head, targets).float(), atol=0.15, rtol=0)
