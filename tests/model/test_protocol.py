"""Laws of model/protocol.py: stages joined are the whole model, and auxiliary losses count once."""

from __future__ import annotations

import pytest
import torch

from ropewalk.base.errors import UserError
from ropewalk.model.config import Model
from ropewalk.model.decoder import Decoder
from ropewalk.model.loss import token_losses
from ropewalk.model.protocol import ForwardPass, Losses, ModelStage, build_model, build_stage
from ropewalk.model.slot_cache import SlotPositions
from ropewalk.model.spec import Spec, resolve
from tests.tiny import small_spec

SPEC = resolve(Model(layers=3, width=16, heads=2, position="learned"), vocabulary=23, sequence_length=12)


def _stages(spec: Spec, whole: ModelStage, layers: list[list[int]]) -> list[ModelStage]:
    """Pipeline stages with the weights of `whole`."""
    last = len(layers) - 1
    found = [build_stage(spec, layers=own, first=number == 0, last=number == last) for number, own in enumerate(layers)]
    weights = {**whole.state_dict(), "head.weight": whole.head_weight}
    for stage in found:
        stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
    return found


@pytest.mark.parametrize("layers", [[[0, 1, 2]], [[0], [1, 2]], [[0], [1], [2]]])
def test_stages_that_hand_over_their_edges_compute_the_loss_of_the_whole_model(layers: list[list[int]]) -> None:
    whole = build_model(SPEC, seed=1)
    tokens, targets = (torch.randint(0, 23, (2, 12), generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    weights = torch.rand(2, 12, generator=torch.Generator().manual_seed(3))
    passing: tuple[torch.Tensor, ...] = ()
    for stage in _stages(SPEC, whole, layers):
        edges = stage.edges(2, 12)
        assert [tuple(x.shape) for x in passing] == [edge.shape for edge in edges.inputs]
        passing = stage.run(passing, ForwardPass(tokens_BT=tokens))
        assert stage.last or [tuple(x.shape) for x in passing] == [edge.shape for edge in edges.outputs]
    each = torch.empty(24)
    loss = stage.loss(passing, targets, weights, each_N=each)
    expected = token_losses(whole(tokens).flatten(0, 1), whole.head_weight, targets.flatten()) * weights.flatten()
    torch.testing.assert_close(loss, expected.sum())
    torch.testing.assert_close(each, expected)
    log_probabilities, _ = stage.scores(passing, targets)
    torch.testing.assert_close(-log_probabilities.flatten() * weights.flatten(), expected)


def test_a_cache_gives_the_logits_of_the_whole_sequence() -> None:
    model = build_model(SPEC, seed=1)
    tokens = torch.randint(0, 23, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = model.cache(slots=3, room=12)
    assert cache is not None
    for first in (0, 5, 10):
        new = tokens[:, first : first + 5]
        positions = torch.arange(first, first + new.shape[1]).expand(2, -1)
        cache.begin(SlotPositions(slice(1, 3), positions, first + new.shape[1]))
        with torch.no_grad():
            outputs = model.run((), ForwardPass(tokens_BT=new, positions_BT=positions, cache=cache))
    whole = model.next_logits(model.run((), ForwardPass(tokens_BT=tokens)))
    torch.testing.assert_close(model.next_logits(outputs), whole)


def test_auxiliary_losses_of_layers_add_up_and_count_once_when_a_block_runs_twice() -> None:
    losses, x = Losses(), torch.tensor(3.0, requires_grad=True)
    for value in (x, x):
        losses.add("balance", value, layer=0, coefficient=0.5)
    losses.add("balance", 2 * x, layer=1, coefficient=0.5)
    total = losses.total()
    assert total is not None
    assert total.item() == 4.5
    assert losses.values()["balance"].item() == 9.0
    losses.add("balance", x, layer=2, coefficient=1.0)  # recomputed in the backward pass
    assert losses.values()["balance"].item() == 9.0
    total.backward()
    assert x.grad is not None
    assert x.grad.item() == 1.5
    assert Losses().total() is None


def test_a_kind_without_tensor_splits_names_the_setting() -> None:
    class Unsplit(Decoder):
        split_over_ranks = ModelStage.split_over_ranks

    with torch.device("meta"):
        stage = Unsplit(small_spec())
    with pytest.raises(UserError, match=r"Unsplit cannot be split over tensor ranks; set `parallel.tensor` to 1"):
        stage.split_over_ranks(look_up=lambda table, tokens: table(tokens), keep=None)
