"""`ropewalk bench train`"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from ropewalk import flow
from ropewalk.config.write import literal
from ropewalk.train.optim.table import OPTIMIZERS

from .breakdown import kind_lines, setting_lines, speed_lines
from .options import Json, verb
from .progress_lines import Console, emit

app = verb(
    help="""Benchmark training speed on this machine.

    Example: ropewalk bench train --size tiny --steps 3"""
)


def _optimizer(name: str) -> str:
    if name not in OPTIMIZERS:
        raise typer.BadParameter(f"no optimizer `{name}`; there are {', '.join(OPTIMIZERS)}")
    return name


@app.callback()
def _group() -> None:
    """Makes `bench` a group although it has a single command."""


@app.command()
def train(
    size: Annotated[
        list[str] | None,
        typer.Option("--size", help="124M, 350M, 1.3B, 7B or tiny; may be repeated.", show_default=False),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Sequences per step.", show_default=False)] = None,
    microbatch: Annotated[
        int | None, typer.Option("--microbatch", min=1, help="Sequences per microbatch.", show_default=False)
    ] = None,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="Tokens per sequence.", show_default=False)
    ] = None,
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "bf16-pure", "fp16", "fp8"],
        typer.Option("--precision", help="Numeric precision, as train.precision."),
    ] = "auto",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to time, after three warm-up steps.")] = 12,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile our model's blocks. Default: on a GPU.",
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="Optimizer, as train.optimizer.kind; a peer always uses AdamW.",
            parser=_optimizer,
            metavar="|".join(OPTIMIZERS),
        ),
    ] = "adamw",
    recompute: Annotated[
        Literal["none", "attention", "full"] | None,
        typer.Option(
            "--recompute",
            help="As parallel.recompute. Default: full for 7B, otherwise none.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Device; `auto` uses a GPU if there is one.")
    ] = "auto",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer", help="Also benchmark this library on the same shapes: transformers.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Benchmark training of well-known model sizes.

    Example: ropewalk bench train --size tiny --steps 3

    Trains each model on random tokens and prints tokens/s, both MFUs, memory, and the time per class of operations
    with its distance from this device's measured limits. Without --size: 124M on a GPU, tiny on a CPU.
    """
    found = flow.bench_train(
        size or (),
        batch_size=batch,
        microbatch_size=microbatch,
        sequence_length=length,
        precision=precision,
        device=device,
        steps=steps,
        compile=compile,
        optimizer=optimizer,
        recompute=recompute,
        peers=peer or (),
        progress=Console(),
    )
    emit(found, as_json=json, text="\n\n".join(_text(each) for each in found["sizes"]))


def _text(found: dict[str, Any]) -> str:
    model = ", ".join(f"{key} = {literal(value)}" for key, value in found["model"].items())
    return "\n".join(
        [
            *setting_lines(found, name=found["size"]),
            f"model = {{ {model} }}",
            "",
            *speed_lines(found["contenders"], peak_flops=found["peak_flops"], peak_from=found["peak_from"]),
            "",
            *kind_lines(found["contenders"]),
        ]
    )
