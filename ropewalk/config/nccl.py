"""Settings of torch's NCCL backend, made before the first process group."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
DUMPS = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def own_error_handling(environment: MutableMapping[str, str] = os.environ) -> None:
    """Keeps torch's NCCL watchdog from aborting a process whose peer died; values that the user has set stay.

    The rendezvous ends every rank with the first error and a status that launchers know, and `train.faults.hang_s` ends
    one that hangs. torch's watchdog sees the broken connection in the same second and would end the process by SIGABRT
    meanwhile, either at once or when it dumps what it recorded for two groups ("Broken promise"): each was seen of one
    in about fifteen ranks (H200, torch 2.11).
    """
    environment.setdefault(ERRORS, "0")
    environment.setdefault(DUMPS, "0")
