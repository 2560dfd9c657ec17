"""What libraries print although nobody asked; said to them before they are first used."""

from __future__ import annotations

import os
from collections.abc import MutableMapping


def quiet_profiler(environment: MutableMapping[str, str] = os.environ) -> None:
    """Keeps torch's profiler from telling stderr when it starts and stops (`USDT: ... profiler_start`, torch 2.13); a
    value that the user has set stays. Errors reach us as exceptions all the same."""
    environment.setdefault("KINETO_LOG_LEVEL", "99")
