"""The tiers of a run at work: what is saved is also copied to memory, to peers and to a store, in the background.

Copies are a gain, never a condition: whatever goes wrong with one is told, and the run goes on with those it has.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ropewalk.base.errors import RopewalkError, StorageError
from ropewalk.base.network import read_secret
from ropewalk.base.seal import read_sealed, write_sealed
from ropewalk.config.ranks import Ranks

from ..commit import Attempt
from ..config import Tiers
from ..format import CheckpointManifest, step_of
from ..read.tiered_load import Check, DiskSource, Offered
from ..run_state import TensorShard
from ..write.save import write_tensor_files
from ..write.task_graph import lower_priority
from .gap_scheduler import Tier, TrafficLearner, TransferForecast, TransferGate, TransferLink, choose, intervals
from .memory_tier import MemorySource, MemoryTier
from .peer_tier import Peer, PeerServer, PeerSource, place_replicas
from .remote_tier import RemoteSource, RemoteTier
from .tier import CopySource, ShardKey, plain_name

_log = logging.getLogger(__name__)

IDENTITY = "copies.json"
IDENTITY_FORMAT = 2
"""Beside the checkpoints: the name of the run among its copies."""
SLICE_BYTES = 512 << 10
"""Of a transfer before there is a profile to choose by."""
SLICE_S = 1e-4
"""What a slice costs beside its bytes: Python, a system call, an acknowledgement within a cluster."""
_CHOOSE_EVERY = 16
"""Transfers between choices of the slice; each simulates thousands of chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyResult:
    """How one copy went."""

    step: int
    tier: str
    """`memory`, `peer HOST:PORT` or `remote`."""
    bytes: int
    measured_s: float
    predicted_s: float | None
    """What the model of the traffic said before; None for the first."""
    waited_s: float
    """For gaps in the traffic of the steps."""
    slice_bytes: int
    error: str = ""
    """Why it is not there; empty when it is."""


class TierWriter:
    """The copies of one rank's states."""

    def __init__(
        self,
        settings: Tiers,
        folder: Path,
        *,
        ranks: Ranks | None = None,
        run: str = "",
        attempt: str = "",
        keep_every: int = 0,
    ) -> None:
        """`folder`: where the checkpoints of the run are. `run`: what `run_name` is on rank 0. `attempt`: a name that
        all ranks of this launch share and no other launch has. One rank alone makes both itself."""
        self._settings, self._folder, self._keep_every = settings, folder, keep_every
        self._ranks = ranks or Ranks()
        assert (attempt and (run or settings.run)) or self._ranks.world == 1, (
            "ranks whose shards fit together share these names"
        )
        self.run = run or run_name(settings, folder)
        self._attempt = attempt or secrets.token_hex(4)
        self.learner = TrafficLearner()
        self._done: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
        self._ways: dict[str, _Way] = {}
        self._memory, self._server = self._open_memory()
        self._peers = self._open_peers()
        self._remote = RemoteTier(settings.remote, self.run) if settings.remote else None
        self._stored, self._sent_step = 0, -1
        self._replicating: _Latest[ShardKey] = _Latest(self._replicate, "replicate")
        self._uploading: _Latest[Path] = _Latest(self._upload, "upload")

    def keep(
        self,
        manifest: CheckpointManifest,
        parts: Mapping[str, Iterable[TensorShard]],
        *,
        tokenizer: bytes,
        size: int,
        digests: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Copies a snapshot to memory, and has it sent to peers. For the thread that persists it."""
        if self._memory is None:
            return
        ranks = self._ranks
        key = ShardKey(run=self.run, step=manifest.step, rank=ranks.rank, world=ranks.world, attempt=self._attempt)
        attempt = Attempt(rank=ranks.rank, world=ranks.world)
        start, error = time.perf_counter(), ""
        try:
            self._memory.keep(
                key,
                manifest,
                size=size,
                write=lambda place, disk: write_tensor_files(
                    place, parts, tokenizer=tokenizer, disk=disk, attempt=attempt, digests=digests
                ),
            )
        except (RopewalkError, OSError) as failure:
            error = str(failure)
        self._tell("memory", key.step, size, seconds=time.perf_counter() - start, error=error)
        if not error and self._peers:
            self._replicating.submit(key)

    def stored(self, path: Path) -> None:
        """A checkpoint has become durable on the disk."""
        if self._remote and self._is_due(step_of(path)):
            self._sent_step = step_of(path)
            self._uploading.submit(path)
        self._stored += 1

    @property
    def in_use(self) -> list[Path]:
        """Checkpoints on the disk that are on their way to the store, or next."""
        return self._uploading.jobs()

    def finished(self) -> list[CopyResult]:
        """What has ended since the last call, in order."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def offered(self, *, check: Check = lambda *_: None) -> contextlib.closing[Offered]:
        """What all places have together; see `Offered`."""
        sources: list[CopySource] = []
        if self._memory:
            sources.append(MemorySource(self._memory, self.run))
        sources += [PeerSource(peer, self.run) for peer in self._others()]
        sources.append(DiskSource(self._folder, self.run, renames=self._ranks.rank == 0))
        if self._remote:
            sources.append(RemoteSource(self._remote, self.run))
        rank = self._ranks.rank
        scratch = self._memory.scratch(self.run, rank) if self._memory else self._folder / f"restore-{rank}.partial"
        return contextlib.closing(Offered(sources, scratch=scratch, check=check))

    def settle(self) -> None:
        """Waits until nothing is on its way."""
        self._replicating.drain()
        self._uploading.drain()

    def end(self) -> None:
        """The run has ended well: what is on its way to the store arrives, copies in memory go."""
        self.settle()
        if self._memory:
            self._memory.drop(self.run)
        for peer in self._peers:
            try:
                peer.drop(self.run)
            except StorageError as error:
                self._tell(f"peer {peer.address}", 0, 0, seconds=0.0, error=str(error))

    def close(self) -> None:
        """Stops serving peers, and begins no further copies."""
        self._replicating.close()
        self._uploading.close()
        if self._server:
            self._server.close()

    def _open_memory(self) -> tuple[MemoryTier | None, PeerServer | None]:
        settings = self._settings
        if settings.memory == "off":
            return None, None
        memory = MemoryTier(memory_folder(settings.folder), limit_bytes=settings.memory_bytes)
        memory.reclaim(own=self.run, idle_s=3600 * settings.idle_hours)
        server = None
        if settings.peers and self._ranks.local_rank == 0:
            address = settings.peers[self._machine]
            server = PeerServer(
                memory,
                address,
                secret=_secret(settings),
                timeout_s=settings.timeout_s,
            )
        return memory, server

    def _open_peers(self) -> list[Peer]:
        """Those that hold this machine's states."""
        settings = self._settings
        if not settings.peers:
            return []
        holders = place_replicas(
            len(settings.peers), copies=settings.copies, kind=settings.placement, racks=settings.racks
        )[self._machine]
        return [self._peer(number) for number in holders[1:]]

    def _others(self) -> list[Peer]:
        """All other machines, those that hold this one's states first."""
        known = {peer.address for peer in self._peers}
        machines = range(len(self._settings.peers))
        rest = [self._peer(n) for n in machines if n != self._machine and self._settings.peers[n] not in known]
        return [*self._peers, *rest]

    @property
    def _machine(self) -> int:
        return self._ranks.rank * len(self._settings.peers) // self._ranks.world

    def _peer(self, number: int) -> Peer:
        settings = self._settings
        return Peer(
            settings.peers[number],
            secret=_secret(settings),
            timeout_s=settings.timeout_s,
        )

    def _replicate(self, key: ShardKey) -> None:
        assert self._memory
        with self._memory.pinned(key) as folder:
            try:
                size = sum(file.stat().st_size for file in folder.iterdir())
            except FileNotFoundError:
                # It waited for the one before, which took longer than two newer copies.
                for peer in self._peers:
                    self._tell(f"peer {peer.address}", key.step, 0, seconds=0.0, error="newer copies took its place")
                return
            for peer in self._peers:
                self._carry(f"peer {peer.address}", key.step, size, functools.partial(_put, peer, key, folder))

    def _upload(self, path: Path) -> None:
        remote = self._remote
        assert remote
        # Peers first: served one after the other, both have their copies sooner on average than side by side, and a
        # peer's is the one that a restart looks for.
        self._replicating.drain()
        step = step_of(path)
        size = sum(file.stat().st_size for file in path.iterdir())
        self._carry("remote", step, size, lambda gate: remote.upload(path, gate=gate).bytes)
        try:
            remote.retain(keep_last=self._settings.remote_keep_last, keep_every=self._keep_every)
        except StorageError as error:
            self._tell("remote", step, 0, seconds=0.0, error=str(error))

    def _is_due(self, step: int) -> bool:
        """Whether the checkpoint of `step` goes to the store: every so many, or as often as the network allows."""
        if self._settings.remote_every:
            return self._stored % self._settings.remote_every == 0
        profile, remote = self.learner.profile(), self._ways.get("remote")
        if self._sent_step < 0 or profile is None or remote is None or not remote.forecast.bytes_per_s:
            return True
        tiers = [Tier(name=name, link="network") for name in self._ways]
        links = {"network": TransferLink(bytes_per_s=remote.rate or math.inf, shared=True)}
        steps = intervals(tiers, links, profile, size=remote.size, chunk=remote.slice_bytes)["remote"]
        return step - self._sent_step >= steps

    def _carry(self, tier: str, step: int, size: int, work: Callable[[TransferGate], int]) -> None:
        """One transfer through the gaps of the step, beside what was expected of it."""
        way = self._ways.setdefault(tier, _Way(self._settings.network_bytes_per_s))
        gate, predicted = way.gate(self.learner, size)
        start, error, sent = time.perf_counter(), "", 0
        try:
            sent = work(gate)
        except (RopewalkError, OSError) as failure:
            error = str(failure)
        seconds = time.perf_counter() - start
        if not error:
            way.forecast.saw(sent, seconds=seconds, waited_s=gate.waited_s)
        self._tell(
            tier,
            step,
            sent,
            seconds=seconds,
            error=error,
            predicted_s=predicted,
            waited_s=gate.waited_s,
            slice_bytes=gate.slice_bytes,
        )

    def _tell(
        self,
        tier: str,
        step: int,
        size: int,
        *,
        seconds: float,
        error: str = "",
        predicted_s: float | None = None,
        waited_s: float = 0.0,
        slice_bytes: int = 0,
    ) -> None:
        copied = CopyResult(
            step=step,
            tier=tier,
            bytes=0 if error else size,
            measured_s=seconds,
            predicted_s=predicted_s,
            waited_s=waited_s,
            slice_bytes=slice_bytes,
            error=error,
        )
        self._done.put(copied)


def _put(peer: Peer, key: ShardKey, folder: Path, gate: TransferGate) -> int:
    return peer.put(key, folder, gate=gate).bytes


def memory_folder(parent: str) -> Path:
    """The memory tier of this user below `parent`; other users have their own."""
    return Path(parent) / f"ropewalk-{os.getuid()}"


@dataclass(slots=True)
class _Way:
    """What is known of the way to one tier."""

    most_bytes_per_s: float | None
    forecast: TransferForecast = field(default_factory=TransferForecast)
    slice_bytes: int = SLICE_BYTES
    transfers: int = 0
    size: int = 0
    """Of the last transfer."""

    @property
    def rate(self) -> float | None:
        """Bytes a second that it carries, or may; None before the first transfer."""
        known = self.forecast.bytes_per_s
        return min(known, self.most_bytes_per_s) if known and self.most_bytes_per_s else known

    def gate(self, learner: TrafficLearner, size: int) -> tuple[TransferGate, float | None]:
        """For the next transfer of `size` bytes; and the seconds that it is expected to take."""
        profile, rate, self.size = learner.profile(), self.rate, size
        if profile and profile.busy and rate and self.transfers % _CHOOSE_EVERY == 1:
            links = {"way": TransferLink(bytes_per_s=rate, latency_s=SLICE_S, shared=True)}
            self.slice_bytes = choose([Tier(name="it", link="way")], links, profile, size=size).chunk_bytes
        self.transfers += 1
        gate = TransferGate(
            slice_bytes=self.slice_bytes,
            bytes_per_s=self.most_bytes_per_s,
            expected_bytes_per_s=rate,
            learner=learner,
        )
        return gate, self.forecast.seconds(size, profile, chunk=self.slice_bytes, most=self.most_bytes_per_s)


J = TypeVar("J")


class _Latest(Generic[J]):
    """A thread that does one job at a time; of those that wait, only the newest is done."""

    def __init__(self, work: Callable[[J], None], name: str) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._waiting: J | None = None
        self._doing: J | None = None
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: J) -> None:
        """Has a job done next."""
        with self._changed:
            self._waiting = job
            self._changed.notify_all()

    def jobs(self) -> list[J]:
        """The one that is being done and the one that is next."""
        with self._changed:
            return [job for job in (self._doing, self._waiting) if job is not None]

    def drain(self) -> None:
        """Waits until there is nothing to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and self._doing is None)

    def close(self) -> None:
        """Does no further jobs; the one under way goes on as long as the process does."""
        with self._changed:
            self._closed, self._waiting = True, None
            self._changed.notify_all()

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                if self._waiting is None:
                    return
                job = self._doing = self._waiting
                self._waiting = None
            try:
                self._work(job)
            except Exception:
                # A bug in a copy must not end the run that it is a copy of, nor hide.
                _log.exception("copying %s", job)
            finally:
                with self._changed:
                    self._doing = None
                    self._changed.notify_all()


def run_name(settings: Tiers, folder: Path) -> str:
    """The name of the run among its copies: the recipe's, or one made the first time. A run directory that was copied
    gets a new one."""
    if settings.run:
        return plain_name(settings.run)
    path, here = folder / IDENTITY, str(folder.resolve())
    told = _read_identity(path) if path.exists() else {}
    if told.get("folder") != here:
        if told:
            _log.warning("%s: this run was made in %s; here its copies begin anew", path, told.get("folder"))
        told = {"format": IDENTITY_FORMAT, "run": f"run-{secrets.token_hex(8)}", "folder": here}
        write_sealed(path, told)
    return plain_name(told["run"])


def _read_identity(path: Path) -> dict[str, Any]:
    return read_sealed(
        path,
        what="name of the run among its copies",
        remedy="restore it from a copy, or name the run in `checkpoint.tiers.run` as its copies do, or move it away: "
        "copies then begin anew",
        current=IDENTITY_FORMAT,
        sealed_since=2,
        upgrades={1: dict},
    )


def _secret(settings: Tiers) -> bytes:
    return read_secret(settings.secret_file, setting="checkpoint.tiers.secret_file")
