"""Several jobs on one machine, one fetch and one preparation of each item an epoch (coordinated prep of CoorDL).

A search over hyper-parameters runs k jobs on the same data; each would decode and augment every image, k times the same
work. Here whoever comes first to an item prepares it and stages the result in a folder, best on /dev/shm; the others
take it from there, and the last one clears it away. Augmentation is keyed by (seed, epoch, document), so that jobs with
one seed ask for the same result.

A job that is ahead waits for the others when the area is full (see `staging`). A job that died holds nobody up: what
only it had yet to read is cleared when room is needed. When nobody can go on (jobs that read in different orders may
fill the area with what the others do not need yet), or when a wait lasts longer than `patience_s`, a job prepares for
itself alone.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.store.items import Fetch, Item

from .flights import Data
from .folder import Claim, until
from .staging import Staging

Prepare = Callable[[Item, Data, int], Data]
"""Item, its bytes and the epoch to the prepared bytes: the same for every job."""

_LOOK_EVERY_S = 0.02


@dataclass(slots=True)
class SharedCounts:
    """What one job did in the area."""

    prepared: int = 0
    """Items fetched and prepared here, for all."""
    taken: int = 0
    """Items that another job had prepared."""
    alone: int = 0
    """Items prepared for this job only, because there was no room or no patience left, or nobody else."""
    waited_s: float = 0.0
    """Time spent waiting for others, to prepare or to make room."""


class Shared:
    """The prepared items of all jobs, as job number `job` of `jobs` reads them."""

    def __init__(
        self,
        folder: Path,
        fetch: Fetch,
        *,
        prepare: Prepare,
        job: int,
        jobs: int,
        budget_bytes: int,
        patience_s: float = 60.0,
    ) -> None:
        """`budget_bytes` bounds what is staged; a few batches of prepared items for each job are enough.

        Jobs that have not come yet are waited for, once, up to `patience_s`.
        """
        self._fetch = fetch
        self._prepare = prepare
        self._staging = Staging(folder, job=job, jobs=jobs, budget_bytes=budget_bytes, patience_s=patience_s)
        self._job = job
        self._jobs = jobs
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._counts = SharedCounts()

    def get(self, items: Sequence[Item], *, epoch: int) -> list[Data]:
        """The prepared items of an epoch. A job asks for an item once an epoch.

        Jobs in step share the work of a batch: each begins at another place of it.
        """
        names = [f"{epoch}-{item.key:016x}" for item in items]
        batch = _Batch(dict(zip(names, items, strict=True)), epoch=epoch, first=self._job * len(items) // self._jobs)
        self._staging.begin(epoch)
        try:
            while not batch.done:
                if not self._advance(batch) and not self._wait(batch):
                    self._go_alone(batch)
        finally:
            batch.release()
            self._staging.end()
        return [batch.data[name] for name in names]

    def at(self, epoch: int) -> Epoch:
        """The area as a Fetch of prepared items, for one epoch."""
        return Epoch(self, epoch)

    def counts(self) -> SharedCounts:
        """What this job did so far."""
        with self._lock:
            return dataclasses.replace(self._counts)

    @property
    def staged_bytes(self) -> int:
        """Bytes in the area, over all jobs."""
        return self._staging.used_bytes

    def close(self) -> None:
        """Leaves the area: others need not wait for this job any more. Closes what is behind."""
        self._staging.close()
        self._fetch.close()

    def _advance(self, batch: _Batch) -> bool:
        """Takes what others have staged, stages what waits for room, makes what nobody else makes."""
        before = batch.progress
        for name in batch.left():
            staged = self._staging.take(name)
            if staged is not None:
                batch.data[name] = staged
                self._count(taken=1)
        for name in [*batch.unstaged]:
            self._stage(batch, name)
        if not batch.unstaged:
            self._make(batch)
        return batch.progress > before

    def _stage(self, batch: _Batch, name: str) -> None:
        outcome = self._staging.put(name, batch.data[name])
        if outcome != "full":
            self._staging.release(batch.unstaged.pop(name))
            self._count(prepared=outcome == "staged", alone=outcome == "unwanted")

    def _make(self, batch: _Batch) -> None:
        """Claims a job's share of what is left, fetches it in one request, prepares each and tries to stage it."""
        claims: dict[str, Claim] = {}
        try:
            for name in batch.left():
                claim = self._staging.claim(name) if len(claims) * self._jobs < len(batch.items) else None
                if claim is not None:
                    claims[name] = claim
            if not claims:
                return
            fetched = self._fetch.fetch([batch.items[name] for name in claims])
            for name, raw in zip([*claims], fetched, strict=True):
                batch.data[name] = self._prepare(batch.items[name], raw, batch.epoch)
                batch.unstaged[name] = claims.pop(name)
                self._stage(batch, name)
        finally:
            for claim in claims.values():
                claim.release()

    def _wait(self, batch: _Batch) -> bool:
        """Waits until the batch comes forward; False when no other job will help, or not in time."""
        start = time.perf_counter()
        seen, again_at = -1, 0.0

        def look() -> bool:
            """Whether there is no more to wait for. A look costs a hundred times what it costs to see that nothing
            has changed; only a death changes nothing, so now and then one looks all the same."""
            nonlocal seen, again_at
            changes, now = self._staging.changes, time.monotonic()
            if changes == seen and now < again_at:
                return False
            seen, again_at = changes, now + _LOOK_EVERY_S
            if self._advance(batch):
                return True
            self._staging.looked(changes)
            return self._staging.is_stuck()

        before = batch.progress
        until(look, patience_s=self._patience_s)
        self._staging.going()
        self._count(waited_s=time.perf_counter() - start)
        return batch.progress > before

    def _go_alone(self, batch: _Batch) -> None:
        """Gives up staging what finds no room; else prepares one item that another job has in its hands."""
        for name in [*batch.unstaged] or batch.left()[:1]:
            # Noted before the claim is given back: who stages the item next must not wait for us to read it.
            self._staging.had(name)
            if name in batch.unstaged:
                self._staging.release(batch.unstaged.pop(name))
            else:
                raw = self._fetch.fetch([batch.items[name]])[0]
                batch.data[name] = self._prepare(batch.items[name], raw, batch.epoch)
            self._count(alone=1)

    def _count(self, *, prepared: int = 0, taken: int = 0, alone: int = 0, waited_s: float = 0.0) -> None:
        with self._lock:
            self._counts.prepared += prepared
            self._counts.taken += taken
            self._counts.alone += alone
            self._counts.waited_s += waited_s


class _Batch:
    """How far one call has come."""

    def __init__(self, items: dict[str, Item], *, epoch: int, first: int) -> None:
        self.items = items
        self.epoch = epoch
        self.data: dict[str, Data] = {}
        self.unstaged: dict[str, Claim] = {}
        """Made by us, waiting for room; the claims keep others from making them too."""
        self._turn = [*items][first:] + [*items][:first]

    def left(self) -> list[str]:
        """What this job still lacks, its own share first."""
        return [name for name in self._turn if name not in self.data]

    @property
    def progress(self) -> int:
        """Grows with everything that comes in or is staged."""
        return 2 * len(self.data) - len(self.unstaged)

    @property
    def done(self) -> bool:
        return len(self.data) == len(self.items) and not self.unstaged

    def release(self) -> None:
        """Gives back the claims that an error left behind."""
        for claim in self.unstaged.values():
            claim.release()


class Epoch:
    """The area in one epoch: a Fetch whose items are prepared."""

    def __init__(self, shared: Shared, epoch: int) -> None:
        self._shared = shared
        self._epoch = epoch

    def fetch(self, items: Sequence[Item]) -> list[Data]:
        """The prepared items."""
        return self._shared.get(items, epoch=self._epoch)

    def close(self) -> None:
        """Nothing: the area stays open for the next epoch."""
