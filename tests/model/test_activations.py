"""The bytes that the spec foresees are those that autograd keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropewalk.model.activations import Precision, saved_bytes, saved_logit_bytes
from ropewalk.model.attend import attend_for
from ropewalk.model.decoder import build
from ropewalk.model.dropout import Dropout, dropout_key
from ropewalk.model.loss import token_losses
from ropewalk.model.spec import Spec

from .specs import small, specs


def kept_bytes(spec: Spec, *, rows: int, precision: Precision) -> int:
    """Bytes of all storages, each counted once, that autograd keeps for the loss; weights left out."""
    model = build(spec, seed=0)
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens_BT, targets_BT = torch.randint(spec.vocabulary, (2, rows, spec.sequence_length)).unbind()
    positions_BT = torch.arange(spec.sequence_length).repeat(rows, 1)
    attend = attend_for(spec, documents_BT=positions_BT // 3)
    dropout = Dropout(spec.dropout, dropout_key(0, torch.tensor(0)), torch.arange(rows)) if spec.dropout else None
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        hidden = model(tokens_BT.clone(), positions_BT=positions_BT, attend=attend, dropout=dropout)
        token_losses(hidden.flatten(0, 1), model.head_weight, targets_BT.clone().flatten())
    return sum(storage.nbytes() for storage in kept.values())


@settings(max_examples=150, deadline=None)
@given(spec=specs(least_length=4), rows=st.integers(1, 4), precision=st.sampled_from(["fp32", "bf16"]))
def test_saved_bytes_are_those_that_autograd_keeps(spec, rows, precision):
    foreseen = saved_bytes(spec, rows=rows, precision=precision)
    foreseen += saved_logit_bytes(spec, tokens=rows * spec.sequence_length)
    # Exact to the byte, but for the sum of weights that the loss keeps: one float32.
    assert kept_bytes(spec, rows=rows, precision=precision) == foreseen + 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_and_rows_add_what_they_should(precision):
    """The count is linear in rows and in layers, so that plans may extrapolate."""

    def count(layers: int, rows: int) -> int:
        return saved_bytes(small(layers=layers), rows=rows, precision=precision)

    assert count(4, 3) - count(3, 3) == count(3, 3) - count(2, 3)
    assert count(3, 4) - count(3, 3) == count(3, 3) - count(3, 2)
