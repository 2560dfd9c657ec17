"""Horovod's environment variables, for scripts that import `ropewalk.parallel.horovod` in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ropewalk.base.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class HorovodSettings:
    """How named collectives travel."""

    fusion_bytes: int = 64 << 20
    """Most bytes that are all-reduced together."""
    cycle_s: float = 0.001
    """Seconds between two looks at what is ready on all ranks."""
    autotune: bool = False
    """Finds `fusion_bytes` by measuring."""
    stall_s: float = 60.0
    """Seconds after which a collective that some ranks have not joined is reported."""


def horovod_settings(environment: Mapping[str, str] = os.environ) -> HorovodSettings:
    """Settings by HOROVOD_FUSION_THRESHOLD (bytes), HOROVOD_CYCLE_TIME (milliseconds), HOROVOD_AUTOTUNE (1) and
    HOROVOD_STALL_CHECK_TIME_SECONDS."""
    usual = HorovodSettings()
    return HorovodSettings(
        fusion_bytes=int(_number(environment, "HOROVOD_FUSION_THRESHOLD", usual.fusion_bytes)),
        cycle_s=_number(environment, "HOROVOD_CYCLE_TIME", 1000 * usual.cycle_s) / 1000,
        autotune=environment.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"),
        stall_s=_number(environment, "HOROVOD_STALL_CHECK_TIME_SECONDS", usual.stall_s),
    )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0:
        raise ConfigError([Problem("environment", f"{name} is `{text}`, not a number of 0 or more", f"unset {name}")])
    return value
