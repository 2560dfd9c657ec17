"""Caches between training and its data: hits, random reads and speed, ours beside what people use.

    make bench NAME=cache           a few minutes
    python benchmarks/cache.py --quick

1. Hits after the first epoch when each epoch reads every item once in another order, for a cache of 10 to 90 % of the
   data, beside Belady's bound: cachetools (LRU, LFU, random), diskcache, functools.lru_cache in the workers of a torch
   DataLoader. Ours is the real tier, not a simulation. Speed is of one core (process time), the data in memory.
2. Four nodes (processes) with a partitioned cache: how often the origin is asked for an item; one of them killed.
3. Two jobs that share preparation: fetches and decodes of an item and epoch, and what both jobs take together.
4. Sampling by importance for one job and for three: hit rate and random reads beside LRU and fill-once, on the plain
   order and on the same draws. A hit of the importance cache is a sample in the high region or in a package
   that is in memory; packages lie on the local disk, which LRU and fill-once have no use for here, and reading one is a
   sequential read. Random reads are of the whole run, the first epoch and the collecting of packages included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
SIZE = 4096
DISK_SIZE = 65536
EPOCHS = 4


def accesses(items: int, epochs: int, seed: int = 0) -> list[int]:
    order = np.random.default_rng(seed)
    return [int(item) for _ in range(epochs) for item in order.permutation(items)]


def measured(get: Callable[[int], bool], items: int) -> dict[str, float]:
    """Hit rate after the first epoch and items a second of one core; `get` reads an item: was it held?"""
    order = accesses(items, EPOCHS)
    start = time.process_time()
    found = [get(item) for item in order]
    seconds = time.process_time() - start
    return {"hits": sum(found[items:]) / len(found[items:]), "items_per_s": len(order) / seconds}


def contender_ropewalk(items: int, share: float) -> dict[str, float]:
    from ropewalk.load.cache.ram import Ram

    known, origin = made(items, SIZE)
    ram = Ram(origin, budget_bytes=round(items * share) * SIZE)

    def get(number: int) -> bool:
        before = origin.requests
        ram.fetch([known[number]])
        return origin.requests == before

    return measured(get, items)


def contender_ropewalk_disk(items: int, share: float) -> dict[str, float]:
    from ropewalk.load.cache.disk import Disk

    known, origin = made(items, DISK_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(origin, Path(folder), budget_bytes=round(items * share) * (DISK_SIZE + 32))

        def get(number: int) -> bool:
            before = origin.requests
            disk.fetch([known[number]])
            return origin.requests == before

        return measured(get, items)


def contender_cachetools(kind: str) -> Callable[[int, float], dict[str, float]]:
    def run(items: int, share: float) -> dict[str, float]:
        import cachetools

        cache = getattr(cachetools, kind)(maxsize=round(items * share) * SIZE, getsizeof=len)
        store = os.urandom(items * SIZE)

        def get(number: int) -> bool:
            if cache.get(number) is not None:
                return True
            cache[number] = store[number * SIZE : (number + 1) * SIZE]
            return False

        return measured(get, items)

    return run


def contender_diskcache(items: int, share: float) -> dict[str, float]:
    import diskcache

    with tempfile.TemporaryDirectory() as folder:
        limit = round(items * share) * DISK_SIZE
        cache = diskcache.Cache(folder, size_limit=limit, eviction_policy="least-recently-used", cull_limit=2)
        store = os.urandom(items * DISK_SIZE)

        def get(number: int) -> bool:
            if cache.get(number) is not None:
                return True
            cache[number] = store[number * DISK_SIZE : (number + 1) * DISK_SIZE]
            return False

        result = measured(get, items)
        cache.close()
        return result


class Cached:
    """A map-style data set whose worker remembers, as one writes it with functools.lru_cache."""

    def __init__(self, items: int, capacity: int) -> None:
        self._store = os.urandom(items * SIZE)
        self._capacity = capacity
        self._cache: Any = None

    def __getitem__(self, number: int) -> tuple[int, np.ndarray]:
        import functools

        if self._cache is None:
            self._cache = functools.lru_cache(self._capacity)(lambda n: self._store[n * SIZE : (n + 1) * SIZE])
        before = self._cache.cache_info().hits
        data = self._cache(number)
        return self._cache.cache_info().hits - before, np.array(np.frombuffer(data, np.uint8))


def contender_dataloader(items: int, share: float) -> dict[str, float]:
    """Two workers, each with half of the memory. Speed is of two cores and the main process: wall time."""
    import torch

    data = Cached(items, round(items * share) // 2)
    order = accesses(items, EPOCHS)
    loader = torch.utils.data.DataLoader(data, batch_size=64, sampler=order, num_workers=2)  # type: ignore[arg-type]
    start = time.perf_counter()
    found = [int(hit) for hits, _ in loader for hit in hits]
    return {
        "hits": sum(found[items:]) / len(found[items:]),
        "items_per_s": len(order) / (time.perf_counter() - start),
    }


CONTENDERS: dict[str, Callable[[int, float], dict[str, float]]] = {
    "ropewalk": contender_ropewalk,
    "ropewalk-disk": contender_ropewalk_disk,
    "cachetools-lru": contender_cachetools("LRUCache"),
    "cachetools-lfu": contender_cachetools("LFUCache"),
    "cachetools-random": contender_cachetools("RRCache"),
    "dataloader-lru": contender_dataloader,
    "diskcache": contender_diskcache,
}


def made(items: int, size: int) -> tuple[list[Any], Any]:
    """Items of a file in memory and the origin that serves and counts them."""
    from ropewalk.store.items import Item

    store = memoryview(os.urandom(items * size))

    class Origin:
        requests = 0

        def fetch(self, wanted: Sequence[Item]) -> list[bytes | memoryview]:
            self.requests += 1
            return [store[item.start : item.stop] for item in wanted]

        def close(self) -> None: ...

    return [Item("memory", number * size, (number + 1) * size) for number in range(items)], Origin()


# Several processes: each is this file with `--role`, counts by appending to a file that all share.


class Appending:
    """An origin that notes each item in a file and makes its bytes from its place."""

    def __init__(self, log: Path) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def fetch(self, items: Sequence[Any]) -> list[bytes | memoryview]:
        os.write(self._log, "".join(f"{item.start}\n" for item in items).encode())
        return [content(item.start, len(item)) for item in items]

    def close(self) -> None: ...


def content(start: int, size: int) -> bytes:
    return np.random.Philox(key=start).random_raw(size // 8).tobytes()


def counted(log: Path) -> Counter[str]:
    return Counter(log.read_text().split())


def items_of(count: int, size: int) -> list[Any]:
    from ropewalk.store.items import Item

    return [Item("origin", number * size, (number + 1) * size) for number in range(count)]


def role_node(arguments: dict[str, Any]) -> None:
    from ropewalk.load.cache.peers import Peers
    from ropewalk.load.cache.ram import Ram
    from ropewalk.load.cache.serve import Server

    items = items_of(arguments["items"], 65536)
    expected = {item.start: content(item.start, len(item)) for item in items}
    origin = Appending(Path(arguments["log"]))
    local = Ram(origin, budget_bytes=1 << 30)
    server = Server(local, listen="127.0.0.1:0", roots=["origin"], secret=b"benchmark")
    print(server.address, flush=True)
    nodes = sys.stdin.readline().split()
    peers = Peers(local, origin, nodes=nodes, me=server.address, secret=b"benchmark")
    order = random.Random(arguments["seed"])
    wrong, start = 0, time.perf_counter()
    for _ in range(arguments["epochs"]):
        order.shuffle(items)
        for first in range(0, len(items), 16):
            batch = items[first : first + 16]
            wrong += sum(data != expected[item.start] for item, data in zip(batch, peers.fetch(batch), strict=True))
    seconds = time.perf_counter() - start
    read = arguments["epochs"] * len(items) * 65536
    counts = peers.counts()
    result = {"wrong": wrong, "mb_per_s": read / 1e6 / seconds, "failures": counts.failures, "hits": counts.hits}
    print(json.dumps(result), flush=True)
    sys.stdin.readline()


def partitioned(items: int, epochs: int, *, killed: bool) -> dict[str, float]:
    """Four nodes read everything; with `killed` the fourth dies on the way."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        nodes = [start("node", {"items": items, "epochs": epochs, "log": str(log), "seed": seed}) for seed in range(4)]
        addresses = [node.stdout.readline().strip() for node in nodes]
        for node in nodes:
            node.stdin.write(" ".join(addresses) + "\n")
            node.stdin.flush()
        living = nodes
        if killed:
            time.sleep(0.3)
            nodes[3].send_signal(signal.SIGKILL)
            living = nodes[:3]
        results = [json.loads(node.stdout.readline()) for node in living]
        for node in living:
            node.communicate("\n")
        times = counted(log)
    return {
        "nodes_finished": len(results),
        "wrong_bytes": sum(result["wrong"] for result in results),
        "peer_failures": sum(result["failures"] for result in results),
        "most_fetches_of_an_item": max(times.values()),
        "mean_fetches_of_an_item": sum(times.values()) / items,
        "mb_per_s_a_node": float(np.mean([result["mb_per_s"] for result in results])),
    }


def role_job(arguments: dict[str, Any]) -> None:
    """Reads prepared samples; decoding is inflating a megabyte, one pass of arithmetic and every seventh byte of it:
    some milliseconds for 150 kB, as an image of half a megapixel takes that is cropped to 224 x 224."""
    from ropewalk.load.cache.shared import Shared

    items = items_of(arguments["items"], 65536)
    packed = zlib.compress(np.tile(np.frombuffer(content(0, 65536), np.uint8), 16).tobytes(), 6)
    origin, decodes = Appending(Path(arguments["log"])), Appending(Path(arguments["log"] + ".decodes"))

    def decode(item: Any, data: bytes | memoryview, epoch: int) -> bytes:
        decodes.fetch([item])
        pixels = np.frombuffer(zlib.decompress(packed), np.uint8)
        return ((pixels.astype(np.float32) - 128.0) * 0.5 + 100.0).astype(np.uint8)[::7].tobytes()

    shared = None
    if arguments["shared"]:
        shared = Shared(
            *(Path(arguments["folder"]), origin),
            prepare=decode,
            job=arguments["job"],
            jobs=2,
            budget_bytes=64 << 20,
        )
    print("ready", flush=True)
    sys.stdin.readline()
    begun, used = time.perf_counter(), time.process_time()
    for epoch in range(arguments["epochs"]):
        random.Random(epoch).shuffle(items)
        for first in range(0, len(items), 16):
            batch = items[first : first + 16]
            if shared:
                shared.get(batch, epoch=epoch)
            else:
                for item, data in zip(batch, origin.fetch(batch), strict=True):
                    decode(item, data, epoch)
    print(json.dumps({"seconds": time.perf_counter() - begun, "cpu": time.process_time() - used}), flush=True)
    sys.stdin.readline()


def two_jobs(items: int, epochs: int, *, shared: bool) -> dict[str, float]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=memory) as area:
        log = Path(folder) / "log"
        common = {"items": items, "epochs": epochs, "log": str(log), "folder": area, "shared": shared}
        jobs = [start("job", {**common, "job": job}) for job in range(2)]
        for job in jobs:
            job.stdout.readline()
        for job in jobs:
            job.stdin.write("\n")
            job.stdin.flush()
        results = [json.loads(job.stdout.readline()) for job in jobs]
        for job in jobs:
            job.communicate("\n")
        passes = items * epochs
        return {
            "fetches_an_item_and_epoch": sum(counted(log).values()) / passes,
            "decodes_an_item_and_epoch": sum(counted(Path(f"{log}.decodes")).values()) / passes,
            "cpu_s_of_both": sum(result["cpu"] for result in results),
            "seconds": max(result["seconds"] for result in results),
        }


def start(role: str, arguments: dict[str, Any]) -> Any:
    command = [sys.executable, __file__, "--role", role, "--arguments", json.dumps(arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# Importance: the tiers in this process, samples of 1 KiB, losses that spread as those of a half-trained model do.


def importance_of(samples: int, jobs: int, seed: int = 0) -> list[np.ndarray]:
    """Losses of each job: half common to all (some samples are hard for any model), half its own, scales apart."""
    draw = np.random.default_rng(seed)
    common = draw.normal(size=samples)
    return [
        10.0**job * np.exp(1.2 * (np.sqrt(0.5) * common + np.sqrt(0.5) * draw.normal(size=samples)))
        for job in range(jobs)
    ]


def lru_hits(order: Iterable[int], capacity: int) -> list[bool]:
    held: OrderedDict[int, None] = OrderedDict()
    found = []
    for item in order:
        found.append(item in held)
        held[item] = None
        held.move_to_end(item)
        if len(held) > capacity:
            held.popitem(last=False)
    return found


def keep_hits(order: Iterable[int], capacity: int) -> list[bool]:
    held: set[int] = set()
    found = []
    for item in order:
        found.append(item in held)
        if len(held) < capacity:
            held.add(item)
    return found


def importance_policy(samples: int, jobs: int, share: float, epochs: int, *, together: bool) -> dict[str, Any]:
    """Hits and reads of our importance cache, and the draws that it made; `together` combines the jobs' importance."""
    from ropewalk.load.cache.importance import combined
    from ropewalk.load.cache.packages import Packages
    from ropewalk.load.cache.sampled import HighRegion, Sampled

    items, origin = made(samples, 1024)
    room = round(samples * share) * 1024
    low_room = max(room // 10, jobs * 32 * 1024)
    values = importance_of(samples, jobs)
    with tempfile.TemporaryDirectory() as folder:
        high = HighRegion(origin, items, budget_bytes=room - low_room)
        caches = [
            Sampled(
                items,
                high,
                Packages(
                    origin, items, Path(folder) / str(job), package_bytes=32 * 1024, memory_bytes=low_room // jobs
                ),
                seed=job,
            )
            for job in range(jobs)
        ]
        drawn: list[list[int]] = []
        hits = draws_made = 0
        for epoch in range(epochs):
            shared = combined(values) if together else None
            orders = [
                cache.begin(epoch, values[job], count=samples, shared=shared).given for job, cache in enumerate(caches)
            ]
            before = _hits(high, caches)
            # The jobs run side by side: batches of 50 in turn.
            for first in range(0, samples, 50):
                for cache, order in zip(caches, orders, strict=True):
                    for sample in order[first : first + 50]:
                        cache.fetch(np.array([sample]))
                    drawn.append(order[first : first + 50].tolist())
            if epoch:
                hits += _hits(high, caches) - before
                draws_made += samples * jobs
        packages = [cache.low_counts() for cache in caches]
        return {
            "hit_rate": hits / draws_made,
            "random_reads": high.ram.counts().misses + sum(count.samples_collected for count in packages),
            "sequential_reads": sum(count.packages_read for count in packages),
            "draws": [sample for batch in drawn for sample in batch],
        }


def _hits(high: Any, caches: Sequence[Any]) -> int:
    return high.ram.counts().hits + sum(cache.low_counts().hits for cache in caches)


def importance(samples: int, epochs: int) -> dict[str, dict[str, Any]]:
    table = {}
    for jobs in (1, 3):
        plain = [order for job in range(jobs) for order in [accesses(samples, epochs, seed=job)]]
        in_turn = [s for f in range(0, samples * epochs, 50) for order in plain for s in order[f : f + 50]]
        for share in (0.1, 0.2, 0.4):
            ours = importance_policy(samples, jobs, share, epochs, together=True)
            apart = importance_policy(samples, jobs, share, epochs, together=False)
            draws = ours.pop("draws")
            del apart["draws"]
            row = {"importance": ours}
            if jobs > 1:
                row["importance, each job for itself"] = apart
            for name, order in (("plain order", in_turn), ("same draws", draws)):
                for policy, rule in (("lru", lru_hits), ("fill once", keep_hits)):
                    found = rule(order, round(samples * share))
                    later = found[samples * jobs :]
                    row[f"{policy}, {name}"] = {
                        "hit_rate": sum(later) / len(later),
                        "random_reads": len(found) - sum(found),
                        "sequential_reads": 0,
                    }
            table[f"{jobs} job{'s' * (jobs > 1)}, {share:.0%}"] = row
    return table


def belady(items: int) -> dict[float, float]:
    from ropewalk.load.cache.simulate import hits

    order = np.array(accesses(items, EPOCHS), np.int64)
    return {share: float(hits(order, capacity=round(items * share), rule="belady")[items:].mean()) for share in SHARES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--items", type=int)
    parser.add_argument("--role", choices=["node", "job"])
    parser.add_argument("--arguments", type=json.loads)
    options = parser.parse_args()
    if options.role:
        {"node": role_node, "job": role_job}[options.role](options.arguments)
        return
    if options.contender:
        contend = CONTENDERS[options.contender]
        print(json.dumps({str(share): contend(options.items, share) for share in SHARES}))
        return

    from harness import call, environment, finish

    items = 1000 if options.quick else 5000
    peer = environment("caches", ["numpy", "cachetools==6.2.1", "diskcache==5.6.3"], constrained=False)
    pythons = {who: peer if who.startswith(("cachetools", "diskcache")) else sys.executable for who in CONTENDERS}
    found = {}
    for who, python in pythons.items():
        count = items // 5 if "disk" in who else items
        found[who] = call(python, __file__, "--contender", who, "--items", str(count))
    bound = belady(items)
    print("hit rate after the first epoch     " + "  ".join(f"{share:>6.0%}" for share in SHARES) + "   items/s")
    print(f"{'Belady bound':<34} " + "  ".join(f"{bound[share]:6.3f}" for share in SHARES))
    for who, rows in found.items():
        rates = "  ".join(f"{rows[str(share)]['hits']:6.3f}" for share in SHARES)
        print(f"{who:<34} {rates}   {np.median([row['items_per_s'] for row in rows.values()]):,.0f}")

    scale = 1 if options.quick else 4
    nodes = partitioned(250 * scale, 3, killed=False)
    survivors = partitioned(250 * scale, 6, killed=True)
    shared, apart = (two_jobs(100 * scale, 3, shared=value) for value in (True, False))
    for name, row in (("four nodes", nodes), ("one killed", survivors), ("two jobs, shared", shared), ("apart", apart)):
        print(f"{name:<18} " + "  ".join(f"{key} {value:,.4g}" for key, value in row.items()))
    table = importance(1000 * scale, 5)
    for case, row in table.items():
        for who, figures in row.items():
            print(f"{case:<13} {who:<32} " + "  ".join(f"{key} {value:,.4g}" for key, value in figures.items()))

    def row_of(who: str) -> dict[str, float]:
        rows = found[who]
        rates = {f"hits_{share * 100:.0f}": rows[str(share)]["hits"] for share in SHARES}
        return {**rates, "items_per_s": float(np.median([row["items_per_s"] for row in rows.values()]))}

    peers = {who: row_of(who) for who in found if not who.startswith("ropewalk")}
    ratios = {}
    for who in peers:
        mine = found["ropewalk-disk" if who == "diskcache" else "ropewalk"]
        ratios[who] = min(mine[str(s)]["hits"] / max(found[who][str(s)]["hits"], 1e-9) for s in SHARES)
    quality = {
        "belady": bound,
        "worst_of_belady": min(found["ropewalk"][str(share)]["hits"] / bound[share] for share in SHARES),
        "disk": row_of("ropewalk-disk"),
        "disk_items_per_s_of_diskcache": row_of("ropewalk-disk")["items_per_s"] / peers["diskcache"]["items_per_s"],
        "four_nodes": nodes,
        "one_node_killed": survivors,
        "two_jobs_shared": shared,
        "two_jobs_apart": apart,
        "importance": table,
    }
    finish("cache", ours=row_of("ropewalk"), peers=peers, ratios=ratios, quality=quality)


if __name__ == "__main__":
    main()
