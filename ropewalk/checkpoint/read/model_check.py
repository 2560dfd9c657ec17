"""Checks that the tensors and the tokenizer of a checkpoint match its model, and advises on damaged ones. No torch.

`format.py` and `validate.py` detect damage. A reader that builds the model needs more: exactly the weights of the spec,
in one dtype, and a tokenizer that loads and has no more tokens than the model. `verify_model` checks all of this, so
that a checkpoint it calls whole works for every reader.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path

from ropewalk.base.errors import DamagedCheckpoint, DataError
from ropewalk.model.hugging_face.strict import NotImportedError, read_spec
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
"""dtypes of weights."""
LOOSE = ("guard", "loss_scale", "compression", "sampler")
"""Optimizer tensors that belong to no parameter, or whose shapes depend on the number of ranks."""


def check_weights(manifest: CheckpointManifest, path: Path) -> Spec:
    """The model spec; DamagedCheckpoint unless the tensors of the checkpoint `path` are its weights and their moments.
    Reads no files."""
    spec = read_spec(manifest.spec, name=str(path))
    problem = _weights_problem(spec, manifest) or _moments_problem(spec, manifest)
    if problem:
        raise DamagedCheckpoint(f"{path}: damaged checkpoint: {problem}")
    if TOKENIZER not in manifest.files:
        raise DamagedCheckpoint(f"{path / TOKENIZER}: damaged checkpoint: this file is missing")
    return spec


def check_model(path: Path) -> Spec:
    """As `check_weights`, for the checkpoint folder `path`; also loads the tokenizer."""
    manifest = read_checkpoint_manifest(path)
    spec = check_weights(manifest, path)
    _check_tokenizer(path, manifest, spec)
    return spec


def verify_model(path: Path) -> list[str]:
    """Reads every byte of the checkpoint `path`; returns everything that prevents its use, empty if it is whole."""
    wrong = verify_checkpoint(path)
    if not wrong:
        try:
            check_model(path)
        except DataError as error:
            wrong = [str(error)]
    return wrong


@contextlib.contextmanager
def advise_on_damage(path: Path) -> Iterator[None]:
    """Adds advice to a DamagedCheckpoint error of the checkpoint `path` raised in this block."""
    try:
        yield
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}; {damage_advice(path)}") from None


def damage_advice(path: Path, *, damaged: Collection[Path] = ()) -> str:
    """What to do about the damaged checkpoint `path`: which other one to use, and how to continue its run from that.

    Reads only the manifests of the others, and none of those in `damaged`.
    """
    path = path if path.name else path.resolve()
    others = [other for other in list_checkpoints(path.parent) if other.name != path.name]
    newest = all(other.name < path.name for other in others)
    use = next((other for other in reversed(others) if other not in damaged and _is_readable(other)), None)
    in_run, again = path.parent.name == "checkpoints", "away and run the same command again, which then trains from"
    if not use:
        return "no other checkpoint is whole" + (f"; move {path.parent} {again} the beginning" if in_run else "")
    advice = f"use {'an older' if newest else 'another'} checkpoint, {use}"
    return advice + (f", or move {path} {again} step {step_of(use)}" if newest and in_run else "")


def _check_tokenizer(path: Path, manifest: CheckpointManifest, spec: Spec) -> None:
    # Training does not need the package `tokenizers`.
    from ropewalk.prepare.foreign import load_foreign

    entry = manifest.files[TOKENIZER]
    content = bytes(ShardFile(path / TOKENIZER, entry).read(0, entry.bytes))
    load_foreign(content, path=path / TOKENIZER, vocabulary=spec.vocabulary)


def _weights_problem(spec: Spec, manifest: CheckpointManifest) -> str:
    stored = manifest.tensors.get(MODEL, {})
    if spec.layers > len(stored):
        return f"{len(stored)} tensors are too few for a model of {spec.layers} layers"
    shapes = spec.shapes()
    for name, shape in shapes.items():
        if name not in stored:
            return f"the weight {name} is missing"
        if stored[name].shape != shape:
            return f"{name} has shape {stored[name].shape}, the model needs {shape}"
    strange = min(stored.keys() - shapes.keys(), default="")
    if strange:
        return f"the model has no weight {strange}"
    types = sorted({entry.dtype for entry in stored.values()})
    if len(types) > 1 or types[0] not in WEIGHTS:
        return f"unsupported dtype of weights: {' and '.join(types)}"
    return ""


def _moments_problem(spec: Spec, manifest: CheckpointManifest) -> str:
    shapes = spec.shapes()
    for name, entry in manifest.tensors.get(OPTIMIZER, {}).items():
        kind, slash, parameter = name.partition("/")
        if slash and kind in LOOSE:
            continue
        # Moments have the shape of their parameter, factored ones a dimension less, step counters none.
        shape = shapes.get(parameter)
        if not slash or shape is None or not set(entry.shape) <= {1, *shape} or prod(entry.shape) > prod(shape):
            return f"the optimizer tensor {name} belongs to no parameter"
    strange = manifest.tensors.keys() - {MODEL, OPTIMIZER}
    return f"unknown tensor group {min(strange)}" if strange else ""


def _is_readable(path: Path) -> bool:
    try:
        with contextlib.suppress(NotImportedError):
            read_checkpoint_manifest(path)
    except DataError:
        return False
    return True
