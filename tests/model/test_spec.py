"""The spec says what the modules build, and counts what they compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ropewalk.base.errors import UserError
from ropewalk.model.attend import additive_mask
from ropewalk.model.components import ACTIVATIONS
from ropewalk.model.config import Lora, Model
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.loss import token_losses
from ropewalk.model.spec import Spec, model_values, resolve
from ropewalk.model.trainable import trained_names, with_lora
from ropewalk.train.optim.table import OPTIMIZERS

from .specs import freeze, small, specs, trained


@settings(max_examples=200, deadline=None)
@given(spec=specs())
def test_shapes_are_those_of_the_modules(spec):
    with torch.device("meta"):
        model = Decoder(spec)
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(spec.shapes().items()) == list(built.items())
    assert spec.parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_unset_sizes_follow_the_documented_rules():
    assert resolve(Model(width=256), vocabulary=100, sequence_length=8).mlp_width == 704
    assert resolve(Model(width=256, mlp="geglu"), vocabulary=100, sequence_length=8).mlp_width == 704
    assert resolve(Model(width=256, mlp="relu2"), vocabulary=100, sequence_length=8).mlp_width == 1024
    assert resolve(Model(width=256, mlp="gelu"), vocabulary=100, sequence_length=8).mlp_width == 1024
    assert resolve(Model(width=256, heads=8), vocabulary=100, sequence_length=8).kv_heads == 8


def explicit(q_BHTD, k_BGTD, v_BGTD):
    """Attention as two matrix products over all T x T pairs, the convention of PaLM."""
    groups = q_BHTD.shape[1] // k_BGTD.shape[1]
    k_BHTD, v_BHTD = (x.repeat_interleave(groups, 1) for x in (k_BGTD, v_BGTD))
    return (q_BHTD @ k_BHTD.transpose(-1, -2)).softmax(-1) @ v_BHTD


def no_products(q_BHTD, k_BGTD, v_BGTD):
    """No attention: what is left are the products with parameters. Every input keeps its gradient."""
    groups = q_BHTD.shape[1] // k_BGTD.shape[1]
    return q_BHTD + (k_BGTD + v_BGTD).repeat_interleave(groups, 1)


def counted(spec, attend, trained: Collection[str] | None = None) -> int:
    """FLOPs of forward and backward over two full rows, as PyTorch counts them."""
    model = build(spec, seed=0)
    freeze(model, trained)
    tokens = torch.zeros(2, spec.sequence_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        hidden = model(tokens, attend=attend).flatten(0, 1)
        token_losses(hidden, model.head_weight, tokens.flatten()).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mlp", list(ACTIVATIONS))
def test_flops_equal_those_that_torch_counts(kv_heads, mlp):
    spec = small(kv_heads=kv_heads, mlp=mlp, bias=kv_heads == 2, qk_norm=kv_heads == 1)
    tokens = 2 * spec.sequence_length
    assert counted(spec, no_products) == 6 * spec.matmul_parameters() * tokens
    assert counted(spec, explicit) == spec.flops_per_token("full") * tokens


@settings(max_examples=100, deadline=None)
@given(spec=specs(), data=st.data())
def test_flops_of_what_is_trained_equal_those_that_torch_counts(spec, data):
    spec = dataclasses.replace(spec, window=None)
    names = data.draw(trained(spec))
    assert counted(spec, explicit, names) == spec.flops_per_token(trained=names) * 2 * spec.sequence_length
    # The other convention counts fewer pairs of the same products.
    products = counted(spec, no_products, names)
    full, causal = (spec.flops_per_token(kind, trained=names) * 2 * spec.sequence_length for kind in ("full", "causal"))
    pairs = spec.attended_pairs() / spec.sequence_length**2
    assert causal == pytest.approx(products + (full - products) * pairs, abs=spec.sequence_length)


def test_flops_without_training_are_those_of_the_forward_pass():
    spec = small(lora=Lora())
    assert 3 * spec.flops_per_token(trained=()) == spec.flops_per_token()


@pytest.mark.parametrize("window", [None, 1, 3, 9, 10, 50])
def test_causal_flops_count_attended_pairs(window):
    spec = small(window=window)
    pairs = sum(min(place + 1, window or 10) for place in range(10))
    assert spec.attended_pairs() == pairs == attend_mask(spec).isfinite().sum()
    # A pair costs two products of 2 D FLOPs a head, three times over (forward, two gradients).
    attention = 12 * spec.layers * spec.heads * spec.head_size * pairs
    row = 6 * spec.matmul_parameters() * spec.sequence_length + attention
    assert spec.flops_per_token("causal") == round(row / spec.sequence_length)
    full = spec.flops_per_token() - 6 * spec.matmul_parameters()
    assert full == 12 * spec.layers * spec.heads * spec.head_size * min(window or 10, 10)


def attend_mask(spec: Spec) -> Tensor:
    place_T = torch.arange(spec.sequence_length)
    return additive_mask(spec, place_T, place_T, heads=range(spec.heads), dtype=torch.float32, documents_BT=None)


def state_bytes(spec: Spec, optimizer: str, **settings: object) -> int:
    return spec.optimizer_bytes(OPTIMIZERS[optimizer].state_bytes, **settings)


def adafactor(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters)


@pytest.mark.parametrize(("name", "make"), [("adamw", torch.optim.AdamW), ("adafactor", adafactor)])
def test_optimizer_bytes_are_those_of_its_moments(name, make):
    spec = small(norm="layer", bias=True, position="learned", tie_embeddings=False)
    model = build(spec, seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(list(model.parameters()))
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert state_bytes(spec, name) == sum(moment.nbytes for moment in moments)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert spec.weight_bytes() == spec.gradient_bytes() == weights


@pytest.mark.parametrize(("name", "make"), [("adamw", torch.optim.AdamW), ("adafactor", adafactor)])
@pytest.mark.parametrize("frozen", [(), ("embedding", "blocks.0.attention"), ("*.weight",)])
def test_gradients_and_moments_are_those_of_what_is_trained(name, make, frozen):
    for spec in (small(bias=True, norm="layer", tie_embeddings=False), small(lora=Lora(rank=3))):
        names = trained_names(spec, frozen)
        model = build(spec, seed=0)
        freeze(model, names)
        model.logits(model(torch.zeros(1, 4, dtype=torch.long))).sum().backward()
        optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
        optimizer.step()
        moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert state_bytes(spec, name, trained=names) == sum(moment.nbytes for moment in moments)
        assert spec.gradient_bytes(trained=names) == sum(gradient.nbytes for gradient in gradients)


def test_muon_keeps_one_moment_for_matrices_of_blocks_and_two_for_the_rest():
    spec = small(bias=True)
    blocks = spec.matmul_parameters() - spec.vocabulary * spec.width
    assert state_bytes(spec, "muon") == 4 * blocks + 8 * (spec.parameters() - blocks)
    assert state_bytes(spec, "lamb") == 8 * spec.parameters()


def test_moments_in_eight_bits_are_two_bytes_a_weight_and_two_numbers_a_row_of_the_blocks_matrices():
    spec = small(bias=True)
    matrices = [s for n, s in spec.shapes().items() if n.startswith("blocks.") and len(s) == 2]
    narrow = sum(rows * columns for rows, columns in matrices)
    wide = 8 * (spec.parameters() - narrow)
    assert state_bytes(spec, "adamw-8bit") == wide + 2 * narrow + 8 * sum(rows for rows, _ in matrices)


def test_a_spec_saved_before_an_option_existed_means_its_default():
    spec = resolve(Model(), vocabulary=100, sequence_length=8)
    later = [
        "bias",
        "norm_position",
        "qk_norm",
        "rope_scaling",
        "rope_factor",
        "window",
        "documents",
        "dropout",
        "init",
    ]
    later += ["lora_rank", "lora_alpha", "lora_targets"]
    old = {name: value for name, value in dataclasses.asdict(spec).items() if name not in later}
    assert Spec(**old) == spec


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"width": 16, "heads": 8, "rope_scaling": "ntk"}, "rope_scaling"),
        ({"rope_factor": 2.0}, "rope_factor"),
        ({"rope_factor": 2.0, "rope_scaling": "linear", "position": "alibi"}, "rope_factor"),
        ({"width": 24, "heads": 8}, "heads"),
    ],
)
def test_settings_that_contradict_each_other_are_named(changes, field):
    assert [name for name, _ in Model(**changes).check()] == [field]


@settings(deadline=None)
@given(spec=specs())
def test_the_settings_of_a_spec_give_it_again(spec: Spec) -> None:
    plain, values = with_lora(spec, None), Model(**model_values(spec))
    assert not list(values.check())
    again = resolve(values, vocabulary=1, sequence_length=spec.sequence_length)
    assert again == dataclasses.replace(plain, positions=again.positions)
    assert again.shapes() == plain.shapes()


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"`model\.vocabulary` is 300, the tokenizer has 301 tokens"):
        resolve(Model(vocabulary=300), vocabulary=301, sequence_length=8)
