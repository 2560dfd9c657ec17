"""Settings of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """Copies beside those on the disk: in memory that outlives the process, in other machines' memory, in a store."""

    memory: Annotated[Literal["off", "on"], CONTINUES] = "off"
    """`on`: every saved state is also kept in shared memory, twice its size, from where a restarted process takes it
    in seconds. It goes when the run ends well."""
    memory_every_steps: Annotated[int, Range(least=0), CONTINUES] = 0
    """Steps between copies in memory and at peers that do not go to the disk, beside those that do; 0: none. Left out
    while a save is on its way, so that no step waits for the disk."""
    folder: Annotated[str, CONTINUES] = "/dev/shm"
    """Where that memory is: a file system in memory."""
    memory_bytes: Annotated[int, Range(above=0), CONTINUES] | None = None
    """The most that it may take on a machine, copies for others included; not set: half of the file system."""
    idle_hours: Annotated[float, Range(above=0), CONTINUES] = 24.0
    """Memory of other runs in which nothing was written for so long is cleared away when this one starts."""
    peers: Annotated[tuple[str, ...], CONTINUES] = ()
    """`host:port` of every machine of the run, in the order of its ranks: each keeps copies for others in its memory
    and listens at its own. Needs `memory` and `secret_file`."""
    copies: Annotated[int, Range(least=2), CONTINUES] = 2
    """Machines that hold each state in memory, its own included. Used with `peers` only."""
    placement: Annotated[Literal["groups", "ring"], CONTINUES] = "groups"
    """`groups` survives more sets of lost machines, `ring` spreads what must be fetched. Used with `peers` only."""
    racks: Annotated[tuple[str, ...], CONTINUES] = ()
    """The rack (failure domain) of each of `peers`; copies go to another one where that can be."""
    secret_file: Annotated[str, CONTINUES] = ""
    """File with a secret that all machines of the run share, 16 bytes or more, that only its owner can read (mode
    0600)."""
    timeout_s: Annotated[float, Range(above=0), CONTINUES] = 30.0
    """Seconds of silence after which a peer is given up."""
    remote: Annotated[str, CONTINUES] = ""
    """URL of a store that fsspec knows (`s3://bucket/folder`), to which checkpoints are sent when they are durable on
    the disk; empty: none."""
    remote_every: Annotated[int, Range(least=0), CONTINUES] = 1
    """Every how many checkpoints one goes there; 0: as often as the network allows beside the steps and the peers, by
    measurement. While one is on its way, newer ones wait and the newest goes next."""
    remote_keep_last: Annotated[int, Range(least=1), CONTINUES] = 2
    """Checkpoints kept there, beside those of steps that `keep_every_steps` divides."""
    network_bytes_per_s: Annotated[float, Range(above=0), CONTINUES] | None = None
    """The most that copies to peers, and those to the store, may take of the network; not set: all of it."""
    run: Annotated[str, CONTINUES] = ""
    """Name of the run among its copies. Not set: made at random and kept in the run directory, so one that is deleted,
    copied or moved begins anew; set it to find the copies again after the directory was lost with its machine."""

    @property
    def used(self) -> bool:
        """Whether there are any."""
        return self.memory == "on" or bool(self.remote)

    def check(self) -> Iterator[tuple[str, str]]:
        if self.memory_every_steps and self.memory == "off":
            yield "memory", 'copies every `memory_every_steps` lie in memory; set it to "on"'
        if self.peers:
            if self.memory == "off":
                yield "memory", 'copies for `peers` lie in memory; set it to "on"'
            if not self.secret_file:
                yield "secret_file", "machines prove to their `peers` that they belong to the run; name a file"
            if len(self.peers) < self.copies:
                yield "copies", f"{len(self.peers)} machines cannot hold {self.copies} copies; lower it"
            for peer in self.peers:
                if not peer.rpartition(":")[0] or not peer.rpartition(":")[2].isdigit():
                    yield "peers", f'"{peer}" is no address; write `host:port`'
        if self.racks and len(self.racks) != len(self.peers):
            yield "racks", f"{len(self.racks)} racks for {len(self.peers)} peers; name one for each"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """When state is saved and what is kept."""

    save_every: Annotated[Literal["steps", "auto"], CONTINUES] = "steps"
    """`steps`: every `save_every_steps`. `auto`: as often as `max_overhead` allows at the measured cost of a save, and
    more often where failures are so frequent that more saves lose less time. The first save comes after ten steps. Each
    decision is printed with its numbers, and what was learned is kept in `checkpoints/frequency.json`."""
    save_every_steps: Annotated[int, Range(least=1), CONTINUES] = 100
    """Steps between checkpoints; the last step is always saved. Not used by `auto`."""
    max_overhead: Annotated[float, Range(above=0, below=1), CONTINUES] = 0.02
    """Maximum fraction of training time that saves may cost: the time for which they block training, and that by which
    steps are slower while they are written. Exceeded only where failures demand it. Used by `auto` only."""
    mtbf_hours: Annotated[float, Range(above=0), CONTINUES] | None = None
    """Hours between failures of the whole run, where they are known. Not set: 50,000 hours of one GPU, divided by
    their number. A launch after one that was killed or crashed counts as a failure; from the first failure on, the
    run's own mean is used where it is shorter. Used by `auto` only."""
    write: Annotated[Literal["background", "blocking"], CONTINUES] = "background"
    """`background`: the state is copied aside during the next step and written while training goes on; needs memory
    for two copies of it. `blocking`: training waits until it is on disk."""
    bytes_per_s: Annotated[float, Range(above=0), CONTINUES] | None = None
    """The most that background writing may take of the disk, in bytes a second; not set: all of it."""
    threads: Annotated[int, Range(least=1), CONTINUES] = 2
    """Threads that hash, compress and write a checkpoint beside training, which has priority. The files are the same
    for any number; more than two help where compression is slower than the disk."""
    compression: Annotated[Literal["off", "on", "auto"], CONTINUES] = "off"
    """Lossless compression (byte planes and zstd) of what is saved. `auto`: where measured
    disk and processor make a save durable sooner by it. Only ropewalk reads compressed files."""
    failures: Annotated[int, Range(least=0), CONTINUES] = 3
    """Saves in a row that may fail (a full or broken disk) before the run ends; each is told."""
    timeout_s: Annotated[float, Range(above=0), CONTINUES] = 600.0
    """Seconds that one call to the disk (a write of 4 MiB, a sync) may last before the disk counts as hanging: saves
    then fail instead of making training wait."""
    keep_last: Annotated[int, Range(least=1), CONTINUES] = 2
    """Checkpoints kept, newest first; older ones are deleted after a new one is durable. With the schedule `wsd`, that
    of the end of its stable part stays beside them."""
    keep_every_steps: Annotated[int, Range(least=0), CONTINUES] = 0
    """Checkpoints of steps that it divides are kept for good; 0: none."""
    keep_verified: Annotated[int, Range(least=0), CONTINUES] = 1
    """Checkpoints that have been read back, every byte, and found whole, before any other is deleted; the newest such
    stay even where `keep_last` says otherwise. Each is read once, in the background. 0: none is read."""
    tiers: Tiers = field(default_factory=Tiers)
    """Copies in memory, in other machines' memory and in a store."""
