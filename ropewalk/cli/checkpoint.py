"""`ropewalk checkpoint list | show | verify | reshard | export | prune`"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ropewalk import flow
from ropewalk.base.errors import DataError, UserError
from ropewalk.base.progress import amount
from ropewalk.checkpoint.format import (
    list_checkpoints,
    read_checkpoint_manifest,
    resolve_checkpoint,
    step_of,
)
from ropewalk.checkpoint.policy.lease import leased
from ropewalk.checkpoint.read.model_check import advise_on_damage, damage_advice, verify_model

from .options import MOST_RANKS, Json, RunFolder, verb
from .progress_lines import emit, table

app = verb(
    help="""Inspect, verify, reshard, export and prune checkpoints.

    Example: ropewalk checkpoint verify runs/quickstart"""
)

Target = Annotated[Path, typer.Argument(help="Folder to write; must not exist.", show_default=False)]
Place = Annotated[
    Path, typer.Argument(help="A checkpoint, or a run directory: its newest checkpoint.", show_default=False)
]
Places = Annotated[
    Path, typer.Argument(help="A checkpoint, or a run directory: all its checkpoints.", show_default=False)
]


@app.command(name="list")
def list_command(run: RunFolder, json: Json = False) -> None:
    """List the checkpoints of a run, oldest first.

    Example: ropewalk checkpoint list runs/quickstart

    Reads only the manifests. Exit status 2 if a manifest is damaged.
    """
    newest = resolve_checkpoint(run)
    found = list_checkpoints(run / "checkpoints") or [newest]
    rows = [_row(path) for path in found]
    emit(rows, as_json=json, text=table([(row["path"], _summary(row)) for row in rows]))
    _end_if({path: [row["damaged"]] for path, row in zip(found, rows, strict=True) if row["damaged"]})


@app.command()
def show(checkpoint: Place, json: Json = False) -> None:
    """Show what a checkpoint holds: step, model, files, tensors.

    Example: ropewalk checkpoint show runs/quickstart
    """
    path = resolve_checkpoint(checkpoint)
    with advise_on_damage(path):
        manifest = read_checkpoint_manifest(path)
    rows = [("path", str(path)), ("step", str(manifest.step)), ("tokens", amount(manifest.tokens))]
    rows += [(key, str(value)) for key, value in manifest.spec.items()]
    rows += [
        (name, f"{amount(entry.bytes, 'B')}, {len(manifest.byte_ranges(name))} tensors, {len(entry.chunks)} chunks")
        for name, entry in manifest.files.items()
    ]
    emit({"path": str(path), **dataclasses.asdict(manifest)}, as_json=json, text=table(rows))


@app.command()
def verify(checkpoint: Places, json: Json = False) -> None:
    """Verify every byte of one or all checkpoints.

    Example: ropewalk checkpoint verify runs/quickstart

    Also checks that weights and tokenizer match the model, and reports what is damaged. Exit status 2 if anything is
    damaged.
    """
    newest = resolve_checkpoint(checkpoint)
    paths = list_checkpoints(checkpoint / "checkpoints") or [newest]
    wrong = {}
    for listed in paths:
        with leased(listed) as path:
            messages = verify_model(path)
        # A running training may have deleted it since.
        if path.exists():
            wrong[path] = messages
    text = "\n".join(f"{path}: {'damaged' if messages else 'whole'}" for path, messages in wrong.items())
    emit({str(path): messages for path, messages in wrong.items()}, as_json=json, text=text)
    _end_if({path: messages for path, messages in wrong.items() if messages})


@app.command()
def reshard(
    checkpoint: Place,
    folder: Target,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, max=MOST_RANKS, help="Number of ranks to write for.", show_default=False)
    ],
    mesh: Annotated[
        str,
        typer.Option(
            "--mesh",
            help="Split of dimensions, e.g. 2x4: the first in 2, the second in 4. Default: only the first.",
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Rewrite a checkpoint as another number of ranks would write it.

    Example: ropewalk checkpoint reshard runs/quickstart resharded --ranks 8 --mesh 2x4

    Copies a few megabytes at a time, then reads the result back and compares it. Training does not need this: any
    number of ranks can load any checkpoint.
    """
    made = flow.reshard_checkpoint(checkpoint, folder, ranks=ranks, mesh=mesh)
    text = f"{made['checkpoint']}: step {made['step']} in {made['files']} files, {amount(made['bytes'], 'B')}, compared"
    emit(made, as_json=json, text=text)


@app.command()
def export(
    checkpoint: Place,
    folder: Target,
    layout: Annotated[
        Literal["auto", "llama", "gpt2"], typer.Option("--layout", help="`auto` selects the layout that fits.")
    ] = "auto",
    json: Json = False,
) -> None:
    """Export a checkpoint as a Hugging Face directory.

    Example: ropewalk checkpoint export runs/quickstart quickstart-hf

    Same as `ropewalk model export`.
    """
    made = flow.export_model(checkpoint, folder, layout=layout)
    emit(made, as_json=json, text=f"{made['folder']}: step {made['step']}, {made['layout']} layout")


@app.command()
def prune(
    run: RunFolder,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="Newest checkpoints to keep.")] = 2,
    keep_every: Annotated[
        int,
        typer.Option("--keep-every", min=0, help="Also keep checkpoints of steps divisible by this number; 0: none."),
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")] = False,
    json: Json = False,
) -> None:
    """Delete old checkpoints.

    Example: ropewalk checkpoint prune runs/quickstart --keep-last 1

    Verifies the checkpoints to keep first: a damaged one does not count, and nothing is deleted if none is whole.
    """
    if not (run / "checkpoints").is_dir():
        raise UserError(f"{run}: no checkpoints here; name a run directory that has been trained")
    done = flow.prune_checkpoints(run, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    word = "would be deleted" if dry_run else "deleted"
    rows = [(path, "whole, kept") for path in done["kept"]]
    rows += [(path, "damaged, kept; does not count") for path in done["damaged"]]
    rows += [(path, "being read, kept for now") for path in done["in_use"]]
    emit(done, as_json=json, text=table(sorted(rows + [(path, word) for path in done["gone"]])))


def _row(path: Path) -> dict[str, Any]:
    """Summary of the manifest of a checkpoint; `damaged` has the error of an unreadable one."""
    try:
        manifest = read_checkpoint_manifest(path)
    except DataError as error:
        step = step_of(path.resolve())
        return {"path": str(path), "step": step, "tokens": None, "bytes": None, "damaged": str(error)}
    figures = {"step": manifest.step, "tokens": manifest.tokens, "bytes": manifest.bytes}
    return {"path": str(path), **figures, "damaged": None}


def _summary(row: dict[str, Any]) -> str:
    if row["damaged"]:
        return f"step {row['step']}, damaged"
    return f"step {row['step']}, {amount(row['tokens'], 'tokens')}, {amount(row['bytes'], 'B')}"


def _end_if(damaged: dict[Path, list[str]]) -> None:
    """Exits with status 2 if anything is damaged, with messages and advice."""
    for path, messages in damaged.items():
        typer.echo("\n".join([*messages, f"{path}: {damage_advice(path, damaged=damaged)}"]), err=True)
    if damaged:
        raise typer.Exit(2)
