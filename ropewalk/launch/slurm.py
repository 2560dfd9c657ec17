"""A run as a Slurm job: a batch script that a person can read and change."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ropewalk.config.ranks import FIRST_PORT, PORTS

from .cluster_job import Job

WARNING_S = 120
"""How long before it ends a job is told so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSettings:
    """What only Slurm wants to know; empty leaves it to the cluster."""

    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    setup: Sequence[str] = ()
    """Lines that make `ropewalk` and `torchrun` available on every machine."""


def batch_script(job: Job, settings: SlurmSettings) -> str:
    """The script for `sbatch`."""
    exports = "\n".join(f"export {name}={value}" for name, value in job.environment.items())
    setup = "\n".join(settings.setup) or "# The environment of the shell that submits is used; or activate one here."
    return f"""\
#!/bin/bash
# {job.name}: {job}, {job.processes} processes. Submit with sbatch; submit again to continue.
{"".join(f"#SBATCH --{option}{chr(10)}" for option in _options(job, settings))}\
set -euo pipefail

{setup}

# The processes find each other at the first machine, at a port that other jobs on it do not use.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))
{exports}

# One torchrun a machine. A process that dies makes all start again from the newest checkpoint, {job.max_restarts} times
# at most. The first process prepares what is not yet prepared while the others wait; `ropewalk prepare` beforehand, on
# a machine without GPUs, saves their time.
srun --kill-on-bad-exit=1 torchrun \\
    --nnodes={job.nodes} \\
    --nproc-per-node={job.processes_per_node} \\
    --max-restarts={job.max_restarts} \\
    --rdzv-backend=c10d \\
    --rdzv-endpoint="$head:$port" \\
    --rdzv-id="$SLURM_JOB_ID" \\
    --no-python \\
    {shlex.join(job.command)}
"""


def _options(job: Job, settings: SlurmSettings) -> Iterator[str]:
    yield f"job-name={job.name}"
    yield f"nodes={job.nodes}"
    yield "ntasks-per-node=1"
    if job.gpus_per_node:
        yield f"gpus-per-node={job.gpus_per_node}"
    yield "exclusive"
    yield f"time={settings.time}"
    if settings.partition:
        yield f"partition={settings.partition}"
    if settings.account:
        yield f"account={settings.account}"
    # Every process then saves the step at hand, if it can in `train.faults.grace_s`.
    yield f"signal=TERM@{WARNING_S}"
    yield "requeue"
    yield "open-mode=append"
    yield f"output={job.name}-%j.log"
