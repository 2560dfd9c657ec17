"""What a checkpoint is on disk: a folder `step-00000100` of safetensors files and a manifest. No torch.

The folder appears by one rename after everything in it is durable, so it exists whole or not at all; the manifest's
hashes tell whether it is still what was written. A tensor may lie in pieces, one for each rank that held a part of it:
each piece names its file, its place there, and its place in the whole tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ropewalk.base.errors import DamagedCheckpoint, DataError
from ropewalk.base.files import storage, upgraded
from ropewalk.base.untrusted import Refused, open_inside, parse_json, plain_tree, read_inside

from .shard_file import FileEntry, ShardFile, item_bytes
from .validate import MANIFEST_BYTES, check_file, check_manifest, check_tensor, check_tree

FORMAT = 3
FILE = "manifest.json"
LATEST = "latest.json"
"""Beside the checkpoints; names the newest."""
REPLACED = ".replaced"
"""Suffix of a checkpoint while another of the same step takes its place."""
TOKENIZER = "tokenizer.json"
_PREFIX = "step-"
_HEADER_BYTES = 100 << 20
"""The most of a safetensors header that any reader takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Where a box of a tensor lies."""

    file: str
    begin: int
    """First byte in the file."""
    offset: tuple[int, ...]
    """The box's corner in the whole tensor."""
    shape: tuple[int, ...]
    """Its sides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint; its pieces cover it, each number once."""

    dtype: str
    """torch's name: `bfloat16`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    """What a checkpoint holds and where it comes from."""

    step: int
    tokens: int
    """Training tokens read so far."""
    seed: int
    """Every random number of a run is a function of it and of a place: there is no other state."""
    spec: dict[str, Any]
    """The model with every size decided: enough to build it again."""
    data: dict[str, Any]
    """The loader's state."""
    files: dict[str, FileEntry]
    tensors: dict[str, dict[str, TensorEntry]]
    """By group (`model`, `optimizer`) and name."""
    versions: dict[str, str]
    """Of ropewalk, torch and Python that wrote it."""
    world: int = 1
    """Ranks that wrote it."""
    parent: str = ""
    """The checkpoint that its run went on from before this one; empty at the beginning."""
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

    @property
    def bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(entry.bytes for entry in self.files.values())

    def places(self, file: str) -> dict[str, tuple[int, int]]:
        """First and last byte (exclusive) in `file` of each tensor that has a piece there."""
        found = {}
        for group, entries in self.tensors.items():
            for name, entry in entries.items():
                for piece in entry.pieces:
                    if piece.file == file:
                        found[f"{group}/{name}"] = (piece.begin, piece.begin + piece_bytes(entry.dtype, piece.shape))
        return found


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return folder / f"{_PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removesuffix(REPLACED).rpartition("-")[2])


def list_checkpoints(folder: Path) -> list[Path]:
    """Every finished checkpoint below `folder`, oldest first; what a crash left behind is not listed."""
    found: dict[int, Path] = {}
    # Sorted, a step comes before its replaced twin, which counts only when a crash left it alone.
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        step = path.name.removesuffix(REPLACED)[len(_PREFIX) :]
        if step.isdigit() and path.is_dir():
            found.setdefault(int(step), path)
    return [found[step] for step in sorted(found)]


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint meant by `path`: itself, or the newest of a run or of a `checkpoints` folder."""
    if (path / FILE).exists() and path.resolve().name.startswith(_PREFIX):
        return path
    for folder in (path, path / "checkpoints"):
        found = list_checkpoints(folder)
        if found:
            return found[-1]
    if (path / "config.json").exists() and not (path / "config.toml").exists():
        raise DataError(
            f"{path}: a Hugging Face directory, not a checkpoint; `ropewalk model import {path} FOLDER` makes it one"
        )
    raise DataError(f"{path}: no checkpoint here; name a `step-...` folder or a run directory that has been trained")


def sealed(manifest: CheckpointManifest) -> bytes:
    """The manifest as JSON whose last field is the hash of every byte before it."""
    tree = {"format": FORMAT, **dataclasses.asdict(manifest)}
    text = json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False)
    body = text.removesuffix("\n}").encode() + _SEAL
    return body + checksum(body).encode() + _END


def identity(manifest: CheckpointManifest) -> str:
    """Hash of what a checkpoint holds, whoever wrote it after which interruptions."""
    tree = dataclasses.asdict(manifest)
    return _tree_checksum({key: value for key, value in tree.items() if key not in ("parent", "versions")})


_SEAL, _END = b',\n "checksum": "', b'"\n}\n'


def read_checkpoint_manifest(path: Path, *, shard: bool = False) -> CheckpointManifest:
    """The manifest of the checkpoint folder `path`; raises DamagedCheckpoint when it is missing, altered, or says what
    cannot be (validate.py). `shard`: of what one rank keeps, whose pieces need not cover the tensors."""
    file = path / FILE
    try:
        with storage(f"reading {file}"):
            data = read_inside(file, most_bytes=MANIFEST_BYTES)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{file}: no such checkpoint manifest") from None
    except Refused as error:
        raise DamagedCheckpoint(f"{file}: damaged checkpoint: {error}") from None
    return parse_checkpoint_manifest(data, path, shard=shard)


def parse_checkpoint_manifest(data: bytes, path: Path, *, shard: bool = False) -> CheckpointManifest:
    """As `read_checkpoint_manifest`, from the bytes of the manifest of the folder `path`."""
    file = path / FILE
    if len(data) > MANIFEST_BYTES:
        raise DamagedCheckpoint(f"{file}: damaged checkpoint: {len(data)} bytes, at most {MANIFEST_BYTES} are read")
    tree = _unsealed(data)
    if tree is None or type(tree.get("format")) is not int or tree["format"] < 1:
        raise DamagedCheckpoint(f"{file}: damaged checkpoint: the manifest is not what was written")
    upgrades: dict[int, Callable[[Any], dict[str, Any]]]
    upgrades = {1: _one_phase, 2: functools.partial(_one_piece, folder=path)}
    try:
        tree = upgraded(tree, path=file, what="checkpoint", current=FORMAT, upgrades=upgrades)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # Older formats have no validator of their own: what they become is checked below.
        what = f"not a manifest of format {tree['format']} ({type(error).__name__}: {error})"
        raise DamagedCheckpoint(f"{file}: damaged checkpoint: {what}") from None
    tree.pop("format")
    check_tree(tree, CheckpointManifest, path=path)
    for name, entry in tree["files"].items():
        check_file(name, entry, path=path)
    for group, entries in tree["tensors"].items():
        for name, entry in entries.items():
            check_tensor(group, name, entry, path=path)
    files = {name: file_entry(entry) for name, entry in tree.pop("files").items()}
    tensors = {
        group: {name: tensor_entry(entry) for name, entry in entries.items()}
        for group, entries in tree.pop("tensors").items()
    }
    manifest = CheckpointManifest(files=files, tensors=tensors, **tree)
    check_manifest(manifest, path=path, shard=shard)
    return manifest


def verify_checkpoint(path: Path, *, shard: bool = False) -> list[str]:
    """Reads every byte of a checkpoint, or of a rank's `shard`; returns what is wrong, nothing when all is as written.
    Whether the weights are those of its model says `checkpoint/read/model_check.py`."""
    try:
        manifest = read_checkpoint_manifest(path, shard=shard)
    except DataError as error:
        return [str(error)]
    return list(_problems(path, manifest))


def _problems(path: Path, manifest: CheckpointManifest) -> Iterator[str]:
    for name, entry in manifest.files.items():
        try:
            yield from ShardFile(path / name, entry, owners=manifest.places(name)).problems()
        except DataError as error:
            yield str(error)


def checksum(data: bytes | memoryview) -> str:
    """xxh3-64 in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def _unsealed(data: bytes) -> dict[str, Any] | None:
    """The manifest without its hash; None when it is not what was written."""
    try:
        tree = parse_json(data)
    except Refused:
        return None
    if not isinstance(tree, dict):
        return None
    told = tree.pop("checksum", None)
    if isinstance(tree.get("format"), int) and tree["format"] < 3:
        return tree if plain_tree(tree) and told == _tree_checksum(tree) else None
    body, seal, _ = data.rpartition(_SEAL)
    whole = body + seal
    return tree if data == whole + checksum(whole).encode() + _END else None


def file_entry(tree: dict[str, Any]) -> FileEntry:
    """A file's entry from JSON."""
    packing = {"frames": tuple(tree["frames"]), "frame_bytes": tree["frame_bytes"]} if tree.get("frames") else {}
    return FileEntry(bytes=tree["bytes"], chunks=tuple(tree["chunks"]), chunk_bytes=tree["chunk_bytes"], **packing)


def tensor_entry(tree: dict[str, Any]) -> TensorEntry:
    """A tensor's entry from JSON."""
    pieces = tuple(
        Piece(file=p["file"], begin=p["begin"], offset=tuple(p["offset"]), shape=tuple(p["shape"]))
        for p in tree["pieces"]
    )
    return TensorEntry(dtype=tree["dtype"], shape=tuple(tree["shape"]), pieces=pieces)


def piece_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a box of a type."""
    return math.prod(shape) * item_bytes(dtype)


# Older formats


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


def _one_piece(tree: dict[str, Any], *, folder: Path) -> dict[str, Any]:
    """Format 2 had one rank, one hash a file, and left the places of the tensors to the files' own headers."""
    files, tensors = {}, {}
    for name, entry in tree["files"].items():
        size = max(1, entry["bytes"])
        files[name] = {"bytes": entry["bytes"], "chunks": [entry["checksum"]], "chunk_bytes": size}
        check_file(name, files[name], path=folder)  # before a file of that name is opened
        begins = _begins(folder / name) if entry["tensors"] else {}
        tensors[name.removesuffix(".safetensors")] = {
            tensor: {
                **told,
                "pieces": [
                    {
                        "file": name,
                        "begin": begins.get(tensor, 0),
                        "offset": [0] * len(told["shape"]),
                        "shape": told["shape"],
                    }
                ],
            }
            for tensor, told in entry["tensors"].items()
        }
    tensors.pop("tokenizer.json", None)
    versions = {"ropewalk": tree["version"]}
    return {
        **{key: value for key, value in tree.items() if key not in ("files", "version")},
        "files": files,
        "tensors": tensors,
        "versions": versions,
    }


def _begins(path: Path) -> dict[str, int]:
    """Where each tensor begins, from the file's header; nothing when it cannot be read, which its hash will tell."""
    try:
        with open(open_inside(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length)) if length <= _HEADER_BYTES else {}
        return {name: 8 + length + told["data_offsets"][0] for name, told in header.items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _tree_checksum(tree: dict[str, Any]) -> str:
    return checksum(json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
