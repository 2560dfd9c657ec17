"""`doctor data`: what limits a run's speed, and what would make it faster.

Measures the data path (warm, cold, copy to the device) and takes the speed of the step from the last run or from a few
steps of its model; the forecast then covers other cores, stores and devices too. The prediction is kept in the run
directory and compared with the steps that follow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.base.progress import Progress, Silent
from ropewalk.load.cache.simulate import hits_per_epoch
from ropewalk.load.forecast import MEDIUMS, Forecast, forecast, on_medium
from ropewalk.load.remedies import Remedy, cheapest, remedies, what_ifs, with_cores
from ropewalk.plan.machine import available_memory

from ..run_or_recipe import RecipeLike, given
from ..start_from.start_from import RUNS
from .data_probe import PAGE_READ, Examined, examine, examine_media
from .predictions import last_error, read_record, remember, tuning_is_stale


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Another machine that the user asks about."""

    cores: int | None = None
    step_speed: float = 1.0
    """Speed-up of the step, as on another GPU."""
    medium: str | None = None
    """Storage medium, a key of `MEDIUMS`."""

    def __post_init__(self) -> None:
        if self.medium is not None and self.medium not in MEDIUMS:
            raise UserError(f"no medium `{self.medium}`; there are {', '.join(MEDIUMS)}")

    def __bool__(self) -> bool:
        return self != Scenario()


def doctor_data(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    cores: int | None = None,
    step_speed: float = 1.0,
    medium: str | None = None,
    tokens_per_s: float | None = None,
    samples_per_s: float | None = None,
    memory_bytes: int | None = None,
    data_bytes: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Rates, forecast, what-ifs and remedies of the recipe's run, and the error of the last prediction.

    `tokens_per_s` is the speed of the step; by default that of the run's last steps, or measured. `samples_per_s` is
    the speed of a step on samples of `load.media`. The benefit of caches is computed for `data_bytes` and
    `memory_bytes`, by default the recipe's data and the free memory. With `cores`, `step_speed` (a factor) or `medium`
    (a key of `MEDIUMS`) the speed is also predicted for that machine.
    """
    asked = Scenario(cores=cores, step_speed=step_speed, medium=medium)
    progress = progress or Silent()
    examined = examine(given(recipe, overrides, runs=runs), tokens_per_s=tokens_per_s, progress=progress)
    record = read_record(examined.run)
    made = forecast(examined.rates, examined.setup)
    found = remedies(examined.rates, examined.setup, examined.facts)
    best = cheapest(found)
    result = {
        "recipe": examined.run.name,
        "device": examined.device,
        "rates": {**_finite(dataclasses.asdict(examined.rates)), "step_from": examined.step_from},
        "store_measured": examined.store_known,
        "setup": dataclasses.asdict(examined.setup),
        "forecast": as_tree(made),
        "what_ifs": [
            {"what": row.what, **as_tree(row.forecast)}
            for row in what_ifs(examined.rates, examined.setup, examined.facts)
        ],
        "asked": as_tree(_asked(examined, asked)) if asked else None,
        "remedies": [_remedy(remedy) for remedy in found],
        "cheapest": _remedy(best) if best else None,
        "reading": reading(examined),
        "caches": caches(
            memory_bytes=float(available_memory()) if memory_bytes is None else float(memory_bytes),
            data_bytes=examined.facts.data_bytes if data_bytes is None else float(data_bytes),
        ),
        "media": [
            examine_media(media, examined, samples_per_s=samples_per_s) for media in examined.settings.load.media
        ],
        "last_prediction": last_error(record, examined.run),
        "tuning_is_stale": tuning_is_stale(record, examined.rates.compute),
    }
    remember(
        examined.run,
        record,
        tokens_per_s=made.tokens_per_s,
        compute=examined.rates.compute,
        binding=made.binding,
    )
    return result


def as_tree(made: Forecast) -> dict[str, Any]:
    """A forecast as plain values; None for a stage without a limit."""
    return {
        "tokens_per_s": made.tokens_per_s,
        "binding": made.binding,
        "stall": made.stall,
        "limits": _finite(made.limits),
    }


def reading(examined: Examined) -> list[str]:
    """The read policy in words: what is in flight, and what overlaps with the step."""
    load, setup = examined.settings.load, examined.setup
    lines = list(examined.policy) or [
        f"memory-mapped shards; reads in flight: {setup.threads}, one per thread; the kernel reads "
        f"{PAGE_READ >> 10} KiB around each"
    ]
    return [
        *lines,
        f"up to {setup.ahead} batches ({load.prefetch_bytes / 1e6:.3g} MB) are prefetched while the step computes; "
        "unpacking its batch is part of the step",
    ]


def caches(*, memory_bytes: float, data_bytes: float) -> dict[str, float]:
    """Share of an epoch's reads that memory serves: by the page cache, LRU, and a cache that never evicts."""
    found = hits_per_epoch(memory_bytes=memory_bytes, data_bytes=data_bytes)
    return {"memory_bytes": memory_bytes, "data_bytes": data_bytes, **dataclasses.asdict(found)}


def _asked(examined: Examined, asked: Scenario) -> Forecast:
    rates, setup, facts = examined.rates, examined.setup, examined.facts
    if asked.cores:
        rates, setup = with_cores(rates, setup, asked.cores)
    rates = dataclasses.replace(rates, compute=rates.compute * asked.step_speed)
    if asked.medium:
        medium = MEDIUMS[asked.medium]
        rates = on_medium(rates, medium, request_bytes=facts.request_bytes, bytes_per_token=facts.read_bytes_per_token)
        setup = dataclasses.replace(setup, hits=0.0)
    return forecast(rates, setup)


def _remedy(remedy: Remedy) -> dict[str, Any]:
    return {
        "what": remedy.what,
        "price": remedy.price.name.lower(),
        "settings": remedy.settings,
        "gain": remedy.gain,
        **as_tree(remedy.forecast),
    }


def _finite(values: dict[Any, float]) -> dict[str, float | None]:
    return {str(key): value if math.isfinite(value) else None for key, value in values.items()}
