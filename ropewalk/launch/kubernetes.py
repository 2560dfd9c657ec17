"""A run as Kubernetes objects, in plain YAML: nothing but Kubernetes itself needs to be installed in the cluster.

An Indexed Job gives every machine a number and a name that a headless Service makes known to the others; torchrun's
agents meet at number 0. A pod that dies is replaced by the Job, and the agents start all processes again.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from ropewalk.config.ranks import FIRST_PORT

from .cluster_job import Job

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


def manifest(job: Job, settings: KubernetesSettings, *, recipe: str) -> str:
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


def _job(name: str, job: Job, settings: KubernetesSettings, claim: str) -> str:
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


def _command(name: str, job: Job) -> Sequence[str]:
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
