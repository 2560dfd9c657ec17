"""Whether a stream is a terminal on which a line can be redrawn."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

DUMB = ("", "dumb", "unknown")
"""Values of TERM for which nothing is known but to append lines."""
OFF = ("", "0", "false")


def redraws(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether progress is one live line on `stream`. Not in a file or a pipe, not where TERM names no terminal, and not
    in CI, whose logs keep every frame."""
    if not stream.isatty() or environment.get("TERM", "").lower() in DUMB:
        return False
    return environment.get("CI", "").lower() in OFF
