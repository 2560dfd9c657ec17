"""`ropewalk report`"""

from __future__ import annotations

from ropewalk import flow

from .options import Json, RunFolder, verb
from .progress_lines import emit

app = verb()


@app.command()
def report(run: RunFolder, json: Json = False) -> None:
    """Write the HTML report of a run.

    Example: ropewalk report runs/quickstart

    RUN/report.html is one page that works offline. An unfinished run gives a report of what there is.
    """
    path = flow.report(run)
    emit({"report": str(path)}, as_json=json, text=str(path))
