"""`ropewalk quickstart`"""

from __future__ import annotations

from pathlib import Path

from ropewalk import flow

from .options import Json, New, Nproc, Overrides, Runs, verb
from .progress_lines import Console, emit
from .run_results import run_text

app = verb()


@app.command()
def quickstart(
    overrides: Overrides = None, runs: Runs = Path("runs"), new: New = False, nproc: Nproc = None, json: Json = False
) -> None:
    """Run the whole path in minutes, on the Python sources of this machine.

    Example: ropewalk quickstart

    Trains a small model on the standard library's sources and documentation, evaluates it and writes
    runs/quickstart/report.html. The same as `ropewalk run` with a built-in recipe: a few minutes on two CPU cores,
    no downloads.
    """
    result = flow.quickstart(overrides or (), runs=runs, new=new, progress=Console(), nproc=nproc)
    emit(result, as_json=json, text=run_text(result) if result else "")
