"""What `save_every = "auto"` has learned about a run, kept beside its checkpoints: it survives restarts.

The file says whether the run is alive. A launch that finds it so knows that the one before it has failed. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError
from ropewalk.base.seal import read_sealed, write_sealed

LEARNED = "frequency.json"
FORMAT = 1


def write_learned(folder: Path, state: dict[str, Any], *, alive: bool, time: float) -> None:
    """Keeps the `state` of a Frequency at `time`. `alive`: the run goes on; False: it has stopped well."""
    write_sealed(folder / LEARNED, {"format": FORMAT, "alive": alive, "time": time, **state})


def read_learned(folder: Path, *, warn: Callable[[str], Any]) -> dict[str, Any] | None:
    """What was kept last; None when there is nothing, or, with a warning, nothing that can be read."""
    path = folder / LEARNED
    if not path.exists():
        return None
    try:
        return read_sealed(
            path,
            what="record of saves and failures",
            remedy="nothing need be done: `checkpoint.save_every` learns anew",
            current=FORMAT,
            sealed_since=1,
        )
    except DataError as error:
        warn(str(error))
        return None
