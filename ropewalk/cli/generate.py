"""`ropewalk generate`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ropewalk import flow
from ropewalk.base.errors import UserError
from ropewalk.config.ranks import ranks

from .options import MOST_TOKENS, Json, verb
from .progress_lines import emit

app = verb()


@app.command()
def generate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a run directory for its newest.", show_default=False)
    ],
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue; `-` reads standard input.")] = "",
    chat: Annotated[
        str, typer.Option("--chat", help="A question for a model trained on dialogues; `-` reads standard input.")
    ] = "",
    template: Annotated[
        Literal["auto", "chatml", "plain"],
        typer.Option("--template", help="How --chat is written; `auto`: as in the model's own data."),
    ] = "auto",
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=MOST_TOKENS, help="Maximum tokens to add.")] = 120,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token.")] = 0.7,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw from the k most likely tokens; 0: all.")] = 50,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same text.")] = 0,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            min=1,
            help="Processes of this machine that share a model too large for a single device, under the "
            "run's plan if that has as many ranks, otherwise ZeRO-3. Default: 1.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Generate text with a trained model.

    Example: ropewalk generate runs/quickstart --prompt "def add(a, b):"

    Prints word by word, with a key-value cache. --chat answers a question. Under torchrun, srun or mpirun, the
    processes they launched share the model.
    """
    if prompt and chat:
        raise UserError("--prompt continues a text, --chat answers a question; give one of them")
    text = sys.stdin.read() if "-" in (prompt, chat) else prompt or chat
    if chat:
        pieces = flow.answer(
            checkpoint,
            question=text,
            template="" if template == "auto" else template,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            nproc=nproc,
        )
    else:
        pieces = flow.generate(
            checkpoint, prompt=text, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, nproc=nproc
        )
    if json:
        emit({"prompt": text, "completion": "".join(pieces)}, as_json=True, text="")
        return
    if ranks().rank > 0:
        for _ in pieces:  # all ranks generate, rank 0 prints
            pass
        return
    first = next(pieces, "")  # before any output: the checkpoint may be damaged
    typer.echo(first if chat else text + first, nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
