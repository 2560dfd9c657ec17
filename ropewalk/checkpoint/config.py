"""Settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ropewalk.config.schema import CONTINUES, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """When state is saved and what is kept."""

    save_every_steps: Annotated[int, Range(least=1), CONTINUES] = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: Annotated[int, Range(least=1), CONTINUES] = 2
    """Checkpoints kept, newest first; older ones are deleted after a new one is durable."""
