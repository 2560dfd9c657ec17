"""Plans generation from a checkpoint with several processes. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ropewalk.checkpoint.format import read_checkpoint_manifest
from ropewalk.model.hugging_face.strict import read_spec
from ropewalk.plan.inference_plan import generation
from ropewalk.plan.plan import FILE, Plan, load_plan


def generation_plan(
    path: Path, *, processes: int, device: Literal["cpu", "cuda"], precision: Literal["fp32", "bf16"] = "fp32"
) -> Plan:
    """The plan for generating from the checkpoint `path` with `processes`: the run's own if its process count matches
    (plan/inference_plan.py)."""
    manifest = read_checkpoint_manifest(path)
    run = path.resolve().parent.parent
    trained = None
    if path.resolve().parent.name == "checkpoints" and (run / FILE).is_file():
        phases = load_plan(run).phases
        trained = phases[min(manifest.phase, len(phases) - 1)].plan
    spec = read_spec(manifest.spec, name=str(path))
    return generation(trained, spec, processes=processes, device=device, precision=precision, where=str(run))
