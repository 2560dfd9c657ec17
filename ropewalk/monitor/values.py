"""Plain JSON values that may not be what they should: each function gives the kind asked for, or nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` when it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str:
    """`value` as text; absent values are empty."""
    return "" if value is None else str(value)


def whole(value: Any) -> int | None:
    """`value` when it is an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """`value` when it is a number or one of the strings "nan", "inf", "-inf" that stand for one in files."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def finite(value: Any) -> float | None:
    """As `number`, without those that are not finite."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None
