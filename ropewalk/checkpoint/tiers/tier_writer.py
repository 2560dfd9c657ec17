"""Copies saved states to the other tiers (memory, peers, an object store) in the background.

A failed copy is reported and never ends the run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ropewalk.base.errors import RopewalkError, StorageError
from ropewalk.base.network import read_secret
from ropewalk.base.seal import read_sealed, write_sealed
from ropewalk.config.ranks import Ranks

from ..commit import Attempt
from ..config import Tiers
from ..format import CheckpointManifest, step_of
from ..read.load import Check
from ..read.tiered_load import DiskSource, TierCandidates
from ..run_state import TensorShard
from ..write.save import write_tensor_files
from ..write.task_graph import lower_priority
from .gap_scheduler import TierLink, TrafficLearner, TransferGate, TransferLink, intervals
from .memory_tier import MemorySource, MemoryTier
from .peer_tier import Peer, PeerServer, PeerSource, place_replicas
from .remote_tier import RemoteSource, RemoteTier
from .tier import CopySource, ShardKey, plain_name

_log = logging.getLogger(__name__)

IDENTITY = "copies.json"
"""File beside the checkpoints with the name of the run in its copies."""
IDENTITY_FORMAT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyResult:
    """The outcome of one copy."""

    step: int
    tier: str
    """`memory`, `peer HOST:PORT` or `remote`."""
    bytes: int
    measured_s: float
    predicted_s: float | None
    """Prediction of the traffic model; None for the first copy."""
    waited_s: float
    """Seconds of waiting for gaps in the traffic of training."""
    slice_bytes: int
    error: str = ""
    """Why the copy failed; empty if it succeeded."""


class TierWriter:
    """Copies the states of one rank."""

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
        """`folder`: the checkpoints of the run. `run`: `run_name` of rank 0. `attempt`: a name unique to this launch,
        the same on all its ranks. A single rank makes both itself."""
        self._settings, self._folder, self._keep_every = settings, folder, keep_every
        self._ranks = ranks or Ranks()
        assert (attempt and (run or settings.run)) or self._ranks.world == 1, (
            "several ranks need a common run name and attempt"
        )
        self.run = run or run_name(settings, folder)
        self._attempt = attempt or secrets.token_hex(4)
        self.learner = TrafficLearner()
        self._done: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
        self._links: dict[str, TierLink] = {}
        self._memory, self._server = self._open_memory()
        self._peers = self._open_peers()
        self._remote = RemoteTier(settings.remote, self.run) if settings.remote else None
        self._stored, self._uploaded_step = 0, -1
        self._replicating: _LatestJob[ShardKey] = _LatestJob(self._replicate, "replicate")
        self._uploading: _LatestJob[Path] = _LatestJob(self._upload, "upload")

    def keep(
        self,
        manifest: CheckpointManifest,
        parts: Mapping[str, Iterable[TensorShard]],
        *,
        tokenizer: bytes,
        size: int,
        digests: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """Copies a snapshot to memory and queues it for the peers. Called by the thread that persists it."""
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
                write=lambda target, disk: write_tensor_files(
                    target, parts, tokenizer=tokenizer, disk=disk, attempt=attempt, digests=digests
                ),
            )
        except (RopewalkError, OSError) as failure:
            error = str(failure)
        self._record("memory", key.step, size, seconds=time.perf_counter() - start, error=error)
        if not error and self._peers:
            self._replicating.submit(key)

    def stored(self, path: Path) -> None:
        """Queues a checkpoint that became durable on disk for upload, if it is due."""
        if self._remote and self._is_upload_due(step_of(path)):
            self._uploaded_step = step_of(path)
            self._uploading.submit(path)
        self._stored += 1

    @property
    def in_use(self) -> list[Path]:
        """Checkpoints on disk that are being uploaded, or next in the queue."""
        return self._uploading.jobs()

    def finished(self) -> list[CopyResult]:
        """Copies that ended since the last call, in order."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def candidates(self, *, check: Check = lambda *_: None) -> contextlib.closing[TierCandidates]:
        """The states of the run in all tiers."""
        sources: list[CopySource] = []
        if self._memory:
            sources.append(MemorySource(self._memory, self.run))
        sources += [PeerSource(peer, self.run) for peer in self._all_peers()]
        sources.append(DiskSource(self._folder, self.run, renames=self._ranks.rank == 0))
        if self._remote:
            sources.append(RemoteSource(self._remote, self.run))
        rank = self._ranks.rank
        scratch = self._memory.scratch(self.run, rank) if self._memory else self._folder / f"restore-{rank}.partial"
        return contextlib.closing(TierCandidates(sources, scratch=scratch, check=check))

    def settle(self) -> None:
        """Waits until no copy is in progress."""
        self._replicating.drain()
        self._uploading.drain()

    def end(self) -> None:
        """Ends a run that finished: completes uploads and frees its copies in memory."""
        self.settle()
        if self._memory:
            self._memory.drop(self.run)
        for peer in self._peers:
            try:
                peer.drop(self.run)
            except StorageError as error:
                self._record(f"peer {peer.address}", 0, 0, seconds=0.0, error=str(error))

    def close(self) -> None:
        """Stops the server and starts no further copies."""
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
        """The peers that hold replicas of this machine."""
        settings = self._settings
        if not settings.peers:
            return []
        holders = place_replicas(
            len(settings.peers), copies=settings.copies, kind=settings.placement, racks=settings.racks
        )[self._machine]
        return [self._peer(number) for number in holders[1:]]

    def _all_peers(self) -> list[Peer]:
        """All other machines; those with replicas of this one first."""
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
                # The previous transfer took longer than two newer copies.
                for peer in self._peers:
                    self._record(f"peer {peer.address}", key.step, 0, seconds=0.0, error="newer copies took its place")
                return
            for peer in self._peers:
                self._transfer(f"peer {peer.address}", key.step, size, functools.partial(_put, peer, key, folder))

    def _upload(self, path: Path) -> None:
        remote = self._remote
        assert remote
        # Peers first: in sequence both tiers complete earlier on average than in parallel, and a restart reads from
        # peers first.
        self._replicating.drain()
        step = step_of(path)
        size = sum(file.stat().st_size for file in path.iterdir())
        self._transfer("remote", step, size, lambda gate: remote.upload(path, gate=gate).bytes)
        try:
            remote.retain(keep_last=self._settings.remote_keep_last, keep_every=self._keep_every)
        except StorageError as error:
            self._record("remote", step, 0, seconds=0.0, error=str(error))

    def _is_upload_due(self, step: int) -> bool:
        """Whether to upload the checkpoint of `step`: every `remote_every`-th, or as often as the network allows."""
        if self._settings.remote_every:
            return self._stored % self._settings.remote_every == 0
        traffic, remote = self.learner.traffic(), self._links.get("remote")
        if self._uploaded_step < 0 or traffic is None or remote is None or not remote.bytes_per_s:
            return True
        link = TransferLink(bytes_per_s=remote.bytes_per_s, shared=True)
        steps = intervals(list(self._links), link, traffic, size=remote.size, chunk=remote.slice_bytes)["remote"]
        return step - self._uploaded_step >= steps

    def _transfer(self, tier: str, step: int, size: int, work: Callable[[TransferGate], int]) -> None:
        """Runs one transfer through the gaps of the steps and records it next to its prediction."""
        link = self._links.setdefault(tier, TierLink(self._settings.network_bytes_per_s))
        gate, predicted = link.gate(self.learner, size)
        start, error, sent = time.perf_counter(), "", 0
        try:
            sent = work(gate)
        except (RopewalkError, OSError) as failure:
            error = str(failure)
        seconds = time.perf_counter() - start
        if not error:
            link.forecast.add(sent, seconds=seconds, waited_s=gate.waited_s)
        self._record(
            tier,
            step,
            sent,
            seconds=seconds,
            error=error,
            predicted_s=predicted,
            waited_s=gate.waited_s,
            slice_bytes=gate.slice_bytes,
        )

    def _record(
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
    """The memory tier of this user below `parent`."""
    return Path(parent) / f"ropewalk-{os.getuid()}"


J = TypeVar("J")


class _LatestJob(Generic[J]):
    """A thread that runs one job at a time; a newer job replaces the one that waits."""

    def __init__(self, work: Callable[[J], None], name: str) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._waiting: J | None = None
        self._doing: J | None = None
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: J) -> None:
        """Queues a job in place of the one that waits."""
        with self._changed:
            self._waiting = job
            self._changed.notify_all()

    def jobs(self) -> list[J]:
        """The running job and the waiting one."""
        with self._changed:
            return [job for job in (self._doing, self._waiting) if job is not None]

    def drain(self) -> None:
        """Waits until no job runs or waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and self._doing is None)

    def close(self) -> None:
        """Starts no further jobs; the running one continues while the process lives."""
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
                # A bug in a copy must not end the run, and must not go unnoticed.
                _log.exception("copying %s", job)
            finally:
                with self._changed:
                    self._doing = None
                    self._changed.notify_all()


def run_name(settings: Tiers, folder: Path) -> str:
    """The name of the run in its copies: from the recipe, or random and stored at the first start. A copied run
    directory
    gets a new name."""
    if settings.run:
        return plain_name(settings.run)
    path, here = folder / IDENTITY, str(folder.resolve())
    stored = _read_identity(path) if path.exists() else {}
    if stored.get("folder") != here:
        if stored:
            _log.warning("%s: this run was made in %s; here it starts without copies", path, stored.get("folder"))
        stored = {"format": IDENTITY_FORMAT, "run": f"run-{secrets.token_hex(8)}", "folder": here}
        write_sealed(path, stored)
    return plain_name(stored["run"])


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
