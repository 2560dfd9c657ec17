"""How a checkpoint comes into being: whole, durable and checked, or not at all. No torch.

    1. every rank writes its files into `step-00000100.<attempt>.partial` and waits until they are durable
    2. every rank leaves a record there: its files with their hashes, its pieces
    3. rank 0 waits for all records, checks that every file is there and that the pieces cover every tensor
    4. rank 0 writes the manifest, syncs the folder, renames it to `step-00000100`, syncs the parent
    5. rank 0 publishes it in `latest.json`; only then may older ones be deleted

A step is acknowledged when 4 is done. Folders of earlier attempts cannot be mistaken for this one: an attempt has a
name of its own, which all ranks know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError, StorageError
from ropewalk.base.files import PARTIAL, point, read_regular, storage

from .disk import Disk
from .format import (
    FILE,
    LATEST,
    REPLACED,
    CheckpointManifest,
    TensorEntry,
    checksum,
    file_entry,
    list_checkpoints,
    sealed,
    step_of,
    step_path,
    tensor_entry,
)
from .regions import Region, tiles
from .shard_file import FileEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """What one rank wrote."""

    files: dict[str, FileEntry]
    tensors: dict[str, dict[str, TensorEntry]]
    """As in the manifest, with the pieces that this rank wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Which ranks make a checkpoint together."""

    rank: int = 0
    world: int = 1
    name: str = "0"
    """The same on every rank, and of no other attempt that may have left files: a launch of a run has one."""
    patience_s: float = 600.0
    """How long rank 0 waits for the records of the others."""


def commit(
    folder: Path,
    manifest: CheckpointManifest,
    *,
    write: Callable[[Path], RankRecord],
    disk: Disk,
    attempt: Attempt | None = None,
) -> Path:
    """Makes the checkpoint of `manifest.step` of what `write` puts into the folder it is given; returns its path.

    On rank 0 it is durable when this returns; other ranks return when their part is. All ranks must call.
    """
    attempt = attempt or Attempt()
    path = step_path(folder, manifest.step)
    partial = path.with_name(f"{path.name}.{attempt.name}{PARTIAL}")
    with storage(f"writing {path}"):
        _make_folders(disk, folder)
        disk.make_folder(partial)
        point(f"checkpoint.begin:{path.name}")
        try:
            record = write(partial)
            if attempt.world > 1:
                _leave(disk, partial, attempt.rank, dataclasses.asdict(record))
            if attempt.rank == 0:
                records = _gather(partial, record, attempt)
                _finish(disk, path, partial, joined(manifest, records, path=path))
        except BaseException as error:
            if attempt.rank == 0:
                disk.remove(partial)
            else:
                # Rank 0 need not wait for what will not come. A disk that refuses this too has told why already.
                with contextlib.suppress(OSError):
                    _leave(disk, partial, attempt.rank, {"error": f"{type(error).__name__}: {error}"})
            raise
    return path


def joined(manifest: CheckpointManifest, records: list[RankRecord], *, path: Path) -> CheckpointManifest:
    """The manifest with what all ranks wrote; raises StorageError when a number of a tensor is missing or doubled."""
    files: dict[str, FileEntry] = {}
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for record in records:
        files |= record.files
        for group, entries in record.tensors.items():
            known = tensors.setdefault(group, {})
            for name, entry in entries.items():
                before = known[name].pieces if name in known else ()
                known[name] = dataclasses.replace(entry, pieces=(*before, *entry.pieces))
    for group, entries in tensors.items():
        for name, entry in entries.items():
            _check_cover(f"{path}: {group}/{name}", entry)
    ordered = {group: dict(sorted(entries.items())) for group, entries in tensors.items()}
    return dataclasses.replace(manifest, files=dict(sorted(files.items())), tensors=ordered, world=len(records))


def publish(disk: Disk, path: Path, manifest: bytes) -> None:
    """Names `path` as the newest in `latest.json`, for people and scripts; ropewalk itself looks at the folders."""
    step = step_of(path)
    told = json.dumps({"format": 1, "step": step, "checkpoint": path.name, "manifest": checksum(manifest)}, indent=1)
    target = path.parent / LATEST
    beside = target.with_name(LATEST + PARTIAL)
    _write(disk, beside, told.encode() + b"\n")
    disk.rename(beside, target)
    disk.sync_folder(path.parent)


def publish_newest(disk: Disk, folder: Path) -> None:
    """Names the newest checkpoint of `folder` again where a crash came between committing and naming it."""
    found = [path for path in list_checkpoints(folder) if (path / FILE).is_file()]
    if not found:
        return
    manifest = (found[-1] / FILE).read_bytes()
    try:
        told = json.loads(read_regular(folder / LATEST))
    except (OSError, ValueError, RecursionError, DataError):
        told = None
    if not isinstance(told, dict) or told.get("manifest") != checksum(manifest):
        publish(disk, found[-1], manifest)


def _finish(disk: Disk, path: Path, partial: Path, manifest: CheckpointManifest) -> None:
    text = sealed(manifest)
    _write(disk, partial / FILE, text)
    point(f"checkpoint.manifest:{path.name}")
    for number in range(1, manifest.world):
        disk.remove(partial / _record_name(number))
    if manifest.world > 1:
        disk.remove(partial / _record_name(0))
    disk.sync_folder(partial)
    point(f"checkpoint.synced:{path.name}")
    if path.exists():
        # Between the two renames the old one stands under its other name, where readers look for it too.
        disk.rename(path, path.with_name(path.name + REPLACED))
        point(f"checkpoint.replacing:{path.name}")
    disk.rename(partial, path)
    disk.sync_folder(path.parent)
    point(f"checkpoint.committed:{path.name}")
    disk.remove(path.with_name(path.name + REPLACED))
    publish(disk, path, text)
    point(f"checkpoint.published:{path.name}")


def _leave(disk: Disk, partial: Path, rank: int, told: dict[str, Any]) -> None:
    """A rank's record for rank 0: what it wrote, or the error because of which it did not."""
    name = _record_name(rank)
    text = json.dumps(told).encode()
    # The hash tells a record that is whole from one that is being written.
    _write(disk, partial / (name + PARTIAL), checksum(text).encode() + text)
    disk.rename(partial / (name + PARTIAL), partial / name)
    point(f"checkpoint.record:{rank}")


def _gather(partial: Path, own: RankRecord, attempt: Attempt) -> list[RankRecord]:
    records = [own]
    deadline = time.monotonic() + attempt.patience_s
    for rank in range(1, attempt.world):
        while (found := _read_record(partial / _record_name(rank))) is None:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{partial}: rank {rank} has not finished its part within {attempt.patience_s:.0f} s; the "
                    "checkpoint is given up, older ones are intact. Do all ranks see the same folder?"
                )
            time.sleep(0.01)
        records.append(found)
    for record in records:
        for name, entry in record.files.items():
            size = (partial / name).stat().st_size
            if size != entry.bytes:
                raise StorageError(f"{partial / name}: {size} bytes arrived of {entry.bytes}; is the disk full?")
    return records


def _read_record(path: Path) -> RankRecord | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if data[:16] != checksum(data[16:]).encode():
        return None
    tree: dict[str, Any] = json.loads(data[16:])
    if "error" in tree:
        raise StorageError(f"{path}: this rank could not write its part ({tree['error']}); older ones are intact")
    return RankRecord(
        files={name: file_entry(entry) for name, entry in tree["files"].items()},
        tensors={
            group: {name: tensor_entry(entry) for name, entry in entries.items()}
            for group, entries in tree["tensors"].items()
        },
    )


def _check_cover(where: str, entry: TensorEntry) -> None:
    regions = [Region(piece.offset, piece.shape) for piece in entry.pieces]
    if not tiles(entry.shape, regions):
        held, size = sum(region.size for region in regions), math.prod(entry.shape)
        raise StorageError(f"{where}: {len(regions)} pieces hold {held} of {size} numbers; nothing is committed")


def _make_folders(disk: Disk, folder: Path) -> None:
    """Makes `folder` and its parents, each name durable: a synced file in a lost folder is a lost file."""
    if not folder.is_dir():
        _make_folders(disk, folder.parent)
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)


def _write(disk: Disk, path: Path, data: bytes) -> None:
    with disk.create(path) as file:
        file.write(data)
        file.sync()


def _record_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"
