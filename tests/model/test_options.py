"""Every value of every option builds, learns, and compiles into one graph."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ropewalk.model.attend import attend_for
from ropewalk.model.components import ACTIVATIONS, NORMS, POSITIONS
from ropewalk.model.config import Documents, Lora, NormPlace
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.dropout import Dropout, dropout_key
from ropewalk.model.init_laws import INITS
from ropewalk.model.loss import token_losses

from .specs import small

CHOICES: dict[str, tuple[Any, ...]] = {
    "norm": list(NORMS),
    "norm_position": get_args(NormPlace),
    "mlp": list(ACTIVATIONS),
    "position": list(POSITIONS),
    "documents": get_args(Documents),
    "init": list(INITS),
    "rope_scaling": ("linear", "ntk"),
    "window": (None, 1, 4),
    "dropout": (0.0, 0.2),
    "kv_heads": (1, 2, 4),
    "lora": (Lora(rank=4), Lora(targets="attention")),
    **dict.fromkeys(("bias", "qk_norm", "tie_embeddings"), (False, True)),
}
VALUES = [{name: value} for name, values in CHOICES.items() for value in values]
VALUES += [{"init": "t-fixup", "norm": "none"}, {"init": "lipschitz", "norm_position": "post", "norm": "layer"}]


def made(changes: dict[str, Any]) -> Decoder:
    return build(small(**changes, **({"rope_factor": 2.0} if "rope_scaling" in changes else {})), seed=0)


def loss_of(model: Decoder, tokens_BT: Tensor, key: Tensor) -> Tensor:
    spec, rows = model.spec, len(tokens_BT)
    inputs_BT = tokens_BT[:, :-1].contiguous()
    documents_BT = (torch.arange(inputs_BT.shape[1]) > 5).int().expand(rows, -1)
    dropout = Dropout(spec.dropout, key, torch.arange(rows)) if spec.dropout else None
    hidden = model(inputs_BT, attend=attend_for(spec, documents_BT=documents_BT), dropout=dropout)
    return token_losses(hidden.flatten(0, 1), model.head_weight, tokens_BT[:, 1:].flatten()).mean()


@pytest.mark.parametrize("changes", VALUES, ids=str)
def test_the_loss_falls_within_thirty_steps(changes):
    model = made(changes)
    tokens_BT = torch.randint(model.spec.vocabulary, (4, 11), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        loss = loss_of(model, tokens_BT, dropout_key(0, torch.tensor(step)))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    # Forty targets that a model of this size can learn by heart.
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": "alibi", "window": 4},
        {"documents": "separate", "dropout": 0.1},
        {"norm_position": "both"},
        {"lora": Lora()},
    ],
    ids=str,
)
def test_a_forward_pass_is_one_graph_with_the_same_numbers(changes):
    model = made(changes)
    tokens_BT = torch.randint(model.spec.vocabulary, (4, 11))
    compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
    for step in range(2):
        key = dropout_key(0, torch.tensor(step))
        torch.testing.assert_close(compiled(model, tokens_BT, key), loss_of(model, tokens_BT, key))
