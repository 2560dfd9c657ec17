"""Which checkpoints go by themselves after a new one is published. No torch.

A rule says which ones stay. Before any other one goes, `keep_verified` of those that stay must have been read back,
every byte, and found whole: a disk that damages what it is given costs the newest checkpoints, never the last good one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.errors import DataError
from ropewalk.base.files import PARTIAL, point
from ropewalk.base.untrusted import Refused, read_inside

from ..disk import Disk, LocalDisk
from ..format import FILE, REPLACED, checksum, list_checkpoints, step_of, verify_checkpoint
from ..validate import MANIFEST_BYTES
from .lease import retiring


class VerifiedCheckpoints:
    """The checkpoints that were read and found whole; each is read once."""

    def __init__(self, *, tell: Callable[[str], None] = lambda _: None) -> None:
        """`tell` hears what is wrong with those that are not."""
        self._tell = tell
        self._known: dict[Path, tuple[str, bool]] = {}

    def holds(self, path: Path) -> bool:
        """Whether the checkpoint at `path` was found whole, now or before."""
        # A step that is saved again has another manifest, by its parent or its hashes, or is the same to the bit.
        try:
            manifest = checksum(read_inside(path / FILE, most_bytes=MANIFEST_BYTES))
        except (FileNotFoundError, Refused):
            manifest = ""
        known, whole = self._known.get(path, ("", False))
        if known != manifest or not manifest:
            wrong = verify_checkpoint(path)
            for message in wrong:
                self._tell(message)
            whole = not wrong
            self._known[path] = manifest, whole
        return whole

    def forget(self, path: Path) -> None:
        """It is gone."""
        self._known.pop(path, None)


def retain(
    folder: Path,
    *,
    keep_last: int,
    keep_every: int = 0,
    keep_verified: int = 1,
    in_use: Collection[Path] = (),
    is_left: Callable[[Path], bool] = lambda _: True,
    verified: VerifiedCheckpoints | None = None,
    disk: Disk | None = None,
) -> list[Path]:
    """Deletes all but the newest `keep_last` checkpoints, those of steps that `keep_every` divides and those `in_use`,
    and what was left half written; returns the checkpoints that went.

    The newest `keep_verified` whole ones stay in any case. `is_left` tells half-written folders that a crash left from
    those that another rank is writing.
    """
    disk, verified = disk or LocalDisk(), verified or VerifiedCheckpoints()
    listed = list_checkpoints(folder)
    for leftover in (*folder.glob(f"*{PARTIAL}"), *folder.glob(f"*{REPLACED}")):
        if leftover not in listed and is_left(leftover):
            disk.remove(leftover)
    stay = {path for path in listed if path in in_use or (keep_every and step_of(path) % keep_every == 0)}
    doomed = [path for path in listed[:-keep_last] if path not in stay]
    if doomed:
        whole = _newest_whole(listed, keep_verified, verified)
        doomed = [path for path in doomed if path not in whole]
    # What somebody reads goes with a later save.
    gone = [path for path in doomed if retire(path, disk=disk)]
    for path in gone:
        verified.forget(path)
    return gone


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneResult:
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
) -> PruneResult:
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
    return PruneResult(
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


def _newest_whole(listed: list[Path], count: int, verified: VerifiedCheckpoints) -> set[Path]:
    """The newest `count` checkpoints that are whole, or as many as there are; reads no more than it must."""
    found: set[Path] = set()
    for path in reversed(listed):
        if len(found) >= count:
            break
        if verified.holds(path):
            found.add(path)
    return found
