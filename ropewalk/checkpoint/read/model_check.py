"""Whether a checkpoint holds the model that its manifest describes, with a tokenizer for it. No torch.

`format.py` and `validate.py` tell whether a checkpoint is what was written. A reader that builds the model needs more:
every weight of the spec and no other, in one type of number, and a tokenizer that loads and knows no more tokens than
the model. `verify_model` asks for all of it, so that it says "whole" when every reader succeeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path

from ropewalk.base.errors import DamagedCheckpoint, DataError
from ropewalk.model.hugging_face.strict import read_spec
from ropewalk.model.spec import Spec

from ..format import (
    TOKENIZER,
    CheckpointManifest,
    list_checkpoints,
    read_checkpoint_manifest,
    step_of,
    verify_checkpoint,
)
from ..shard_file import ShardFile

MODEL, OPTIMIZER = "model", "optimizer"


WEIGHTS = ("float64", "float32", "bfloat16", "float16")
"""Types of numbers that a model computes in."""


LOOSE = ("guard", "loss_scale", "compression", "sampler")
"""Kinds of the optimizer's tensors that belong to no parameter, or whose shapes depend on the layout of ranks."""


def check_weights(manifest: CheckpointManifest, path: Path) -> Spec:
    """The spec, when the tensors of the checkpoint `path` are those of its model and moments of its parameters; else
    DamagedCheckpoint. Reads nothing."""
    spec = read_spec(manifest.spec, name=str(path))
    problem = _weights_problem(spec, manifest) or _moments_problem(spec, manifest)
    if problem:
        raise DamagedCheckpoint(f"{path}: damaged checkpoint: {problem}")
    if TOKENIZER not in manifest.files:
        raise DamagedCheckpoint(f"{path / TOKENIZER}: damaged checkpoint: this file is missing")
    return spec


def check_model(path: Path) -> Spec:
    """As `check_weights`, of the checkpoint folder `path`; loads its tokenizer too."""
    manifest = read_checkpoint_manifest(path)
    spec = check_weights(manifest, path)
    _check_tokenizer(path, manifest, spec)
    return spec


def verify_model(path: Path) -> list[str]:
    """Reads every byte of the checkpoint `path`; what is wrong with it or keeps a reader from using it, nothing when
    all of it is whole."""
    wrong = verify_checkpoint(path)
    if not wrong:
        try:
            check_model(path)
        except DataError as error:
            wrong = [str(error)]
    return wrong


@contextlib.contextmanager
def advise_on_damage(path: Path) -> Iterator[None]:
    """Whoever reads the checkpoint `path` in this block and finds it damaged is told what to do about it."""
    try:
        yield
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}; {damage_advice(path)}") from None


def damage_advice(path: Path, *, damaged: Collection[Path] = ()) -> str:
    """What to do about the damaged checkpoint `path`: which other one to use, and how its run makes it again.

    Of the others only the manifests are read, of those in `damaged` nothing.
    """
    path = path if path.name else path.resolve()
    others = [other for other in list_checkpoints(path.parent) if other.name != path.name]
    newest = all(other.name < path.name for other in others)
    use = next((other for other in reversed(others) if other not in damaged and _is_readable(other)), None)
    of_a_run, again = path.parent.name == "checkpoints", "away and give the run's command again, which then trains from"
    if not use:
        return "no other checkpoint is whole" + (f"; move {path.parent} {again} the beginning" if of_a_run else "")
    words = f"use {'an older' if newest else 'another'} checkpoint, {use}"
    return words + (f", or move {path} {again} step {step_of(use)}" if newest and of_a_run else "")


def _check_tokenizer(path: Path, manifest: CheckpointManifest, spec: Spec) -> None:
    # The package `tokenizers` is not needed by those who only train.
    from ropewalk.prepare.foreign import load_foreign

    entry = manifest.files[TOKENIZER]
    content = bytes(ShardFile(path / TOKENIZER, entry).read(0, entry.bytes))
    load_foreign(content, path=path / TOKENIZER, vocabulary=spec.vocabulary)


def _weights_problem(spec: Spec, manifest: CheckpointManifest) -> str:
    stored = manifest.tensors.get(MODEL, {})
    if spec.layers > len(stored):
        return f"{len(stored)} tensors cannot be a model of {spec.layers} layers"
    shapes = spec.shapes()
    for name, shape in shapes.items():
        if name not in stored:
            return f"it lacks the weight {name} of its model"
        if stored[name].shape != shape:
            return f"{name} has the shape {stored[name].shape}, its model {shape}"
    strange = min(stored.keys() - shapes.keys(), default="")
    if strange:
        return f"the tensor {strange} is not of its model"
    types = sorted({entry.dtype for entry in stored.values()})
    if len(types) > 1 or types[0] not in WEIGHTS:
        return f"its weights are numbers of the type {' and '.join(types)}"
    return ""


def _moments_problem(spec: Spec, manifest: CheckpointManifest) -> str:
    shapes = spec.shapes()
    for name, entry in manifest.tensors.get(OPTIMIZER, {}).items():
        kind, slash, parameter = name.partition("/")
        if slash and kind in LOOSE:
            continue
        # Moments have the shape of their parameter, sums of it one side less, step counters none.
        shape = shapes.get(parameter)
        if not slash or shape is None or not set(entry.shape) <= {1, *shape} or prod(entry.shape) > prod(shape):
            return f"the tensor {name} of its optimizer belongs to no parameter"
    strange = manifest.tensors.keys() - {MODEL, OPTIMIZER}
    return f"the tensors of {min(strange)} belong to nothing" if strange else ""


def _is_readable(path: Path) -> bool:
    try:
        read_checkpoint_manifest(path)
    except DataError:
        return False
    return True
