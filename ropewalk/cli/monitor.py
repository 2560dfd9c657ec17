"""`ropewalk monitor`"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow
from ropewalk.base.progress import duration
from ropewalk.config.terminal import redraws
from ropewalk.flow.view_runs import RunWatch, newest_run, standing
from ropewalk.monitor.run_list import RunLine, newest_runs
from ropewalk.monitor.run_text import RunStatus, moment
from ropewalk.monitor.run_view import RunView

from .options import Json, Runs, verb
from .progress_lines import LINE_EVERY_S, emit
from .run_results import aligned

app = verb()


@app.command()
def monitor(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run directory, e.g. runs/quickstart. Default: the newest runs (the newest with --follow or --to).",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Refresh until the run ends or Ctrl-C is pressed.")] = False,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="KIND=PATH",
            help="Write its curves for another tool until the run ends: tensorboard=FOLDER or csv=FILE; may be given "
            "several times.",
            show_default=False,
        ),
    ] = None,
    runs: Runs = Path("runs"),
    json: Json = False,
) -> None:
    """Show where a run stands: stages, step, loss, speed, ETA.

    Example: ropewalk monitor runs/quickstart

    Only reads files and does not affect the run. Curves written by --to hold every step once, without steps that a
    restart or rollback undid.
    """
    if run is None and not follow and not to:
        found = newest_runs(runs)
        emit([dataclasses.asdict(each) for each in found], as_json=json, text=_runs_text(found, runs))
        return
    folder = newest_run(runs) if run is None else run
    if not follow and not to:
        value, lines = flow.monitor(folder)
        emit(value, as_json=json, text="\n".join(lines))
        return
    with flow.watch(folder, to=to or ()) as watch:
        try:
            if follow:
                _follow(watch, json=json)
            else:
                for _ in watch.looks():
                    pass
        except KeyboardInterrupt:  # the usual end
            pass
    if to:
        written = {"run": str(folder), "points": watch.points, "to": to}
        emit(written, as_json=json, text=f"{folder}: {watch.points} points in {' and '.join(to)}")


def _follow(watch: RunWatch, *, json: bool) -> None:
    """Shows the run until it ends: redrawn on a terminal, elsewhere a line from time to time."""
    screen = None
    if redraws(sys.stdout) and not json:
        from .live import Page

        screen = Page(sys.stdout)
    shown, spoken = "", 0.0
    try:
        for over in watch.looks(waits=True):
            view, now = watch.view(), time.monotonic()
            if screen:
                screen.show(*_page(view, over))
            elif (over or not shown or now - spoken >= LINE_EVERY_S) and (text := _line(view)) != shown:
                emit(standing(view)[0], as_json=json, text=text)
                shown, spoken = text, now
    finally:
        if screen:
            screen.close()


def _page(view: RunView, over: bool) -> tuple[RunStatus, list[str]]:
    _, lines = standing(view)
    told = "" if over else "  Ctrl-C leaves it; the run goes on" if view.process else "  waiting; Ctrl-C leaves it"
    return moment(view), [*lines, *([told] if told else [])]


def _line(view: RunView) -> str:
    state = "" if view.process or view.finished else "stopped  "
    return f"{state}{moment(view)}"


def _runs_text(found: list[RunLine], runs: Path) -> str:
    if not found:
        return f"{runs}: there is no run yet"
    now = time.time()
    rows: list[tuple[str, ...]] = [("run", "state", "step", "loss", "measured", "last event")]
    for each in found:
        step = "-" if each.step is None else f"{each.step:,}" + (f" of {each.steps:,}" if each.steps else "")
        loss = "-" if each.loss is None else f"{each.loss:.4f}"
        measured = "-" if each.validation_loss is None else f"validation loss {each.validation_loss:.4f}"
        measured = each.evaluation or measured
        age = duration(max(0.0, now - each.changed))
        rows.append((each.folder, each.state, step, loss, measured, f"{age} ago"))
    return "\n".join(aligned(rows))
