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
    """The plan in a few lines, with a heading for each phase where there are several."""
    several = len(planned["phases"]) > 1
    rows = [("machine", planned["machine"])]
    for number, phase in enumerate(planned["phases"], 1):
        rows += [("", ""), (f"phase {number}", "")] if several else []
        rows += _phase_rows(phase)
    if several:
        totals = planned["derived"]
        rows += [("", ""), ("all phases", f"{amount(totals['tokens'])} tokens in {totals['steps']} steps, ")]
        rows += [("", f"{amount(totals['flops'])} FLOPs")]
    return table(rows)


def _phase_rows(phase: dict[str, Any]) -> list[tuple[str, str]]:
    layout, memory, derived = phase["plan"], phase["memory"], phase["derived"]
    return [
        ("device", f"{layout['device']}, {layout['precision']}"),
        ("parameters", amount(derived["parameters"])),
        ("step", f"{layout['batch_rows']} rows in microbatches of {layout['microbatch_rows']}"),
        ("memory", " + ".join(f"{name} {amount(value, 'B')}" for name, value in memory.items())),
        ("tokens", f"{amount(phase['tokens'])} in {phase['steps']} steps"),
        (
            "FLOPs",
            f"{amount(derived['flops'])} ({amount(derived['flops_per_token'])} a token, full attention)",
        ),
    ]
