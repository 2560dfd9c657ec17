"""`ropewalk human export | import | show | huse`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ropewalk import flow
from ropewalk.base.progress import counted

from .options import Json, verb
from .progress_lines import Console, emit, table
from .run_results import aligned

app = verb(
    help="""Let people rate texts: write sheets, read ratings, agreement, HUSE.

    Example: ropewalk human export runs/quickstart --out my-study"""
)

Sheets = Annotated[Path, typer.Argument(help="The folder that `human export` wrote.", show_default=False)]
_WIDEST = 60
"""Characters of a text in the list of disagreements."""
_LISTED = 3
"""Disagreements that are printed."""


@app.command()
def export(
    runs: Annotated[list[Path], typer.Argument(help="Run directories whose texts are rated.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="Folder for sheets and key.", show_default=False)],
    items: Annotated[int, typer.Option("--items", min=1, help="Most texts (or pairs) that a rater sees once.")] = 40,
    raters: Annotated[int, typer.Option("--raters", min=1, max=1000, help="Number of sheets.")] = 3,
    repeat: Annotated[float, typer.Option("--repeat", help="Share of items shown twice, for self-agreement.")] = 0.1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same sheets.")] = 0,
    task: Annotated[
        str, typer.Option("--task", help="Task whose answers are rated; `completions` are those in samples.jsonl.")
    ] = "completions",
    questions: Annotated[
        Path | None, typer.Option("--questions", help="TOML file with instructions and questions.", show_default=False)
    ] = None,
    mode: Annotated[
        Literal["score", "pairwise", "binary"],
        typer.Option("--mode", help="Scores on a scale, the better of two texts, or yes and no."),
    ] = "score",
    human: Annotated[
        bool | None,
        typer.Option(
            "--human/--no-human",
            help="Texts by people among them, which HUSE needs. Default: where the runs have some.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write blind, shuffled sheets for raters, as web page and as CSV.

    Example: ropewalk human export runs/quickstart --out my-study --items 20 --raters 3

    Give each rater one sheet; keep key.json, which tells what is what.
    """
    wanted: Literal["auto", "yes", "no"] = "auto" if human is None else "yes" if human else "no"
    made = flow.export_sheets(
        runs,
        out,
        items=items,
        raters=raters,
        repeat=repeat,
        seed=seed,
        task=task,
        questions=questions,
        mode=mode,
        human=wanted,
    )
    names = made["raters"]
    rows = [
        ("texts by", ", ".join(made["systems"])),
        ("items", f"{made['items']} of {counted(made['prompts'], 'prompt')}, {made['repeated']} of them shown twice"),
        ("questions", ", ".join(made["questions"])),
        ("for raters", f"{out}/sheet-{names[0]}.html (or .csv) to sheet-{names[-1]}, with instructions.md"),
        ("for you", f"{out}/key.json; then `ropewalk human import {out} FILES`"),
    ]
    emit(made, as_json=json, text=table(rows))


@app.command(name="import")
def import_(
    folder: Sheets,
    files: Annotated[list[Path], typer.Argument(help="Filled sheets, CSV or JSON.", show_default=False)],
    run: Annotated[
        Path | None, typer.Option("--run", help="Write the results into this run, too.", show_default=False)
    ] = None,
    half_width: Annotated[
        float | None,
        typer.Option(
            "--half-width",
            help="Precision of means for which raters are counted. Default: a sixteenth of the scale.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Read filled sheets; print means, agreement and what they are worth.

    Example: ropewalk human import my-sheets my-sheets/filled-r1.csv my-sheets/filled-r2.csv

    Checks every line. Incomplete sheets count as far as they go; the same file twice changes nothing.
    """
    found = flow.import_ratings(folder, files, run=run, half_width=half_width)
    read = [
        f"{each['file']}: {counted(each['ratings'], 'rating')}"
        + (f", {each['missing']} missing" if each["missing"] else "")
        for each in found["files"]
    ]
    changed = f", {found['changed']} changed" if found["changed"] else ""
    text = "\n".join([*read, f"{counted(found['added'], 'new rating')}{changed}", "", _text(found)])
    emit(found, as_json=json, text=text)


@app.command()
def show(
    folder: Sheets,
    json: Json = False,
) -> None:
    """Show what raters said, with intervals and agreement.

    Example: ropewalk human show my-sheets
    """
    found = flow.show_ratings(folder)
    emit(found, as_json=json, text=_text(found))


@app.command()
def huse(
    folder: Sheets,
    run: Annotated[Path, typer.Option("--run", help="The run whose model wrote the texts.", show_default=False)],
    question: Annotated[str, typer.Option("--question", help="Rating of typicality. Default: the first.")] = "",
    system: Annotated[str, typer.Option("--system", help="Name of the run in the sheets, if it has moved.")] = "",
    json: Json = False,
) -> None:
    """Compute HUSE, HUSE-Q and HUSE-D from ratings and log-probabilities.

    Example: ropewalk human huse my-sheets --run runs/quickstart

    Needs imported ratings of more than 16 texts, by the model and by people. The model scores them all.
    """
    found = flow.measure_huse(folder, run, question=question, system=system, progress=Console())
    emit(found, as_json=json, text=_huse_text({found["system"]: found}))


def _text(results: dict[str, Any]) -> str:
    """The results of all questions."""
    head = (
        f"{counted(results['items'], 'item')}, {results['ratings']} of {results['expected']} ratings by "
        f"{counted(sum(1 for sheet in results['sheets'].values() if sheet['ratings']), 'rater')}"
    )
    parts = [head, *(_question_text(name, found) for name, found in results["questions"].items())]
    if results.get("huse"):
        parts.append(_huse_text(results["huse"]))
    if results["notes"]:
        parts.append("\n".join(f"note: {note}" for note in results["notes"]))
    return "\n\n".join(parts)


def _question_text(name: str, found: dict[str, Any]) -> str:
    low, high = found["scale"]
    lines = [f"{name}: {found['text']} ({'share' if found['unit'] else f'{low} to {high}'})"]
    if not found["systems"]:
        return lines[0]
    rows = [("system", "mean", "95 % interval", "items", "ratings")]
    rows += [
        (each["system"], f"{each['mean']:.2f}", _interval(each["interval"]), str(each["items"]), str(each["ratings"]))
        for each in found["systems"]
    ]
    lines += aligned(rows)
    for each in found["differences"]:
        raters = f"{each['raters_agreeing']} of {counted(len(each['by_rater']), 'rater')} agree"
        pair = " - ".join(each["systems"])
        lines.append(f"{pair}: {each['difference']:+.2f} {_interval(each['interval'])}, {raters}")
    return "\n".join([*lines, *_reliability(found), *_disagreements(found)])


def _reliability(found: dict[str, Any]) -> list[str]:
    agreed = found["agreement"]
    rows = [
        (f"Krippendorff alpha, {level}", _value(each["value"]), _interval(each["interval"]))
        for level, each in agreed["krippendorff"].items()
    ]
    rows.append(("Fleiss kappa", _value(agreed["fleiss"]["value"]), _interval(agreed["fleiss"]["interval"])))
    if len(agreed["cohen"]) == 1:
        rows.append(("Cohen kappa", _value(agreed["cohen"][0]["value"]), ""))
    if again := found["self_agreement"]:
        equal = f"{100 * again['equal']:.0f} % of {again['ratings']}"
        rows.append(("same answer when asked again", equal, _interval(again["equal_interval"])))
    if place := found["position"]:
        rows.append(("chose the text shown as A", f"{100 * place['first_shown']:.0f} %", _interval(place["interval"])))
    lines = ["", *(line.rstrip() for line in aligned([("agreement", "value", "95 % interval"), *rows]))]
    if needed := found["needed"]:
        lines.append(_needed_text(needed))
    return lines


def _needed_text(needed: dict[str, Any]) -> str:
    raters, items = needed["raters_needed"], needed["items_needed"]
    now = f"{counted(needed['raters'], 'rater')} and {needed['items_per_system']} items per system"
    text = f"a mean of {now} is known to +- {needed['half_width']:.2f}; for +- {needed['wanted']:.2f}: "
    ways = [f"{counted(raters, 'rater')}"] if raters else []
    ways += [f"{items} items per system"] if items else []
    return text + (" or ".join(ways) if ways else "more raters and more items")


def _disagreements(found: dict[str, Any]) -> list[str]:
    rows = found["disagreements"][:_LISTED]
    if not rows:
        return []
    lines = ["", "raters differ most on"]
    for each in rows:
        scores = ", ".join(f"{rater} {score:g}" for rater, score in each["scores"].items())
        lines.append(f"  item {each['item']} ({' and '.join(each['systems'])}): {scores}: {_short(each['texts'][0])}")
    return lines


def _huse_text(found: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [("system", "HUSE", "HUSE-Q (quality)", "HUSE-D (diversity)", "texts")]
    notes = []
    for system, each in found.items():
        cells = [f"{each[name]:.2f} {_interval(each[f'{name}_interval'])}" for name in ("huse", "quality", "diversity")]
        rows.append((system, *cells, str(each["texts"])))
        notes += [f"note: {note}" for note in each["notes"]]
    return "\n".join([*aligned(rows), *notes])


def _interval(interval: Any) -> str:
    return "" if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}...")
