"""`ropewalk chat`"""

from __future__ import annotations

import contextlib
import json as json_text
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ropewalk import flow
from ropewalk.base.errors import UserError
from ropewalk.base.progress import counted

from .options import MOST_TOKENS, Json, MinP, RepetitionPenalty, Stop, TopP, verb

if TYPE_CHECKING:
    from ropewalk.evaluate.conversation import Conversation

app = verb()

PROMPT = "you> "
COMMANDS = {
    "/reset": "forgets the conversation, but for the system text",
    "/exit": "ends it, as Ctrl-D does; Ctrl-C stops an answer",
    "/help": "lists these commands; a turn that begins with / is written with two of them",
}
CONTROLS = {code: "\ufffd" for code in (*range(9), *range(11, 32), *range(127, 160))}
"""Control characters that must not reach a terminal: all but tab and new line."""


@app.command()
def chat(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a run directory for its newest.", show_default=False)
    ],
    system: Annotated[str, typer.Option("--system", help="System text: stays before the first turn.")] = "",
    template: Annotated[
        Literal["auto", "chatml", "plain"],
        typer.Option("--template", help="How turns are written; `auto`: as in the model's own data, else plain."),
    ] = "auto",
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=MOST_TOKENS, help="Maximum tokens per answer.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token.")] = 0.7,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw from the k most likely tokens; 0: all.")] = 50,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed and questions give the same answers.")] = 0,
    json: Json = False,
) -> None:
    """Chat with a trained model in the terminal.

    Example: ropewalk chat runs/quickstart

    Write a turn; the model answers word by word and remembers the conversation as far as its context reaches.
    /reset clears it, /exit ends. From a pipe, every line is a turn; with --json, every answer is an object.
    """
    conversation = flow.chat(
        checkpoint,
        system=system,
        template="" if template == "auto" else template,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop or (),
        seed=seed,
    )
    by_hand = sys.stdin.isatty()
    if template == "auto" and not conversation.own_template:
        _say(f"this model was trained without dialogues: turns are written by the template `{conversation.template}`")
    if by_hand:
        _say("/reset forgets, /exit or Ctrl-D ends, Ctrl-C stops an answer")
    try:
        _talk(conversation, by_hand=by_hand, json=json)
    except KeyboardInterrupt:
        if not by_hand:
            raise
        typer.echo()


def _talk(conversation: Conversation, *, by_hand: bool, json: bool) -> None:
    for question in _questions(by_hand):
        if question.startswith("/") and not question.startswith("//"):
            if question == "/exit":
                return
            _command(conversation, question)
            continue
        try:
            pieces = conversation.answer(question.removeprefix("/"))
        except UserError as error:
            if not by_hand:
                raise
            _say(str(error))
            continue
        if conversation.dropped and not json:
            _say(
                f"the oldest {counted(conversation.dropped, 'turn')} went: the model sees {conversation.context} tokens"
            )
        if json:
            answer = "".join(pieces)
            told = {
                "turn": conversation.answers,
                "prompt": conversation.turns[-2].content,
                "answer": answer,
                "tokens": conversation.drawn,
                "ended": conversation.ended,
                "dropped_turns": conversation.dropped,
            }
            typer.echo(json_text.dumps(told, ensure_ascii=False))
        else:
            _show(pieces, by_hand=by_hand)


def _show(pieces: Generator[str, None, None], *, by_hand: bool) -> None:
    """Prints an answer as it is generated; at a terminal Ctrl-C ends it and keeps what was printed."""
    terminal = sys.stdout.isatty()
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                typer.echo(piece.translate(CONTROLS) if terminal else piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        if not by_hand:
            raise
    typer.echo()
    sys.stdout.flush()


def _questions(by_hand: bool) -> Iterator[str]:
    """The non-blank lines of standard input, with a prompt and a history at a terminal."""
    from ropewalk.flow.generation import checked_text  # not for --help

    if by_hand:
        import readline  # noqa: F401 - input() then edits lines and knows the last ones
    while True:
        try:
            line = input(PROMPT) if by_hand else sys.stdin.readline()
        except EOFError:
            typer.echo()
            return
        except UnicodeDecodeError:
            raise UserError("standard input is not UTF-8 text; give it in that encoding") from None
        if not line and not by_hand:
            return
        if line.strip():
            yield checked_text(line.strip())


def _command(conversation: Conversation, word: str) -> None:
    if word == "/reset":
        conversation.reset()
        _say("forgotten")
        return
    if word != "/help":
        _say(f"there is no command {word.split()[0]}")
    for command, does in COMMANDS.items():
        _say(f"{command:<8} {does}")


def _say(text: str) -> None:
    """A line of ours, on stderr."""
    typer.echo(text, err=True)
