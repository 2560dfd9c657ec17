"""`ropewalk launch`: job files for clusters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ropewalk.base.files import committed_file
from ropewalk.launch.cluster import Job
from ropewalk.launch.kubernetes import KubernetesSettings, manifest, object_name
from ropewalk.launch.slurm import SlurmSettings, batch_script
from ropewalk.plan.layout import degrees

from .opening import read_recipe
from .stages import Result

RUNS = Path("runs")


def launch_slurm(
    recipe: Path | str,
    overrides: Sequence[str] = (),
    *,
    nodes: int = 1,
    gpus_per_node: int = 0,
    settings: SlurmSettings | None = None,
    runs: Path = RUNS,
    out: Path | None = None,
) -> Result:
    """Writes the batch script that trains `recipe` on `nodes` machines; its name and what to do with it.

    Checks the recipe and that `[parallel]` fits so many processes; input files may lie where only the cluster sees
    them.
    """
    job = _job(Path(recipe), overrides, nodes=nodes, gpus_per_node=gpus_per_node, runs=runs)
    file = out or Path(f"{job.name}.sbatch")
    _write(file, batch_script(job, settings or SlurmSettings()))
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
) -> Result:
    """Writes the objects that train `recipe` on `nodes` machines; the file's name and what to do with it.

    The recipe goes with them; the files that it names must lie on the volume, and `runs` is a folder of it.
    """
    job = _job(Path(recipe), overrides, nodes=nodes, gpus_per_node=gpus_per_node, runs=runs)
    file = out or Path(f"{job.name}.yaml")
    _write(file, manifest(job, settings, recipe=Path(recipe).read_text(encoding="utf-8-sig")))
    name = object_name(job.name)
    return {
        "file": str(file),
        "processes": job.processes,
        "submit": f"kubectl apply -f {file}",
        "watch": f"kubectl logs -f job/{name}",
        "continue": f"kubectl delete job {name} && kubectl apply -f {file}",
    }


def _job(recipe: Path, overrides: Sequence[str], *, nodes: int, gpus_per_node: int, runs: Path) -> Job:
    value = read_recipe(recipe, overrides).value
    job = Job(
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


def _watch(job: Job) -> str:
    return f"ropewalk monitor {Path(job.runs) / job.name}"


def _write(file: Path, text: str) -> None:
    with committed_file(file, "w") as opened:
        opened.write(text)
