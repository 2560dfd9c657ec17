"""State <-> checkpoint folder."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ropewalk import __version__
from ropewalk.base.errors import DataError
from ropewalk.base.files import PARTIAL, committed_folder, point, write_json
from ropewalk.model.spec import Spec

from .format import (
    FILE,
    CheckpointManifest,
    FileEntry,
    checksum,
    list_checkpoints,
    read_checkpoint_manifest,
    read_verified,
    sealed,
    step_path,
)

MODEL, OPTIMIZER, TOKENIZER = "model.safetensors", "optimizer.safetensors", "tokenizer.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything that a run needs to go on."""

    step: int
    tokens: int
    seed: int
    spec: Spec
    data: dict[str, Any]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    tokenizer: bytes
    """The tokenizer's file: a checkpoint generates text without anything beside it."""
    phase: int = 0
    phase_step: int = 0
    phase_ended: bool = False
    validation: dict[str, Any] = field(default_factory=dict)
    chat: str = ""
    """These as in `CheckpointManifest`."""


def save(folder: Path, state: State) -> Path:
    """Commits the checkpoint of `state.step` below `folder` and returns its path; blocks until it is durable."""
    path = step_path(folder, state.step)
    payloads = {
        MODEL: (safetensors.torch.save(_contiguous(state.model)), state.model),
        OPTIMIZER: (safetensors.torch.save(_contiguous(state.optimizer)), state.optimizer),
        TOKENIZER: (state.tokenizer, {}),
    }
    with committed_folder(path) as partial:
        files = {name: _write(partial / name, data, tensors) for name, (data, tensors) in payloads.items()}
        manifest = CheckpointManifest(
            step=state.step,
            tokens=state.tokens,
            seed=state.seed,
            spec=dataclasses.asdict(state.spec),
            data=state.data,
            files=files,
            version=__version__,
            phase=state.phase,
            phase_step=state.phase_step,
            phase_ended=state.phase_ended,
            validation=state.validation,
            chat=state.chat,
        )
        write_json(partial / FILE, sealed(manifest))
    return path


def load(path: Path, *, optimizer: bool = True) -> State:
    """The state in the checkpoint folder `path`, every byte checked; without `optimizer` its tensors stay unread."""
    manifest = read_checkpoint_manifest(path)
    wanted = (MODEL, OPTIMIZER, TOKENIZER) if optimizer else (MODEL, TOKENIZER)
    data = {name: read_verified(path / name, manifest.files[name]) for name in wanted}
    return State(
        step=manifest.step,
        tokens=manifest.tokens,
        seed=manifest.seed,
        spec=Spec(**manifest.spec),
        data=manifest.data,
        model=safetensors.torch.load(data[MODEL]),
        optimizer=safetensors.torch.load(data[OPTIMIZER]) if optimizer else {},
        tokenizer=data[TOKENIZER],
        phase=manifest.phase,
        phase_step=manifest.phase_step,
        phase_ended=manifest.phase_ended,
        validation=manifest.validation,
        chat=manifest.chat,
    )


def load_newest(folder: Path) -> tuple[Path | None, State | None, list[str]]:
    """The newest checkpoint below `folder` whose every byte is right, and what was wrong with newer ones.

    (None, None, []) when there is none yet. When there are some and none is whole, raises DataError: starting from
    scratch would silently throw away a run.
    """
    wrong: list[str] = []
    candidates = list_checkpoints(folder)
    for path in reversed(candidates):
        try:
            return path, load(path), wrong
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        raise DataError(
            "\n".join([*wrong, f"{folder}: no checkpoint is whole; delete this folder to start from scratch"])
        )
    return None, None, []


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint to `step-00000100.damaged`: it no longer counts among those to keep."""
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    return aside


def retain(folder: Path, *, keep_last: int) -> list[Path]:
    """Deletes all but the newest `keep_last` checkpoints, and what a crash left half written; returns what went."""
    for leftover in folder.glob(f"*{PARTIAL}"):
        shutil.rmtree(leftover)
    doomed = list_checkpoints(folder)[:-keep_last]
    for path in doomed:
        # Renamed first: a crash in the middle of deleting leaves garbage, not half a checkpoint.
        trash = path.with_name(path.name + PARTIAL)
        os.replace(path, trash)
        point(f"checkpoint.retired:{path.name}")
        shutil.rmtree(trash)
    return doomed


def _write(path: Path, data: bytes, tensors: Mapping[str, Tensor]) -> FileEntry:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    point(f"checkpoint.payload:{path.name}")
    described = {
        name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
        for name, t in sorted(tensors.items())
    }
    return FileEntry(bytes=len(data), checksum=checksum(data), tensors=described)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
