"""Rendezvous of the ranks of one launch: when one fails, all stop (base/rendezvous.py)."""

from __future__ import annotations

from pathlib import Path

from ropewalk.base.events import EventLog
from ropewalk.base.rendezvous import Failure, Rendezvous
from ropewalk.config.ranks import Ranks


def meet(run: Path, place: Ranks) -> Rendezvous:
    """The rendezvous of the ranks launched with `place` for `run`; logs failures of others as `rank_failed`."""

    def note(failure: Failure) -> None:
        if run.is_dir():
            # A separate log: a blocked main thread may hold the lock of the other.
            with EventLog(run, rank=place.rank) as events:
                events.write(
                    "rank_failed",
                    failed_rank=failure.rank,
                    host=failure.host,
                    step=failure.step,
                    message=failure.message,
                )

    return Rendezvous(
        run,
        rank=place.rank,
        world=place.world,
        launch=place.launch,
        head=place.head,
        one_host=place.local_world == place.world,
        on_failure=note,
    )
