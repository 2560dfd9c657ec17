"""What would make a run faster, cheapest first, with the gain that the forecast promises. No torch.

A remedy is a change of `Setup` or `Rates`; its gain is the forecast after over the forecast before. Settings cost
nothing, memory is cheaper than disk, software cheaper than hardware: that is the order of `Price`.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .forecast import MEDIUMS, Forecast, Rates, Setup, cache_hits, compressed, forecast, on_medium


class Price(enum.IntEnum):
    """What a change takes, least first."""

    SETTING = 0
    MEMORY = 1
    DISK = 2
    CONVERSION = 3
    """The shards are written once more."""
    DEVICE = 4
    """Time and memory of the device."""
    HARDWARE = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the run reads, for remedies that depend on it."""

    data_bytes: float
    """Of all shards it reads."""
    batch_bytes: float
    """Of one batch in host memory."""
    request_bytes: float = 1 << 20
    """Of one read."""
    read_bytes_per_token: float = 2.0
    """What has to be read for a token; more than it takes, where rows are smaller than reads."""
    epochs: float = math.inf
    """How often the run reads everything."""
    memory_bytes: float = 0.0
    """Free host memory, for a cache."""
    disk_bytes: float = 0.0
    """Free local disk, for a cache; 0 also when the data are local."""
    compression: float = 1.0
    """How many times smaller the shards would be."""
    decompress: float = math.inf
    """Tokens a second that one core decompresses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change and what it is predicted to give."""

    what: str
    """In words."""
    price: Price
    settings: dict[str, int | str]
    """Keys of the recipe that bring it about; empty for hardware."""
    forecast: Forecast
    gain: float
    """Predicted speed over the present one, less one."""


Changed = tuple[Rates, Setup]

WORTH = 0.02
"""Least gain that is told: a fiftieth is within the noise of what was measured."""
ENOUGH = 0.8
"""Share of the largest gain that makes a cheaper remedy preferable."""
MOST_REQUESTS = 256
"""In flight to one store; more are refused by most."""
RAM_TOKENS_PER_S = 2e9
"""Reading a RAM tier, one thread: 4 GB/s of uint16 tokens, a copy in memory."""


def remedies(rates: Rates, setup: Setup, facts: Facts) -> list[Remedy]:
    """The changes worth their while, cheapest first; none when the step itself is the limit."""
    before = forecast(rates, setup)
    found = []
    for what, price, settings, (then_rates, then_setup) in _changes(rates, setup, facts):
        after = forecast(then_rates, then_setup)
        gain = after.tokens_per_s / before.tokens_per_s - 1.0
        if gain >= WORTH:
            found.append(Remedy(what=what, price=price, settings=settings, forecast=after, gain=gain))
    return sorted(found, key=lambda remedy: (remedy.price, -remedy.gain))


def cheapest(found: Sequence[Remedy]) -> Remedy | None:
    """The cheapest remedy that gives most of what any would give; hardware only when nothing else helps."""
    here = [remedy for remedy in found if remedy.price < Price.HARDWARE] or found
    most = max((remedy.gain for remedy in here), default=0.0)
    return next((remedy for remedy in here if remedy.gain >= ENOUGH * most), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """Another world, and how fast the run would be there."""

    what: str
    forecast: Forecast


def what_ifs(rates: Rates, setup: Setup, facts: Facts) -> list[WhatIf]:
    """The run on other cores, caches, stores and devices. Each line changes one thing."""
    replace = dataclasses.replace
    rows: list[tuple[str, Rates, Setup]] = [("as it is", rates, setup)]
    for factor in (2, 10):
        rows.append((f"a step {factor} times as fast", replace(rates, compute=rates.compute * factor), setup))
    for cores in (setup.cores * 2, setup.cores * 4):
        rows.append((f"{cores} cores, as many threads", *with_cores(rates, setup, cores)))
    if math.isfinite(rates.fetch):
        for hits in (0.0, 0.5, 1.0):
            rows.append((f"{hits:.0%} of the data in memory", rates, replace(setup, hits=hits)))
    uncached = replace(setup, hits=0.0)
    for name, medium in MEDIUMS.items():
        there = on_medium(rates, medium, request_bytes=facts.request_bytes, bytes_per_token=facts.read_bytes_per_token)
        rows.append((f"data on {name}, none in memory", there, uncached))
    return [WhatIf(what=what, forecast=forecast(then, chosen)) for what, then, chosen in rows]


def with_cores(rates: Rates, setup: Setup, cores: int) -> Changed:
    """The run on another number of cores, with as many threads. A step on the CPU is taken to use them all as well."""
    ahead = max(setup.ahead, cores + 1)
    changed = dataclasses.replace(setup, cores=cores, threads=cores, ahead=ahead)
    if not setup.cores_of_step:
        return rates, changed
    faster = dataclasses.replace(rates, compute=rates.compute * cores / setup.cores_of_step)
    return faster, dataclasses.replace(changed, cores_of_step=cores)


def _changes(rates: Rates, setup: Setup, facts: Facts) -> Iterator[tuple[str, Price, dict[str, int | str], Changed]]:
    """Every change there is to try."""
    now = forecast(rates, setup)
    if now.stall < WORTH:
        return
    threads = _threads_wanted(rates, setup)
    if threads != setup.threads:
        with_threads = dataclasses.replace(setup, threads=threads, ahead=max(setup.ahead, threads + 1))
        yield f"{threads} threads", Price.SETTING, {"load.threads": threads}, (rates, with_threads)
    requests = _requests_wanted(rates, setup)
    if requests > setup.requests:
        more_requests = dataclasses.replace(setup, requests=requests)
        yield (
            f"{requests} requests in flight",
            Price.SETTING,
            {"load.remote.max_requests": requests},
            (rates, more_requests),
        )
    ahead = _ahead_wanted(rates, setup)
    if ahead != setup.ahead:
        size: dict[str, int | str] = {"load.prefetch_bytes": math.ceil((ahead + 1) * facts.batch_bytes)}
        yield f"{ahead} batches ahead", Price.MEMORY, size, (rates, dataclasses.replace(setup, ahead=ahead))
        if threads != setup.threads:
            both = dataclasses.replace(setup, threads=threads, ahead=max(ahead, threads + 1))
            what = f"{threads} threads and {both.ahead} batches ahead"
            yield what, Price.MEMORY, {"load.threads": threads, **size}, (rates, both)
    yield from _caches(rates, setup, facts)
    if facts.compression > 1.0:
        smaller = compressed(rates, ratio=facts.compression, decompress=facts.decompress)
        what = f"shards {facts.compression:.1f} times smaller by zstd"
        yield what, Price.CONVERSION, {}, (smaller, setup)
    for name, medium in MEDIUMS.items():
        there = on_medium(rates, medium, request_bytes=facts.request_bytes, bytes_per_token=facts.read_bytes_per_token)
        yield f"data on {name}", Price.HARDWARE, {}, (there, setup)
    more = 2 * setup.cores
    yield f"{more} cores", Price.HARDWARE, {"load.threads": more}, with_cores(rates, setup, more)


def _caches(rates: Rates, setup: Setup, facts: Facts) -> Iterator[tuple[str, Price, dict[str, int | str], Changed]]:
    for tier, price, room, rate in (
        ("ram", Price.MEMORY, facts.memory_bytes, RAM_TOKENS_PER_S),
        ("disk", Price.DISK, facts.disk_bytes, MEDIUMS["nvme"].stream / facts.read_bytes_per_token),
    ):
        size = min(room, facts.data_bytes)
        hits = cache_hits(size, facts.data_bytes, epochs=facts.epochs)
        if hits <= setup.hits or math.isinf(rates.fetch):
            continue
        what = f"{tier} cache of {size / 1e9:.3g} GB ({hits:.0%} hits)"
        cached = dataclasses.replace(rates, cache=rate)
        yield what, price, {f"load.cache.{tier}_bytes": int(size)}, (cached, dataclasses.replace(setup, hits=hits))


def _threads_wanted(rates: Rates, setup: Setup) -> int:
    """The fewest threads that suffice for the step, else those that give most."""
    most = 4 * setup.cores if setup.joined else setup.cores
    tries = [
        (threads, forecast(rates, dataclasses.replace(setup, threads=threads, ahead=max(setup.ahead, threads + 1))))
        for threads in range(1, max(most, setup.threads) + 1)
    ]
    best = max(made.tokens_per_s for _, made in tries)
    return next(threads for threads, made in tries if made.tokens_per_s >= 0.99 * best)


def _requests_wanted(rates: Rates, setup: Setup) -> int:
    """The fewest requests in flight that give nearly all that any number would; threads have their own when joined."""
    if setup.joined:
        return setup.requests
    doubling = [setup.requests * 2**power for power in range(9) if setup.requests * 2**power <= MOST_REQUESTS]
    speeds = {
        requests: forecast(rates, dataclasses.replace(setup, requests=requests)).tokens_per_s
        for requests in doubling or [setup.requests]
    }
    return next(requests for requests in speeds if speeds[requests] >= 0.99 * max(speeds.values()))


def _ahead_wanted(rates: Rates, setup: Setup) -> int:
    """The fewest batches ahead that give nearly all that any number would."""
    most = forecast(rates, dataclasses.replace(setup, ahead=1024)).tokens_per_s
    doubling = itertools.chain(range(1, 9), (2**power for power in range(4, 11)))
    return next(
        ahead
        for ahead in doubling
        if forecast(rates, dataclasses.replace(setup, ahead=ahead)).tokens_per_s >= 0.99 * most
    )
