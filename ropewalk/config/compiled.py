"""Where what torch.compile made is kept."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path


def keep_compiled(environment: MutableMapping[str, str] = os.environ) -> None:
    """Kernels stay in the user's cache folder from run to run; torch's own place is emptied with every restart of the
    machine. A folder that the user has set stays."""
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "ropewalk" / "compiled"))
