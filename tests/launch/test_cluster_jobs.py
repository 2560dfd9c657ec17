"""Job files: what schedulers would read in them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ropewalk.base.errors import UserError
from ropewalk.cli.main import main
from ropewalk.flow import launch_kubernetes, launch_slurm
from ropewalk.launch.cluster_jobs import KubernetesSettings, SlurmSettings, object_name

RECIPE = """\
name = "Two_Ropes"  # with "quotes": and a colon

[[prepare.sources]]
name = "notes"
paths = ["notes/*.txt"]

[parallel]
tensor = 4

[train.faults]
max_restarts = 7
"""
OVERRIDE = "prepare.sources.0.paths=[\"it's/*.txt\", 'b']"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("ropes.toml").write_text(RECIPE)
    return Path("ropes.toml")


def options_of(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, flags=re.MULTILINE))


def test_a_batch_script_asks_for_what_was_asked_for(recipe: Path) -> None:
    settings = SlurmSettings(time="1:00:00", partition="gpu", setup=[". .venv/bin/activate"])
    made = launch_slurm(recipe, nodes=3, gpus_per_node=8, settings=settings)
    script = Path(made["file"]).read_text()
    wanted = {"nodes": "3", "gpus-per-node": "8", "ntasks-per-node": "1", "time": "1:00:00", "partition": "gpu"}
    assert wanted.items() <= options_of(script).items()
    assert "account" not in options_of(script)
    assert "\n. .venv/bin/activate\n" in script
    assert (made["submit"], made["processes"]) == ("sbatch Two_Ropes.sbatch", 24)


def test_a_batch_script_is_bash_and_starts_torchrun_at_the_first_machine(recipe: Path) -> None:
    """Runs the script with programs in place of Slurm's that tell what they were given."""
    launch_slurm(recipe, [OVERRIDE], nodes=3, gpus_per_node=4, out=Path("job"))
    for name, body in {"scontrol": 'printf "n7\\nn8\\n"', "srun": 'printf "%s\\n" "$@"'}.items():
        Path("bin").mkdir(exist_ok=True)
        Path("bin", name).write_text(f"#!/bin/sh\n{body}\n")
        Path("bin", name).chmod(0o755)
    environment = {"PATH": f"{Path.cwd()}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "30017", "SLURM_JOB_NODELIST": "n[7-9]"}
    done = subprocess.run(["bash", "job"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:2] == ["--kill-on-bad-exit=1", "torchrun"]
    assert {"--nnodes=3", "--nproc-per-node=4", "--max-restarts=7", "--rdzv-endpoint=n7:20017"} <= set(words)
    assert words[-6:] == ["ropewalk", "train", "ropes.toml", OVERRIDE, "--runs", "runs"]


def test_torchrun_understands_the_options_of_the_jobs(recipe: Path) -> None:
    from torch.distributed.run import parse_args

    launch_kubernetes(recipe, [OVERRIDE], nodes=2, gpus_per_node=4, settings=KubernetesSettings(image="here"))
    container = objects_of("Two_Ropes.yaml")["Job"]["spec"]["template"]["spec"]["containers"][0]
    program, *words = container["command"]
    given = parse_args(words)
    assert (program, given.nnodes, given.nproc_per_node, given.max_restarts) == ("torchrun", "2", "4", 7)
    assert [given.training_script, *given.training_script_args][:2] == ["ropewalk", "train"]
    assert OVERRIDE in given.training_script_args
    assert shutil.which("torchrun", path=str(Path(sys.executable).parent))


def objects_of(file: str) -> dict[str, dict]:
    return {thing["kind"]: thing for thing in yaml.safe_load_all(Path(file).read_text())}


def test_the_objects_are_yaml_that_fits_together(recipe: Path) -> None:
    made = launch_kubernetes(recipe, nodes=2, gpus_per_node=2, settings=KubernetesSettings(image="example.org/a:1"))
    things = objects_of(made["file"])
    assert list(things) == ["ConfigMap", "PersistentVolumeClaim", "Service", "Job"]
    name = things["Job"]["metadata"]["name"]
    spec = things["Job"]["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    # The name at which the agents meet is that of pod 0 under the service.
    assert things["Service"]["metadata"]["name"] == pod["subdomain"] == name
    assert things["Service"]["spec"]["selector"] == {"job-name": name}
    assert f"--rdzv-endpoint={name}-0.{name}:20000" in container["command"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if volume["name"] == "data"]
    assert claims == [things["PersistentVolumeClaim"]["metadata"]["name"]]
    assert things["ConfigMap"]["data"]["recipe.toml"] == RECIPE


def test_a_claim_that_exists_is_used_and_not_made(recipe: Path) -> None:
    settings = KubernetesSettings(image="here", claim="ours")
    made = launch_kubernetes(recipe, nodes=4, settings=settings)
    assert "PersistentVolumeClaim" not in objects_of(made["file"])
    assert "claimName: ours" in Path(made["file"]).read_text()


@pytest.mark.parametrize(
    ("name", "expected"), [("Two_Ropes", "two-ropes"), ("--a.b--", "a-b"), ("绳", "run"), ("x" * 80, "x" * 50)]
)
def test_names_become_what_kubernetes_allows(name: str, expected: str) -> None:
    assert object_name(name) == expected


def test_processes_that_do_not_fit_the_recipe_are_refused(recipe: Path) -> None:
    with pytest.raises(UserError, match="6 processes do not fit `\\[parallel\\]`"):
        launch_slurm(recipe, nodes=3, gpus_per_node=2)
    assert not Path("Two_Ropes.sbatch").exists()


def test_a_script_quotes_what_the_shell_would_change(recipe: Path) -> None:
    launch_slurm(recipe, [OVERRIDE], nodes=4)
    assert shlex.quote(OVERRIDE) in Path("Two_Ropes.sbatch").read_text()


KINDS = {
    "slurm": ("Two_Ropes.sbatch", ["launch", "slurm", "ropes.toml", "--nodes", "4"]),
    "kubernetes": ("Two_Ropes.yaml", ["launch", "kubernetes", "ropes.toml", "--nodes", "4", "--image", "here"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_file_is_overwritten_only_while_nobody_has_edited_it(
    kind: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*options: str) -> int:
        try:
            main([*KINDS[kind][1], *options])
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    file = Path(KINDS[kind][0])
    assert call() == 0
    written = file.read_bytes()
    # As it was written: other settings replace it.
    assert call("--nodes", "8") == 0
    assert file.read_bytes() != written
    edited = file.read_bytes().replace(b"8", b"9", 1)
    file.write_bytes(edited)
    assert call() == 2
    assert f"{file}: edited since `ropewalk launch` wrote it" in capsys.readouterr().err
    assert file.read_bytes() == edited
    assert call("--out", "other") == 0
    assert file.read_bytes() == edited
    assert call("--force") == 0
    assert file.read_bytes() == written
