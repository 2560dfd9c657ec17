"""`ropewalk report`"""

from __future__ import annotations

from ropewalk import flow

from .console import emit
from .options import Json, RunFolder, verb

app = verb()


@app.command()
def report(run: RunFolder, json: Json = False) -> None:
    """Example: ropewalk report runs/quickstart

    Draws RUN/report.html from the run's files: one page that works offline. A run that is not finished gives a
    report of what there is.
    """
    path = flow.report(run)
    emit({"report": str(path)}, as_json=json, text=str(path))
