"""`ropewalk checkpoint list | show | verify`"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ropewalk.base.errors import DataError
from ropewalk.base.progress import amount
from ropewalk.checkpoint.format import FILE as MANIFEST
from ropewalk.checkpoint.format import (
    list_checkpoints,
    read_checkpoint_manifest,
    resolve_checkpoint,
    verify_checkpoint,
)

from .console import emit, table
from .options import Json, RunFolder, verb

app = verb(
    help="""Example: ropewalk checkpoint verify runs/quickstart

    Looks at checkpoints without loading them."""
)

Place = Annotated[Path, typer.Argument(help="A checkpoint, or a run directory for its newest.", show_default=False)]


@app.command(name="list")
def list_command(run: RunFolder, json: Json = False) -> None:
    """Example: ropewalk checkpoint list runs/quickstart

    Lists the checkpoints of a run, oldest first.
    """
    found = list_checkpoints(run / "checkpoints") or [resolve_checkpoint(run)]
    manifests = [(path, read_checkpoint_manifest(path)) for path in found if (path / MANIFEST).exists()]
    rows: list[dict[str, Any]] = [
        {
            "path": str(path),
            "step": manifest.step,
            "tokens": manifest.tokens,
            "bytes": manifest.bytes,
        }
        for path, manifest in manifests
    ]
    text = table(
        [
            (str(path), f"step {manifest.step}, {amount(manifest.tokens, 'tokens')}, {amount(row['bytes'], 'B')}")
            for (path, manifest), row in zip(manifests, rows, strict=True)
        ]
    )
    emit(rows, as_json=json, text=text)


@app.command()
def show(checkpoint: Place, json: Json = False) -> None:
    """Example: ropewalk checkpoint show runs/quickstart

    Prints what a checkpoint holds: step, model, files, tensors.
    """
    path = resolve_checkpoint(checkpoint)
    manifest = read_checkpoint_manifest(path)
    rows = [("path", str(path)), ("step", str(manifest.step)), ("tokens", amount(manifest.tokens))]
    rows += [(key, str(value)) for key, value in manifest.spec.items()]
    rows += [
        (name, f"{amount(entry.bytes, 'B')}, {len(manifest.places(name))} tensors, {len(entry.chunks)} chunks")
        for name, entry in manifest.files.items()
    ]
    emit({"path": str(path), **dataclasses.asdict(manifest)}, as_json=json, text=table(rows))


@app.command()
def verify(checkpoint: Place, json: Json = False) -> None:
    """Example: ropewalk checkpoint verify runs/quickstart

    Reads every byte of a checkpoint (of all checkpoints, for a run directory) and says what is damaged. Exit status
    2 when something is.
    """
    paths = list_checkpoints(checkpoint / "checkpoints") or [resolve_checkpoint(checkpoint)]
    wrong = {str(path): verify_checkpoint(path) for path in paths}
    damaged = [message for messages in wrong.values() for message in messages]
    if damaged and not json:
        raise DataError("\n".join(damaged))
    emit(wrong, as_json=json, text="\n".join(f"{path}: whole" for path in wrong))
    if damaged:
        raise typer.Exit(2)
