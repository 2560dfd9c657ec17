"""`ropewalk model describe`"""

from __future__ import annotations

from math import prod

from ropewalk import flow
from ropewalk.base.progress import amount

from .console import emit, table
from .options import Json, Overrides, RecipeFile, verb

app = verb(
    help="""Example: ropewalk model describe recipes/books.toml

    Looks at a recipe's model without building it."""
)


@app.callback()
def _group() -> None:
    """Keeps `describe` a word of its own."""


@app.command()
def describe(recipe: RecipeFile, overrides: Overrides = None, json: Json = False) -> None:
    """Example: ropewalk model describe recipes/books.toml model.layers=8

    Prints every parameter with its shape and how it may be split, and the FLOPs of a token. Needs no torch.
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
