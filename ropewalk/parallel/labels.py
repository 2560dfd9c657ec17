"""Names for the parts of a step, as a profiler shows them (`ropewalk train --profile`)."""

from __future__ import annotations

import contextlib
from typing import Literal

import torch
from torch.profiler import record_function

PREFIX = "ropewalk: "
"""What the names of our labels begin with in a trace."""

Part = Literal[
    "data wait",
    "copy",
    "forward",
    "loss",
    "backward",
    "clip and guard",
    "update",
    "device wait",
    "layers",
    "log",
    "validate",
    "save",
]

_NOTHING = contextlib.nullcontext()


def label(part: Part) -> contextlib.AbstractContextManager:
    """Names the block in the trace of a running profiler. Blocks lie beside each other, never inside.

    `record_function` takes 6.0 us when nobody profiles, this question 0.3 us (torch 2.13, one core): a step of 4
    microbatches has about 20 labels.
    """
    return record_function(PREFIX + part) if torch._C._autograd._profiler_enabled() else _NOTHING
