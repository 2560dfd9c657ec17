"""Validates untrusted manifests before use. No torch.

The seal of a manifest is an unkeyed hash, which detects damage but not malice, and a checkpoint may come from anyone.
Therefore these checks cover all fields: types and ranges; file names inside the folder; one hash per chunk; pieces
inside their files, disjoint, and covering their tensors; a valid model spec. A valid tensor is no larger than its files
before compression, so memory is never allocated on the claim of a manifest alone.

The cost is one pass over the manifest: 1.2 s of CPU time for 23 MB and 128,000 pieces, 0.5 s of it for the JSON.
`verify` also decompresses files, one frame at a time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ropewalk.base.errors import ConfigError, DamagedCheckpoint
from ropewalk.base.untrusted import plain_text, plain_tree
from ropewalk.model.hugging_face.strict import read_spec

from .regions import Region, tiles
from .shard_file import CODES, FileEntry, item_bytes

if TYPE_CHECKING:
    from .format import CheckpointManifest, TensorEntry

MANIFEST_BYTES = 256 << 20
"""Maximum size of a manifest; 100,000 tensors need 30 MB. Also the limit per message of peers."""
MOST_BYTES = 1 << 60
MOST_FRAME_BYTES = 1 << 30
MOST_RATIO = 1 << 17
"""Maximum compression ratio; zstd compresses 4 MiB of zeros about 30,000 times."""
MOST_DIMENSIONS = 16
MOST_TEXT = 4096

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_HASH = re.compile(r"[0-9a-f]{16}")
_GROUP = re.compile(r"[a-z_]{1,64}")


def check_tree(tree: Mapping[str, Any], known: type, *, path: Path) -> None:
    """Checks that the JSON of a manifest has the fields of the class `known`, each of the right type. Errors name
    `path`
    here and below."""
    refuse = _refuser(path)
    expected = {field.name: field for field in fields(known)}
    for key in tree:
        if key not in expected:
            refuse(f"its manifest has an unknown key `{str(key)[:64]}`")
    for name, field in expected.items():
        if name not in tree:
            if field.default is MISSING and field.default_factory is MISSING:
                refuse(f"its manifest lacks `{name}`")
            continue
        if not _KINDS[name](tree[name]):
            refuse(f"`{name}` of its manifest is {_shown(tree[name])}")


def check_file(name: str, tree: Any, *, path: Path) -> None:
    """Checks the JSON entry of a file."""
    refuse = _refuser(path)
    if not _NAME.fullmatch(name) or name == "manifest.json":
        refuse(f"{_shown(name)} is not a valid file name")
    if not isinstance(tree, dict) or not {"bytes", "chunks", "chunk_bytes"} <= tree.keys() <= _FILE_KEYS:
        refuse(f"the entry of {name} does not have exactly its bytes and hashes")
    size, chunks, chunk_bytes = tree["bytes"], tree["chunks"], tree["chunk_bytes"]
    if not _is_count(size, MOST_BYTES) or not _is_count(chunk_bytes, MOST_BYTES, least=1):
        refuse(f"{name} has {_shown(size)} bytes in chunks of {_shown(chunk_bytes)}")
    if not isinstance(chunks, list) or len(chunks) != -(-size // chunk_bytes):
        refuse(f"{name} has {size} bytes, and its manifest does not have one hash per {chunk_bytes} bytes")
    if not all(isinstance(chunk, str) and _HASH.fullmatch(chunk) for chunk in chunks):
        refuse(f"{name}: some hashes are not 16 hexadecimal digits")
    frames: Any = tree.get("frames", [])
    frame_bytes: Any = tree.get("frame_bytes")
    if not isinstance(frames, list) or not all(_is_count(frame, MOST_BYTES, least=5) for frame in frames):
        refuse(f"{name}: its frames are not sizes in bytes")
    if frames and (sum(frames) != size or not _is_count(frame_bytes, MOST_FRAME_BYTES, least=1)):
        refuse(f"{name}: its {len(frames)} frames of {_shown(frame_bytes)} bytes do not add up to the file")
    if frames and len(frames) * frame_bytes > MOST_RATIO * size:
        refuse(f"{name}: {size} bytes cannot hold {len(frames)} frames of {frame_bytes}")


def check_tensor(group: str, name: str, tree: Any, *, path: Path) -> None:
    """Checks the JSON entry of a tensor."""
    refuse = _refuser(path)
    where = f"{group}/{name[:MOST_TEXT]}"
    if not _GROUP.fullmatch(group) or not name or len(name) > MOST_TEXT or not name.isprintable():
        refuse(f"{_shown(where)} is not a valid tensor name")
    if not isinstance(tree, dict) or tree.keys() != {"dtype", "shape", "pieces"}:
        refuse(f"the entry of {where} does not have exactly type, shape and pieces")
    if not isinstance(tree["dtype"], str) or tree["dtype"] not in CODES:
        refuse(f"{where} has the type {_shown(tree['dtype'])}")
    if not _is_shape(tree["shape"]) or not isinstance(tree["pieces"], list):
        refuse(f"{where} has the shape {_shown(tree['shape'])} in the pieces {_shown(tree['pieces'])}")
    for piece in tree["pieces"]:
        sound = isinstance(piece, dict) and piece.keys() == {"file", "begin", "offset", "shape"}
        sound = sound and isinstance(piece["file"], str) and _is_count(piece["begin"], MOST_BYTES)
        if not sound or not _is_shape(piece["offset"]) or not _is_shape(piece["shape"]):
            refuse(f"{where} has the piece {_shown(piece)}")


def check_manifest(manifest: CheckpointManifest, *, path: Path, shard: bool = False) -> None:
    """Checks that the tensors of a manifest lie in its files and are complete. In a `shard` of one rank, pieces need
    not
    cover the tensors."""
    refuse = _refuser(path)
    spans: dict[str, list[tuple[int, int, str]]] = {name: [] for name in manifest.files}
    for where, entry in _entries(manifest):
        size = item_bytes(entry.dtype)
        for piece in entry.pieces:
            if piece.file not in spans:
                refuse(f"{where} is in {_shown(piece.file)}, which is not a file of this checkpoint")
            end = piece.begin + prod(piece.shape) * size
            if end > raw_bytes(manifest.files[piece.file]):
                refuse(f"{where}: bytes {piece.begin} to {end} are beyond the end of {piece.file}")
            if end > piece.begin:
                spans[piece.file].append((piece.begin, end, where))
        regions = [Region(piece.offset, piece.shape) for piece in entry.pieces]
        if not (shard or tiles(entry.shape, regions)) or not all(_inside(region, entry.shape) for region in regions):
            held = sum(prod(region.shape) for region in regions)
            refuse(f"{where}: its {len(regions)} pieces hold {held} elements, not each of {prod(entry.shape)} once")
    for file, found in spans.items():
        found.sort()
        for (_, end, first), (begin, _, second) in itertools.pairwise(found):
            if begin < end:
                refuse(f"{first} and {second} share bytes of {file}")
    _check_spec(manifest.spec, refuse)


def raw_bytes(entry: FileEntry) -> int:
    """Maximum bytes of a file before compression."""
    return len(entry.frames) * entry.frame_bytes if entry.frames else entry.bytes


def _check_spec(tree: Mapping[str, Any], refuse: Callable[[str], NoReturn]) -> None:
    try:
        read_spec(tree, name="this checkpoint")
    except ConfigError as error:
        refuse(f"invalid model spec: {error.problems[0].what}")


def _entries(manifest: CheckpointManifest) -> Iterator[tuple[str, TensorEntry]]:
    for group, entries in manifest.tensors.items():
        for name, entry in entries.items():
            yield f"{group}/{name}", entry


def _refuser(path: Path) -> Callable[[str], NoReturn]:
    def refuse(what: str) -> NoReturn:
        raise DamagedCheckpoint(f"{path / 'manifest.json'}: damaged checkpoint: {what}")

    return refuse


def _inside(region: Region, shape: tuple[int, ...]) -> bool:
    return len(region.offset) == len(region.shape) == len(shape) and all(
        begin + side <= whole for begin, side, whole in zip(region.offset, region.shape, shape, strict=True)
    )


def _is_count(value: Any, most: int, *, least: int = 0) -> bool:
    return type(value) is int and least <= value <= most


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_DIMENSIONS and all(_is_count(v, MOST_BYTES) for v in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT and plain_text(value)


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__} of {len(value)}"
    return text if len(text) <= 80 else text[:77] + "..."


_FILE_KEYS = {"bytes", "chunks", "chunk_bytes", "frames", "frame_bytes"}

_KINDS: dict[str, Callable[[Any], bool]] = {
    **{name: lambda v: _is_count(v, 1 << 62) for name in ("step", "tokens", "phase", "phase_step")},
    "seed": lambda v: type(v) is int and v.bit_length() <= 64,
    "world": lambda v: _is_count(v, 1 << 31, least=1),
    "phase_ended": lambda v: type(v) is bool,
    **{name: _is_text for name in ("parent", "chat")},
    **{name: lambda v: isinstance(v, dict) and plain_tree(v) for name in ("spec", "data", "validation")},
    "versions": lambda v: isinstance(v, dict) and all(map(_is_text, (*v, *v.values()))),
    "files": lambda v: isinstance(v, dict),
    "tensors": lambda v: isinstance(v, dict) and all(isinstance(entries, dict) for entries in v.values()),
}
"""A predicate per field of a manifest."""
