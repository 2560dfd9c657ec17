"""Where what was compiled or measured once is kept."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The user's folder for what can be made again."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ropewalk"


def keep_compiled(environment: MutableMapping[str, str] = os.environ) -> None:
    """Kernels stay in the user's cache folder from run to run; torch's own place is emptied with every restart of the
    machine. A folder that the user has set stays."""
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder(environment) / "compiled"))
