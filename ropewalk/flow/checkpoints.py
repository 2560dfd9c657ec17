"""Reshards and prunes checkpoints: `ropewalk checkpoint reshard | prune`."""

from __future__ import annotations

import math
from pathlib import Path

from ropewalk.base.errors import UserError
from ropewalk.base.files import locked
from ropewalk.checkpoint.format import read_checkpoint_manifest, resolve_checkpoint
from ropewalk.checkpoint.policy import retention as pruning
from ropewalk.checkpoint.policy.lease import leased
from ropewalk.checkpoint.read.model_check import advise_on_damage, check_weights

from .models import refuse_to_overwrite
from .plan_recipe import needs_torch
from .run_stages import Result


def reshard_checkpoint(checkpoint: Path, folder: Path, *, ranks: int, mesh: str = "") -> Result:
    """Rewrites a checkpoint, or the newest of a run, into `folder` as `ranks` ranks would write it; returns a summary.

    The mesh `2x4` splits the first dimension of every tensor in 2 and the second in 4; empty: the first among all
    ranks.
    """
    resolve_checkpoint(checkpoint)
    axes = _axes(mesh, ranks=ranks)
    refuse_to_overwrite(folder)
    module = needs_torch("ropewalk.checkpoint.read.reshard", "resharding a checkpoint")
    with leased(checkpoint) as path, advise_on_damage(path):
        check_weights(read_checkpoint_manifest(path), path)
        made: Path = module.reshard(path, folder, mesh=axes)
    manifest = read_checkpoint_manifest(made)
    return {
        "checkpoint": str(made),
        "from": str(path),
        "step": manifest.step,
        "mesh": list(axes),
        "files": len(manifest.files),
        "bytes": manifest.bytes,
    }


def prune_checkpoints(run: Path, *, keep_last: int, keep_every: int = 0, dry_run: bool = False) -> Result:
    """Deletes old checkpoints of a run that is not being trained, after verifying those it keeps."""
    with locked(run):
        done = pruning.prune(run / "checkpoints", keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    return {
        "kept": [str(path) for path in done.kept],
        "gone": [str(path) for path in done.gone],
        "damaged": done.damaged,
        "in_use": [str(path) for path in done.in_use],
        "dry_run": dry_run,
    }


def _axes(mesh: str, *, ranks: int) -> tuple[int, ...]:
    if not mesh:
        return (ranks,)
    axes = mesh.split("x")
    if not all(axis.isdecimal() and int(axis) > 0 for axis in axes):
        raise UserError(f"--mesh {mesh}: not a mesh; write it as 2x4")
    sides = tuple(map(int, axes))
    if math.prod(sides) != ranks:
        raise UserError(f"--mesh {mesh} has {math.prod(sides)} ranks, but --ranks is {ranks}; make them equal")
    return sides
