"""`evaluate` of a run as it is: its newest checkpoint, whatever the settings that evaluation does not use say."""

from __future__ import annotations

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.events import EventLog
from ropewalk.base.files import locked
from ropewalk.base.progress import Progress, Silent
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.config.ranks import ranks
from ropewalk.train.failures import meet

from .continue_run import Continuation
from .run_dir import open_run
from .run_or_recipe import Given, narrowed
from .run_recipe import Flow, assist, leave_world
from .run_stages import Result

USED = ("evaluate", "plan", "parallel")
"""The settings of evaluation, by table."""
MOST_LISTED = 4
"""Settings that a line names."""


def measure_run(meant: Given, *, progress: Progress | None = None, processes: int | None = None) -> Result:
    """Measures the newest checkpoint of a run; nothing is trained, and settings that this does not use are the run's.

    Where a launcher started several processes, all must call, as for `advance`.
    """
    folder, place, say = meant.folder, ranks(), progress or Silent()
    with meet(folder, place) as rendezvous:
        if place.world > 1 and processes not in (None, place.world):
            raise UserError(f"{place.launcher} started {place.world} processes; leave out --nproc")
        if place.rank > 0:
            return assist(folder, rendezvous)
        with locked(folder), EventLog(folder) as events:
            checkpoints = list_checkpoints(folder / "checkpoints")
            if not checkpoints:
                raise DataError(f"{folder}: no checkpoint yet; `ropewalk run {folder}` trains")
            resolved, others = narrowed(folder, meant.resolved, keys=USED)
            open_run(folder, Continuation(resolved=resolved), events)
            if others:
                more = f" and {len(others) - MOST_LISTED} more" if len(others) > MOST_LISTED else ""
                say.say(f"evaluating with the run's own settings ({', '.join(others[:MOST_LISTED])}{more})")
            flow = Flow(
                *(folder, resolved.value, events, say),
                prepared=None,
                profile_steps=0,
                processes=place.world if place.world > 1 else processes,
                rendezvous=rendezvous,
            )
            result = flow.evaluate()
            rendezvous.announce("nothing")
            leave_world(place)
            return result
