"""Settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """When state is saved and what is kept."""

    save_every: Annotated[Literal["steps", "auto"], CONTINUES] = "steps"
    """`steps`: every `save_every_steps`. `auto`: as often as measured costs and failures make worth while, within
    `overhead`; the decision is printed with its numbers."""
    save_every_steps: Annotated[int, Range(least=1), CONTINUES] = 100
    """Steps between checkpoints; the last step is always saved. Not used by `auto`."""
    overhead: Annotated[float, Range(above=0, below=1), CONTINUES] = 0.02
    """Share of the time that saving may take from training. Used by `auto` only."""
    mtbf_hours: Annotated[float, Range(above=0), CONTINUES] | None = None
    """Hours between failures of the whole run, where they are known. Not set: 50,000 hours of one GPU, divided by
    their number, corrected by what the run sees. Used by `auto` only."""
    write: Annotated[Literal["background", "blocking"], CONTINUES] = "background"
    """`background`: the state is copied aside during the next step and written while training goes on; needs memory
    for two copies of it. `blocking`: training waits until it is on disk."""
    bytes_per_s: Annotated[float, Range(above=0), CONTINUES] | None = None
    """The most that background writing may take of the disk, in bytes a second; not set: all of it."""
    failures: Annotated[int, Range(least=0), CONTINUES] = 3
    """Saves in a row that may fail (a full or broken disk) before the run ends; each is told."""
    keep_last: Annotated[int, Range(least=1), CONTINUES] = 2
    """Checkpoints kept, newest first; older ones are deleted after a new one is durable."""
    keep_every_steps: Annotated[int, Range(least=0), CONTINUES] = 0
    """Checkpoints of steps that it divides are kept for good; 0: none."""
