"""Each law of initialisation keeps what its paper promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ropewalk.model.attend import causal
from ropewalk.model.decoder import build
from ropewalk.model.init import initial_value
from ropewalk.model.init_laws import INITS, STD, Distribution, Matrix
from ropewalk.model.loss import token_losses
from ropewalk.model.sharding import splits
from ropewalk.model.spec import Spec

from .specs import small


def wide(init: str, **changes: object) -> Spec:
    sizes = {"layers": 4, "width": 64, "heads": 8, "kv_heads": 4, "mlp_width": 192, "vocabulary": 300}
    return small(**{**sizes, "init": init, "tie_embeddings": False, **changes})


def unfused(spec: Spec, name: str) -> dict[str, Tensor]:
    """A parameter's first value by part: the whole matrix of all queries, of all keys..."""
    value, split = initial_value(name, spec.shapes()[name], spec, seed=0), splits(spec)[name]
    if not split.parts:
        return {name.split(".")[-2]: value}
    units = value.unflatten(0, (split.units, -1)).split([rows for _, rows in split.parts], dim=1)
    return {part: unit.flatten(0, 1) for (part, _), unit in zip(split.parts, units, strict=True)}


def expected_std(spec: Spec, part: str, layer: int, shape: torch.Size) -> float:
    """The deviations as the papers give them, written again from their formulas."""
    outputs, inputs = shape
    glorot = math.sqrt(2 / (inputs + outputs))
    outside = part in ("embedding", "positions", "head")
    if spec.init == "gaussian":
        return 0.02
    if spec.init == "depth-scaled":
        return 0.02 / math.sqrt(2 * spec.layers) if part in ("out", "down") else 0.02
    if spec.init == "zero-projection":
        return 0.0 if part in ("out", "down") else 0.02
    if spec.init == "lipschitz":
        embeds = part in ("embedding", "positions")
        return (math.sqrt(2 / (inputs + outputs)) if embeds else math.sqrt(1 / inputs)) / math.sqrt(3)
    if spec.init == "ds-init":
        return 0.02 if outside else glorot / math.sqrt(layer + 1)
    scale = (6 * spec.layers) ** (-1 / 4)
    if part in ("embedding", "positions"):
        return scale / math.sqrt(inputs)
    return glorot * (1 if part in ("query", "key", "head") else scale)


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
@pytest.mark.parametrize("init", list(INITS))
def test_every_matrix_has_the_spread_of_its_paper(init, mlp):
    spec = wide(init, mlp=mlp, position="learned", sequence_length=50)
    for name in spec.shapes():
        if not name.endswith("norm.weight"):
            layer = int(name.split(".")[1]) if name.startswith("blocks.") else 0
            for part, value in unfused(spec, name).items():
                std = expected_std(spec, part, layer, value.shape)
                # Five standard errors; a uniform's deviation has smaller ones than a Gaussian's.
                assert abs(value.std() - std) <= 5 * std / math.sqrt(2 * value.numel())
                assert abs(value.mean()) <= 5 * std / math.sqrt(value.numel())


@pytest.mark.parametrize("init", ["lipschitz", "ds-init"])
def test_uniform_laws_stay_within_their_bound(init):
    spec = wide(init)
    for part, value in unfused(spec, "blocks.3.mlp.up.weight").items():
        bound = math.sqrt(3) * expected_std(spec, part, 3, value.shape)
        assert 0.99 * bound < value.abs().max() <= bound


def jacobian_rows(branch, x_BTC: Tensor) -> Tensor:
    """The Lipschitz constant of each output feature of the last token, at `x`, by all inputs."""
    jacobian = torch.autograd.functional.jacobian(lambda x: branch(x)[0, -1], x_BTC)
    return jacobian.flatten(1).norm(dim=1)


@pytest.mark.parametrize("mlp", ["gelu", "gelu-tanh"])
def test_lipschitz_branches_are_1_lipschitz(mlp):
    """Xu et al.: k <= 1 for what is added to the stream, on normalised inputs; a plain sum of units would not be."""
    spec = wide("lipschitz", mlp=mlp, norm="layer", norm_position="post", mlp_width=256)
    for name in spec.shapes():
        if name.startswith("blocks.") and name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight")):
            assert initial_value(name, spec.shapes()[name], spec, seed=0).norm(dim=1).max() <= 1
    block = build(spec, seed=0, dtype=torch.float64).blocks["1"]
    x_BTC = torch.nn.functional.layer_norm(torch.randn(1, 6, 64, dtype=torch.float64), (64,))
    assert jacobian_rows(lambda x: block.attention(x, angles=None, attend=causal), x_BTC).max() <= 1
    assert jacobian_rows(block.mlp, x_BTC).max() <= 1
    # The deviation that a norm after the sum divides by: near 1, so that the stream passes almost unchanged.
    added = block.attention(x_BTC, angles=None, attend=causal)
    assert added.std() < 0.5
    assert 1 <= (x_BTC + added).std() < 1.15


def stream_share(layers: int, *, init: str = "ds-init") -> float:
    """What the norms of a post-norm model leave of its first stream: each divides by the deviation of x + f(x)."""
    spec = wide(init, layers=layers, norm="layer", norm_position="post", mlp="gelu", mlp_width=256)
    share = 1.0

    def divide(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal share
        share /= inputs[0].std(-1, unbiased=False).mean().item()

    model = build(spec, seed=0, dtype=torch.float64)
    x_BTC = torch.nn.functional.layer_norm(torch.randn(2, 8, 64, dtype=torch.float64), (64,))
    with torch.no_grad():
        for block in model.blocks.values():
            block.attention_norm.register_forward_pre_hook(divide)
            block.mlp_norm.register_forward_pre_hook(divide)
            x_BTC = block(x_BTC, angles=None, attend=causal)
    return share


def test_ds_init_keeps_the_stream_of_deep_post_norm_models():
    """Zhang et al.: a branch of two matrices at layer l has a deviation of 1/l of the first one's. The sum
    of variances then converges, and with it what norms leave of the stream; equal variances leave nothing."""
    assert stream_share(48) > 0.8 * stream_share(3)
    assert stream_share(48, init=UNSCALED) < 1e-6 * stream_share(3, init=UNSCALED)


UNSCALED = f"{__name__}:unscaled"


def unscaled(matrix: Matrix, spec: Spec) -> Distribution:
    """Plain Glorot."""
    return Distribution("uniform", matrix.glorot_std)


def first_update(optimizer: type[torch.optim.Optimizer], layers: int, *, init: str = "t-fixup") -> float:
    """How far the logits of a token move in the first step, divided by the learning rate; no norm anywhere."""
    spec = wide(init, layers=layers, norm="none", mlp="gelu", mlp_width=256, position="none", vocabulary=37)
    model = build(spec, seed=0, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(37, (2, 4, 10), generator=draw)
    hidden = model(tokens)
    token_losses(hidden.flatten(0, 1), model.head_weight, targets.flatten()).mean().backward()
    before = model.logits(hidden).detach()
    optimizer(model.parameters(), lr=1e-5).step()  # type: ignore[call-arg]
    with torch.no_grad():
        return (model.logits(model(tokens)) - before).norm().item() / 1e-5 / math.sqrt(tokens.numel())


def test_t_fixup_bounds_the_first_update_at_any_depth():
    shallow, deep = (first_update(torch.optim.SGD, layers) for layers in (2, 32))
    # Huang et al.: a gradient step moves the output by Theta(learning rate), whatever the depth.
    assert 0.8 < deep / shallow < 1.25
    # Adam moves every weight alike, whatever its gradient: the same sum then grows as sqrt(depth), no faster.
    shallow, deep = (first_update(torch.optim.Adam, layers) for layers in (2, 32))
    assert deep / shallow < 1.1 * math.sqrt(16)
    shallow, deep = (first_update(torch.optim.SGD, layers, init=UNSCALED) for layers in (2, 12))
    assert deep / shallow > 1e4


def test_zero_projection_starts_as_the_identity():
    spec = wide("zero-projection", norm="none")
    model = build(spec, seed=0)
    tokens = torch.randint(spec.vocabulary, (2, 10))
    assert torch.equal(model(tokens), model.embedding(tokens))


@pytest.mark.parametrize("init", list(INITS))
def test_tied_heads_start_as_the_embedding(init):
    spec = small(init=init)
    shape = spec.shapes()["embedding.weight"]
    head, embedding = (initial_value(name, shape, spec, seed=1) for name in ("head.weight", "embedding.weight"))
    assert torch.equal(head, embedding)
    assert STD == 0.02
