"""`ropewalk new`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow

from .options import Json, verb
from .progress_lines import emit

app = verb()


@app.command()
def new(
    recipe: Annotated[Path, typer.Argument(help="The TOML file to write.", show_default=False)],
    data: Annotated[list[str], typer.Argument(help="Your files, folders, globs or URLs.", show_default=False)],
    name: Annotated[str | None, typer.Option("--name", help="Name of the run. Default: the file's name.")] = None,
    hours: Annotated[
        float | None,
        typer.Option("--hours", help="Time for the run. Default: ten minutes.", show_default=False),
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Size the model for a GPU: this machine's, else an RTX 4090."),
    ] = False,
    start_from: Annotated[
        str,
        typer.Option(
            "--start-from",
            help="Fine-tune this model: a run, a checkpoint or a Hugging Face directory.",
            show_default=False,
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: Json = False,
) -> None:
    """Write a commented recipe for your own files.

    Example: ropewalk new books.toml my-books/

    Detects format, text key and how to cut large files into documents, and chooses a model and steps that this
    machine trains in about ten minutes. Reads text, Markdown, source code, JSON lines, Parquet, dialogues, HTML,
    LaTeX, PDF, EPUB and WARC, compressed or not; only samples are read. The recipe holds every setting with its
    meaning and default, and the reason of each choice. --start-from continues training an existing model and keeps
    its shape and tokenizer.
    """
    written = flow.new_recipe(recipe, data=data, name=name, force=force, hours=hours, gpu=gpu, start_from=start_from)
    lines = [*written.lines(), *(f"note: {note}" for note in written.notes)]
    lines += [f"wrote {written.path}; next: ropewalk recipe check {written.path}"]
    emit(written.tree(), as_json=json, text="\n".join(lines))
