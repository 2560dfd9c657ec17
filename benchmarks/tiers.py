"""How fast a state comes back, by where its copy lies: own memory, a peer's memory, the disk, a remote store.

    make bench NAME=tiers          about a minute; `--quick` with a smaller state

The state is what one rank holds. The peer is a process of its own, reached over TCP on this machine. The remote store
is a folder behind fsspec that gives 20 MB/s, a rank's share of 20 Gbit/s for 16 machines of 8 GPUs (the setting of
Gemini, Wang et al. 2023), with 20 ms before the first byte. What the disk holds is in the page cache. Every restore
finds the newest step, fetches every file, checks every chunk and ends with the state in memory; its bits are compared.
Then copies are sent to the peer through the gaps of a step that is busy for 40 % of its time, and the model's forecast
is compared with the clock.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import register_implementation
from harness import ROOT, finish

sys.path.insert(0, str(ROOT))

from ropewalk.checkpoint.commit import Attempt
from ropewalk.checkpoint.read.load_latest import restore
from ropewalk.checkpoint.read.tiered_load import DiskSource
from ropewalk.checkpoint.run_state import State, groups_of, local_shards, manifest_of
from ropewalk.checkpoint.tiers.gap_scheduler import TrafficLearner, TransferForecast, TransferGate
from ropewalk.checkpoint.tiers.memory_tier import MemorySource, MemoryTier
from ropewalk.checkpoint.tiers.peer_tier import Peer, PeerServer, PeerSource
from ropewalk.checkpoint.tiers.remote_tier import RemoteSource, RemoteTier
from ropewalk.checkpoint.tiers.tier import CopySource, ShardKey
from ropewalk.checkpoint.write.save import save, write_tensor_files
from ropewalk.checkpoint.write.shard_writer import RateLimiter
from ropewalk.model.config import Model
from ropewalk.model.spec import resolve

SECRET = b"a secret of the benchmark"
BYTES_PER_S, FIRST_BYTE_S = 20e6, 0.02
BLOCK = 1 << 20
STEP_S, BUSY = 0.05, 0.4


class Throttled(LocalFileSystem):
    """A folder that gives its files as slowly as an object store gives one stream."""

    protocol = ("throttled",)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("throttled://").rstrip("/")

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        time.sleep(FIRST_BYTE_S)
        with open(self._strip_protocol(rpath), "rb") as source, open(lpath, "wb") as target:
            while block := source.read(BLOCK):
                target.write(block)
                with _turn:
                    time.sleep(_pace.delay(len(block)))


_turn = threading.Lock()
_pace = RateLimiter(BYTES_PER_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", type=Path)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    torch.set_num_threads(1)
    register_implementation("throttled", Throttled)
    size = (128 if options.quick else 512) << 20
    with tempfile.TemporaryDirectory(dir=shared()) as fast, tempfile.TemporaryDirectory() as slow:
        peer_process, address = start_peer(Path(fast) / "peer")
        try:
            figures, quality = measure(size, Path(fast), Path(slow), Peer(address, secret=SECRET))
        finally:
            peer_process.kill()
            peer_process.wait()
    ours = {
        "peer_memory_s": figures["peer"],
        "own_memory_s": figures["own memory"],
        "cached_disk_s": figures["disk"],
        "state_MB": size / 1e6,
    }
    quality["peer memory is 10 times as fast as a remote of, MB/s"] = round(size / figures["peer"] / 10 / 1e6)
    ratios = {"remote": figures["remote"] / figures["peer"]}
    finish("tiers", ours=ours, peers={"remote": {"restore_s": figures["remote"]}}, ratios=ratios, quality=quality)


def measure(size: int, fast: Path, slow: Path, peer: Peer) -> tuple[dict[str, float], dict[str, Any]]:
    state = make_state(size)
    memory, remote = MemoryTier(fast / "own", limit_bytes=4 * size), RemoteTier(f"throttled://{slow}/store", "run")
    keep_s = [keep(memory, state, step) for step in (1, 2, 3, state.step)]
    key = memory.shards("run")[-1]
    sent = peer.put(key, memory.path(key))
    path = save(slow / "disk", state)
    remote.upload(path)
    places: dict[str, CopySource] = {
        "own memory": MemorySource(memory, "run"),
        "peer": PeerSource(peer, "run"),
        "disk": DiskSource(slow / "disk", "run"),
        "remote": RemoteSource(remote, "run"),
    }
    figures, same = {}, True
    for name, place in places.items():
        times = []
        for _ in range(1 if name == "remote" else 5):
            start = time.perf_counter()
            found, _ = restore([place], scratch=fast / "scratch")
            times.append(time.perf_counter() - start)
            same &= found is not None and all(torch.equal(found.model[k], v) for k, v in state.model.items())
        figures[name] = statistics.median(times)
    quality = {
        "every restore has the same bits": same,
        "copy to own memory, first, s/GB": round(keep_s[0] / size * 1e9, 3),
        "copy to own memory, pages used again, s/GB": round(keep_s[-1] / size * 1e9, 3),
        "copy to the peer, GB/s": round(sent.bytes / sent.seconds / 1e9, 3),
        "remote, MB/s": BYTES_PER_S / 1e6,
        **forecasts(memory, key, peer),
    }
    return figures, quality


def forecasts(memory: MemoryTier, key: ShardKey, peer: Peer) -> dict[str, float]:
    """Sends a shard through the gaps of a simulated step, again and again; how far off the model was."""
    learner, forecast, stop = TrafficLearner(), TransferForecast(), threading.Event()

    def steps() -> None:
        while not stop.is_set():
            learner.step()
            with learner.busy():
                time.sleep(BUSY * STEP_S)
            time.sleep((1 - BUSY) * STEP_S)

    thread = threading.Thread(target=steps)
    thread.start()
    time.sleep(20 * STEP_S)
    errors = []
    for _ in range(6):
        gate = TransferGate(slice_bytes=1 << 20, expected_bytes_per_s=forecast.bytes_per_s, learner=learner)
        predicted = forecast.seconds(
            sum(file.stat().st_size for file in memory.path(key).iterdir()), learner.traffic(), chunk=1 << 20
        )
        sent = peer.put(key, memory.path(key), gate=gate)
        forecast.add(sent.bytes, seconds=sent.seconds, waited_s=gate.waited_s)
        if predicted is not None:
            errors.append(abs(predicted - sent.seconds) / sent.seconds)
    stop.set()
    thread.join()
    return {"traffic model, median error": round(statistics.median(errors), 3)}


def keep(memory: MemoryTier, state: State, step: int) -> float:
    """Copies the state to memory; the seconds it takes."""
    parts = {group: list(local_shards(tensors)) for group, tensors in groups_of(state).items()}
    start = time.perf_counter()
    memory.keep(
        ShardKey(run="run", step=step),
        manifest_of(state),
        size=sum(part.local.nbytes for group in parts.values() for part in group),
        write=lambda place, disk: write_tensor_files(
            place, parts, tokenizer=state.tokenizer, disk=disk, attempt=Attempt()
        ),
    )
    return time.perf_counter() - start


def make_state(size: int) -> State:
    """Random weights and two moments."""
    rows = size // 3 // 4 // 1024 // 8
    draw = torch.Generator().manual_seed(0)
    weights = {f"w{number}": torch.randn(rows, 1024, generator=draw) for number in range(8)}
    moments = {f"{kind}/{name}": t.clone() for kind in ("exp_avg", "exp_avg_sq") for name, t in weights.items()}
    spec = resolve(Model(width=8, heads=1), vocabulary=3, sequence_length=4)
    return State(step=4, tokens=0, seed=0, spec=spec, data={}, model=weights, optimizer=moments, tokenizer=b"{}")


def start_peer(folder: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(folder)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout
    return process, process.stdout.readline().strip()


def serve(folder: Path) -> None:
    """A machine that keeps copies, until its standard input ends."""
    server = PeerServer(MemoryTier(folder), "127.0.0.1:0", secret=SECRET)
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


def shared() -> str | None:
    """A file system in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()
