"""Jobs for clusters: a Slurm batch script, or Kubernetes objects."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ropewalk.config.ranks import FIRST_PORT, PORTS

from .worker import elastic_environment


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A training run on `nodes` machines."""

    name: str
    recipe: str
    """Path of the recipe within the job."""
    overrides: Sequence[str] = ()
    runs: str = "runs"
    nodes: int = 1
    gpus_per_node: int = 0
    """One process per GPU; 0: one process per machine, on the CPU."""
    max_restarts: int = 3
    """Maximum restarts of all processes after one has died."""
    grace_s: float = 30.0
    """Seconds for saving after a request to terminate."""

    @property
    def processes_per_node(self) -> int:
        return max(1, self.gpus_per_node)

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the agents of torch elastic."""
        return elastic_environment(self.grace_s)

    @property
    def command(self) -> list[str]:
        """Command of every process."""
        return ["ropewalk", "train", self.recipe, *self.overrides, "--runs", self.runs]

    def __str__(self) -> str:
        machines = f"{self.nodes} machine{'s' if self.nodes > 1 else ''}"
        return f"{machines} with {self.gpus_per_node} GPUs each" if self.gpus_per_node else f"{machines}, on the CPU"


# Slurm


WARNING_S = 120
"""Seconds between SIGTERM and the time limit of a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSettings:
    """Options of Slurm; empty: the default of the cluster."""

    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    setup: Sequence[str] = ()
    """Shell lines that make `ropewalk` and `torchrun` available on every machine."""


def batch_script(job: ClusterJob, settings: SlurmSettings) -> str:
    """The script for `sbatch`."""
    exports = "\n".join(f"export {name}={value}" for name, value in job.environment.items())
    setup = "\n".join(settings.setup) or "# Uses the environment of the submitting shell; or activate one here."
    return f"""\
#!/bin/bash
# {job.name}: {job}, {job.processes} processes. Submit with sbatch; submit again to continue.
{"".join(f"#SBATCH --{option}{chr(10)}" for option in _options(job, settings))}\
set -euo pipefail

{setup}

# Rendezvous on the first machine, at a port that no other job there uses.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))
{exports}

# One torchrun per machine. When a process dies, all restart from the newest checkpoint, at most {job.max_restarts}
# times. Rank 0 prepares data that is not prepared yet while the others wait; to save their time, run `ropewalk prepare`
# first on a machine without GPUs.
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


def _options(job: ClusterJob, settings: SlurmSettings) -> Iterator[str]:
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
    # On SIGTERM, every process saves the current step within `train.faults.grace_s`.
    yield f"signal=TERM@{WARNING_S}"
    yield "requeue"
    yield "open-mode=append"
    yield f"output={job.name}-%j.log"


# Kubernetes


RECIPE_FOLDER, RECIPE = "/recipe", "recipe.toml"
"""Path of the recipe in pods."""
MAX_NAME = 50
"""Of the 63 characters of a host name; the Job appends the index of the pod."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesSettings:
    """Options of Kubernetes."""

    image: str
    """Container image with ropewalk installed."""
    claim: str = ""
    """Claim of a volume for data and runs that all pods can write; empty: create one."""
    storage: str = "100Gi"
    """Size of a new volume."""
    folder: str = "/data"
    """Mount path of the volume; paths in the recipe are relative to it."""


def manifest(job: ClusterJob, settings: KubernetesSettings, *, recipe: str) -> str:
    """The objects for `kubectl apply`, in plain YAML: a Job, a Service, the text `recipe`, and a volume claim.

    An Indexed Job numbers the machines, and a headless Service gives them names; torchrun's agents rendezvous at number
    0. The Job replaces a pod that dies, and the agents restart all processes. The cluster needs no operator.
    """
    name = object_name(job.name)
    claim = settings.claim or f"{name}-runs"
    parts = [
        _config_map(name, recipe),
        *([] if settings.claim else [_volume_claim(claim, settings.storage)]),
        _service(name),
        _job(name, job, settings, claim),
    ]
    head = f"# {job.name}: {job}, {job.processes} processes. Apply again after deleting the Job to continue.\n"
    return head + "---\n".join(parts)


def object_name(name: str) -> str:
    """`name` as a valid Kubernetes name: lower-case letters, digits and hyphens."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME].strip("-") or "run"


def _config_map(name: str, recipe: str) -> str:
    return f"""\
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
  {RECIPE}: |
{textwrap.indent(recipe.rstrip() + chr(10), "    ", lambda line: True)}"""


def _volume_claim(claim: str, storage: str) -> str:
    return f"""\
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {claim}
spec:
  # All pods write the run and prepared data.
  accessModes: [ReadWriteMany]
  resources:
    requests:
      storage: {storage}
"""


def _service(name: str) -> str:
    return f"""\
# Gives every pod a host name: {name}-0.{name}, {name}-1.{name}, ...
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  # Pods resolve each other before they are ready.
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
"""


def _job(name: str, job: ClusterJob, settings: KubernetesSettings, claim: str) -> str:
    return f"""\
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {job.nodes}
  parallelism: {job.nodes}
  # Maximum number of lost pods.
  backoffLimit: {job.nodes * (job.max_restarts + 1)}
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      # Time to save before a pod is killed.
      terminationGracePeriodSeconds: {round(job.grace_s) + 20}
      containers:
        - name: train
          image: {json.dumps(settings.image)}
          workingDir: {json.dumps(settings.folder)}
          env:
{_environment(job.environment)}\
          command:
{_words(_command(name, job))}\
{_resources(job.gpus_per_node)}\
          volumeMounts:
            - name: data
              mountPath: {json.dumps(settings.folder)}
            - name: recipe
              mountPath: {RECIPE_FOLDER}
            # Shared memory; the default of 64 MB is too small for NCCL.
            - name: shared-memory
              mountPath: /dev/shm
      volumes:
        - name: data
          persistentVolumeClaim:
            claimName: {claim}
        - name: recipe
          configMap:
            name: {name}
        - name: shared-memory
          emptyDir:
            medium: Memory
"""


def _command(name: str, job: ClusterJob) -> Sequence[str]:
    return [
        "torchrun",
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.processes_per_node}",
        f"--max-restarts={job.max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={name}-0.{name}:{FIRST_PORT}",
        f"--rdzv-id={name}",
        "--no-python",
        *dataclasses.replace(job, recipe=f"{RECIPE_FOLDER}/{RECIPE}").command,
    ]


def _words(words: Sequence[str]) -> str:
    # Every JSON string is a valid YAML string.
    return "".join(f"            - {json.dumps(word)}\n" for word in words)


def _environment(values: dict[str, str]) -> str:
    return "".join(
        f"            - name: {name}\n              value: {json.dumps(value)}\n" for name, value in values.items()
    )


def _resources(gpus: int) -> str:
    return f"          resources:\n            limits:\n              nvidia.com/gpu: {gpus}\n" if gpus else ""
