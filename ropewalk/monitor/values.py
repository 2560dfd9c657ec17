"""Reads plain JSON values of the wrong type safely: each function returns its type, or nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str:
    """`value` as text; empty if absent."""
    return "" if value is None else str(value)


def whole(value: Any) -> int | None:
    """`value` if it is an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """`value` if it is a number, or one of the strings "nan", "inf" and "-inf" that files use."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def finite(value: Any) -> float | None:
    """`value` if it is a finite number."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None
