"""Commits a checkpoint atomically: it exists whole, durable and checked, or not at all. No torch.

    1. every rank writes its files into `step-00000100.<attempt>.partial` and waits until they are durable
    2. every rank writes a record there: its files with their hashes, and its pieces
    3. rank 0 waits for all records, and checks that all files exist and that the pieces cover every tensor
    4. rank 0 writes the manifest, syncs the folder, renames it to `step-00000100`, and syncs the parent
    5. rank 0 publishes it in `latest.json`; only then may older checkpoints be deleted

The checkpoint is committed after 4. Each attempt has a unique name that all ranks know, so that files of earlier
attempts are never mixed in.
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
    """The files and pieces that one rank wrote."""

    files: dict[str, FileEntry]
    tensors: dict[str, dict[str, TensorEntry]]
    """As in the manifest, with the pieces of this rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt of all ranks to write a checkpoint together."""

    rank: int = 0
    world: int = 1
    name: str = "0"
    """The same on every rank, and unique among attempts that may have left files."""
    timeout_s: float = 600.0
    """Seconds that rank 0 waits for the records of the others."""


def commit(
    folder: Path,
    manifest: CheckpointManifest,
    *,
    write: Callable[[Path], RankRecord],
    disk: Disk,
    attempt: Attempt | None = None,
) -> Path:
    """Commits the files that `write` puts into a given folder as the checkpoint of `manifest.step`; returns its path.

    On return, the checkpoint is durable on rank 0; on other ranks, their own files are. All ranks must call.
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
                _write_record(disk, partial, attempt.rank, dataclasses.asdict(record))
            if attempt.rank == 0:
                records = _gather(partial, record, attempt)
                _finish(disk, path, partial, joined(manifest, records, path=path))
        except BaseException as error:
            if attempt.rank == 0:
                disk.remove(partial)
            else:
                # So that rank 0 stops waiting. A disk that fails again has reported its error already.
                with contextlib.suppress(OSError):
                    _write_record(disk, partial, attempt.rank, {"error": f"{type(error).__name__}: {error}"})
            raise
    return path


def joined(manifest: CheckpointManifest, records: list[RankRecord], *, path: Path) -> CheckpointManifest:
    """The manifest with the records of all ranks; StorageError if an element of a tensor is missing or duplicate."""
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
    """Names `path` as the newest in `latest.json`, for people and scripts; ropewalk itself lists the folders."""
    step = step_of(path)
    text = json.dumps({"format": 1, "step": step, "checkpoint": path.name, "manifest": checksum(manifest)}, indent=1)
    target = path.parent / LATEST
    beside = target.with_name(LATEST + PARTIAL)
    _write(disk, beside, text.encode() + b"\n")
    disk.rename(beside, target)
    disk.sync_folder(path.parent)


def publish_newest(disk: Disk, folder: Path) -> None:
    """Repairs `latest.json` after a crash between commit and publication."""
    found = [path for path in list_checkpoints(folder) if (path / FILE).is_file()]
    if not found:
        return
    manifest = (found[-1] / FILE).read_bytes()
    try:
        latest = json.loads(read_regular(folder / LATEST))
    except (OSError, ValueError, RecursionError, DataError):
        latest = None
    if not isinstance(latest, dict) or latest.get("manifest") != checksum(manifest):
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
        # Between the two renames the old one has the other name, under which readers find it too.
        disk.rename(path, path.with_name(path.name + REPLACED))
        point(f"checkpoint.replacing:{path.name}")
    disk.rename(partial, path)
    disk.sync_folder(path.parent)
    point(f"checkpoint.committed:{path.name}")
    disk.remove(path.with_name(path.name + REPLACED))
    publish(disk, path, text)
    point(f"checkpoint.published:{path.name}")


def _write_record(disk: Disk, partial: Path, rank: int, content: dict[str, Any]) -> None:
    """Writes the record of a rank for rank 0: its files and pieces, or its error."""
    name = _record_name(rank)
    text = json.dumps(content).encode()
    # The hash distinguishes a complete record from one in progress.
    _write(disk, partial / (name + PARTIAL), checksum(text).encode() + text)
    disk.rename(partial / (name + PARTIAL), partial / name)
    point(f"checkpoint.record:{rank}")


def _gather(partial: Path, own: RankRecord, attempt: Attempt) -> list[RankRecord]:
    records = [own]
    deadline = time.monotonic() + attempt.timeout_s
    for rank in range(1, attempt.world):
        while (found := _read_record(partial / _record_name(rank))) is None:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{partial}: rank {rank} did not write its shard within {attempt.timeout_s:.0f} s; this "
                    "checkpoint is abandoned, older ones are intact. Do all ranks see the same folder?"
                )
            time.sleep(0.01)
        records.append(found)
    for record in records:
        for name, entry in record.files.items():
            size = (partial / name).stat().st_size
            if size != entry.bytes:
                raise StorageError(f"{partial / name}: {size} of {entry.bytes} bytes were written; is the disk full?")
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
        raise StorageError(f"{path}: this rank could not write its shard ({tree['error']}); older ones are intact")
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
        raise StorageError(f"{where}: {len(regions)} pieces hold {held} of {size} elements; nothing is committed")


def _make_folders(disk: Disk, folder: Path) -> None:
    """Creates `folder` and its parents and makes each name durable: a synced file in a lost folder is lost."""
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
