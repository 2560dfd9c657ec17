"""Parts of a model make the whole: tensor splits as declared, pipeline stages as built."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch
from hypothesis import given, settings

from ropewalk.model.attend import attend_for
from ropewalk.model.components import ACTIVATIONS, POSITIONS
from ropewalk.model.config import Lora, NormPlace
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.init import initialize
from ropewalk.model.modules import Block
from ropewalk.model.positions import rotation
from ropewalk.model.sharding import splits

from .specs import loud, small, specs


@settings(max_examples=60, deadline=None)
@given(spec=specs())
def test_every_parameter_has_a_split_that_fits_it(spec):
    declared = splits(spec)
    assert set(declared) == set(spec.shapes())
    for name, shape in spec.shapes().items():
        split = declared[name]
        if split.dimension is not None:
            assert shape[split.dimension] % split.units == 0
        if split.parts:
            assert shape[0] == split.units * sum(rows for _, rows in split.parts)


@pytest.mark.parametrize("hidden", [704, 5632, 11008, 14336, 40, 1000])
@pytest.mark.parametrize("mlp", list(ACTIVATIONS))
def test_usual_tensor_degrees_divide_the_feed_forward_units(hidden, mlp):
    spec = small(mlp_width=hidden, mlp=mlp)
    for name in ("blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"):
        assert splits(spec)[name].units % 8 == 0


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("mlp", list(ACTIVATIONS))
@pytest.mark.parametrize("place", get_args(NormPlace))
@pytest.mark.parametrize(
    "changes", [{}, {"position": "alibi", "window": 4}, {"qk_norm": True, "bias": True}, {"bias": True, "lora": Lora()}]
)
def test_row_parallel_outputs_of_a_split_block_add_up(degree, mlp, place, changes):
    spec = small(heads=8, kv_heads=4, mlp=mlp, norm_position=place, mlp_width=96, **changes)
    block = loud(spec, seed=1).blocks["1"]
    parts = [tensor_part(block, spec, rank, degree) for rank in range(degree)]
    x_BTC = torch.randn(2, 7, spec.width, dtype=torch.float64)
    angles = None
    if spec.position == "rope":
        angles = rotation(torch.arange(7).expand(2, -1), spec, dtype=torch.float64)

    def attention(x_BTC):
        attends = [attend_for(spec, first_head=rank * 8 // degree) for rank in range(degree)]
        return sum(p.attention(x_BTC, angles=angles, attend=a) for p, a in zip(parts, attends, strict=True))

    def feed_forward(x_BTC):
        return sum(part.mlp(x_BTC) for part in parts)

    def written(x_BTC, branch, norm, post_norm):
        if place == "post":
            return norm(x_BTC + branch(x_BTC))
        return x_BTC + (post_norm or torch.nn.Identity())(branch(norm(x_BTC)))

    middle_BTC = written(x_BTC, attention, block.attention_norm, block.attention_post_norm)
    summed_BTC = written(middle_BTC, feed_forward, block.mlp_norm, block.mlp_post_norm)
    whole_BTC = block(x_BTC, angles=angles, attend=attend_for(spec))
    torch.testing.assert_close(summed_BTC, whole_BTC, atol=1e-12, rtol=1e-12)
    whole_BTC.square().sum().backward()
    summed_BTC.square().sum().backward()
    for name, parameter in block.named_parameters():
        partial = [dict(part.named_parameters())[name].grad for part in parts]
        split = splits(spec)[f"blocks.1.{name}"]
        if split.dimension is not None:
            torch.testing.assert_close(torch.cat(partial, split.dimension), parameter.grad, atol=1e-10, rtol=1e-10)
        elif name.startswith(("attention.", "mlp.")) and not name.endswith(("out.bias", "down.bias")):
            assert split.partial_gradient
            torch.testing.assert_close(sum(partial), parameter.grad, atol=1e-10, rtol=1e-10)


def tensor_part(block: Block, spec, rank: int, degree: int) -> Block:
    """What tensor rank `rank` of `degree` holds: of each parameter an equal run of whole units."""
    part = copy.deepcopy(block)
    for name, parameter in part.named_parameters():
        split = splits(spec)[f"blocks.1.{name}"]
        if split.dimension is not None:
            assert split.units % degree == 0
            parameter.data = parameter.data.chunk(degree, dim=split.dimension)[rank].clone()
        elif rank and name.endswith(("out.bias", "down.bias")):
            # It joins once, after the partial sums.
            parameter.data.zero_()
    return part


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("position", list(POSITIONS))
@pytest.mark.parametrize("place", get_args(NormPlace))
def test_two_pipeline_stages_equal_the_whole(tied, position, place):
    spec = small(layers=4, tie_embeddings=tied, position=position, norm="layer", norm_position=place, window=5)
    whole = build(spec, seed=3, dtype=torch.float64)
    first = Decoder(spec, layers=[0, 1], last=False).double()
    second = Decoder(spec, layers=[2, 3], first=False).double()
    for stage in (first, second):
        initialize(stage, spec, seed=3)
    tokens_BT = torch.randint(spec.vocabulary, (2, 9))
    with torch.no_grad():
        staged = second.logits(second(first(tokens_BT)))
        assert torch.equal(staged, whole.logits(whole(tokens_BT)))


@pytest.mark.parametrize("tied", [True, False])
def test_stages_start_with_the_values_of_the_whole(tied):
    spec = small(layers=4, tie_embeddings=tied, position="learned")
    whole = dict(build(spec, seed=3).named_parameters())
    stages = [Decoder(spec, layers=[0], last=False), Decoder(spec, layers=[1, 2, 3], first=False)]
    seen = set()
    for stage in stages:
        initialize(stage, spec, seed=3)
        for name, parameter in stage.named_parameters():
            source = "embedding.weight" if tied and name == "head.weight" else name
            assert torch.equal(parameter, whole[source])
            seen.add(source)
    assert seen == set(whole)
