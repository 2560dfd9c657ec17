"""The decoder against a slow one written from the formulas: one head, one token, one sum at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropewalk.model.attend import attend_for, causal
from ropewalk.model.decoder import build
from ropewalk.model.positions import alibi_slopes, rotation
from ropewalk.model.sharding import splits
from ropewalk.model.spec import Spec

from .specs import loud, small, specs

Weights = dict[str, Tensor]


@settings(max_examples=150, deadline=None)
@given(spec=specs(), seed=st.integers(0, 99))
def test_logits_equal_the_reference(spec, seed):
    model = loud(spec, seed=seed)
    tokens_T = random_tokens(spec, min(spec.sequence_length, 7), seed=seed)
    documents_T = (random_tokens(spec, len(tokens_T), seed=seed + 1) % 3 == 0).int().cumsum(0)
    attend = attend_for(spec, documents_BT=documents_T.unsqueeze(0))
    with torch.no_grad():
        logits_TV = model.logits(model(tokens_T.unsqueeze(0), attend=attend))[0]
        expected_TV = reference_logits(spec, dict(model.named_parameters()), tokens_T, documents_T.tolist())
    # Relative to the largest: without norms, logits of very different sizes share one sum.
    largest = max(1.0, expected_TV.abs().max().item())
    torch.testing.assert_close(logits_TV / largest, expected_TV / largest, atol=1e-12, rtol=1e-12)


@settings(max_examples=60, deadline=None)
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


def test_a_window_and_a_document_hide_what_lies_outside():
    spec = small(window=3, documents="separate", layers=1)
    model = loud(spec, seed=0)
    tokens_BT = random_tokens(spec, 1, 10)
    documents_BT = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1]])
    reached = torch.zeros(10, 10, dtype=torch.bool)
    for place in range(10):
        other_BT = tokens_BT.clone()
        other_BT[:, place] = (other_BT[:, place] + 1) % spec.vocabulary
        with torch.no_grad():
            here, there = (model(t, attend=attend_for(spec, documents_BT=documents_BT)) for t in (tokens_BT, other_BT))
        reached[:, place] = (here != there).any(-1)[0]
    wanted = [[0 <= t - s < 3 and (t < 5) == (s < 5) for s in range(10)] for t in range(10)]
    assert reached.tolist() == wanted


def test_nothing_special_takes_the_fast_path():
    assert attend_for(small(), documents_BT=torch.zeros(1, 10)) is causal
    assert attend_for(small(documents="separate")) is causal
    assert attend_for(small(position="none")) is causal
    for changes in ({"window": 3}, {"position": "alibi"}):
        assert attend_for(small(**changes)) is not causal


def test_ntk_keeps_the_fastest_pair_and_slows_the_slowest_by_the_factor():
    turns = {}
    for scaling in ("none", "ntk"):
        spec = small(rope_scaling=scaling, rope_factor=4.0 if scaling == "ntk" else 1.0)
        cos, sin = rotation(torch.ones(1, 1), spec, dtype=torch.float64)
        turns[scaling] = torch.atan2(sin, cos).flatten()
    torch.testing.assert_close(turns["ntk"][0], turns["none"][0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(turns["ntk"][-1], turns["none"][-1] / 4, atol=1e-12, rtol=1e-12)


def test_slopes_are_those_of_the_paper():
    # Press et al. 2022, section 3: 1/2 to 1/256 for 8 heads; half the steps for 16; 12 take 8 and every second of 16.
    eight = [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(8).tolist() == eight
    assert alibi_slopes(16).tolist() == pytest.approx([2 ** (-n / 2) for n in range(1, 17)])
    assert alibi_slopes(12).tolist() == pytest.approx([*eight, *(2 ** (-n / 2) for n in (1, 3, 5, 7))])
    assert [len(alibi_slopes(heads)) for heads in range(1, 30)] == list(range(1, 30))


@pytest.mark.parametrize(
    "changes", [{}, {"position": "alibi", "window": 3}, {"position": "sinusoidal"}, {"qk_norm": True, "bias": True}]
)
def test_half_precision_weights_keep_their_type(changes):
    model = build(small(**changes), seed=0, dtype=torch.bfloat16)
    assert model(torch.zeros(1, 4, dtype=torch.long)).dtype == torch.bfloat16


def random_tokens(spec: Spec, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(spec.vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def reference_logits(spec: Spec, weights: Weights, tokens_T: Tensor, documents: list[int]) -> Tensor:
    """Logits T V of one row."""
    x_TC = weights["embedding.weight"][tokens_T]
    if spec.position == "learned":
        x_TC = x_TC + weights["positions.weight"][: len(tokens_T)]
    if spec.position == "sinusoidal":
        x_TC = x_TC * math.sqrt(spec.width) + waves(spec, len(tokens_T))
    for layer in range(spec.layers):
        block = {
            name.removeprefix(f"blocks.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        parts = unfused(spec, block, f"blocks.{layer}.")
        for branch, compute in (("attention", attention), ("mlp", feed_forward)):
            before_TC = x_TC if spec.norm_position == "post" else norm(spec, block, f"{branch}_norm", x_TC)
            added_TC = compute(spec, block, parts, before_TC, documents)
            if spec.norm_position == "both":
                added_TC = norm(spec, block, f"{branch}_post_norm", added_TC)
            x_TC = x_TC + added_TC
            if spec.norm_position == "post":
                x_TC = norm(spec, block, f"{branch}_norm", x_TC)
    head_VC = weights["embedding.weight" if spec.tie_embeddings else "head.weight"]
    if spec.norm_position != "post":
        x_TC = norm(spec, weights, "norm", x_TC)
    return x_TC @ head_VC.T


def waves(spec: Spec, tokens: int) -> Tensor:
    """Sinusoids of Vaswani et al., one number at a time."""

    def wave(position: int, feature: int) -> float:
        angle = position / 10_000 ** (2 * (feature // 2) / spec.width)
        return math.cos(angle) if feature % 2 else math.sin(angle)

    rows = [[wave(position, feature) for feature in range(spec.width)] for position in range(tokens)]
    return torch.tensor(rows, dtype=torch.float64)


def unfused(spec: Spec, block: Weights, prefix: str) -> Weights:
    """The matrices and biases that the fused ones are made of, taken apart as the declared splits say."""
    taken: dict[str, list[Tensor]] = {}
    for name in block:
        if name.startswith(("attention.qkv.", "mlp.up.")):
            split = splits(spec)[prefix + name]
            if name.endswith(".lora_a"):
                # All parts read through one A; each writes through its own rows of B.
                whole = splits(spec)[prefix + name.replace("lora_a", "weight")]
                taken |= {f"{part}.lora_a": [block[name]] for part, _ in whole.parts}
            row = 0
            for _ in range(split.units if split.parts else 0):
                for part, rows in split.parts:
                    taken.setdefault(f"{part}.{name.split('.')[-1]}", []).append(block[name][row : row + rows])
                    row += rows
            assert not split.parts or row == len(block[name])
    return {name: torch.cat(pieces) for name, pieces in taken.items()}


def linear(spec: Spec, weights: Weights, name: str, x_TC: Tensor) -> Tensor:
    y_TC = x_TC @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)
    if f"{name}.lora_b" not in weights:
        return y_TC
    # Hu et al. 2021: one column of B times one row of A for each rank.
    columns, rows = weights[f"{name}.lora_b"].unbind(1), weights[f"{name}.lora_a"].unbind(0)
    added = sum(torch.outer(x_TC @ row, column) for column, row in zip(columns, rows, strict=True))
    return y_TC + added * spec.lora_alpha / spec.lora_rank


def norm(spec: Spec, weights: Weights, name: str, x_TC: Tensor) -> Tensor:
    if spec.norm == "none":
        return x_TC
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


def attention(spec: Spec, block: Weights, parts: Weights, x_TC: Tensor, documents: list[int]) -> Tensor:
    size = spec.head_size
    q_TC, k_TC, v_TC = (linear(spec, parts, name, x_TC) for name in ("query", "key", "value"))
    heads = []
    for head in range(spec.heads):
        group = head * spec.kv_heads // spec.heads
        q_TD = q_TC[:, head * size : (head + 1) * size]
        k_TD, v_TD = (x[:, group * size : (group + 1) * size] for x in (k_TC, v_TC))
        if spec.qk_norm:
            q_TD = unit_mean_square(q_TD) * block["attention.query_norm.weight"]
            k_TD = unit_mean_square(k_TD) * block["attention.key_norm.weight"]
        if spec.position == "rope":
            q_TD, k_TD = rotated(spec, q_TD), rotated(spec, k_TD)
        slope = reference_slope(head, spec.heads) if spec.position == "alibi" else 0.0
        rows = []
        for t in range(len(x_TC)):
            first = 0 if spec.window is None else max(0, t + 1 - spec.window)
            seen = [s for s in range(first, t + 1) if spec.documents == "ignore" or documents[s] == documents[t]]
            penalty_S = torch.tensor([-slope * (t - s) for s in seen], dtype=torch.float64)
            rows.append(attend_one(q_TD[t], k_TD[seen], v_TD[seen], penalty_S))
        heads.append(torch.stack(rows))
    return linear(spec, block, "attention.out", torch.cat(heads, dim=1))


def unit_mean_square(x_TD: Tensor) -> Tensor:
    return torch.stack([x_D / math.sqrt(sum(v * v for v in x_D.tolist()) / len(x_D) + 1e-6) for x_D in x_TD])


def reference_slope(head: int, heads: int) -> float:
    """ALiBi: 8 octaves shared by the heads; beyond a power of two, the odd steps of half the size."""
    power = 2 ** int(math.log2(heads))
    return 2.0 ** -(8 / power * (head + 1)) if head < power else 2.0 ** -(4 / power * (2 * (head - power) + 1))


def attend_one(q_D: Tensor, k_SD: Tensor, v_SD: Tensor, penalty_S: Tensor) -> Tensor:
    scores_S = k_SD @ q_D / math.sqrt(len(q_D)) + penalty_S
    weights_S = (scores_S - scores_S.max()).exp()
    return (weights_S / weights_S.sum()) @ v_SD


def rotated(spec: Spec, x_TD: Tensor) -> Tensor:
    """RoPE as multiplication of complex numbers (feature i, feature i + D/2) by e^(i position frequency)."""
    half = spec.head_size // 2
    stretch = spec.rope_factor if spec.rope_scaling == "linear" else 1.0
    base = spec.rope_theta
    if spec.rope_scaling == "ntk":
        base *= spec.rope_factor ** (spec.head_size / (spec.head_size - 2))
    rows = []
    for position, x_D in enumerate(x_TD.tolist()):
        pairs = [complex(x_D[i], x_D[i + half]) for i in range(half)]
        angles = [position / stretch * base ** (-2 * i / spec.head_size) for i in range(half)]
        moved = [z * complex(math.cos(a), math.sin(a)) for z, a in zip(pairs, angles, strict=True)]
        rows.append([z.real for z in moved] + [z.imag for z in moved])
    return torch.tensor(rows, dtype=torch.float64)


def feed_forward(spec: Spec, block: Weights, parts: Weights, x_TC: Tensor, documents: list[int]) -> Tensor:
    gated = "gate.weight" in parts
    raw_TF = linear(spec, parts, "gate", x_TC) if gated else linear(spec, block, "mlp.up", x_TC)
    inner_TF = ACTIVATIONS[spec.mlp](raw_TF)
    if gated:
        inner_TF = inner_TF * linear(spec, parts, "up", x_TC)
    return linear(spec, block, "mlp.down", inner_TF)


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def relu2(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x, 0.0)


ACTIVATIONS = {"swiglu": silu, "geglu": gelu, "gelu": gelu, "gelu-tanh": gelu_tanh, "relu2": relu2}
