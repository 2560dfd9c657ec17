"""`ropewalk plan`, `ropewalk plan draw`"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from ropewalk import flow
from ropewalk.base.progress import amount, counted, span
from ropewalk.plan.schedules import PIPELINE_SCHEDULES

from .options import Json, Overrides, RecipeOrRun, WithDefault, verb
from .progress_lines import emit, table

app = verb(
    help="""Forecast parameters, memory, tokens, FLOPs and time of a recipe.

    Example: ropewalk plan recipes/books.toml model.layers=8

    Needs neither torch nor prepared data.""",
    cls=WithDefault,
)


@app.command(name="forecast", hidden=True)
def plan(recipe: RecipeOrRun, overrides: Overrides = None, json: Json = False) -> None:
    """Forecast what a recipe needs.

    Example: ropewalk plan recipes/books.toml model.layers=8
    """
    planned = flow.plan(recipe, overrides or ())
    emit(planned, as_json=json, text=plan_text(planned))


@app.command()
def draw(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="SVG file to write. Default: NAME-SCHEDULE.svg.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            help="Schedule to draw instead of the plan's.",
            show_default=False,
            metavar="|".join(PIPELINE_SCHEDULES),
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=2, help="Pipeline ranks.", show_default=False)] = None,
    chunks: Annotated[
        int | None, typer.Option("--chunks", min=1, help="Pipeline stages per rank.", show_default=False)
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", min=1, help="Microbatches per step.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Draw the pipeline schedule of a recipe as SVG.

    Example: ropewalk plan draw recipes/books.toml --schedule zero-bubble --ranks 4 --microbatches 8

    Shows what each rank computes when, how long it waits and how many microbatches it holds. Options replace the
    recipe's values.
    """
    drawn = flow.draw_plan(
        recipe,
        overrides or (),
        out=out,
        schedule=schedule,
        ranks=ranks,
        chunks=chunks,
        microbatches=microbatches,
    )
    emit(drawn, as_json=json, text=_drawn_text(drawn))


def plan_text(planned: dict[str, Any]) -> str:
    """The plan in a few lines, with a heading per phase if there are several."""
    several = len(planned["phases"]) > 1
    rows = [("machine", planned["machine"])]
    for number, phase in enumerate(planned["phases"], 1):
        rows += [("", ""), (f"phase {number}", "")] if several else []
        rows += _phase_rows(phase)
    if several:
        totals = planned["derived"]
        rows += [("", ""), ("all phases", f"{amount(totals['tokens'])} tokens in {counted(totals['steps'], 'step')}, ")]
        rows += [("", f"{amount(totals['flops'])} FLOPs, causal attention")]
    time = planned["time"]
    if time:
        rows.append(("time", f"training takes about {span(time['low_s'], time['high_s'])}"))
        rows.append(("", f"({time['basis']})"))
    else:
        rows.append(("time", "not known: the speed of this machine could not be measured"))
    return table(rows)


def _phase_rows(phase: dict[str, Any]) -> list[tuple[str, str]]:
    layout, memory, derived = phase["plan"], phase["memory"], phase["derived"]
    degrees = {axis: layout[axis] for axis in ("pipeline", "replicate", "shard", "context", "tensor")}
    several = prod(degrees.values()) > 1
    return [
        ("device", f"{layout['device']}, {layout['precision']}"),
        *(_layout_rows(layout, degrees) if several else []),
        *_option_rows(layout),
        ("parameters", amount(derived["parameters"])),
        ("step", f"{counted(layout['batch_size'], 'sequence')} in microbatches of {layout['microbatch_size']}"),
        (
            "memory per rank" if several else "memory",
            " + ".join(f"{name} {amount(value, 'B')}" for name, value in memory.items()),
        ),
        ("tokens", f"{amount(phase['tokens'])} in {counted(phase['steps'], 'step')}"),
        (
            "FLOPs",
            f"{amount(derived['flops'])} ({amount(derived['flops_per_token_causal'])} per token, causal attention)",
        ),
    ]


def _layout_rows(layout: dict[str, Any], degrees: dict[str, int]) -> list[tuple[str, str]]:
    """Parallelism over several processes."""
    used = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    rows = [("processes", f"{prod(degrees.values())} = {' x '.join(used)}")]
    if layout["zero"]:
        shares = ("optimizer state", "gradients", "parameters")[: layout["zero"]]
        rows.append(("shard", f"ZeRO-{layout['zero']}: shards {', '.join(shares)}"))
    if layout["tensor"] > 1:
        rows.append(("tensor", "with sequence parallelism" if layout["sequence"] else "without sequence parallelism"))
    if layout["context"] > 1:
        rows.append(("context", layout["context_method"]))
    if layout["pipeline"] > 1:
        stages = " | ".join(_range(list(layers)) for layers in layout["stages"])
        rows.append(("pipeline", f"{layout['schedule']}, layers {stages}"))
    return rows


def _option_rows(layout: dict[str, Any]) -> list[tuple[str, str]]:
    """Options of the step, which also apply to a single process."""
    named = {
        "recompute": ("recompute", "none"),
        "saved_activations": ("activations", "whole"),
        "devices": ("devices", 1),
        "gradient_compression": ("compression", "none"),
    }
    changed = [f"{name} {layout[key]}" for key, (name, usual) in named.items() if layout[key] != usual]
    changed += [key for key in ("exact", "balance", "deterministic") if layout[key]]
    if layout["offload"]:
        changed.append(f"offload {' and '.join(layout['offload'])}")
    return [("options", ", ".join(changed))] if changed else []


def _drawn_text(drawn: dict[str, Any]) -> str:
    equal = drawn["equal_stages_bubble"]
    closed = "" if equal is None else f" ({equal:.1%} in closed form for equal stages)"
    return table(
        [
            ("drawing", drawn["drawing"]),
            ("schedule", f"{drawn['schedule']}, {drawn['microbatches']} microbatches on {drawn['ranks']} ranks"),
            ("layers", " | ".join(_range(layers) for layers in drawn["stages"])),
            ("bubble", f"{drawn['bubble']:.1%} of all ranks' time{closed}"),
            ("waits", " | ".join(f"{share:.1%}" for share in drawn["idle"])),
            ("holds", f"{' | '.join(map(str, drawn['peak_live']))} forward passes at most"),
        ]
    )


def _range(layers: list[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
