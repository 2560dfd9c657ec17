"""Deletes old checkpoints: after each save (`retain`), or on demand (`prune`). No torch.

Before a checkpoint is deleted, `keep_verified` of the remaining ones must have been read back and verified in full: a
disk that damages data costs the newest checkpoints, but never the last good one.
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
    """Verifies checkpoints, each one once."""

    def __init__(self, *, report: Callable[[str], None] = lambda _: None) -> None:
        """`report` receives the damage that is found."""
        self._report = report
        self._known: dict[Path, tuple[str, bool]] = {}

    def holds(self, path: Path) -> bool:
        """Whether the checkpoint at `path` is whole, from the first verification."""
        # A step that is saved again has a different manifest, unless it is bit-identical.
        try:
            manifest = checksum(read_inside(path / FILE, most_bytes=MANIFEST_BYTES))
        except (FileNotFoundError, Refused):
            manifest = ""
        known, whole = self._known.get(path, ("", False))
        if known != manifest or not manifest:
            wrong = verify_checkpoint(path)
            for message in wrong:
                self._report(message)
            whole = not wrong
            self._known[path] = manifest, whole
        return whole

    def forget(self, path: Path) -> None:
        """Forgets a deleted checkpoint."""
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
    """Deletes old checkpoints and leftovers of crashes; returns the deleted checkpoints.

    Keeps the newest `keep_last`, those of steps that `keep_every` divides, those `in_use`, and the newest
    `keep_verified` that are whole. `is_left` distinguishes leftovers from folders that another rank is writing.
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
    # Checkpoints that are being read are deleted after a later save.
    gone = [path for path in doomed if retire(path, disk=disk)]
    for path in gone:
        verified.forget(path)
    return gone


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneResult:
    """The result of `prune`."""

    kept: tuple[Path, ...]
    """Verified and whole."""
    gone: tuple[Path, ...]
    damaged: dict[str, list[str]]
    """The damage of those that are kept for inspection although they are not whole."""
    in_use: tuple[Path, ...] = ()
    """Not deleted, because another process reads them."""


def prune(
    folder: Path, *, keep_last: int, keep_every: int = 0, dry_run: bool = False, disk: Disk | None = None
) -> PruneResult:
    """Deletes all checkpoints in `folder` except the newest `keep_last` and those of steps that `keep_every` divides.

    A damaged checkpoint does not count: the next older whole one is kept instead. If none is whole, nothing is deleted.
    Reads every byte of the checkpoints that are kept, also with `dry_run`.
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
        lines = "\n".join(message for wrong in damaged.values() for message in wrong)
        raise DataError(f"{lines}\n{folder}: no checkpoint is whole; nothing was deleted")
    gone.reverse()
    in_use = () if dry_run else tuple(path for path in gone if not retire(path, disk=disk or LocalDisk()))
    return PruneResult(
        kept=tuple(reversed(kept)),
        gone=tuple(path for path in gone if path not in in_use),
        damaged=damaged,
        in_use=in_use,
    )


def retire(path: Path, *, disk: Disk) -> bool:
    """Deletes a checkpoint unless it is being read (lease.py); returns whether it did. A crash leaves only files that
    the
    next save removes."""
    trash = path.with_name(path.name + PARTIAL)
    with retiring(path) as free:
        if not free:
            return False
        disk.rename(path, trash)
    # The rename must be durable first: a power failure must not restore the name without its files.
    disk.sync_folder(path.parent)
    point(f"checkpoint.retired:{path.name}")
    disk.remove(trash)
    return True


def _newest_whole(listed: list[Path], count: int, verified: VerifiedCheckpoints) -> set[Path]:
    """The newest `count` whole checkpoints, or all; verifies no more than needed."""
    found: set[Path] = set()
    for path in reversed(listed):
        if len(found) >= count:
            break
        if verified.holds(path):
            found.add(path)
    return found
