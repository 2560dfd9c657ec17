"""`ropewalk launch`: job files for clusters."""

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
SEAL_NOTE = "# `ropewalk launch` overwrites this file only while nobody has edited it; the next line tells."


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
    """Writes the batch script that trains `recipe` on `nodes` machines; its name and what to do with it.

    Checks the recipe and that `[parallel]` fits so many processes; input files may lie where only the cluster sees
    them. A file that is there and was edited is only overwritten with `force`.
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
    """Writes the objects that train `recipe` on `nodes` machines; the file's name and what to do with it.

    The recipe goes with them; the files that it names must lie on the volume, and `runs` is a folder of it. A file that
    is there and was edited is only overwritten with `force`.
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
    """Commits `text` with a seal, by which a file that somebody has edited is known; that is not overwritten."""
    if file.exists() and not force and not is_sealed_text(read_regular(file)):
        raise UserError(
            f"{file}: it was edited since `ropewalk launch` wrote it, or comes from elsewhere; write another file with "
            "--out, or overwrite this one with --force"
        )
    with committed_file(file) as opened:
        opened.write(sealed_toml(f"{text.rstrip()}\n\n{SEAL_NOTE}\n"))
