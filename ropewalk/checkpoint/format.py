"""The checkpoint format: a folder `step-00000100` of safetensors files and a manifest. No torch.

The folder appears by one rename after all its files are durable, so a checkpoint exists whole or not at all. The hashes
in the manifest detect later damage. A tensor is stored in pieces, one per rank that held a shard: each piece names its
file, its offset in the file, and its region of the tensor.
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
from ropewalk.config.resolved import import_model_plugins

from .shard_file import FileEntry, ShardFile, item_bytes
from .validate import MANIFEST_BYTES, check_file, check_manifest, check_tensor, check_tree

FORMAT = 3
FILE = "manifest.json"
LATEST = "latest.json"
"""File beside the checkpoints that names the newest."""
REPLACED = ".replaced"
"""Suffix of a checkpoint while a new one of the same step replaces it."""
TOKENIZER = "tokenizer.json"
_PREFIX = "step-"
_MAX_HEADER_BYTES = 100 << 20
"""Maximum safetensors header that is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stored region of a tensor."""

    file: str
    begin: int
    """First byte in the file."""
    offset: tuple[int, ...]
    """Of the region in the tensor."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint; its pieces cover each element once."""

    dtype: str
    """torch's name, e.g. `bfloat16`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    """Content and origin of a checkpoint."""

    step: int
    tokens: int
    """Training tokens read so far."""
    seed: int
    """Random numbers are functions of the seed and a position: there is no other random state."""
    spec: dict[str, Any]
    """The resolved model spec, sufficient to build the model."""
    data: dict[str, Any]
    """State of the loader."""
    files: dict[str, FileEntry]
    tensors: dict[str, dict[str, TensorEntry]]
    """By group (`model`, `optimizer`) and name."""
    versions: dict[str, str]
    """Of ropewalk, torch and Python that wrote the checkpoint."""
    world: int = 1
    """Number of ranks that wrote the checkpoint."""
    parent: str = ""
    """The checkpoint that the run last continued from; empty if it started from scratch."""
    phase: int = 0
    """Index of the phase."""
    phase_step: int = 0
    """Completed steps of the phase."""
    phase_ended: bool = False
    """Whether the phase has ended: at its last step, or by early stopping."""
    validation: dict[str, Any] = field(default_factory=dict)
    """State of the plateau schedule and of early stopping in this phase."""
    chat: str = ""
    """Name of the chat template of the data; empty: none."""

    @property
    def bytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(entry.bytes for entry in self.files.values())

    def byte_ranges(self, file: str) -> dict[str, tuple[int, int]]:
        """First and last byte (exclusive) of each tensor with a piece in `file`."""
        found = {}
        for group, entries in self.tensors.items():
            for name, entry in entries.items():
                for piece in entry.pieces:
                    if piece.file == file:
                        found[f"{group}/{name}"] = (piece.begin, piece.begin + piece_bytes(entry.dtype, piece.shape))
        return found


def step_path(folder: Path, step: int) -> Path:
    """Path of the checkpoint of `step`."""
    return folder / f"{_PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint folder."""
    return int(path.name.removesuffix(REPLACED).rpartition("-")[2])


def list_checkpoints(folder: Path) -> list[Path]:
    """The committed checkpoints in `folder`, oldest first; without leftovers of a crash."""
    found: dict[int, Path] = {}
    # A step sorts before its replaced twin, which counts only if a crash left it alone.
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        step = path.name.removesuffix(REPLACED)[len(_PREFIX) :]
        if step.isdigit() and path.is_dir():
            found.setdefault(int(step), path)
    return [found[step] for step in sorted(found)]


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is the folder of one checkpoint."""
    return (path / FILE).exists() and path.resolve().name.startswith(_PREFIX)


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest of the run or `checkpoints` folder at `path`. Of a run, what its model
    names of the user's is imported; a checkpoint alone never says what is."""
    import_model_plugins(path)
    if is_checkpoint(path):
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
    """The manifest as JSON; its last field is the hash of all bytes before it."""
    tree = {"format": FORMAT, **dataclasses.asdict(manifest)}
    text = json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False)
    body = text.removesuffix("\n}").encode() + _SEAL
    return body + checksum(body).encode() + _END


def identity(manifest: CheckpointManifest) -> str:
    """Hash of the content of a checkpoint, independent of versions and interruptions."""
    tree = dataclasses.asdict(manifest)
    return _tree_checksum({key: value for key, value in tree.items() if key not in ("parent", "versions")})


_SEAL, _END = b',\n "checksum": "', b'"\n}\n'


def read_checkpoint_manifest(path: Path, *, shard: bool = False) -> CheckpointManifest:
    """The manifest of the checkpoint folder `path`; DamagedCheckpoint if it is missing, altered or invalid
    (validate.py).
    `shard`: of one rank's shard, whose pieces need not cover the tensors."""
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
    """As `read_checkpoint_manifest`, from the bytes of the manifest."""
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
        # Older formats are validated after the upgrade, below.
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
    """Reads every byte of a checkpoint, or of a rank's `shard`, and returns its damage; empty if there is none. Whether
    the weights match the model is checked by `read/model_check.py`."""
    try:
        manifest = read_checkpoint_manifest(path, shard=shard)
    except DataError as error:
        return [str(error)]
    return list(_problems(path, manifest))


def _problems(path: Path, manifest: CheckpointManifest) -> Iterator[str]:
    for name, entry in manifest.files.items():
        try:
            yield from ShardFile(path / name, entry, owners=manifest.byte_ranges(name)).problems()
        except DataError as error:
            yield str(error)


def checksum(data: bytes | memoryview) -> str:
    """xxh3-64 in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def _unsealed(data: bytes) -> dict[str, Any] | None:
    """The manifest without its hash; None if it is damaged."""
    try:
        tree = parse_json(data)
    except Refused:
        return None
    if not isinstance(tree, dict):
        return None
    stored = tree.pop("checksum", None)
    if isinstance(tree.get("format"), int) and tree["format"] < 3:
        return tree if plain_tree(tree) and stored == _tree_checksum(tree) else None
    body, seal, _ = data.rpartition(_SEAL)
    whole = body + seal
    return tree if data == whole + checksum(whole).encode() + _END else None


def file_entry(tree: dict[str, Any]) -> FileEntry:
    """The entry of a file, from JSON."""
    compressed = {"frames": tuple(tree["frames"]), "frame_bytes": tree["frame_bytes"]} if tree.get("frames") else {}
    return FileEntry(bytes=tree["bytes"], chunks=tuple(tree["chunks"]), chunk_bytes=tree["chunk_bytes"], **compressed)


def tensor_entry(tree: dict[str, Any]) -> TensorEntry:
    """The entry of a tensor, from JSON."""
    pieces = tuple(
        Piece(file=p["file"], begin=p["begin"], offset=tuple(p["offset"]), shape=tuple(p["shape"]))
        for p in tree["pieces"]
    )
    return TensorEntry(dtype=tree["dtype"], shape=tuple(tree["shape"]), pieces=pieces)


def piece_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a region."""
    return math.prod(shape) * item_bytes(dtype)


# Older formats


def _one_phase(tree: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had a single phase, and counted steps of the data instead of sequences."""
    known = {key: value for key, value in tree.items() if key not in ("schedule", "data")}
    plateau = tree.get("schedule")
    return {
        **known,
        "data": {"row": tree["tokens"] // tree["spec"]["sequence_length"]} if tree["data"] else {},
        "phase_step": tree["step"],
        "validation": {"plateau": plateau} if plateau else {},
    }


def _one_piece(tree: dict[str, Any], *, folder: Path) -> dict[str, Any]:
    """Format 2 had one rank and one hash per file; the offsets of tensors were only in the headers of the files."""
    files, tensors = {}, {}
    for name, entry in tree["files"].items():
        size = max(1, entry["bytes"])
        files[name] = {"bytes": entry["bytes"], "chunks": [entry["checksum"]], "chunk_bytes": size}
        check_file(name, files[name], path=folder)  # before opening a file of this name
        begins = _begins(folder / name) if entry["tensors"] else {}
        tensors[name.removesuffix(".safetensors")] = {
            tensor: {
                **stored,
                "pieces": [
                    {
                        "file": name,
                        "begin": begins.get(tensor, 0),
                        "offset": [0] * len(stored["shape"]),
                        "shape": stored["shape"],
                    }
                ],
            }
            for tensor, stored in entry["tensors"].items()
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
    """Offset of each tensor, from the header; empty if it cannot be read, which verification reports."""
    try:
        with open(open_inside(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length)) if length <= _MAX_HEADER_BYTES else {}
        return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _tree_checksum(tree: dict[str, Any]) -> str:
    return checksum(json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
