"""What verification costs: processor seconds in checksums and seals, as a share of `prepare` and of a run's start.

    make bench NAME=checksums
    python benchmarks/checksums.py --corpus FILE_OR_FOLDER

Every checksum (xxh3, BLAKE2b) that the process computes is timed by the processor's clock of its thread, the timing
itself included, so that the shares are upper bounds: hashes that name documents and settings count as well. `prepare`
works in this process (`workers = 1`). The start of a run is `train` with one step on data that is prepared, from the
call to the end of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from harness import finish

from ropewalk import flow

LIMITS = {"prepare": 0.02, "start": 0.01}
RECIPE = """\
name = "checksums"
seed = 1
[[prepare.sources]]
name = "texts"
paths = ["{corpus}"]
[prepare]
workers = 1
folder = "{folder}/prepared"
[train]
steps = 1
validate_every_steps = 100
[plan]
device = "cpu"
"""


class Clock:
    """Processor seconds spent in checksums."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def call(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self.seconds += time.thread_time() - began
                self.calls += 1

        return call


class Running:
    """A hash that grows, whose updates are timed."""

    def __init__(self, clock: Clock, inner: Any) -> None:
        self._inner = inner
        self.update = clock.timed(inner.update)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextlib.contextmanager
def counted(clock: Clock) -> Iterator[None]:
    """Times every checksum in this block."""
    whole = [name for name in dir(xxhash) if name.startswith("xxh3_") and name.endswith("digest")]
    kept = {name: getattr(xxhash, name) for name in (*whole, "xxh3_64", "xxh3_128")}
    blake = hashlib.blake2b
    for name in whole:
        setattr(xxhash, name, clock.timed(kept[name]))
    for name in ("xxh3_64", "xxh3_128"):
        make = clock.timed(kept[name])
        setattr(xxhash, name, lambda *given, make=make, **named: Running(clock, make(*given, **named)))
    make_blake = clock.timed(blake)
    hashlib.blake2b = lambda *given, **named: Running(clock, make_blake(*given, **named))  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(xxhash, name, function)
        hashlib.blake2b = blake  # type: ignore[misc]


def measure(work: Callable[[], object]) -> dict[str, float]:
    """Processor seconds of `work`, of its checksums, and their share."""
    clock = Clock()
    began = time.process_time()
    with counted(clock):
        work()
    seconds = time.process_time() - began
    return {"seconds": seconds, "checksums": clock.seconds, "calls": clock.calls, "share": clock.seconds / seconds}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--corpus", default="python:stdlib", help="what is prepared")
    options.add_argument("--quick", action="store_true", help="the documentation topics of Python alone")
    given = options.parse_args()
    corpus = "python:prose" if given.quick else given.corpus
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe = folder / "checksums.toml"
        recipe.write_text(RECIPE.format(corpus=corpus, folder=folder), "utf-8")
        # Kernels compile, and torch is imported, before anything is timed.
        flow.train(recipe, ["name=warm-up"], runs=folder / "runs")
        found = {
            "prepare": measure(lambda: flow.prepare(recipe, [f"prepare.folder={folder}/again"], runs=folder / "runs")),
            "start": measure(lambda: flow.train(recipe, ["name=started"], runs=folder / "runs")),
        }
    ours = {f"{what} {key}": value for what, figures in found.items() for key, value in figures.items()}
    quality = {what: {"share": found[what]["share"], "limit": limit} for what, limit in LIMITS.items()}
    finish("checksums", ours=ours, peers={}, ratios={}, quality=quality)


if __name__ == "__main__":
    main()
