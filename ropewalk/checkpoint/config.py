"""Settings of checkpoints and their tiers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """Copies in addition to the disk: in shared memory, in the memory of other machines, in an object store."""

    memory: Annotated[Literal["off", "on"], CONTINUES] = "off"
    """`on`: every saved state is also copied to shared memory, which takes twice its size; a restarted process loads it
    from there in seconds. The memory is freed when the run ends normally."""
    memory_every_steps: Annotated[int, Range(least=0), CONTINUES] = 0
    """Steps between copies that go to memory and peers only, in addition to every checkpoint; 0: none. Skipped while a
    save is in progress, so that no step waits for the disk."""
    folder: Annotated[str, CONTINUES] = "/dev/shm"
    """Folder in an in-memory file system for the copies."""
    memory_bytes: Annotated[int, Range(above=0), CONTINUES] | None = None
    """Maximum memory on a machine, copies for others included. Not set: half of the file system."""
    idle_hours: Annotated[float, Range(above=0), CONTINUES] = 24.0
    """Hours without writes after which the copies of other runs are deleted, at the start of a run."""
    peers: Annotated[tuple[str, ...], CONTINUES] = ()
    """`host:port` of every machine of the run, in rank order. Each listens at its own address and keeps copies for
    others in memory. Needs `memory` and `secret_file`."""
    copies: Annotated[int, Range(least=2), CONTINUES] = 2
    """Replicas of each state in memory, including the machine's own. Used with `peers` only."""
    placement: Annotated[Literal["groups", "ring"], CONTINUES] = "groups"
    """Placement of replicas. `groups` survives more combinations of lost machines; `ring` spreads the load of a
    restore.
    Used with `peers` only."""
    racks: Annotated[tuple[str, ...], CONTINUES] = ()
    """Failure domain (rack) of each of `peers`; replicas go to another rack where possible."""
    secret_file: Annotated[str, CONTINUES] = ""
    """File with a secret of at least 16 bytes that all machines of the run share and only its owner can read (mode
    0600)."""
    timeout_s: Annotated[float, Range(above=0), CONTINUES] = 30.0
    """Seconds without a reply before a peer is marked down."""
    remote: Annotated[str, CONTINUES] = ""
    """fsspec URL of an object store (`s3://bucket/folder`) to which durable checkpoints are uploaded; empty: none."""
    remote_every: Annotated[int, Range(least=0), CONTINUES] = 1
    """Upload every n-th checkpoint; 0: as often as the measured network allows besides steps and peers. During an
    upload newer checkpoints wait, and the newest is uploaded next."""
    remote_keep_last: Annotated[int, Range(least=1), CONTINUES] = 2
    """Checkpoints kept in the object store, in addition to those of `keep_every_steps`."""
    network_bytes_per_s: Annotated[float, Range(above=0), CONTINUES] | None = None
    """Maximum network bandwidth of copies to peers, and of uploads, each. Not set: no limit."""
    run: Annotated[str, CONTINUES] = ""
    """Name of the run in its copies. Not set: random and stored in the run directory, so that a deleted, copied or
    moved
    directory starts without copies. Set it to find the copies after the directory was lost with its machine."""

    @property
    def used(self) -> bool:
        """Whether any tier is used."""
        return self.memory == "on" or bool(self.remote)

    def check(self) -> Iterator[tuple[str, str]]:
        if self.memory_every_steps and self.memory == "off":
            yield "memory", '`memory_every_steps` makes copies in memory; set `memory` to "on"'
        if self.peers:
            if self.memory == "off":
                yield "memory", '`peers` keep replicas in memory; set `memory` to "on"'
            if not self.secret_file:
                yield "secret_file", "`peers` authenticate each other with a shared secret; name its file"
            if len(self.peers) < self.copies:
                yield "copies", f"{len(self.peers)} peers cannot hold {self.copies} replicas; lower `copies`"
            for peer in self.peers:
                if not peer.rpartition(":")[0] or not peer.rpartition(":")[2].isdigit():
                    yield "peers", f'"{peer}" is not an address; write `host:port`'
        if self.racks and len(self.racks) != len(self.peers):
            yield "racks", f"{len(self.racks)} racks for {len(self.peers)} peers; name one per peer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """When to save checkpoints, and which ones to keep."""

    save_every: Annotated[Literal["steps", "auto"], CONTINUES] = "steps"
    """`steps`: every `save_every_steps`. `auto`: as often as `max_overhead` allows at the measured cost of a save, and
    more often where frequent failures make that worthwhile. The first save comes after ten steps. Each decision is
    printed with its figures and kept in `checkpoints/frequency.json`."""
    save_every_steps: Annotated[int, Range(least=1), CONTINUES] = 100
    """Steps between checkpoints; the last step is always saved. Not used by `auto`."""
    max_overhead: Annotated[float, Range(above=0, below=1), CONTINUES] = 0.02
    """Maximum fraction of training time spent on saves: the time they block training, plus the slowdown of steps while
    a save is written. Exceeded only where failures demand it. Used by `auto` only."""
    mtbf_hours: Annotated[float, Range(above=0), CONTINUES] | None = None
    """Mean time between failures of the whole run, if known. Not set: 50,000 hours per GPU. A start after a killed or
    crashed one counts as a failure; from the first failure on, the run's own mean is used where it is shorter. Used by
    `auto` only."""
    write: Annotated[Literal["background", "blocking"], CONTINUES] = "background"
    """`background`: the state is copied during the next step and written while training continues; needs memory for two
    copies. `blocking`: training waits until the checkpoint is on disk."""
    bytes_per_s: Annotated[float, Range(above=0), CONTINUES] | None = None
    """Maximum disk bandwidth of background writing, in bytes per second. Not set: no limit."""
    threads: Annotated[int, Range(least=1), CONTINUES] = 2
    """Threads that hash, compress and write a checkpoint; training has priority. The files do not depend on the number;
    more than two help where compression is slower than the disk."""
    compression: Annotated[Literal["off", "on", "auto"], CONTINUES] = "off"
    """Lossless compression (byte planes and zstd). `auto`: compress where the measured speed of disk and processor
    makes
    the save durable sooner. Only ropewalk reads compressed files."""
    failures: Annotated[int, Range(least=0), CONTINUES] = 3
    """Maximum number of consecutive failed saves (full or broken disk) before the run ends; each one is reported."""
    timeout_s: Annotated[float, Range(above=0), CONTINUES] = 600.0
    """Seconds that one disk call (a write of 4 MiB, a sync) may take before the disk counts as hanging; saves then fail
    instead of blocking training."""
    keep_last: Annotated[int, Range(least=1), CONTINUES] = 2
    """Newest checkpoints to keep; older ones are deleted after a new one is durable. With the schedule `wsd`, the
    checkpoint at the end of the stable part is kept as well."""
    keep_every_steps: Annotated[int, Range(least=0), CONTINUES] = 0
    """Checkpoints of steps divisible by this number are kept forever; 0: none."""
    keep_verified: Annotated[int, Range(least=0), CONTINUES] = 1
    """Checkpoints that must have been read back completely and found intact before any other is deleted; the newest of
    them are kept even beyond `keep_last`. Each is read once, in the background. 0: no verification."""
    tiers: Tiers = field(default_factory=Tiers)
    """Copies in memory, in the memory of other machines and in an object store."""
