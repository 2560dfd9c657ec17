"""Settings of `plan`: how a step is laid out on the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What the plan may decide, and what is decided for it."""

    microbatch_rows: Annotated[int, Range(least=1), CONTINUES] | None = None
    """Rows in one forward and backward; must divide `train.batch_rows`. Not set: as many as the memory forecast
    allows."""
    device: Annotated[Literal["auto", "cpu", "cuda"], CONTINUES] = "auto"
    """Where the model runs; `auto` takes a GPU when there is one."""
    memory_bytes: Annotated[int, Range(least=1), CONTINUES] | None = None
    """Memory the run may use. Not set: 80 % of the device's (or of this machine's for the CPU)."""
