"""Which checkpoints of a run may go, by hand: never before one that stays has been read and found whole. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.errors import DataError
from ropewalk.base.files import PARTIAL, point

from ..disk import Disk, LocalDisk
from ..format import REPLACED, list_checkpoints, verify_checkpoint
from .lease import retiring


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """What stays of a folder of checkpoints, and what goes."""

    kept: tuple[Path, ...]
    """Read and found whole."""
    gone: tuple[Path, ...]
    damaged: dict[str, list[str]]
    """What is wrong with those that the rule keeps and that are not whole; they stay, for people to look at."""
    in_use: tuple[Path, ...] = ()
    """Those that should have gone, which another process reads."""


def prune(
    folder: Path, *, keep_last: int, keep_every: int = 0, dry_run: bool = False, disk: Disk | None = None
) -> Pruning:
    """Deletes all but the newest `keep_last` checkpoints below `folder` and those of steps that `keep_every` divides.

    A damaged one does not count: the newest whole one before it stays in its place. When none is whole, nothing goes.
    Reads every byte of what stays; `dry_run` reads too and deletes nothing.
    """
    listed = list_checkpoints(folder)
    if not listed:
        raise DataError(f"{folder}: no checkpoint here; name a run directory that has been trained")
    kept: list[Path] = []
    gone: list[Path] = []
    damaged: dict[str, list[str]] = {}
    for path in reversed(listed):
        if len(kept) >= keep_last and not (keep_every and step_of(path) % keep_every == 0):
            gone.append(path)
            continue
        wrong = verify_checkpoint(path)
        if wrong:
            damaged[str(path)] = wrong
        else:
            kept.append(path)
    if not kept:
        told = "\n".join(message for wrong in damaged.values() for message in wrong)
        raise DataError(f"{told}\n{folder}: no checkpoint is whole; nothing was deleted")
    gone.reverse()
    in_use = () if dry_run else tuple(path for path in gone if not retire(path, disk=disk or LocalDisk()))
    return Pruning(
        kept=tuple(reversed(kept)),
        gone=tuple(path for path in gone if path not in in_use),
        damaged=damaged,
        in_use=in_use,
    )


def retire(path: Path, *, disk: Disk) -> bool:
    """Deletes a checkpoint, unless somebody reads it (lease.py); whether it did. A crash in the middle leaves garbage,
    not half a checkpoint."""
    trash = path.with_name(path.name + PARTIAL)
    with retiring(path) as free:
        if not free:
            return False
        disk.rename(path, trash)
    # Durable before anything inside goes: a power cut must not bring the name back without the files.
    disk.sync_folder(path.parent)
    point(f"checkpoint.retired:{path.name}")
    disk.remove(trash)
    return True


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removesuffix(REPLACED).rpartition("-")[2])
