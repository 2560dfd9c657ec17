"""Loss and scores, whole and in chunks."""

from __future__ import annotations

import pytest
import torch

from ropewalk.model import loss
from ropewalk.model.loss import token_losses, token_scores

VOCABULARY, WIDTH = 50, 8


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(33, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, head, torch.randint(VOCABULARY, (33,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 7, 11, 32, 33])
def test_chunks_change_neither_values_nor_gradients(problem, monkeypatch, chunk):
    hidden, head, targets = problem
    weights = torch.linspace(0, 2, 33, dtype=torch.float64)
    whole = token_losses(hidden, head, targets)
    expected = torch.autograd.grad((whole * weights).sum(), (hidden, head))
    monkeypatch.setattr(loss, "LOGIT_BYTES", 4 * VOCABULARY * chunk)
    chunked = token_losses(hidden, head, targets)
    gradients = torch.autograd.grad((chunked * weights).sum(), (hidden, head))
    torch.testing.assert_close(chunked, whole, atol=1e-13, rtol=1e-13)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-13, rtol=1e-12)


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
