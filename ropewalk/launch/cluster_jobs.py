"""A run as a job for a cluster."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ropewalk.config.ranks import FIRST_PORT, PORTS


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """One training, on `nodes` machines."""

    name: str
    recipe: str
    """Path of the recipe, as the job sees it."""
    overrides: Sequence[str] = ()
    runs: str = "runs"
    nodes: int = 1
    gpus_per_node: int = 0
    """A process a GPU; 0: one process a machine, on its CPU."""
    max_restarts: int = 3
    """How often all processes start again because one of them died."""
    grace_s: float = 30.0
    """How long a process may save when it is asked to end."""

    @property
    def processes_per_node(self) -> int:
        return max(1, self.gpus_per_node)

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def environment(self) -> dict[str, str]:
        """What the machines' agents are told."""
        return {
            # Else torch 2.13 keeps one store over all attempts, in which gloo finds the addresses of dead processes.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            # Between the signal to end and the one that kills.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(self.grace_s) + 10),
        }

    @property
    def command(self) -> list[str]:
        """What every process runs."""
        return ["ropewalk", "train", self.recipe, *self.overrides, "--runs", self.runs]

    def __str__(self) -> str:
        machines = f"{self.nodes} machine{'s' if self.nodes > 1 else ''}"
        return f"{machines} with {self.gpus_per_node} GPUs each" if self.gpus_per_node else f"{machines}, on the CPU"


# Slurm


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


def batch_script(job: ClusterJob, settings: SlurmSettings) -> str:
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
    # Every process then saves the step at hand, if it can in `train.faults.grace_s`.
    yield f"signal=TERM@{WARNING_S}"
    yield "requeue"
    yield "open-mode=append"
    yield f"output={job.name}-%j.log"


# Kubernetes


RECIPE_FOLDER, RECIPE = "/recipe", "recipe.toml"
"""Where pods see the recipe."""
LONGEST_NAME = 50
"""Of 63 characters that a host's name may have; the Job adds the number of the pod."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesSettings:
    """What only Kubernetes wants to know."""

    image: str
    """An image in which ropewalk is installed."""
    claim: str = ""
    """A claim of a volume that all pods can write, for data and runs; empty: one is made."""
    storage: str = "100Gi"
    """Size of the volume that is made."""
    folder: str = "/data"
    """Where the volume is in every pod; paths of the recipe are relative to it."""


def manifest(job: ClusterJob, settings: KubernetesSettings, *, recipe: str) -> str:
    """The objects for `kubectl apply`; `recipe` is the text of the recipe, which goes with them."""
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
    """`name` as Kubernetes allows it: lower-case letters, digits and hyphens."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:LONGEST_NAME].strip("-") or "run"


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
  # All pods write: the run, and data that is being prepared.
  accessModes: [ReadWriteMany]
  resources:
    requests:
      storage: {storage}
"""


def _service(name: str) -> str:
    return f"""\
# Gives every pod a name: {name}-0.{name}, {name}-1.{name}, ...
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  # They look for each other before any of them is ready.
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
  # Pods that may be lost before the Job gives up.
  backoffLimit: {job.nodes * (job.max_restarts + 1)}
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      # Time to save before a pod is taken away.
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
            # What processes of one machine share; the default, 64 MB, is too small for NCCL.
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
    # JSON strings are YAML strings, whatever they hold.
    return "".join(f"            - {json.dumps(word)}\n" for word in words)


def _environment(values: dict[str, str]) -> str:
    return "".join(
        f"            - name: {name}\n              value: {json.dumps(value)}\n" for name, value in values.items()
    )


def _resources(gpus: int) -> str:
    return f"          resources:\n            limits:\n              nvidia.com/gpu: {gpus}\n" if gpus else ""
