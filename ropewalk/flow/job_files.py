"""`ropewalk launch`: writes job files for clusters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ropewalk.base.errors import UserError
from ropewalk.base.files import committed_file, read_regular
from ropewalk.base.seal import is_sealed_text, sealed_toml
from ropewalk.config.read import read_text
from ropewalk.launch.cluster_jobs import (
    ClusterJob,
    KubernetesSettings,
    SlurmSettings,
    batch_script,
    manifest,
    object_name,
)
from ropewalk.plan.layout import degrees

from .run_or_recipe import read_recipe
from .run_stages import Result

RUNS = Path("runs")
SEAL_NOTE = "# `ropewalk launch` overwrites this file only if it was not edited, as the next line proves."


def launch_slurm(
    recipe: Path | str,
    overrides: Sequence[str] = (),
    *,
    nodes: int = 1,
    gpus_per_node: int = 0,
    settings: SlurmSettings | None = None,
    runs: Path = RUNS,
    out: Path | None = None,
    force: bool = False,
) -> Result:
    """Writes a batch script that trains `recipe` on `nodes` machines; returns its name and how to use it.

    Checks the recipe, and `[parallel]` against the number of processes, but not input files, which may exist only on
    the cluster. Overwrites an edited file only with `force`.
    """
    job = _job(Path(recipe), overrides, nodes=nodes, gpus_per_node=gpus_per_node, runs=runs)
    file = out or Path(f"{job.name}.sbatch")
    _write(file, batch_script(job, settings or SlurmSettings()), force=force)
    return {"file": str(file), "processes": job.processes, "submit": f"sbatch {file}", "watch": _watch(job)}


def launch_kubernetes(
    recipe: Path | str,
    overrides: Sequence[str] = (),
    *,
    settings: KubernetesSettings,
    nodes: int = 1,
    gpus_per_node: int = 0,
    runs: Path = RUNS,
    out: Path | None = None,
    force: bool = False,
) -> Result:
    """Writes the objects that train `recipe` on `nodes` machines; returns the name of the file and how to use it.

    The file includes the recipe; its input files and `runs` must be on the volume. Overwrites an edited file only with
    `force`.
    """
    job = _job(Path(recipe), overrides, nodes=nodes, gpus_per_node=gpus_per_node, runs=runs)
    file = out or Path(f"{job.name}.yaml")
    _write(file, manifest(job, settings, recipe=read_text(Path(recipe))), force=force)
    name = object_name(job.name)
    return {
        "file": str(file),
        "processes": job.processes,
        "submit": f"kubectl apply -f {file}",
        "watch": f"kubectl logs -f job/{name}",
        "continue": f"kubectl delete job {name} && kubectl apply -f {file}",
    }


def _job(recipe: Path, overrides: Sequence[str], *, nodes: int, gpus_per_node: int, runs: Path) -> ClusterJob:
    value = read_recipe(recipe, overrides).value
    job = ClusterJob(
        name=value.name,
        recipe=str(recipe),
        overrides=tuple(overrides),
        runs=str(runs),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        max_restarts=value.train.faults.max_restarts,
        grace_s=value.train.faults.grace_s,
    )
    degrees(value.parallel, job.processes)
    return job


def _watch(job: ClusterJob) -> str:
    return f"ropewalk monitor {Path(job.runs) / job.name}"


def _write(file: Path, text: str, *, force: bool) -> None:
    """Commits `text` with a seal that detects edits; refuses to overwrite an edited file."""
    if file.exists() and not force and not is_sealed_text(read_regular(file)):
        raise UserError(
            f"{file}: edited since `ropewalk launch` wrote it, or not written by it; write another file with --out, or "
            "overwrite this one with --force"
        )
    with committed_file(file) as opened:
        opened.write(sealed_toml(f"{text.rstrip()}\n\n{SEAL_NOTE}\n"))
