"""Messages between the ranks of `doctor cluster`, through torch's TCPStore at the launcher's address.

The store needs neither the shared folder nor a process group, which are to be checked; a rank that does not answer is
recognised by its missing message.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from ropewalk.base.errors import UserError
from ropewalk.config.ranks import Ranks, store_address
from ropewalk.parallel import mpi

LOOK_EVERY_S = 0.02


class Control:
    """The messages of one launch. Only `wait` blocks for longer than a round trip."""

    def __init__(self, place: Ranks, *, timeout_s: float) -> None:
        self.rank, self.world = place.rank, place.world
        self._store = _open(place, timeout_s)
        self._prefix = f"ropewalk-doctor/{place.restart}"

    def post(self, key: str, value: Any) -> None:
        """Stores `value` as JSON under `key`."""
        self._store.set(f"{self._prefix}/{key}", json.dumps(value))

    def read(self, key: str) -> Any:
        """The value of `key`; None if there is none."""
        name = f"{self._prefix}/{key}"
        return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def count(self, key: str) -> int:
        """Increments a counter and returns its new value."""
        return int(self._store.add(f"{self._prefix}/{key}", 1))

    def wait(self, key: str, *, timeout_s: float, ended: Callable[[], bool] = lambda: False) -> Any:
        """The value of `key` as soon as there is one; None after `timeout_s` or when `ended`."""
        deadline = time.monotonic() + timeout_s
        while (found := self.read(key)) is None and time.monotonic() < deadline and not ended():
            time.sleep(LOOK_EVERY_S)
        return found

    def connect(self) -> Store:
        """Another connection to the store, for a process group, whose waits must not block this one."""
        # torch's own stub leaves it out.
        return self._store.clone()  # type: ignore[attr-defined]


def _open(place: Ranks, timeout_s: float) -> TCPStore:
    address, wait = store_address(place), datetime.timedelta(seconds=timeout_s)
    if address is None:
        return mpi.meet()
    serves = place.rank == 0 and not address.served
    try:
        return TCPStore(address.host, address.port, place.world, serves, timeout=wait, wait_for_workers=False)
    except dist.DistError as error:
        where = f"{address.host}:{address.port}"
        if serves:
            raise UserError(
                f"rank 0 cannot listen at {where} for the rendezvous: {error}; set MASTER_ADDR to this host "
                "and MASTER_PORT to a free port"
            ) from None
        raise UserError(
            f"rank {place.rank} did not reach the rendezvous at {where} within {timeout_s:.0f} s; check "
            "that rank 0 was started, MASTER_ADDR and MASTER_PORT, and the firewall between the hosts"
        ) from None
