"""Dropout: a fair coin for every feature, the same wherever and however often it is thrown."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from ropewalk.model.decoder import build
from ropewalk.model.dropout import SITES, Dropout, dropout_key

from .specs import small

ROWS, TOKENS, FEATURES = 16, 64, 128


def masks(
    *, rate: float = 0.1, seed: int = 0, step: int = 0, rows: Tensor | None = None, places: Tensor | None = None
) -> Dropout:
    rows_B = torch.arange(ROWS) if rows is None else rows
    return Dropout(rate, dropout_key(seed, torch.tensor(step)), rows_B, places)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_each_feature_is_dropped_at_the_rate(rate):
    kept = masks(rate=rate).at(1).kept(TOKENS, FEATURES, site="mlp").double()
    for dims in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):
        counted = ROWS * TOKENS * FEATURES / kept.mean(dims).numel()
        # Six standard errors of a coin, over at most 128 means: odds of about 1 in a million.
        assert (kept.mean(dims) - (1 - rate)).abs().max() < 6 * math.sqrt(rate * (1 - rate) / counted)


def test_every_coordinate_makes_independent_masks():
    """Masks that differ in one coordinate of the key agree as often as independent coins."""
    half = masks(rate=0.5)
    one = half.at(1).kept(TOKENS, FEATURES, site="mlp")
    others = [
        half.at(2).kept(TOKENS, FEATURES, site="mlp"),
        half.at(1).kept(TOKENS, FEATURES, site="attention"),
        masks(rate=0.5, step=1).at(1).kept(TOKENS, FEATURES, site="mlp"),
        masks(rate=0.5, seed=1).at(1).kept(TOKENS, FEATURES, site="mlp"),
        masks(rate=0.5, rows=torch.arange(ROWS) + ROWS).at(1).kept(TOKENS, FEATURES, site="mlp"),
        *(one.roll(1, dim) for dim in range(3)),
        *(one.roll(7, dim) for dim in range(3)),
    ]
    for left, right in itertools.combinations([one, *others], 2):
        agree = (left == right).double().mean().item()
        assert abs(agree - 0.5) < 6 * 0.5 / math.sqrt(one.numel())


def test_masks_do_not_depend_on_the_company():
    whole = masks().at(3).kept(TOKENS, FEATURES, site="attention")
    order = torch.randperm(ROWS)
    assert torch.equal(masks(rows=order).at(3).kept(TOKENS, FEATURES, site="attention"), whole[order])
    places = torch.randperm(TOKENS)[:20]
    some = masks(places=places).at(3).kept(len(places), FEATURES, site="attention")
    assert torch.equal(some, whole[:, places])
    fewer = masks().at(3).kept(TOKENS, 5, site="attention")
    assert torch.equal(fewer, whole[..., :5])


def test_the_mean_is_kept_and_gradients_follow_the_mask():
    x = torch.ones(ROWS, TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)
    y = masks(rate=0.25)(x, site="embedding")
    kept = masks(rate=0.25).kept(TOKENS, FEATURES, site="embedding")
    torch.testing.assert_close(y, kept.double() / 0.75, atol=1e-15, rtol=1e-15)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y.detach())


def test_a_model_drops_at_every_site_and_only_when_asked():
    spec = small(dropout=0.5)
    model = build(spec, seed=0, dtype=torch.float64)
    tokens = torch.randint(spec.vocabulary, (4, 10))
    sites, first = [], dropout_key(0, torch.tensor(3))

    class Noted(Dropout):
        def __call__(self, x_BTC, *, site):
            sites.append((int(self.key - first) // len(SITES), site))
            return super().__call__(x_BTC, site=site)

    with torch.no_grad():
        plain = model(tokens)
        assert torch.equal(plain, model(tokens))
        whole = model(tokens, dropout=Noted(0.5, dropout_key(0, torch.tensor(3)), torch.arange(4)))
        assert not torch.equal(plain, whole)
        parts = [
            model(tokens[rows], dropout=Dropout(0.5, dropout_key(0, torch.tensor(3)), rows))
            for rows in torch.arange(4).split(3)
        ]
    assert sites == [(0, "embedding"), *((layer, site) for layer in (0, 1) for site in ("attention", "mlp"))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-13, rtol=1e-12)
