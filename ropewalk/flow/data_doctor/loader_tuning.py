"""`doctor data --tune`: chooses the loader's settings by measurement and writes them into the recipe.

Feeds real steps of the recipe's model from its loader with one candidate after the other. Settings change one at a
time, only for a gain beyond the noise, and each change is reported with its gain. Only settings that leave the batches
unchanged are tuned, so a run that has started can continue with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.base.files import committed_file, storage
from ropewalk.base.progress import Progress, Silent
from ropewalk.config.edit import with_values
from ropewalk.load.config import Load
from ropewalk.load.forecast import forecast
from ropewalk.load.remedies import WORTH

from ..plan_recipe import needs_torch
from ..run_or_recipe import given
from ..start_from.start_from import RUNS
from .data_probe import Examined, examine
from .predictions import remember_tuning

SECONDS = 2.0
"""Seconds of steps per candidate."""
MOST_THREADS = 16
CHOSEN = ("load.remote.max_requests", "load.remote.prefetch_bytes", "load.threads", "load.prefetch_bytes")
"""The tuned settings."""

Change = dict[str, Any]


def tune_data(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    tokens_per_s: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes the fastest measured loader settings into `recipe`; returns what was tried and changed."""
    progress = progress or Silent()
    taken = sorted({item.split("=")[0] for item in overrides} & set(CHOSEN))
    if taken:
        raise UserError(f"--tune chooses {', '.join(taken)} itself and writes it into the recipe; leave it out")
    meant = given(recipe, overrides, runs=runs)
    if meant.is_run:
        raise UserError(f"{recipe}: --tune writes settings into a recipe, and this is a run; give its recipe")
    examined = examine(meant, tokens_per_s=tokens_per_s, progress=progress)
    before = forecast(examined.rates, examined.setup)
    # Without stalls there is nothing to gain.
    tried, changes = _search(examined, progress) if before.stall >= WORTH else ([], [])
    settings = {change["key"]: change["after"] for change in changes}
    if settings:
        _write(recipe, settings)
    remember_tuning(examined.run, compute=examined.rates.compute, settings=settings)
    return {
        "recipe": str(recipe),
        "stall": before.stall,
        "binding": before.binding,
        "tried": tried,
        "changes": changes,
    }


def _search(examined: Examined, progress: Progress) -> tuple[list[Change], list[Change]]:
    """Every candidate with its speed, and the changes that helped."""
    throughput = needs_torch("ropewalk.train.measure.throughput", "measuring")
    load = examined.settings.load
    tried: list[Change] = []
    changes: list[Change] = []
    with contextlib.closing(throughput.Bench(examined.settings)) as bench:
        speed = bench.fed(load, seconds=SECONDS).tokens_per_s
        tried.append({"key": "", "value": None, "tokens_per_s": speed})
        for key, values in _candidates(examined):
            progress.say(f"measuring {key} = {', '.join(map(str, values))}")
            speeds = {}
            for value in values:
                speeds[value] = bench.fed(with_setting(load, key, value), seconds=SECONDS).tokens_per_s
                tried.append({"key": key, "value": value, "tokens_per_s": speeds[value]})
            best = max(speeds, key=lambda value: speeds[value])
            # The smallest of nearly equal values: it leaves resources to others.
            chosen = min(value for value in speeds if speeds[value] >= (1.0 - WORTH / 2) * speeds[best])
            gain = speeds[chosen] / speed - 1.0
            if gain >= WORTH:
                changes.append({"key": key, "before": setting(load, key), "after": chosen, "gain": gain})
                load, speed = with_setting(load, key, chosen), speeds[chosen]
    return tried, changes


def _candidates(examined: Examined) -> Iterator[tuple[str, list[int]]]:
    """Settings and their values to try, the most promising first."""
    load = examined.settings.load
    most = min(MOST_THREADS, examined.setup.cores * (2 if examined.mapped else 1))
    threads = [2**power for power in range(most.bit_length()) if 2**power != load.threads]
    least = int(examined.facts.batch_bytes) + 1
    if not examined.mapped:
        requests = [factor * load.remote.max_requests for factor in (2, 4) if factor * load.remote.max_requests <= 256]
        if requests:
            yield "load.remote.max_requests", requests
        yield "load.remote.prefetch_bytes", [4 * load.remote.prefetch_bytes]
    if threads:
        yield "load.threads", threads
    yield "load.prefetch_bytes", [4 * max(load.prefetch_bytes, least)]


def setting(load: Load, key: str) -> Any:
    """The value of a dotted key as `load.remote.max_requests`."""
    value: Any = load
    for name in key.split(".")[1:]:
        value = getattr(value, name)
    return value


def with_setting(load: Load, key: str, value: Any) -> Load:
    """`load` with the value of a dotted key replaced."""
    _, *path = key.split(".")
    if len(path) == 1:
        return dataclasses.replace(load, **{path[0]: value})
    inner = dataclasses.replace(getattr(load, path[0]), **{path[1]: value})
    return dataclasses.replace(load, **{path[0]: inner})


def _write(recipe: Path, settings: dict[str, Any]) -> None:
    with storage(f"reading {recipe}"):
        text = recipe.read_text(encoding="utf-8")
    changed = with_values(text, settings, name=str(recipe))
    with committed_file(recipe, "w") as file:
        file.write(changed)
