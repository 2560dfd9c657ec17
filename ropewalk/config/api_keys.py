"""Keys of services on the network. They stand in environment variables only: recipes and run directories are shared."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ropewalk.base.errors import UserError


def api_key(variable: str, purpose: str, environment: Mapping[str, str] = os.environ) -> str:
    """The key in this environment variable; UserError if there is none."""
    key = environment.get(variable, "").strip()
    if not key:
        raise UserError(
            f"{purpose} needs a key in the environment variable {variable}; set it and run the command again"
        )
    return key
