"""Local disk as a tier: a folder of items within a quota, shared by all processes of the machine that open it.

    items/3f/3f9a….item    the bytes of an item, then what it is and their xxh3 (32 bytes)

An item appears by a rename, so it is whole or not there. Its checksum is verified when it is written, and when a
process reads it for the first time or after the file was written again; a damaged file is dropped and fetched again.
Reading needs no lock: a file that another process drops stays readable for who has it open. When the quota is met or
storage refuses, items are handed on without being kept: a cache never stops a run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import xxhash

from ropewalk.base.errors import DamagedFile
from ropewalk.base.files import PARTIAL, open_regular, point
from ropewalk.store.items import Fetch, Item

from .flights import Data, Flights
from .folder import Claim, SharedFolder, write_all
from .policies import Keep, Policy
from .stats import Counts, Stats

_log = logging.getLogger(__name__)
_TRAILER = struct.Struct("<8sQQQ")
_MAGIC = b"rwitem01"


class Disk:
    """Items as files under `folder`, in front of `behind`.

    Opening continues what is there. Two processes that miss an item at the same moment fetch it once: the second
    waits up to `patience_s` for the first. `sync` makes each file durable, which is only of use where a power loss is
    likelier than a second fetch is dear: a torn file is found by its checksum anyway.
    """

    def __init__(
        self,
        behind: Fetch,
        folder: Path,
        *,
        budget_bytes: int,
        policy: Policy | None = None,
        sync: bool = False,
        patience_s: float = 60.0,
    ) -> None:
        self._behind = behind
        self._items = folder / "items"
        self._policy = Keep() if policy is None else policy
        self._policy_lock = threading.Lock()
        self._sync = sync
        self._patience_s = patience_s
        self._verified: dict[int, tuple[int, int]] = {}
        """Time and inode of the files whose checksum was right."""
        self._stats = Stats()
        self._flights = Flights(self._stats)
        self._warned = False
        self._folder = SharedFolder(folder, limit_bytes=budget_bytes, tidy=self._tidy)
        for _, key, size in sorted((when, key, size) for key, size, when in self._files()):
            self._policy.kept(key, size=size)

    @property
    def used_bytes(self) -> int:
        """Bytes of all items in the folder, whoever wrote them."""
        return self._folder.used_bytes

    def holds(self, item: Item) -> bool:
        """Whether the item is in the folder now."""
        return self._path(item.key).exists()

    def fetch(self, items: Sequence[Item]) -> list[Data]:
        """The items' bytes; those not in the folder come from behind in one call, one fetch a machine."""
        return self._flights.fetch(items, held=self._find, behind=self._fetch_behind)

    def counts(self) -> Counts:
        """What happened so far in this process."""
        return self._stats.counts()

    def close(self) -> None:
        """Gives the lease on the folder back and closes what is behind; the items stay."""
        self._folder.close()
        self._behind.close()

    def _path(self, key: int) -> Path:
        name = f"{key:016x}"
        return self._items / name[:2] / f"{name}.item"

    def _find(self, key: int, item: Item) -> Data | None:
        path = self._path(key)
        try:
            with open_regular(path) as file:
                stamp, data = _stamp(file.fileno()), file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedFile as error:
            _log.warning("%s", error)
            return None
        except OSError as error:
            _log.warning("%s: %s; the item is fetched again", path, error)
            self._forget(key, damaged=True)
            return None
        body = memoryview(data)[: -_TRAILER.size]
        state = _state(item, body, data[-_TRAILER.size :], known=self._verified.get(key) == stamp)
        if state == "good":
            with self._policy_lock:
                # What another process has put here is told to our policy when we first meet it.
                if key not in self._verified:
                    self._policy.kept(key, size=len(data))
                self._policy.used(key)
            self._verified[key] = stamp
            return body
        if state == "damaged":
            _log.warning("%s: not what was written; the item is fetched again", path)
        self._forget(key, damaged=state == "damaged")
        return None

    def _fetch_behind(self, missing: list[tuple[int, Item]]) -> list[Data]:
        """Fetches what nobody else is fetching, then takes the rest from the folder, where others have put it."""
        data: dict[int, Data] = {}
        claims: dict[int, Claim] = {}
        mine: list[tuple[int, Item]] = []
        try:
            for key, item in missing:
                if self._wants(key, item):
                    claim = self._folder.claim(f"{key:016x}")
                    if claim is None:
                        continue
                    claims[key] = claim
                    found = self._find(key, item)
                    if found is not None:
                        data[key] = found
                        continue
                mine.append((key, item))
            if mine:
                for (key, item), value in zip(mine, self._behind.fetch([item for _, item in mine]), strict=True):
                    data[key] = value
                    self._keep(key, item, value)
        finally:
            for claim in claims.values():
                claim.release()
        rest = [(key, item) for key, item in missing if key not in data]
        for key, item in rest:
            self._folder.wait(f"{key:016x}", patience_s=self._patience_s)
            found = self._find(key, item)
            if found is not None:
                data[key] = found
        left = [(key, item) for key, item in rest if key not in data]
        if left:
            data.update(zip([key for key, _ in left], self._behind.fetch([item for _, item in left]), strict=True))
        return [data[key] for key, _ in missing]

    def _wants(self, key: int, item: Item) -> bool:
        with self._policy_lock:
            return self._policy.victims(key, size=_on_disk(item), free=self._folder.free_bytes) is not None

    def _keep(self, key: int, item: Item, data: Data) -> None:
        """Writes `data` into the folder if the policy wants it there."""
        item.checked(data)
        if not self._take_room(key, item):
            return
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{PARTIAL}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            point("cache.reserved")
            with open(partial, "wb", buffering=0) as file:
                trailer = _TRAILER.pack(_MAGIC, _identity(item), len(data), xxhash.xxh3_64_intdigest(data))
                write_all(file.fileno(), data)
                write_all(file.fileno(), trailer)
                if self._sync:
                    os.fsync(file.fileno())
                stamp = _stamp(file.fileno())
            point("cache.written")
            with self._folder.locked():
                if path.exists():
                    self._folder.add(-_on_disk(item))
                    partial.unlink()
                else:
                    os.replace(partial, path)
            point("cache.committed")
        except OSError as error:
            self._refuse(item, partial, error)
            return
        self._verified[key] = stamp
        with self._policy_lock:
            self._policy.kept(key, size=_on_disk(item))
        with self._stats as counts:
            counts.kept += 1

    def _take_room(self, key: int, item: Item) -> bool:
        with self._folder.locked(), self._policy_lock:
            victims = self._policy.victims(key, size=_on_disk(item), free=self._folder.free_bytes)
            if victims is None:
                return False
            for victim in victims:
                self._drop(victim)
            # Another process may have dropped some of them first and used the room.
            if self._folder.free_bytes < _on_disk(item):
                return False
            self._folder.add(_on_disk(item))
        with self._stats as counts:
            counts.dropped += len(victims)
        return True

    def _refuse(self, item: Item, partial: Path, error: OSError) -> None:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        with self._folder.locked():
            self._folder.add(-_on_disk(item))
        with self._stats as counts:
            counts.refused += 1
        if not self._warned:
            self._warned = True
            _log.warning("%s: %s; items that do not fit are fetched again each time", self._folder.path, error)

    def _forget(self, key: int, *, damaged: bool) -> None:
        with self._folder.locked(), self._policy_lock:
            self._drop(key)
        self._verified.pop(key, None)
        if damaged:
            with self._stats as counts:
                counts.damaged += 1

    def _drop(self, key: int) -> None:
        """Removes the file and its bytes from the count, once among all processes; inside both locks."""
        self._policy.dropped(key)
        path = self._path(key)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s: cannot be removed: %s", path, error)
            return
        self._folder.add(-size)

    def _files(self) -> list[tuple[int, int, float]]:
        """Key, size and time of each item in the folder."""
        found = []
        for path in self._items.glob("*/*.item"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                status = path.stat()
                found.append((int(path.stem, 16), status.st_size, status.st_mtime))
        return found

    def _tidy(self) -> int:
        for path in self._items.glob(f"*/*.item.*{PARTIAL}"):
            path.unlink()
        return sum(size for _, size, _ in self._files())


def _on_disk(item: Item) -> int:
    return len(item) + _TRAILER.size


def _identity(item: Item) -> int:
    """Tells apart two items whose keys are equal by chance: independent of the key."""
    return xxhash.xxh3_64_intdigest(f"{item.file}\0{item.start}\0{item.stop}".encode(), seed=1)


def _state(item: Item, body: memoryview, trailer: bytes, *, known: bool) -> Literal["good", "damaged", "other"]:
    """Whether these are the bytes; "other" are those of another item, or of an earlier version of the file. Of a file
    that is `known` to be whole the bytes are not hashed again."""
    if len(trailer) != _TRAILER.size:
        return "damaged"
    magic, identity, size, checksum = _TRAILER.unpack(trailer)
    if magic != _MAGIC or size != len(body):
        return "damaged"
    if identity != _identity(item) or item.checksum not in (None, checksum):
        return "other"
    return "good" if known or xxhash.xxh3_64_intdigest(body) == checksum else "damaged"


def _stamp(descriptor: int) -> tuple[int, int]:
    """What changes whenever a file is written."""
    status = os.fstat(descriptor)
    return status.st_mtime_ns, status.st_ino
