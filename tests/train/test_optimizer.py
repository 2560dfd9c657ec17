"""Which parameters decay."""

from __future__ import annotations

import itertools

import pytest

from ropewalk.model.decoder import build
from ropewalk.train.config import AdamW
from ropewalk.train.optimizer import decays, make_optimizer
from tests.tiny import small_spec

MATRICES = ("embedding.weight", "qkv.weight", "out.weight", "up.weight", "down.weight", "head.weight")
OPTIONS = list(itertools.product(("rms", "layer"), ("swiglu", "gelu"), ("rope", "learned"), (True, False)))


@pytest.mark.parametrize(("norm", "mlp", "position", "tied"), OPTIONS)
def test_matrices_decay_and_norms_biases_and_positions_do_not(norm: str, mlp: str, position: str, tied: bool) -> None:
    model = build(small_spec(norm=norm, mlp=mlp, position=position, tied=tied), seed=0)
    decayed = {name for name, parameter in model.named_parameters() if decays(name, parameter)}
    assert decayed == {name for name, _ in model.named_parameters() if name.endswith(MATRICES)}


def test_every_parameter_is_in_one_group_with_the_settings() -> None:
    model = build(small_spec(position="learned"), seed=0)
    settings = AdamW(beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.3)
    groups = make_optimizer(dict(model.named_parameters()), settings).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert all((group["betas"], group["eps"], group["fused"]) == ((0.8, 0.9), 1e-6, True) for group in groups)
