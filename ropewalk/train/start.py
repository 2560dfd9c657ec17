"""Training that does not begin from scratch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.checkpoint.tensors import TOKENIZER, load
from ropewalk.model.spec import Spec


def starting_weights(path: Path, spec: Spec, tokenizer: bytes) -> Mapping[str, Tensor]:
    """The weights in the checkpoint `path`; raises UserError unless they fit a model of `spec` and its `tokenizer`."""
    state = load(path, optimizer=False)
    theirs, ours = dataclasses.asdict(state.spec), dataclasses.asdict(spec)
    # How a model was first filled and what it drops say nothing about its shapes; rotations know no longest row.
    free = {"init", "dropout"} | ({"sequence_length"} if "positions.weight" not in spec.shapes() else set())
    other = [
        f"model.{key} is {theirs[key]}, here {ours[key]}"
        for key in ours
        if key not in free and theirs[key] != ours[key]
    ]
    if other:
        raise UserError(f"{path}: this checkpoint is of another model ({'; '.join(other)}); change `[model]` to fit it")
    if state.tokenizer != tokenizer:
        raise UserError(
            f"{path}: this checkpoint was trained with another tokenizer; set "
            f'`prepare.tokenizer.file = "{path / TOKENIZER}"`, so that its token ids mean the same'
        )
    return state.model
