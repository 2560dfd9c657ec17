"""What a checkpoint is on disk: a folder `step-00000100` of safetensors files and a manifest. No torch.

The folder appears by one rename after everything in it is durable, so it exists whole or not at all; the manifest's
checksums tell whether it is still what was written.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ropewalk.base.errors import DataError
from ropewalk.base.files import read_json, storage, upgraded

FORMAT = 2
FILE = "manifest.json"
_PREFIX = "step-"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    bytes: int
    checksum: str
    tensors: dict[str, dict[str, Any]]
    """`dtype` and `shape` by tensor name; empty for a file of another kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    """What a checkpoint holds and where it comes from."""

    step: int
    tokens: int
    """Training tokens read so far."""
    seed: int
    spec: dict[str, Any]
    """The model with every size decided: enough to build it again."""
    data: dict[str, Any]
    """The loader's state."""
    files: dict[str, FileEntry]
    version: str
    phase: int = 0
    """Number of the phase, counted from 0."""
    phase_step: int = 0
    """Steps of this phase that are done."""
    phase_ended: bool = False
    """Whether the phase is over: at its last step, or stopped early."""
    validation: dict[str, Any] = field(default_factory=dict)
    """What an adaptive learning rate and early stopping remember of the validations in this phase."""
    chat: str = ""
    """Name of the chat template of its data; empty when there was none."""


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return folder / f"{_PREFIX}{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Every finished checkpoint below `folder`, oldest first; what a crash left behind is not listed."""
    found = [p for p in folder.glob(f"{_PREFIX}*") if p.name[len(_PREFIX) :].isdigit() and p.is_dir()]
    return sorted(found, key=lambda path: int(path.name[len(_PREFIX) :]))


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint meant by `path`: itself, or the newest of a run or of a `checkpoints` folder."""
    if (path / FILE).exists() and path.resolve().name.startswith(_PREFIX):
        return path
    for folder in (path, path / "checkpoints"):
        found = list_checkpoints(folder)
        if found:
            return found[-1]
    raise DataError(f"{path}: no checkpoint here; name a `step-...` folder or a run directory that has been trained")


def sealed(manifest: CheckpointManifest) -> dict[str, Any]:
    """The manifest as JSON with its own checksum."""
    tree = {"format": FORMAT, **dataclasses.asdict(manifest)}
    return {**tree, "checksum": _tree_checksum(tree)}


def read_checkpoint_manifest(path: Path) -> CheckpointManifest:
    """The manifest of the checkpoint folder `path`; raises DataError when it is missing or altered."""
    file = path / FILE
    tree = read_json(file, what="checkpoint manifest")
    if not isinstance(tree, dict) or tree.pop("checksum", None) != _tree_checksum(tree):
        raise DataError(f"{file}: damaged checkpoint: the manifest is not what was written; use an older checkpoint")
    tree = upgraded(tree, path=file, what="checkpoint", current=FORMAT, upgrades={1: _one_phase})
    tree.pop("format")
    files = {name: FileEntry(**entry) for name, entry in tree.pop("files").items()}
    return CheckpointManifest(files=files, **tree)


def _one_phase(tree: dict[str, Any]) -> dict[str, Any]:
    """Format 1 knew one phase, and counted the steps of its data, not the rows."""
    known = {key: value for key, value in tree.items() if key not in ("schedule", "data")}
    plateau = tree.get("schedule")
    return {
        **known,
        "data": {"row": tree["tokens"] // tree["spec"]["sequence_length"]} if tree["data"] else {},
        "phase_step": tree["step"],
        "validation": {"plateau": plateau} if plateau else {},
    }


def verify_checkpoint(path: Path) -> list[str]:
    """Reads every byte of a checkpoint; returns what is wrong, nothing when all is as written."""
    try:
        manifest = read_checkpoint_manifest(path)
    except DataError as error:
        return [str(error)]
    wrong = []
    for name, entry in manifest.files.items():
        try:
            read_verified(path / name, entry)
        except DataError as error:
            wrong.append(str(error))
    return wrong


def read_verified(path: Path, entry: FileEntry) -> bytes:
    """The bytes of one file, checked against its manifest entry."""
    try:
        with storage(f"reading {path}"):
            data = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: damaged checkpoint: this file is missing; use an older checkpoint") from None
    if len(data) != entry.bytes:
        raise DataError(f"{path}: damaged checkpoint: {len(data)} bytes, {entry.bytes} were written; use an older one")
    if checksum(data) != entry.checksum:
        raise DataError(f"{path}: damaged checkpoint: its bytes are not what was written; use an older checkpoint")
    return data


def checksum(data: bytes) -> str:
    """xxh3-64 in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def _tree_checksum(tree: dict[str, Any]) -> str:
    return checksum(json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
