"""Settings of the cache between training and where its data lies. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """Memory, disk and other nodes in front of data that is read by pieces. No setting here changes a batch."""

    policy: Annotated[Literal["keep", "lru", "once"], CONTINUES] = "keep"
    """`keep`: fill once, never evict; the best there is when every epoch reads everything in another order. `lru`: drop
    what was not read the longest; for data of which recent parts come again soon. `once`: hold nothing."""
    ram_bytes: Annotated[int, Range(least=0), CONTINUES] = 1 << 30
    """Memory of each process for pieces; 0 for none. Beside a disk tier that keeps, memory holds what the disk does
    not: pieces on the disk are in the operating system's page cache anyway."""
    pinned: Annotated[bool, CONTINUES] = False
    """Takes `ram_bytes` at once as page-locked memory where there is a GPU, which then copies from it directly; needs
    `policy = "keep"`."""
    disk: Annotated[str, CONTINUES] = ""
    """Folder for pieces on a local disk, kept from run to run and shared by all processes of the machine; empty for
    none."""
    disk_bytes: Annotated[int, Range(least=0), CONTINUES] = 64 << 30
    """Quota of that folder, over all processes."""
    peers: Annotated[tuple[str, ...], CONTINUES] = ()
    """Addresses ("host:port") of all nodes, this one included, in the same order on each: every piece is held by one of
    them and fetched from its origin once a cluster."""
    listen: Annotated[str, CONTINUES] = ""
    """Where this node's pieces are offered, when that is not its own entry in `peers` ("0.0.0.0:7070"). Jobs that share
    a cache without being one run, one job a node, name their own entry here."""
    secret_file: Annotated[str, CONTINUES] = ""
    """File with the secret that nodes prove to each other, 16 bytes or more, that only its owner can read (mode 0600);
    needed unless all of them are on this machine."""
    peer_timeout_s: Annotated[float, Range(above=0), CONTINUES] = 10.0
    """A peer that is silent for so long is left alone for a while, and its pieces come from elsewhere."""
    staging: Annotated[str, CONTINUES] = ""
    """Folder, best on /dev/shm, in which `jobs` runs on this machine that train on one corpus in one order (the same
    seed, sequence length and mixture) leave fetched and unpacked pieces for each other: one fetch and one unpacking per
    piece and epoch for all. Empty for none. For shards that are compressed or behind a URL. A run that ends or dies
    holds no other up. Name a `disk` too where the store should be asked once for all epochs."""
    staging_bytes: Annotated[int, Range(least=0), CONTINUES] = 4 << 30
    """Bound of that folder; the job that is ahead waits when it is full."""
    jobs: Annotated[int, Range(least=1), CONTINUES] = 1
    """How many runs share `staging`."""
    job: Annotated[int, Range(least=0), CONTINUES] = 0
    """Which of them this is, from 0."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Contradictions among these settings."""
        if self.pinned and self.policy != "keep":
            yield "pinned", f'pinned memory is never dropped; set `policy = "keep"`, not "{self.policy}"'
        if self.listen and not self.peers:
            yield "listen", "nobody would ask; name all nodes in `peers`, or leave `listen` out"
        if self.job >= self.jobs:
            yield "job", f"jobs are counted from 0 to {self.jobs - 1}; it is {self.job}"
        if self.jobs > 1 and not self.staging:
            yield "staging", f"{self.jobs} jobs need a folder to share; name one, best on /dev/shm"
        if self.staging and self.jobs == 1:
            yield "jobs", "one run shares with nobody; set how many runs use `staging`, or leave `staging` out"
