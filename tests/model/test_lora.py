"""Adapters: what they compute, how they start and learn, and that merging changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropewalk.model.config import Lora
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.init import initial_value
from ropewalk.model.modules import Linear
from ropewalk.model.spec import Spec
from ropewalk.model.trainable import adapted, adapter_names, merged, with_lora

from .specs import freeze, loras, loud, small, specs


def logits(spec: Spec, weights: dict[str, Tensor]) -> Tensor:
    model = Decoder(spec).double()
    model.load_state_dict(weights)
    tokens_BT = torch.arange(2 * min(spec.sequence_length, 8)).view(2, -1) % spec.vocabulary
    with torch.no_grad():
        return model.logits(model(tokens_BT))


@settings(max_examples=60, deadline=None)
@given(spec=specs(), lora=loras(), seed=st.integers(0, 99))
def test_a_merged_model_computes_what_the_adapted_one_does(spec, lora, seed):
    spec = with_lora(spec, lora)
    weights = loud(spec, seed=seed).state_dict()
    plain, plain_spec = merged(weights, spec)
    assert plain_spec == with_lora(spec, None)
    assert {name: tuple(tensor.shape) for name, tensor in plain.items()} == plain_spec.shapes()
    before, after = logits(spec, weights), logits(plain_spec, plain)
    # Relative to the largest: without norms, logits of very different sizes share one sum.
    largest = max(1.0, before.abs().max().item())
    torch.testing.assert_close(after / largest, before / largest, atol=1e-12, rtol=1e-12)
    assert not torch.equal(plain["blocks.0.attention.qkv.weight"], weights["blocks.0.attention.qkv.weight"])


@settings(max_examples=60, deadline=None)
@given(spec=specs(), lora=loras())
def test_fresh_adapters_change_nothing(spec, lora):
    plain, spec = with_lora(spec, None), with_lora(spec, lora)
    weights = loud(plain, seed=0).state_dict()
    fresh = adapted(weights, spec, seed=3)
    assert {name: tuple(tensor.shape) for name, tensor in fresh.items()} == spec.shapes()
    assert torch.equal(logits(spec, fresh), logits(plain, weights))
    back, _ = merged(fresh, spec)
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_a_model_without_adapters_is_its_own_merger():
    spec = small()
    weights = build(spec, seed=0).state_dict()
    same, same_spec = merged(weights, spec)
    assert same_spec == spec
    assert list(same) == list(weights)
    assert all(same[name] is weights[name] for name in same)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_formula(bias):
    """y = x W^T + b + s (x A^T) B^T, and G the gradient of y: written out by the chain rule."""
    draw = torch.Generator().manual_seed(0)
    layer = Linear(6, 5, bias=bias, rank=3, alpha=7.5).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    x, g = (torch.randn(4, size, generator=draw, dtype=torch.float64) for size in (6, 5))
    x.requires_grad_()
    layer(x).backward(g)
    w, a, b, s = layer.weight.detach(), layer.lora_a.detach(), layer.lora_b.detach(), 7.5 / 3
    with torch.no_grad():
        expected = {"weight": g.T @ x, "lora_a": s * (g @ b).T @ x, "lora_b": s * g.T @ (x @ a.T)}
        expected |= {"bias": g.sum(0)} if bias else {}
        assert set(expected) == {name for name, _ in layer.named_parameters()}
        for name, gradient in expected.items():
            torch.testing.assert_close(getattr(layer, name).grad, gradient, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(x.grad, g @ w + s * (g @ b) @ a, atol=1e-12, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(spec=specs(), lora=loras())
def test_gradients_of_a_whole_model_follow_from_those_of_the_merged_one(spec, lora):
    """With D the gradient of W + s B A: s B^T D for A, s D A^T for B."""
    spec = with_lora(spec, lora)
    model = loud(spec, seed=1)
    freeze(model, adapter_names(spec))
    plain_weights, plain_spec = merged(model.state_dict(), spec)
    plain = Decoder(plain_spec).double()
    plain.load_state_dict(plain_weights)
    tokens_BT = torch.arange(2 * min(spec.sequence_length, 6)).view(2, -1) % spec.vocabulary
    for each in (model, plain):
        each.logits(each(tokens_BT)).logsumexp(-1).sum().backward()
    weights, scale = dict(model.named_parameters()), spec.lora_alpha / spec.lora_rank
    assert {name for name, weight in weights.items() if weight.grad is not None} == set(adapter_names(spec))
    for name in adapter_names(spec):
        part, _, kind = name.rpartition(".")
        whole = dict(plain.named_parameters())[f"{part}.weight"].grad
        a, b = weights[f"{part}.lora_a"].detach(), weights[f"{part}.lora_b"].detach()
        expected = scale * (b.T @ whole if kind == "lora_a" else whole @ a.T)
        largest = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(weights[name].grad / largest, expected / largest, atol=1e-10, rtol=1e-10)


def test_a_starts_gaussian_by_its_inputs_and_b_at_zero_under_every_law():
    for init in ("depth-scaled", "lipschitz", "zero-projection"):
        spec = small(width=128, heads=8, mlp_width=256, init=init, lora=Lora(rank=64))
        for name, value in build(spec, seed=0).named_parameters():
            if name.endswith(".lora_b"):
                assert (value == 0).all()
            if name.endswith(".lora_a"):
                # Five standard errors of a Gaussian's deviation and kurtosis.
                expected = math.sqrt(1 / (3 * value.shape[1]))
                assert abs(value.std() / expected - 1) < 5 / math.sqrt(2 * value.numel())
                assert abs((value / value.std()).pow(4).mean() - 3) < 5 * math.sqrt(24 / value.numel())


def test_adapters_start_by_seed_and_name_alone():
    spec = small(lora=Lora(rank=4))
    plain = build(with_lora(spec, None), seed=0, dtype=torch.bfloat16).state_dict()
    first, again, other = (adapted(plain, spec, seed=seed) for seed in (1, 1, 2))
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    for name in adapter_names(spec):
        assert torch.equal(first[name], again[name])
        expected = initial_value(name, spec.shapes()[name], spec, seed=1)
        assert torch.equal(first[name], expected.bfloat16())
        assert torch.equal(first[name], other[name]) == name.endswith(".lora_b")


@pytest.mark.parametrize(("targets", "maps"), [("attention", 2), ("all", 4)])
def test_targets_say_which_maps_have_adapters(targets, maps):
    spec = small(lora=Lora(rank=4, targets=targets))
    names = adapter_names(spec)
    assert len(names) == 2 * maps * spec.layers
    assert any(".mlp." in name for name in names) == (targets == "all")
    assert adapter_names(with_lora(spec, None)) == ()
    sizes = sum(math.prod(spec.shapes()[name]) for name in names)
    assert spec.parameters() == with_lora(spec, None).parameters() + sizes
    assert spec.parameters(trained=names) == sizes


def test_merging_half_precision_rounds_once():
    """The sum is exact before it is rounded: no bit more is lost than bfloat16 must lose."""
    spec = small(lora=Lora(rank=4))
    weights = {name: tensor.bfloat16() for name, tensor in loud(spec, seed=0).state_dict().items()}
    plain, _ = merged(weights, spec)
    part = "blocks.1.mlp.up"
    w, a, b = (weights[f"{part}.{kind}"].double() for kind in ("weight", "lora_a", "lora_b"))
    assert plain[f"{part}.weight"].dtype == torch.bfloat16
    assert torch.equal(plain[f"{part}.weight"], (w + 16 / 4 * b @ a).bfloat16())


def test_training_adapters_alone_lowers_the_loss_and_moves_nothing_else():
    spec = small(lora=Lora(rank=8))
    model = build(spec, seed=0)
    freeze(model, adapter_names(spec))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tokens_BT = torch.randint(spec.vocabulary, (4, 11), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(30):
        scores = model.logits(model(tokens_BT[:, :-1]))
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens_BT[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == set(adapter_names(spec))
