"""A checkpoint on the ranks of a plan: each builds and reads its own parts, so that a model that fits no single device
can be measured and can write."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any, Literal

import torch

from ropewalk.base.errors import DamagedCheckpoint, UserError
from ropewalk.base.progress import Progress, Silent
from ropewalk.checkpoint.format import TOKENIZER, list_checkpoints, read_checkpoint_manifest
from ropewalk.checkpoint.read.load import CheckpointReader, LazyTensors
from ropewalk.checkpoint.read.model_check import advise_on_damage, check_weights
from ropewalk.checkpoint.run_state import head_of
from ropewalk.config.ranks import Ranks, ranks
from ropewalk.config.resolved import load_section, load_value
from ropewalk.config.stages import read_stage
from ropewalk.model.decoder import Decoder
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor
from ropewalk.parallel.mesh import Mesh, join, pick_device
from ropewalk.plan.inference_plan import inference
from ropewalk.plan.plan import Plan, load_plan

from .config import Evaluate
from .evaluation import Evaluating, write_evaluation
from .generation_plan import generation_plan
from .results import read_results


def evaluate_run(run: Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Measures the newest checkpoint of the run in directory `run` under the run's own plan, as `evaluate_checkpoint`
    does on one device. All ranks must call; the first one writes the results. The process stays in its world."""
    settings, seed = load_section(run, "evaluate", Evaluate), load_value(run, "seed")
    prepared = read_stage(run, "prepare")
    place, planned = ranks(), load_plan(run).phases[-1].plan
    device = pick_device(planned, place)
    join(planned, place)
    mesh = Mesh(inference(planned, length=planned.sequence_length or 1), place.rank)
    # Named by one rank: a network file system may show the others an older list.
    path = run / "checkpoints" / mesh.control.broadcast_json(list_checkpoints(run / "checkpoints")[-1].name)
    head = head_of(read_checkpoint_manifest(path))
    length = head.spec.sequence_length
    plan = inference(planned, length=length)
    evaluating = Evaluating(Path(prepared["result"]["folder"]), settings, seed=seed, progress=progress or Silent())
    executor = load_executor(path, plan, mesh, device=device)
    evaluating.score(executor, sequence_length=length, rows=plan.batch_size)
    if settings.samples and plan.precision != "fp32":
        # Completions are computed in float32, as on one device. One executor at a time has its parts.
        del executor
        gc.collect()
        executor = load_executor(path, dataclasses.replace(plan, precision="fp32"), mesh, device=device)
    evaluating.sample(executor)
    measured = evaluating.result()
    if place.rank == 0:
        write_evaluation(run, measured, step=head.step)
    mesh.control.gather_numbers(place.rank)  # nobody reads the results before they are written
    return read_results(run)


def load_generator(path: Path) -> tuple[Executor, bytes]:
    """The model in the checkpoint `path` on the ranks of this launch, for generation, and its tokenizer's file. All
    ranks must call."""
    place = ranks()
    device = _device(place)
    with advise_on_damage(path):
        check_weights(read_checkpoint_manifest(path), path)
        plan = generation_plan(path, processes=place.world, device=device)
        tokenizer = CheckpointReader(path).file(TOKENIZER)
    join(plan, place)
    mesh = Mesh(plan, place.rank)
    here = torch.device("cuda", place.local_rank) if device == "cuda" else torch.device("cpu")
    return load_executor(path, plan, mesh, device=here), tokenizer


def load_executor(path: Path, plan: Plan, mesh: Mesh, *, device: torch.device) -> Executor:
    """An executor without an optimizer whose ranks each read their own parts of the checkpoint `path`; every byte that
    is read is checked. All ranks must call, and fail together."""
    with advise_on_damage(path):
        reader = CheckpointReader(path)
        check_weights(reader.manifest, path)
        stored = reader.manifest.tensors["model"]["embedding.weight"].dtype
        with torch.device("meta"):
            model = Decoder(head_of(reader.manifest).spec).to(getattr(torch, stored))
        executor = apply(plan, model, mesh, None, device=device, trained=(), init_seed=None)
        weights = LazyTensors(reader, "model", executor.wants())
        executor.load_state(weights, {})
        sound = mesh.control.all_reduce(torch.tensor([int(weights.problem is None)]), operation="min")
        weights.check()
        if not sound.item():
            raise DamagedCheckpoint(f"{path}: another rank cannot read its part of this checkpoint")
    return executor


def _device(place: Ranks) -> Literal["cpu", "cuda"]:
    """What the processes of this machine generate on: a GPU each, or the CPU where there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < count < place.local_world:
        raise UserError(
            f"{place.local_world} processes want a GPU each, but torch sees {count}; start at most {count}, or hide "
            "the GPUs (`CUDA_VISIBLE_DEVICES=`) to compute on the CPU"
        )
    return "cuda" if count else "cpu"
