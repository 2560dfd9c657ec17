"""`ropewalk launch slurm`, `ropewalk launch kubernetes`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow
from ropewalk.launch.cluster_jobs import KubernetesSettings, SlurmSettings

from .options import MOST_RANKS, Json, Overrides, RecipeFile, Runs, verb
from .progress_lines import emit, table

app = verb(
    help="""Write a job file for Slurm or Kubernetes.

    Example: ropewalk launch slurm recipes/books.toml --nodes 2 --gpus-per-node 8

    The job is a text file to read, edit and submit. A single machine needs none: `ropewalk train --nproc` starts its
    own processes."""
)

Nodes = Annotated[int, typer.Option("--nodes", min=1, max=MOST_RANKS, help="Number of machines.")]
Gpus = Annotated[
    int,
    typer.Option(
        "--gpus-per-node",
        min=0,
        max=MOST_RANKS,
        help="GPUs per machine, one process each; 0: one process per machine, on the CPU.",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="The file to write.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file even if it was edited.")]


@app.command()
def slurm(
    recipe: RecipeFile,
    overrides: Overrides = None,
    nodes: Nodes = 1,
    gpus_per_node: Gpus = 0,
    time: Annotated[str, typer.Option("--time", help="Time limit of the job, in Slurm's format.")] = "24:00:00",
    partition: Annotated[str, typer.Option("--partition", help="Partition of the job.", show_default=False)] = "",
    account: Annotated[str, typer.Option("--account", help="Account of the job.", show_default=False)] = "",
    setup: Annotated[
        list[str] | None,
        typer.Option("--setup", help="Shell line at the start of the job; may be repeated.", show_default=False),
    ] = None,
    runs: Runs = Path("runs"),
    out: Out = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write NAME.sbatch, which starts torchrun on every node.

    Example: ropewalk launch slurm recipes/books.toml --nodes 2 --gpus-per-node 8 --setup ". .venv/bin/activate"

    All nodes must share the current folder.
    """
    settings = SlurmSettings(time=time, partition=partition, account=account, setup=setup or ())
    made = flow.launch_slurm(
        recipe,
        overrides or (),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        settings=settings,
        runs=runs,
        out=out,
        force=force,
    )
    emit(made, as_json=json, text=table([(key, str(value)) for key, value in made.items()]))


@app.command()
def kubernetes(
    recipe: RecipeFile,
    image: Annotated[str, typer.Option("--image", help="Container image with ropewalk installed.", show_default=False)],
    overrides: Overrides = None,
    nodes: Nodes = 1,
    gpus_per_node: Gpus = 0,
    claim: Annotated[
        str, typer.Option("--claim", help="Volume claim for data and runs. Default: create one.", show_default=False)
    ] = "",
    storage: Annotated[str, typer.Option("--storage", help="Size of a new volume.")] = "100Gi",
    runs: Runs = Path("runs"),
    out: Out = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write NAME.yaml, an Indexed Job for Kubernetes.

    Example: ropewalk launch kubernetes recipes/books.toml --image example.org/ropewalk:0.1 --nodes 2

    Includes a Service for rendezvous, the recipe, and a volume for data and runs. Needs no operator in the cluster.
    """
    made = flow.launch_kubernetes(
        recipe,
        overrides or (),
        settings=KubernetesSettings(image=image, claim=claim, storage=storage),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        runs=runs,
        out=out,
        force=force,
    )
    emit(made, as_json=json, text=table([(key, str(value)) for key, value in made.items()]))
