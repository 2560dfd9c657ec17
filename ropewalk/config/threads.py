"""How threads of a training process wait for each other; set before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

SPINS = "1000"
"""Turns a thread of GNU OpenMP waits busily before it sleeps. The default, hundreds of thousands, suits a machine of
one's own and ruins a shared one: two trainings on two cores ran 1.4 and 3.6 times faster with this value, and alone
none was slower (docs/log.md)."""


YIELD = "OMPI_MCA_mpi_yield_when_idle"
"""Makes a process that waits in Open MPI offer its core to others between two looks. Else it keeps the core busy, which
on a shared machine slows those that it waits for: a sum of 0.5 MB over two processes on two busy cores took 14 ms, and
2 to 5 ms with this."""


CONNECTIONS = "32"
"""Queues between the host and a GPU. Streams that share one wait for each other: a receive of a pipeline that spins
would stop what its sender waits for. The default, 8, is fewer than the streams of a plan of several axes."""


def share_cores(environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes idle threads and processes leave their core to others, and the streams of a GPU independent; a value that
    the user has set stays."""
    environment.setdefault("GOMP_SPINCOUNT", SPINS)
    environment.setdefault(YIELD, "1")
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS)


def one_thread(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process whose matrix products take one thread."""
    return {**environment, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
