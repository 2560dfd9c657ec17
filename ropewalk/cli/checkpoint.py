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
Place = Annotated[Path, typer.Argument(help="A checkpoint, or a run directory for its newest.", show_default=False)]
Places = Annotated[Path, typer.Argument(help="A checkpoint, or a run directory for all of its.", show_default=False)]


@app.command(name="list")
def list_command(run: RunFolder, json: Json = False) -> None:
    """List the checkpoints of a run, oldest first.

    Example: ropewalk checkpoint list runs/quickstart

    Reads only their manifests. Exit status 2 when one is damaged.
    """
    found = list_checkpoints(run / "checkpoints") or [resolve_checkpoint(run)]
    rows = [_row(path) for path in found]
    emit(rows, as_json=json, text=table([(row["path"], _told(row)) for row in rows]))
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
        (name, f"{amount(entry.bytes, 'B')}, {len(manifest.places(name))} tensors, {len(entry.chunks)} chunks")
        for name, entry in manifest.files.items()
    ]
    emit({"path": str(path), **dataclasses.asdict(manifest)}, as_json=json, text=table(rows))


@app.command()
def verify(checkpoint: Places, json: Json = False) -> None:
    """Verify every byte of a checkpoint, or of all of a run.

    Example: ropewalk checkpoint verify runs/quickstart

    Also checks that weights and tokenizer match the model, and names what is damaged. Exit status 2 when something
    is.
    """
    paths = list_checkpoints(checkpoint / "checkpoints") or [resolve_checkpoint(checkpoint)]
    wrong = {}
    for listed in paths:
        with leased(listed) as path:
            messages = verify_model(path)
        # A run that is training may have deleted it since it was listed.
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
        int, typer.Option("--ranks", min=1, max=MOST_RANKS, help="How many ranks to write for.", show_default=False)
    ],
    mesh: Annotated[
        str,
        typer.Option(
            "--mesh",
            help="How dimensions are split, e.g. 2x4: the first in 2, the second in 4. Default: only the first.",
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Rewrite a checkpoint as another number of ranks would write it.

    Example: ropewalk checkpoint reshard runs/quickstart resharded --ranks 8 --mesh 2x4

    Copies a few megabytes at a time, then reads the result back and compares. Training does not need this: any
    number of ranks reads any checkpoint.
    """
    made = flow.reshard_checkpoint(checkpoint, folder, ranks=ranks, mesh=mesh)
    text = f"{made['checkpoint']}: step {made['step']} in {made['files']} files, {amount(made['bytes'], 'B')}, compared"
    emit(made, as_json=json, text=text)


@app.command()
def export(
    checkpoint: Place,
    folder: Target,
    layout: Annotated[
        Literal["auto", "llama", "gpt2"], typer.Option("--layout", help="`auto` takes the one that fits.")
    ] = "auto",
    json: Json = False,
) -> None:
    """Export a checkpoint as a Hugging Face directory.

    Example: ropewalk checkpoint export runs/quickstart quickstart-hf

    The same as `ropewalk model export`.
    """
    made = flow.export_model(checkpoint, folder, layout=layout)
    emit(made, as_json=json, text=f"{made['folder']}: step {made['step']}, {made['layout']} layout")


@app.command()
def prune(
    run: RunFolder,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="Newest checkpoints to keep.")] = 2,
    keep_every: Annotated[
        int, typer.Option("--keep-every", min=0, help="Also keep those of steps that it divides; 0: none.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go and delete nothing.")] = False,
    json: Json = False,
) -> None:
    """Delete old checkpoints.

    Example: ropewalk checkpoint prune runs/quickstart --keep-last 1

    Verifies the checkpoints to keep first: a damaged one does not count, and nothing is deleted when none is whole.
    """
    if not (run / "checkpoints").is_dir():
        raise UserError(f"{run}: no checkpoints here; name a run directory that has been trained")
    done = flow.prune_checkpoints(run, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    word = "would go" if dry_run else "deleted"
    rows = [(path, "whole, stays") for path in done["kept"]]
    rows += [(path, "damaged, stays; does not count") for path in done["damaged"]]
    rows += [(path, "is being read, stays for now") for path in done["in_use"]]
    emit(done, as_json=json, text=table(sorted(rows + [(path, word) for path in done["gone"]])))


def _row(path: Path) -> dict[str, Any]:
    """What a checkpoint's manifest tells; `damaged` says why it tells nothing."""
    try:
        manifest = read_checkpoint_manifest(path)
    except DataError as error:
        told = {"step": step_of(path.resolve()), "tokens": None, "bytes": None}
        return {"path": str(path), **told, "damaged": str(error)}
    told = {"step": manifest.step, "tokens": manifest.tokens, "bytes": manifest.bytes}
    return {"path": str(path), **told, "damaged": None}


def _told(row: dict[str, Any]) -> str:
    if row["damaged"]:
        return f"step {row['step']}, damaged"
    return f"step {row['step']}, {amount(row['tokens'], 'tokens')}, {amount(row['bytes'], 'B')}"


def _end_if(damaged: dict[Path, list[str]]) -> None:
    """Ends with status 2 when something is damaged, and says what it is and what to do."""
    for path, messages in damaged.items():
        typer.echo("\n".join([*messages, f"{path}: {damage_advice(path, damaged=damaged)}"]), err=True)
    if damaged:
        raise typer.Exit(2)
