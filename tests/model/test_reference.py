"""The decoder against a slow one written from the formulas: one head, one token, one sum at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropewalk.model.decoder import build
from ropewalk.model.sharding import splits
from ropewalk.model.spec import Spec

from .specs import small, specs

Weights = dict[str, Tensor]


@settings(max_examples=40, deadline=None)
@given(spec=specs(), seed=st.integers(0, 99))
def test_logits_equal_the_reference(spec, seed):
    model = loud(spec, seed=seed)
    tokens_T = random_tokens(spec, min(spec.sequence_length, 7), seed=seed)
    with torch.no_grad():
        logits_TV = model.logits(model(tokens_T.unsqueeze(0)))[0]
        expected_TV = reference_logits(spec, dict(model.named_parameters()), tokens_T)
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-12, rtol=1e-12)


@settings(max_examples=20, deadline=None)
@given(spec=specs(), data=st.data())
def test_a_token_changes_nothing_before_it(spec, data):
    model = loud(spec, seed=0)
    place = data.draw(st.integers(0, spec.sequence_length - 1))
    tokens_BT = random_tokens(spec, 2, spec.sequence_length)
    other_BT = tokens_BT.clone()
    other_BT[:, place] = (other_BT[:, place] + 1) % spec.vocabulary
    with torch.no_grad():
        hidden_BTC, changed_BTC = model(tokens_BT), model(other_BT)
    torch.testing.assert_close(hidden_BTC[:, :place], changed_BTC[:, :place], atol=1e-12, rtol=1e-12)
    assert not torch.equal(hidden_BTC[:, place], changed_BTC[:, place])


@pytest.mark.parametrize("shift", [1, 1000])
def test_rotation_sees_only_distances(shift):
    model = loud(small(), seed=0)
    tokens_BT = random_tokens(model.spec, 2, 10)
    places_BT = torch.arange(10).expand(2, -1)
    with torch.no_grad():
        here, there = model(tokens_BT, positions_BT=places_BT), model(tokens_BT, positions_BT=places_BT + shift)
    torch.testing.assert_close(here, there, atol=1e-10, rtol=1e-10)
    with torch.no_grad():
        stretched = model(tokens_BT, positions_BT=2 * places_BT)
    assert (here - stretched).abs().max() > 1e-3


def test_half_precision_weights_keep_their_type():
    model = build(small(), seed=0, dtype=torch.bfloat16)
    assert model(torch.zeros(1, 4, dtype=torch.long)).dtype == torch.bfloat16


def random_tokens(spec: Spec, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(spec.vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def loud(spec: Spec, *, seed: int):
    """A float64 model with weights large enough, and norms uneven enough, that no term is lost."""
    model = build(spec, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1)
    return model


def reference_logits(spec: Spec, weights: Weights, tokens_T: Tensor) -> Tensor:
    """Logits T V of one row."""
    x_TC = weights["embedding.weight"][tokens_T]
    if spec.position == "learned":
        x_TC = x_TC + weights["positions.weight"][: len(tokens_T)]
    for layer in range(spec.layers):
        block = {
            name.removeprefix(f"blocks.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        parts = unfused(spec, block, f"blocks.{layer}.")
        x_TC = x_TC + attention(spec, block, parts, norm(spec, block, "attention_norm", x_TC))
        x_TC = x_TC + feed_forward(spec, block, parts, norm(spec, block, "mlp_norm", x_TC))
    head_VC = weights["embedding.weight" if spec.tied else "head.weight"]
    return norm(spec, weights, "norm", x_TC) @ head_VC.T


def unfused(spec: Spec, block: Weights, prefix: str) -> Weights:
    """The matrices that the fused ones are made of, taken apart as the declared splits say."""
    taken: dict[str, list[Tensor]] = {}
    for name in ("attention.qkv.weight", "mlp.up.weight"):
        split = splits(spec)[prefix + name]
        row = 0
        for _ in range(split.units if split.parts else 0):
            for part, rows in split.parts:
                taken.setdefault(f"{name}:{part}", []).append(block[name][row : row + rows])
                row += rows
        assert not split.parts or row == len(block[name])
    return {name: torch.cat(pieces) for name, pieces in taken.items()}


def norm(spec: Spec, weights: Weights, name: str, x_TC: Tensor) -> Tensor:
    rows = []
    for x_C in x_TC:
        if spec.norm == "rms":
            rows.append(x_C / math.sqrt(sum(v * v for v in x_C.tolist()) / len(x_C) + 1e-6))
        else:
            mean = sum(x_C.tolist()) / len(x_C)
            variance = sum((v - mean) ** 2 for v in x_C.tolist()) / len(x_C)
            rows.append((x_C - mean) / math.sqrt(variance + 1e-5))
    bias = weights.get(f"{name}.bias", 0.0)
    return torch.stack(rows) * weights[f"{name}.weight"] + bias


def attention(spec: Spec, block: Weights, parts: Weights, x_TC: Tensor) -> Tensor:
    size = spec.head_size
    q_TC, k_TC, v_TC = (x_TC @ parts[f"attention.qkv.weight:{name}"].T for name in ("query", "key", "value"))
    heads = []
    for head in range(spec.heads):
        group = head * spec.kv_heads // spec.heads
        q_TD = q_TC[:, head * size : (head + 1) * size]
        k_TD, v_TD = (x[:, group * size : (group + 1) * size] for x in (k_TC, v_TC))
        if spec.position == "rope":
            q_TD, k_TD = turned(spec, q_TD), turned(spec, k_TD)
        heads.append(torch.stack([attend_one(q_TD[t], k_TD[: t + 1], v_TD[: t + 1]) for t in range(len(x_TC))]))
    return torch.cat(heads, dim=1) @ block["attention.out.weight"].T


def attend_one(q_D: Tensor, k_SD: Tensor, v_SD: Tensor) -> Tensor:
    scores_S = k_SD @ q_D / math.sqrt(len(q_D))
    weights_S = (scores_S - scores_S.max()).exp()
    return (weights_S / weights_S.sum()) @ v_SD


def turned(spec: Spec, x_TD: Tensor) -> Tensor:
    """RoPE as multiplication of complex numbers (feature i, feature i + D/2) by e^(i position frequency)."""
    half = spec.head_size // 2
    rows = []
    for position, x_D in enumerate(x_TD.tolist()):
        pairs = [complex(x_D[i], x_D[i + half]) for i in range(half)]
        angles = [position * spec.rope_base ** (-2 * i / spec.head_size) for i in range(half)]
        moved = [z * complex(math.cos(a), math.sin(a)) for z, a in zip(pairs, angles, strict=True)]
        rows.append([z.real for z in moved] + [z.imag for z in moved])
    return torch.tensor(rows, dtype=torch.float64)


def feed_forward(spec: Spec, block: Weights, parts: Weights, x_TC: Tensor) -> Tensor:
    if spec.mlp == "swiglu":
        gate_TF, up_TF = (x_TC @ parts[f"mlp.up.weight:{name}"].T for name in ("gate", "up"))
        inner_TF = gate_TF / (1 + (-gate_TF).exp()) * up_TF
    else:
        raw_TF = x_TC @ block["mlp.up.weight"].T
        inner_TF = raw_TF * (1 + torch.erf(raw_TF / math.sqrt(2))) / 2
    return inner_TF @ block["mlp.down.weight"].T
