"""A grown model computes what the smaller one did, wherever that is promised."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.model.config import Lora
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.growth.growth import grow
from ropewalk.model.growth.larger import Sizes, larger
from ropewalk.model.spec import Spec
from ropewalk.model.trainable import with_lora
from tests.tiny import random_batch, small_spec

# float64 keeps 16 digits; a few layers of sums lose at most three of them.
TOLERANCE = 1e-10

GPT2 = {"norm": "layer", "position": "learned", "mlp": "gelu", "bias": True}
MODELS = {
    "default": {},
    "untied": {"tie_embeddings": False},
    "grouped": {"kv_heads": 2, "qk_norm": True},
    "gpt2": GPT2,
    "both": {"norm_position": "both", "norm": "layer"},
    "both-rms": {"norm_position": "both"},
    "no-norm": {"norm": "none", "tie_embeddings": False},
    "both-none": {"norm": "none", "norm_position": "both", "tie_embeddings": False},
    "relu2-window": {"mlp": "relu2", "window": 3},
    "alibi": {"position": "alibi"},
    "sinusoidal": {"position": "sinusoidal", "mlp": "geglu"},
    "post": {"norm_position": "post", "norm": "layer"},
    "post-untied": {"norm_position": "post", "tie_embeddings": False},
}
SIZES = {
    "mlp_width": Sizes(mlp_width=40),
    "width": Sizes(width=32),
    "thrice": Sizes(width=48, mlp_width=72),
    "layers": Sizes(layers=5),
    "all": Sizes(layers=3, width=32, mlp_width=64),
}


def trained(spec: Spec, seed: int = 0) -> Decoder:
    """A model none of whose numbers is special: norms and biases are not 1 and 0 either."""
    model = build(spec, seed=seed, dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model


def logits(spec: Spec, weights: dict[str, Tensor]) -> Tensor:
    model = Decoder(spec).double()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model.logits(model(random_batch(spec, rows=3).tokens))


def can_grow(spec: Spec, sizes: Sizes) -> bool:
    moved = spec.position in ("alibi", "sinusoidal") or (spec.norm == "none" and spec.tie_embeddings)
    return not (sizes.width and moved) and not (sizes.layers and spec.norm_position == "post")


CASES = [
    pytest.param(small_spec(**MODELS[name]), SIZES[size], id=f"{name}-{size}")
    for name in MODELS
    for size in SIZES
    if can_grow(small_spec(**MODELS[name]), SIZES[size])
]


@pytest.mark.parametrize(("spec", "sizes"), CASES)
def test_the_larger_model_gives_the_same_logits(spec: Spec, sizes: Sizes) -> None:
    weights = trained(spec).state_dict()
    grown = grow(weights, spec, larger(spec, sizes))
    assert grown.preserving
    assert {name: tuple(t.shape) for name, t in grown.weights.items()} == grown.spec.shapes()
    assert (logits(grown.spec, grown.weights) - logits(spec, weights)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("size", SIZES)
def test_adapters_are_merged_before_a_model_grows(size: str) -> None:
    spec = with_lora(small_spec(kv_heads=2, bias=True), Lora(rank=3, targets="attention"))
    weights = trained(spec).state_dict()
    grown = grow(weights, spec, larger(spec, SIZES[size]))
    assert grown.spec.lora_rank == 0
    assert {name: tuple(t.shape) for name, t in grown.weights.items()} == grown.spec.shapes()
    assert (logits(grown.spec, grown.weights) - logits(spec, weights)).abs().max() <= TOLERANCE


def test_merging_alone_is_no_growth() -> None:
    with pytest.raises(UserError, match="nothing grows"):
        larger(with_lora(small_spec(), Lora()), Sizes(layers=2))


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_grouped_heads_grow_within_their_groups_or_with_them(kv_heads: int) -> None:
    spec = small_spec(kv_heads=2)
    weights = trained(spec).state_dict()
    grown = grow(weights, spec, larger(spec, Sizes(width=32, kv_heads=kv_heads)))
    assert (grown.spec.heads, grown.spec.kv_heads) == (8, kv_heads)
    assert (logits(grown.spec, grown.weights) - logits(spec, weights)).abs().max() <= TOLERANCE


def test_stacking_copies_the_trained_blocks_in_order() -> None:
    spec = small_spec(norm_position="post")
    weights = trained(spec).state_dict()
    grown = grow(weights, spec, larger(spec, Sizes(layers=5)), new_blocks="stack")
    assert not grown.preserving
    for layer in range(5):
        for part in ("attention.qkv.weight", "mlp.down.weight"):
            assert torch.equal(grown.weights[f"blocks.{layer}.{part}"], weights[f"blocks.{layer % 2}.{part}"])


@pytest.mark.parametrize("place", ["pre", "both"])
def test_blocks_that_start_as_the_identity_do_learn(place: str) -> None:
    spec = small_spec(norm_position=place)
    grown = grow(trained(spec).state_dict(), spec, larger(spec, Sizes(layers=4)))
    model = Decoder(grown.spec).double()
    model.load_state_dict(grown.weights)
    model.logits(model(random_batch(spec, rows=2).tokens)).logsumexp(-1).sum().backward()
    ends = ("attention.out", "mlp.down") if place == "pre" else ("attention_post_norm", "mlp_post_norm")
    assert all(model.get_parameter(f"blocks.3.{end}.weight").grad.abs().max() > 0 for end in ends)


def test_copies_stay_copies_unless_noise_is_asked_for() -> None:
    spec = small_spec(mlp="gelu")
    weights, wide = trained(spec).state_dict(), larger(spec, Sizes(mlp_width=48))
    plain, noisy, again = (grow(weights, spec, wide, noise=noise, seed=5) for noise in (0.0, 0.01, 0.01))
    up = "blocks.0.mlp.up.weight"
    assert torch.equal(plain.weights[up][:24], plain.weights[up][24:])
    assert torch.equal(noisy.weights[up][:24], weights[up])
    assert torch.equal(noisy.weights[up], again.weights[up])
    relative = (noisy.weights[up][24:] - weights[up]).square().mean().sqrt() / weights[up].square().mean().sqrt()
    assert 0.008 < relative < 0.012
    assert not noisy.preserving
    assert (logits(wide, noisy.weights) - logits(spec, weights)).abs().max() > 1e-6


def test_half_precision_weights_keep_their_type() -> None:
    spec = small_spec()
    weights = build(spec, seed=0, dtype=torch.bfloat16).state_dict()
    grown = grow(weights, spec, larger(spec, Sizes(layers=3, width=32, mlp_width=48)), noise=0.1)
    assert {tensor.dtype for tensor in grown.weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "sizes", "words"),
    [
        ({}, Sizes(layers=1), ["model.layers", "models only grow"]),
        ({}, Sizes(), ["nothing grows"]),
        ({}, Sizes(layers=2), ["nothing grows"]),
        ({}, Sizes(width=24), ["model.width", "no multiple of 16"]),
        ({}, Sizes(width=32, heads=4), ["model.heads", "8 heads"]),
        ({}, Sizes(heads=8), ["model.heads", "size of a head"]),
        ({"kv_heads": 2}, Sizes(width=32, kv_heads=3), ["model.kv_heads", "choose 2 or 4"]),
        ({"position": "alibi"}, Sizes(width=32), ["model.width", "alibi"]),
        ({"position": "sinusoidal"}, Sizes(width=32), ["model.width", "sinusoidal"]),
        ({"norm": "none"}, Sizes(width=32, layers=1), ["tied head", "models only grow"]),
    ],
)
def test_what_cannot_be_preserved_is_refused_with_the_reason(settings: dict, sizes: Sizes, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        larger(small_spec(**settings), sizes)
    assert [word for word in words if word not in str(error.value)] == []


def test_no_block_is_the_identity_after_post_norms() -> None:
    spec = small_spec(norm_position="post")
    with pytest.raises(UserError, match="--new-blocks stack"):
        grow(trained(spec).state_dict(), spec, dataclasses.replace(spec, layers=3))
