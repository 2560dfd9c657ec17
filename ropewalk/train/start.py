"""Training that does not begin from scratch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.checkpoint.format import resolve_checkpoint
from ropewalk.checkpoint.instead import advising
from ropewalk.checkpoint.layouts import wholes
from ropewalk.checkpoint.tensors import TOKENIZER, load
from ropewalk.model.layouts import CONFIG
from ropewalk.model.lora import adapted, merged
from ropewalk.model.spec import Spec


def starting_weights(place: str, spec: Spec, tokenizer: bytes, *, seed: int) -> tuple[str, Mapping[str, Tensor]]:
    """(where exactly, the weights) of the checkpoint or Hugging Face directory at `place`, as a model of `spec` has
    them; raises UserError unless they fit it and its `tokenizer`. New adapters are filled from `seed`."""
    path, weights, theirs, their_tokenizer = _read(Path(place))
    # Adapters come and go; how a model was first filled and what it drops say nothing about its shapes; rotations know
    # no longest row.
    free = {"init", "dropout", "lora_rank", "lora_alpha", "lora_targets"}
    free |= {"sequence_length"} if "positions.weight" not in spec.shapes() else set()
    there, here = dataclasses.asdict(theirs), dataclasses.asdict(spec)
    other = [
        f"model.{key} is {there[key]}, here {here[key]}" for key in here if key not in free and there[key] != here[key]
    ]
    if other:
        raise UserError(f"{path}: this model is another one ({'; '.join(other)}); change `[model]` to fit it")
    if their_tokenizer != tokenizer and _canonical(their_tokenizer) != _canonical(tokenizer):
        raise UserError(
            f"{path}: this model was trained with another tokenizer; set "
            f'`prepare.tokenizer.file = "{path / TOKENIZER}"`, so that its token ids mean the same'
        )
    return str(path), carried(weights, theirs, spec, seed=seed)


def carried(weights: Mapping[str, Tensor], before: Spec, after: Spec, *, seed: int) -> Mapping[str, Tensor]:
    """Weights of a model of `before` as one of `after` has them: adapters that it lacks are merged, new ones do nothing
    yet. Adapters of the same kind go on."""
    if (before.lora_rank, before.lora_alpha, before.lora_targets) == (
        after.lora_rank,
        after.lora_alpha,
        after.lora_targets,
    ):
        return weights
    plain, _ = merged(weights, before)
    return adapted(plain, after, seed=seed) if after.lora_rank else plain


def _canonical(tokenizer: bytes) -> str:
    """The same for two files that mean the same."""
    from tokenizers import Tokenizer  # a worker that starts from scratch does without

    return Tokenizer.from_buffer(tokenizer).to_str()


def _read(place: Path) -> tuple[Path, Mapping[str, Tensor], Spec, bytes]:
    if (place / CONFIG).is_file():
        from ropewalk.model.directory import read_directory  # needs tokenizers

        found = read_directory(place, dtype="float32")
        return place, found.weights, found.spec, found.tokenizer
    path = resolve_checkpoint(place)
    with advising(path):
        state = load(path, optimizer=False)
    return path, wholes(state.model), state.spec, state.tokenizer
