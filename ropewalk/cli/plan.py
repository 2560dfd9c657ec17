"""`ropewalk plan`"""

from __future__ import annotations

from typing import Any

from ropewalk import flow
from ropewalk.base.progress import amount

from .console import emit, table
from .options import Json, Overrides, RecipeFile, verb

app = verb()


@app.command()
def plan(recipe: RecipeFile, overrides: Overrides = None, json: Json = False) -> None:
    """Example: ropewalk plan recipes/books.toml model.layers=8

    Forecasts parameters, memory, tokens and FLOPs of a recipe on this machine. Needs neither torch nor prepared data.
    """
    planned = flow.plan(recipe, overrides or ())
    emit(planned, as_json=json, text=plan_text(planned))


def plan_text(planned: dict[str, Any]) -> str:
    """The plan in a few lines."""
    layout, memory, derived = planned["plan"], planned["memory"], planned["derived"]
    rows = [
        ("machine", planned["machine"]),
        ("device", f"{layout['device']}, {layout['precision']}"),
        ("parameters", amount(derived["parameters"])),
        ("step", f"{layout['batch_rows']} rows in microbatches of {layout['microbatch_rows']}"),
        ("memory", " + ".join(f"{name} {amount(value, 'B')}" for name, value in memory.items())),
        ("tokens", f"{amount(derived['tokens'])} in {planned['steps']} steps"),
        (
            "FLOPs",
            f"{amount(derived['flops'])} ({amount(derived['flops_per_token'])} a token, full attention)",
        ),
    ]
    return table(rows)
