"""`ropewalk model describe | export | import | grow`"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated, Literal

import typer

from ropewalk import flow
from ropewalk.base.progress import amount

from .options import Json, Overrides, RecipeOrRun, verb
from .progress_lines import emit, table

app = verb(
    help="""Describe a recipe's model; export, import or grow a trained one.

    Example: ropewalk model describe recipes/books.toml"""
)

Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, or a run directory for its newest.", show_default=False)
]
Target = Annotated[Path, typer.Argument(help="Folder for the new checkpoint; must not exist.", show_default=False)]


@app.command()
def describe(recipe: RecipeOrRun, overrides: Overrides = None, json: Json = False) -> None:
    """List the parameters of a recipe's model with shapes, splits and FLOPs.

    Example: ropewalk model describe recipes/books.toml model.layers=8

    Needs no torch.
    """
    model = flow.describe(recipe, overrides or ())
    rows = [
        (name, f"{' x '.join(map(str, shape)):<14} {amount(prod(shape)):>8}  {model['splits'][name]}")
        for name, shape in model["shapes"].items()
    ]
    full, causal = amount(model["flops_per_token"]), amount(model["flops_per_token_causal"])
    rows += [
        ("parameters", f"{model['parameters']:,}"),
        ("FLOPs a token", f"{full} full attention, {causal} causal"),
    ]
    emit(model, as_json=json, text=table(rows))


@app.command()
def export(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(help="Directory to write; must not exist.", show_default=False)],
    layout: Annotated[
        Literal["auto", "llama", "gpt2"], typer.Option("--layout", help="`auto` takes the one that fits.")
    ] = "auto",
    json: Json = False,
) -> None:
    """Export a checkpoint as a Hugging Face directory.

    Example: ropewalk model export runs/quickstart quickstart-hf

    Writes config, safetensors and tokenizer; the exported model gives the same logits. LoRA adapters are merged
    into the weights.
    """
    made = flow.export_model(checkpoint, folder, layout=layout)
    text = f"{made['folder']}: {amount(made['parameters'])} parameters of step {made['step']}, {made['layout']} layout"
    emit(made, as_json=json, text=text)


@app.command(name="import")
def import_command(
    folder: Annotated[Path, typer.Argument(help="A local Hugging Face directory.", show_default=False)],
    to: Target,
    dtype: Annotated[
        Literal["keep", "float32"], typer.Option("--dtype", help="`float32` widens half-precision weights.")
    ] = "keep",
    json: Json = False,
) -> None:
    """Import a local Hugging Face directory (Llama or GPT-2) as a checkpoint.

    Example: ropewalk model import my-llama imported

    `ropewalk generate` reads the result. Nothing is downloaded.
    """
    made = flow.import_model(folder, to, dtype=dtype)
    what = f"{amount(made['parameters'])} parameters, {made['dtype']}, {made['layout']} layout"
    emit(made, as_json=json, text=f"{made['checkpoint']}: {what}, end of text {made['end_of_text']}")


@app.command()
def grow(
    checkpoint: Checkpoint,
    to: Target,
    sizes: Annotated[
        list[str], typer.Argument(help="New sizes, such as model.layers=8; also width, heads, kv_heads, mlp_width.")
    ],
    new_blocks: Annotated[
        Literal["identity", "stack"],
        typer.Option("--new-blocks", help="New blocks start as identities, or as copies (Gong et al. 2019)."),
    ] = "identity",
    noise: Annotated[
        float,
        typer.Option(
            "--noise",
            min=0.0,
            help="Noise added to copied weights, relative to their size; breaks the symmetry of copies.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the noise.")] = 0,
    json: Json = False,
) -> None:
    """Initialize a larger model from a smaller trained one.

    Example: ropewalk model grow runs/quickstart grown model.layers=8

    Adds blocks, widens features (Net2Net) or the feed-forward part, and reports whether the larger model computes
    the same function.
    """
    made = flow.grow_model(checkpoint, to, sizes, new_blocks=new_blocks, noise=noise, seed=seed)
    grown = [(name, f"{before} -> {after}") for name, (before, after) in made["sizes"].items() if before != after]
    rows = [
        ("checkpoint", made["checkpoint"]),
        ("parameters", f"{amount(made['parameters_before'])} -> {amount(made['parameters'])}"),
        *grown,
        ("function", "preserved: the same logits as before" if made["preserving"] else "changed: train it further"),
    ]
    emit(made, as_json=json, text=table(rows))
