"""`ropewalk monitor`"""

from __future__ import annotations

from ropewalk import flow

from .console import emit
from .options import Json, RunFolder, verb

app = verb()


@app.command()
def monitor(run: RunFolder, json: Json = False) -> None:
    """Example: ropewalk monitor runs/quickstart

    Tells where a run stands: its stages, last step, loss, speed and time left. Only reads; the run does not notice.
    """
    value, lines = flow.monitor(run)
    emit(value, as_json=json, text="\n".join(lines))
