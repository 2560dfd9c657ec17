"""A store that is slow, uneven and faulty: reading ahead beside torch's DataLoader with an LRU cache.

    make bench NAME=origin          about two minutes
    python benchmarks/origin.py --quick

A local HTTP server injects latency, jitter, a bandwidth limit, 503 answers, answers cut short and stragglers, all
seeded. Two cases:

    tokens   a corpus of tokens is read through the Loader by steps that compute for as long as the store takes for two
             batches: no step should wait after the first ones, for which a group of blocks has to be there
    items    samples of 128 KiB in a new random order every epoch, a cache of 35 % of them: ours keeps (MinIO) and reads
             ahead; the peers are DataLoaders whose workers share an LRU cache of the same size and ask the same store
             in the same order, each with a connection of its own that is kept open, and retries
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.load.throttled import Throttle, arguments  # noqa: E402

ITEM_BYTES = 128 << 10
BATCH = 8
CACHED = 0.35
EPOCHS = 3
STORE = Throttle(
    latency_s=0.03,
    jitter_s=0.02,
    bytes_per_s=24e6,
    status_share=0.01,
    short_share=0.01,
    straggler_share=0.01,
    straggler_s=1.0,
    seed=1,
)
"""An object store seen from one node: 50 ms a request on average, 24 MB/s."""
WORKERS = {"dataloader-lru-2": 2, "dataloader-lru-8": 8}


@contextlib.contextmanager
def store(folder: Path) -> Iterator[str]:
    """The URL of the throttled store, in a process of its own."""
    with subprocess.Popen(arguments(folder, STORE), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def injected(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/stats") as answer:
        return {"status": 0, "short": 0, "straggler": 0, **json.load(answer)}


def order_of(items: int) -> list[int]:
    """Every item once an epoch, in a new random order."""
    draw = np.random.default_rng(7)
    return np.concatenate([draw.permutation(items) for _ in range(EPOCHS)]).tolist()


def read_tokens(steps: int) -> dict[str, Any]:
    """Waiting of steps that read tokens through the Loader."""
    from ropewalk.load.config import Remote
    from ropewalk.load.loader import Loader
    from ropewalk.load.stalls import Stalls
    from ropewalk.store.manifest import Manifest, ShardEntry, SourceEntry, TokenizerEntry, write_manifest
    from ropewalk.store.shards import Run, write_runs

    rows, length, budget = 64, 2048, 192 << 20
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        url = stack.enter_context(store(folder))
        shards = []
        for number in range(10):
            lengths = draw.integers(100, 4000, 8000)
            tokens = draw.integers(0, 50_000, int(lengths.sum()), dtype=np.uint16)
            keys = draw.integers(0, 1 << 62, len(lengths), dtype=np.uint64)
            written = write_runs(folder / f"{number}.bin", [Run(keys, lengths, tokens)], dtype="uint16")
            shards.append(
                ShardEntry(
                    file=f"{url}/{number}.bin",
                    source="a",
                    split="train",
                    documents=written.documents,
                    tokens=written.tokens,
                    text_bytes=4 * written.tokens,
                    file_bytes=written.bytes,
                    checksum=written.checksum,
                )
            )
        source = SourceEntry(name="a", domain="", weight=1.0, steps=())
        tokenizer = TokenizerEntry(file="tokenizer.json", checksum="", vocabulary=50_000, end_of_text=0)
        manifest = Manifest(
            recipe_hash="0", dtype="uint16", tokenizer=tokenizer, sources=(source,), shards=tuple(shards)
        )
        write_manifest(folder, manifest)
        stalls = Stalls()
        loader = Loader(
            folder,
            sequence_length=length,
            batch_size=rows,
            seed=0,
            shuffle="blocks",
            threads=2,
            stalls=stalls,
            remote=Remote(prefetch_bytes=budget),
        )
        step_s = rows * length * 2 / (STORE.bytes_per_s / 2)
        # Until all is there that may be ahead, a quarter more for faults: the price of beginning.
        warm_up_s, began = 1.25 * budget / STORE.bytes_per_s, time.perf_counter()
        warm_up: dict[str, float] = {}
        for _ in range(steps):
            loader.take()  # as it goes to a device; its expansion on a CPU is no waiting
            time.sleep(step_s)
            if not warm_up and time.perf_counter() - began > warm_up_s:
                warm_up = stalls.take()
        seconds, warm = time.perf_counter() - began, stalls.take()
        lines = loader.describe()
        loader.close()
        faults, made = loader._remote.stores.faults(), injected(url)
        read = sum(service.bytes for service in loader._remote.stores.services())
    return {
        "steps": steps,
        "step_s": step_s,
        "warm_up_s": warm_up_s,
        "warm_up_wait_s": warm_up["wait_s"],
        "wait_share": warm["wait_s"] / warm["elapsed_s"],
        "wait_for_the_store_share": (warm["fetch_s"] + warm["queue_s"]) / warm["elapsed_s"],
        "budget_bytes": budget,
        "bytes_read_per_byte_used": read / (steps * rows * length * 2),
        "seconds": seconds,
        "faults_injected": made["status"] + made["short"],
        "faults_retried": faults.retried,
        "faults_reported": faults.reported,
        "stores": lines,
    }


def ours(url: str, items: int, step_s: float) -> dict[str, Any]:
    from ropewalk.load.cache.policies import Keep
    from ropewalk.load.cache.ram import Ram
    from ropewalk.load.config import Remote
    from ropewalk.load.prefetch import Prefetcher
    from ropewalk.load.remote import Stores
    from ropewalk.store.items import Item

    order = order_of(items)
    known = [Item(f"{url}/items.bin", n * ITEM_BYTES, (n + 1) * ITEM_BYTES) for n in range(items)]
    tiers: list[Ram] = []

    def cached(behind: Any) -> Ram:
        tiers.append(Ram(behind, budget_bytes=int(CACHED * items) * ITEM_BYTES, policy=Keep()))
        return tiers[0]

    stores = Stores(Remote(), cached=cached)
    batches = len(order) // BATCH

    def needs(batch: int) -> list[Item]:
        if batch >= batches:
            raise StopIteration
        return [known[n] for n in order[batch * BATCH : (batch + 1) * BATCH]]

    # Neighbours in the file are not neighbours in a random order: nothing is joined that nobody needs.
    prefetcher = Prefetcher(stores, needs, budget_bytes=8 << 20, requests=stores.limit, gap_bytes=0)
    waits, began, check = [], time.perf_counter(), 0
    for batch in range(batches):
        asked = time.perf_counter()
        found = prefetcher.take(batch)
        check += sum(data[0] for data in found.values())
        waits.append(time.perf_counter() - asked)
        time.sleep(step_s)
    seconds = time.perf_counter() - began
    prefetcher.close()
    stores.close()
    faults = stores.faults()
    counts = tiers[0].counts()
    return {
        "items_per_s": batches * BATCH / seconds,
        "wait_share": sum(waits) / seconds,
        "hit_rate": counts.hits / (counts.hits + counts.misses),
        "retried": faults.retried,
        "reported": faults.reported,
        "check": check,
        "stores": stores.lines(),
    }


class Samples(torch.utils.data.Dataset):
    """The samples for a DataLoader: a worker's part of an LRU cache before a connection of its own."""

    def __init__(self, url: str, items: int, *, workers: int) -> None:
        self._host, self._kept = urlsplit(url).netloc, int(CACHED * items) // workers
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._connection: http.client.HTTPConnection | None = None

    def __getitem__(self, number: int) -> tuple[int, int, int]:
        hit, retries = number in self._cache, 0
        if hit:
            self._cache.move_to_end(number)
        else:
            data, retries = self._get(number)
            self._cache[number] = data
            if len(self._cache) > self._kept:
                self._cache.popitem(last=False)
        return self._cache[number][0], int(hit), retries

    def _get(self, number: int) -> tuple[bytes, int]:
        span = f"bytes={number * ITEM_BYTES}-{(number + 1) * ITEM_BYTES - 1}"
        for attempt in range(6):
            try:
                self._connection = self._connection or http.client.HTTPConnection(self._host, timeout=60)
                self._connection.request("GET", "/items.bin", headers={"Range": span})
                answer = self._connection.getresponse()
                data = answer.read()
                if answer.status == 206 and len(data) == ITEM_BYTES:
                    return data, attempt
            except (OSError, http.client.HTTPException):
                pass  # as a bad status: asked for again on a new connection
            self._connection = None
            time.sleep(0.1)
        raise OSError(f"item {number} could not be had")


def dataloader(url: str, items: int, step_s: float, *, workers: int) -> dict[str, Any]:
    order = order_of(items)
    loader = torch.utils.data.DataLoader(
        Samples(url, items, workers=workers), batch_size=BATCH, sampler=order, num_workers=workers, drop_last=True
    )
    waits, check, hits, retries = [], 0, 0, 0
    began = asked = time.perf_counter()
    for values, hit, retried in loader:
        waits.append(time.perf_counter() - asked)
        check, hits, retries = check + int(values.sum()), hits + int(hit.sum()), retries + int(retried.sum())
        time.sleep(step_s)
        asked = time.perf_counter()
    seconds = time.perf_counter() - began
    return {
        "items_per_s": len(waits) * BATCH / seconds,
        "wait_share": sum(waits) / seconds,
        "hit_rate": hits / (len(waits) * BATCH),
        "retried": retries,
        "reported": 0,
        "check": check,
    }


def read_items(who: str, items: int) -> dict[str, Any]:
    # A step computes as long as the store takes for what is not in the cache.
    step_s = BATCH * (1 - CACHED) * ITEM_BYTES / STORE.bytes_per_s
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        data = np.random.default_rng(0).integers(0, 256, items * ITEM_BYTES, dtype=np.uint8)
        data.tofile(Path(place) / "items.bin")
        url = stack.enter_context(store(Path(place)))
        run = ours if who == "ropewalk" else lambda *given: dataloader(*given, workers=WORKERS[who])
        found = run(url, items, step_s)
        made = injected(url)
        return {**found, "injected": made["status"] + made["short"], "requests": made["requests"], "step_s": step_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    items, steps = (160, 700) if options.quick else (480, 1000)

    from harness import finish

    tokens = read_tokens(steps)
    print(json.dumps(tokens, indent=1))
    found = {who: read_items(who, items) for who in ("ropewalk", *WORKERS)}
    for who, figures in found.items():
        print(f"{who:<18}", json.dumps(figures))
    assert len({figures["check"] for figures in found.values()}) == 1, "all read the same bytes"
    speed = {who: {"items_per_s": figures["items_per_s"]} for who, figures in found.items()}
    mine = speed.pop("ropewalk")
    finish(
        "origin",
        ours={**mine, "token_wait_share": tokens["wait_share"]},
        peers=speed,
        ratios={who: mine["items_per_s"] / figures["items_per_s"] for who, figures in speed.items()},
        quality={
            "tokens": tokens,
            "items": {who: {k: v for k, v in figures.items() if k != "stores"} for who, figures in found.items()},
            "every_fault_accounted_for": {
                "tokens": tokens["faults_injected"] == tokens["faults_retried"] + tokens["faults_reported"],
                "items": found["ropewalk"]["injected"] == found["ropewalk"]["retried"] + found["ropewalk"]["reported"],
            },
        },
    )


if __name__ == "__main__":
    main()
