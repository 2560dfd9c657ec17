"""`ropewalk generate`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow

from .console import emit
from .options import Json, verb

app = verb()


@app.command()
def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a run directory for its newest.", show_default=False)
    ],
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue; `-` reads standard input.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens to add.")] = 120,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw from the k likeliest tokens; 0 from all.")] = 50,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same text.")] = 0,
    json: Json = False,
) -> None:
    """Example: ropewalk generate runs/quickstart --prompt "def add(a, b):"

    Continues a text with a trained model, word by word, with a key-value cache.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    pieces = flow.generate(checkpoint, prompt=text, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    if json:
        emit({"prompt": text, "completion": "".join(pieces)}, as_json=True, text="")
        return
    first = next(pieces, "")  # before anything is printed: the checkpoint may be damaged
    typer.echo(text + first, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
