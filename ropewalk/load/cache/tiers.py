"""The chain of tiers that a recipe asks for: memory, disk, the other nodes, the origin."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ropewalk.base.errors import ConfigError, Problem
from ropewalk.base.network import read_secret
from ropewalk.base.private import open_private
from ropewalk.store.items import Fetch, Item

from .config import Cache
from .coordinated import Coordinated
from .disk import Disk
from .flights import Data
from .peers import Peers
from .policies import make_policy
from .ram import Ram
from .serve import Server
from .shared import Prepare, Shared
from .stats import Counts


class Tiers:
    """A chain as one Fetch, with the figures of each tier."""

    def __init__(
        self,
        first: Fetch,
        named: dict[str, Ram | Disk | Peers],
        server: Server | None,
        coordinated: Coordinated | None = None,
    ) -> None:
        self._first = first
        self.named = named
        self._server = server
        self.coordinated = coordinated
        """The staging area that jobs share, before all tiers."""

    @property
    def address(self) -> str | None:
        """Where other nodes ask this one."""
        return self._server.address if self._server else None

    def fetch(self, items: Sequence[Item]) -> list[Data]:
        """The items from the nearest tier that holds them."""
        return self._first.fetch(items)

    def counts(self) -> dict[str, Counts]:
        """Figures by tier, the nearest first: "ram", "disk", "peers"."""
        return {name: tier.counts() for name, tier in self.named.items()}

    def lines(self) -> list[str]:
        """The figures, for people."""
        staged = [self.coordinated.line()] if self.coordinated else []
        return [_line(name, counts) for name, counts in self.counts().items()] + staged

    def close(self) -> None:
        """Stops serving others, then closes all tiers and the origin."""
        if self._server:
            self._server.close()
        self._first.close()


def open_tiers(settings: Cache, origin: Fetch, *, roots: Sequence[str] = (), rank: int = 0, world: int = 1) -> Tiers:
    """The tiers of `settings` in front of `origin`, for process `rank` of `world`.

    With peers, the first process of each node holds the node's share and answers the others, for files below `roots`
    only; the other processes of the node ask it.
    """
    if not settings.peers:
        return Tiers(*_local(settings, origin), None)
    me, serves = _node_of(settings, rank=rank, world=world)
    named = settings.secret_file
    secret = read_secret(named, setting="load.cache.secret_file") if named else b""
    first, tiers = _local(settings, origin) if serves else (origin, {})
    server = Server(first, listen=settings.listen or me, roots=roots, secret=secret) if serves else None
    peers = Peers(
        first,
        origin,
        nodes=settings.peers,
        me=me if serves else None,
        secret=secret,
        timeout_s=settings.peer_timeout_s,
    )
    return Tiers(peers, {**tiers, "peers": peers}, server)


def caching(settings: Cache | None, *, files: Iterable[str], rank: int = 0, world: int = 1) -> Callable[[Fetch], Fetch]:
    """What puts the tiers of `settings` in front of an origin; without settings the origin stays as it is.

    Other nodes are answered for the folders in which `files` lie.
    """
    if settings is None:
        return lambda origin: origin
    roots = sorted({file.rpartition("/")[0] or "." for file in files})

    def cached(origin: Fetch) -> Tiers:
        tiers = open_tiers(settings, origin, roots=roots, rank=rank, world=world)
        return coordinate(settings, tiers, rank=rank, world=world) if settings.staging else tiers

    return cached


def coordinate(settings: Cache, tiers: Tiers, *, rank: int = 0, world: int = 1) -> Tiers:
    """`tiers` behind the staging area of `settings`. Ranks of a job read rows of their own, so that each shares an area
    with the same rank of the other jobs."""
    area = Path(settings.staging) / f"rank-{rank}-of-{world}" if world > 1 else Path(settings.staging)
    if world > 1:
        os.close(open_private(Path(settings.staging), setting="load.cache.staging"))
    own = dataclasses.replace(settings, staging=str(area), staging_bytes=settings.staging_bytes // world)
    coordinated = Coordinated(tiers, lambda behind, prepare: open_shared(own, behind, prepare=prepare))
    return Tiers(coordinated, tiers.named, None, coordinated)


def open_shared(settings: Cache, fetch: Fetch, *, prepare: Prepare) -> Shared:
    """The staging area of `settings`: samples prepared once for all jobs of the machine."""
    return Shared(
        Path(settings.staging),
        fetch,
        prepare=prepare,
        job=settings.job,
        jobs=settings.jobs,
        budget_bytes=settings.staging_bytes,
    )


def _node_of(settings: Cache, *, rank: int, world: int) -> tuple[str, bool]:
    """The address of this process's node, and whether it is the one that serves there.

    Ranks are numbered node by node. Jobs that are worlds of their own, one a node, say who they are by `listen`.
    """
    nodes = len(settings.peers)
    if settings.listen in settings.peers:
        return settings.listen, rank == 0
    if world % nodes:
        remedy = "name every node once, or set `load.cache.listen` to this node's entry"
        raise ConfigError([Problem("load.cache.peers", f"{nodes} nodes do not share {world} processes evenly", remedy)])
    return settings.peers[rank * nodes // world], rank % (world // nodes) == 0


def _local(settings: Cache, origin: Fetch) -> tuple[Fetch, dict[str, Ram | Disk | Peers]]:
    """This machine's own tiers."""
    named: dict[str, Ram | Disk | Peers] = {}
    first = origin
    disk = None
    if settings.disk and settings.policy != "once":
        first = disk = Disk(
            first, Path(settings.disk), budget_bytes=settings.disk_bytes, policy=make_policy(settings.policy)
        )
        named["disk"] = disk
    if settings.ram_bytes and settings.policy != "once":
        # What is never dropped from the disk need not be held twice: the two budgets add up.
        elsewhere = disk.holds if disk is not None and settings.policy == "keep" else None
        first = ram = Ram(
            first,
            budget_bytes=settings.ram_bytes,
            policy=make_policy(settings.policy),
            pin=settings.pinned,
            elsewhere=elsewhere,
        )
        named = {"ram": ram, **named}
    return first, named


def _line(name: str, counts: Counts) -> str:
    parts = [
        f"{name}: {counts.hits:,} of {counts.hits + counts.misses:,} items ({counts.hit_rate:.1%})",
        f"{counts.hit_bytes / 1e9:.2f} GB",
    ]
    told = {"dropped": counts.dropped, "damaged": counts.damaged, "not kept": counts.refused, "failed": counts.failures}
    parts += [f"{number:,} {word}" for word, number in told.items() if number]
    return ", ".join(parts)
