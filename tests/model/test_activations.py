"""The bytes that the spec foresees are those that autograd keeps."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropewalk.model.activations import Precision, saved_bytes
from ropewalk.model.attend import attend_for
from ropewalk.model.config import Lora
from ropewalk.model.decoder import build
from ropewalk.model.dropout import Dropout, dropout_key
from ropewalk.model.loss import weighted_loss
from ropewalk.model.spec import Spec
from ropewalk.model.trainable import adapter_names, trained_names

from .specs import freeze, small, specs, trained


def kept_bytes(spec: Spec, *, rows: int, precision: Precision, trained: Collection[str] | None = None) -> int:
    """Bytes of all storages, each counted once, that autograd keeps for the loss; weights left out."""
    model = build(spec, seed=0)
    freeze(model, trained)
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
    types = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    autocast = torch.autocast("cpu", types[precision], enabled=precision != "fp32")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        hidden = model(tokens_BT.clone(), positions_BT=positions_BT, attend=attend, dropout=dropout)
        weighted_loss(hidden.flatten(0, 1), model.head_weight, targets_BT.flatten(), torch.ones(targets_BT.numel()))
    return sum(storage.nbytes() for storage in kept.values())


@settings(max_examples=300, deadline=None)
@given(
    spec=specs(least_length=4),
    rows=st.integers(1, 4),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    data=st.data(),
)
def test_saved_bytes_are_those_that_autograd_keeps(spec, rows, precision, data):
    names = data.draw(trained(spec))
    foreseen = saved_bytes(spec, rows=rows, precision=precision, trained=names)
    assert kept_bytes(spec, rows=rows, precision=precision, trained=names) == foreseen


@pytest.mark.parametrize("changes", [{}, {"lora": Lora(rank=3)}, {"qk_norm": True, "lora": Lora(targets="attention")}])
@pytest.mark.parametrize("frozen", [(), ("embedding",), ("embedding", "blocks.0")])
def test_copies_of_weights_are_what_does_not_grow_with_rows(changes, frozen):
    spec = small(**changes)
    names = trained_names(spec, frozen)
    one, two = (kept_bytes(spec, rows=rows, precision="bf16", trained=names) for rows in (1, 2))
    head = 4 * spec.vocabulary * spec.width * ("embedding.weight" in names)  # its gradient, made by the loss
    wide, pure = (
        [saved_bytes(spec, rows=rows, precision="bf16", trained=names, pure=pure) for rows in (1, 2)]
        for pure in (False, True)
    )
    assert 2 * wide[0] - wide[1] == 2 * one - two > head
    # Weights that are narrow already have none.
    assert 2 * pure[0] - pure[1] == head


def test_adapters_keep_less_than_full_training():
    """Frozen matrices do not keep their inputs, but adapters do; frozen norms keep nothing of their own."""
    spec = small(lora=Lora(rank=2))
    for precision in ("fp32", "bf16"):
        full = saved_bytes(spec, rows=4, precision=precision)
        assert saved_bytes(spec, rows=4, precision=precision, trained=adapter_names(spec)) < 0.9 * full


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_and_rows_add_what_they_should(precision):
    """The count is linear in rows and in layers, so that plans may extrapolate."""

    def count(layers: int, rows: int) -> int:
        return saved_bytes(small(layers=layers), rows=rows, precision=precision)

    assert count(4, 3) - count(3, 3) == count(3, 3) - count(2, 3)
    assert count(3, 4) - count(3, 3) == count(3, 3) - count(3, 2)
