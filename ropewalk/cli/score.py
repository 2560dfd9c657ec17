"""`ropewalk score`"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer

from ropewalk import flow
from ropewalk.base.errors import UserError
from ropewalk.base.metric import Metric

from .options import Json, verb
from .progress_lines import emit

app = verb()


@app.command()
def score(
    annotated: Annotated[
        list[Path] | None,
        typer.Argument(help="Annotated summaries of DUCView (.pan), for their PYRAMID scores.", show_default=False),
    ] = None,
    metrics: Annotated[str, typer.Option("--metrics", help="Metrics, separated by commas.")] = "bleu,chrf",
    references: Annotated[
        str, typer.Option("--references", help="Files of references, separated by commas.", show_default=False)
    ] = "",
    predictions: Annotated[
        Path | None, typer.Option("--predictions", help="File of predictions, one per line.", show_default=False)
    ] = None,
    predictions_b: Annotated[
        Path | None,
        typer.Option("--predictions-b", help="A second system's, to test the difference.", show_default=False),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="An option of a metric, as bleu.tokenize=zh.", show_default=False),
    ] = None,
    pyramid: Annotated[
        Path | None,
        typer.Option("--pyramid", help="Pyramid (.pyr) for the metric `pyramid`.", show_default=False),
    ] = None,
    test: Annotated[
        Literal["randomization", "bootstrap"], typer.Option("--test", help="Test of the difference.")
    ] = "randomization",
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder for automatic annotations of the .pan files.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of intervals and tests.")] = 0,
    json: Json = False,
) -> None:
    """Score files of predictions without a model: BLEU, ROUGE, METEOR and others.

    Example: ropewalk score --metrics bleu,chrf,rougeL --references ref.txt --predictions out.txt

    Prints value, 95 % interval, number of lines and signature of each metric. With a second system, tests whether the
    two differ. Files ending with .jsonl hold one JSON string per line. Summaries annotated in DUCView are scored
    exactly and automatically.
    """
    if annotated:
        _annotated(annotated, output, as_json=json)
        return
    if predictions is None:
        raise UserError("name the predictions: --predictions FILE; or annotated summaries (.pan)")
    found = flow.score_files(
        [name.strip() for name in metrics.split(",") if name.strip()],
        predictions=predictions,
        references=[Path(name) for name in references.split(",") if name],
        predictions_b=predictions_b,
        options=option or (),
        pyramid=pyramid,
        test=test,
        seed=seed,
    )
    emit({"scores": [each.tree() for each in found]}, as_json=json, text="\n".join(map(_lines, found)))


def _lines(score: flow.FileScore) -> str:
    systems = [("", score.a)] if score.b is None else [("A ", score.a), ("B ", score.b)]
    lines = []
    for name, metric in systems:
        interval = (
            f" [{_text(metric, metric.interval[0])}, {_text(metric, metric.interval[1])}]" if metric.interval else ""
        )
        lines.append(f"{name}{metric.name} {_text(metric, metric.value)}{interval}  n {metric.n}  {metric.signature}")
    if score.test:
        low, high = score.test.interval
        lines.append(
            f"  B - A {score.test.difference:+.4g} [{low:+.4g}, {high:+.4g}]  "
            f"p {score.test.p_value:.2g} ({score.test.test}, {score.test.resamples} resamples)"
        )
    return "\n".join(lines)


def _text(metric: Metric, value: float) -> str:
    """Two decimals where scores run to 100, as papers print them."""
    return metric.text(value) if metric.unit or abs(value) < 10 else f"{value:.2f}"


def _annotated(files: list[Path], output: Path | None, *, as_json: bool) -> None:
    scores, agreed = flow.score_annotations(files, output=output)
    lines = [
        f"{each.file}: modified {each.manual.modified:.3f}, original {each.manual.original:.3f}, weight "
        f"{each.manual.weight} of {each.manual.found} units, {each.manual.other} others; automatic modified "
        f"{each.automatic.modified:.3f}, original {each.automatic.original:.3f}"
        for each in scores
    ]
    lines.append(
        f"automatic against manual, {agreed.pairs} pairs of summary and unit: precision {agreed.precision:.3f}, "
        f"recall {agreed.recall:.3f}, F1 {agreed.f1:.3f}, kappa {agreed.kappa:.3f}"
    )
    tree = {"scores": [dataclasses.asdict(each) for each in scores], "agreement": dataclasses.asdict(agreed)}
    emit(tree, as_json=as_json, text="\n".join(lines))
