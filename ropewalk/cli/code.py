"""`ropewalk code score`, `ropewalk code check`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ropewalk import flow
from ropewalk.base.metric import Metric, read_tasks
from ropewalk.base.progress import counted

from .options import Json, verb
from .progress_lines import Console, emit, table

app = verb(
    help="""Run generated code in a sandbox against the tests of programming problems.

    Example: ropewalk code score problems.jsonl samples.jsonl"""
)

Sandbox = Annotated[
    Literal["auto", "bubblewrap", "namespaces", "none"],
    typer.Option("--sandbox", help="As evaluate.sandbox; `none` runs the code unprotected, with your rights."),
]
SHOWN = 10
"""Samples that failed, in the text; --results writes all."""


def _numbers(text: str) -> str:
    if not all(part.strip().isdigit() and int(part) > 0 for part in text.split(",")):
        raise typer.BadParameter(f"`{text}` must be whole numbers of at least 1, such as 1,10")
    return text


@app.command()
def score(
    problems: Annotated[Path, typer.Argument(help="Problems in the format of HumanEval or MBPP.", show_default=False)],
    samples: Annotated[
        Path | None,
        typer.Argument(
            help="Lines with task_id and completion. Without: the problems' own solutions.", show_default=False
        ),
    ] = None,
    k: Annotated[str, typer.Option("--k", parser=_numbers, help="Values of k for pass@k.", metavar="K,K")] = "1,10,100",
    results: Annotated[
        Path | None, typer.Option("--results", help="Write the verdict on each sample here.", show_default=False)
    ] = None,
    seconds: Annotated[int, typer.Option("--seconds", min=1, help="CPU seconds per program.")] = 5,
    partial: Annotated[bool, typer.Option("--partial", help="Allow problems without samples.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run programs again that ran before.")] = False,
    sandbox: Sandbox = "auto",
    json: Json = False,
) -> None:
    """Run samples against the tests of their problems and report pass@k.

    Example: ropewalk code score problems.jsonl samples.jsonl --k 1,10

    The verdict is pass, fail, timeout or fault. A fault is a failure of the sandbox: it is retried, counted and never
    scored. Verdicts are remembered by content in the user's cache folder.
    """
    from ropewalk.evaluate.sandbox.program import Limits

    found = flow.run_code(
        problems,
        samples,
        k=[int(part) for part in k.split(",")],
        sandbox=sandbox,
        limits=Limits(cpu_s=seconds, wall_s=3.0 * seconds),
        partial=partial,
        fresh=fresh,
        results=results,
        progress=Console(),
    )
    emit(found, as_json=json, text=_text(found))


@app.command()
def check(sandbox: Sandbox = "auto", json: Json = False) -> None:
    """Try to escape from this machine's sandbox in some ninety ways.

    Example: ropewalk code check

    Reads what should be hidden, reaches for the network, exhausts resources and forges verdicts. Exits with 1 if an
    attempt is not contained.
    """
    found = flow.check_sandbox(sandbox, progress=Console())
    attempts, escaped = found["attempts"], found["escaped"]
    lines = [f"{found['sandbox']}: {attempts - len(escaped)} of {attempts} attempts to escape are contained"]
    lines += [f"  not contained: {name}: {detail}" for name, detail in escaped.items()]
    emit(found, as_json=json, text="\n".join(lines))
    if escaped:
        raise typer.Exit(1)


def _text(found: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in found["verdicts"].items() if count)
    head = f"{counted(found['samples'], 'sample')} of {counted(found['problems'], 'problem')}: {counts}"
    metrics = read_tasks({"tasks": {"code": found["metrics"]}})["code"]
    failed = [f"{each['task_id']}: {each['verdict']}, {each['detail']}" for each in found["failed"]]
    more = [f"and {len(failed) - SHOWN} more; --results FILE has all"] if len(failed) > SHOWN else []
    speed = f"{found['seconds']:.1f} s, sandbox: {found['sandbox']}"
    return "\n".join(
        [head, table([(metric.label, _measured(metric)) for metric in metrics]), speed, *failed[:SHOWN], *more]
    )


def _measured(metric: Metric) -> str:
    low, high = (metric.text(end) for end in metric.interval or (metric.value, metric.value))
    return f"{metric.text():>7}  (95 %: {low} to {high}, {counted(metric.n or 0, 'problem')})"
