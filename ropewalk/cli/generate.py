"""`ropewalk generate`"""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ropewalk import flow
from ropewalk.base.errors import UserError
from ropewalk.config.ranks import ranks

from .options import MOST_TOKENS, Json, MinP, RepetitionPenalty, Stop, TopP, verb
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
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="A file of prompts, all completed at once: .txt with one per line, or .jsonl with `prompt` in each "
            "object.",
            show_default=False,
        ),
    ] = None,
    template: Annotated[
        Literal["auto", "chatml", "plain"],
        typer.Option("--template", help="How --chat is written; `auto`: as in the model's own data."),
    ] = "auto",
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=MOST_TOKENS, help="Maximum tokens to add.")] = 120,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token.")] = 0.7,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw from the k most likely tokens; 0: all.")] = 50,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same text.")] = 0,
    precision: Annotated[
        Literal["fp32", "bf16"],
        typer.Option("--precision", help="`bf16` is faster; in `fp32` every number of processes gives the same text."),
    ] = "fp32",
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

    Prints word by word, with a key-value cache. --chat answers a question. --prompts completes all prompts of a file
    together; with --json, it prints an object per line. Under torchrun, srun or
    mpirun, the processes they launched share the model.
    """
    if sum(map(bool, (prompt, chat, prompts))) > 1:
        raise UserError("--prompt continues a text, --prompts many, --chat answers a question; give one of them")
    settings: dict[str, Any] = {
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or (),
        "seed": seed,
        "precision": precision,
        "nproc": nproc,
    }
    if prompts:
        _complete(checkpoint, prompts, settings, json=json)
        return
    text = sys.stdin.read() if "-" in (prompt, chat) else prompt or chat
    if chat:
        pieces = flow.answer(checkpoint, question=text, template="" if template == "auto" else template, **settings)
    else:
        pieces = flow.generate(checkpoint, prompt=text, **settings)
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


def _complete(checkpoint: Path, file: Path, settings: dict[str, Any], *, json: bool) -> None:
    """Prints the completions of the prompts in `file`."""
    asked = read_prompts(file)
    texts = flow.complete(checkpoint, asked, **settings)
    if ranks().rank > 0:
        return
    for prompt, text in zip(asked, texts, strict=True):
        line = json_text.dumps({"prompt": prompt, "completion": text}, ensure_ascii=False)
        typer.echo(line if json else f"{prompt}{text}\n")


def read_prompts(file: Path) -> list[str]:
    """The prompts in a file; UserError names the line that has none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text; give it in that encoding") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if file.suffix == ".jsonl":
        prompts = [_prompt_in(line, where=f"{file}:{number}") for number, line in numbered]
    else:
        prompts = [line for _, line in numbered]
    if not prompts:
        raise UserError(f"{file} has no prompts; write one per line")
    return prompts


def _prompt_in(line: str, *, where: str) -> str:
    try:
        found = json_text.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: no JSON ({error})") from None
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str):
        raise UserError(f'{where}: no prompt; write an object such as {{"prompt": "The rope"}}')
    return prompt
