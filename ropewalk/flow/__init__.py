"""The verbs as functions: `from ropewalk.flow import train`. Each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .authoring import check, describe, diff, new_recipe, show
    from .verbs import (
        detach,
        evaluate,
        explain,
        generate,
        monitor,
        plan,
        prepare,
        quickstart,
        report,
        run,
        train,
    )

__all__ = [
    "check",
    "describe",
    "detach",
    "diff",
    "evaluate",
    "explain",
    "generate",
    "monitor",
    "new_recipe",
    "plan",
    "prepare",
    "quickstart",
    "report",
    "run",
    "show",
    "train",
]

_AUTHORING = {"check", "describe", "diff", "new_recipe", "show"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "authoring" if name in _AUTHORING else "verbs"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
