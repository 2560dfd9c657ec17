"""Evaluates and generates under a parallel plan: each rank loads its own shards, so that the model may be larger than
one device."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ropewalk.base.errors import DamagedCheckpoint, UserError
from ropewalk.base.progress import Progress
from ropewalk.checkpoint.format import TOKENIZER, list_checkpoints, read_checkpoint_manifest
from ropewalk.checkpoint.read.load import CheckpointReader, LazyTensors
from ropewalk.checkpoint.read.model_check import advise_on_damage, check_weights
from ropewalk.checkpoint.run_state import head_of
from ropewalk.config.ranks import Ranks, ranks
from ropewalk.config.resolved import load_section, load_value
from ropewalk.config.stages import read_stage
from ropewalk.model.protocol import ModelStage, build_stage
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor
from ropewalk.parallel.mesh import Mesh, join, pick_device
from ropewalk.plan.inference_plan import inference
from ropewalk.plan.plan import Plan, load_plan

from .config import Evaluate
from .evaluation import evaluate, write_evaluation
from .generate import generate
from .generation_plan import generation_plan
from .held_out import HeldOut
from .results import read_results
from .score import score_documents
from .task import Likelihood, Sampling


class PlannedModel:
    """A model under a plan, for tasks. All ranks must call its methods. Scores in the plan's precision and generates in
    float32, so that every plan samples the same tokens."""

    def __init__(
        self,
        plan: Plan,
        load: Callable[[Plan], Executor | ModelStage],
        *,
        length: int,
        held_out: HeldOut,
    ) -> None:
        """`load` loads the model under a plan of any precision; one is in memory at a time."""
        self._plan, self._load, self._length, self._held_out = plan, load, length, held_out
        self._loaded: tuple[Plan, Executor | ModelStage] | None = None

    def rolling(self, documents: Sequence[np.ndarray]) -> list[Likelihood]:
        executor = self._under(self._plan)
        assert not isinstance(executor, ModelStage), "an executor scores"
        return score_documents(
            executor,
            documents,
            sequence_length=self._length,
            rows=self._plan.batch_size,
            end_of_text=self._held_out.end_of_text,
            progress=self._held_out.progress,
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seeds: Sequence[int]
    ) -> list[list[int]]:
        return generate(
            self._under(dataclasses.replace(self._plan, precision="fp32")),
            prompts,
            sampling,
            seeds=seeds,
            end=self._held_out.end_of_text,
            vocabulary=self._held_out.detokenizer.vocabulary,
            text=self._held_out.detokenizer.text,
            progress=self._held_out.progress,
        )

    def _under(self, plan: Plan) -> Executor | ModelStage:
        if self._loaded is None or self._loaded[0] != plan:
            self._loaded = None
            gc.collect()
            self._loaded = plan, self._load(plan)
        return self._loaded[1]


def evaluate_run(run: Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Evaluates the newest checkpoint of the run directory `run` under the run's plan, like `evaluate_checkpoint` on
    one device. All ranks must call; rank 0 writes the results. The process group stays initialized."""
    settings, seed = load_section(run, "evaluate", Evaluate), load_value(run, "seed")
    prepared = read_stage(run, "prepare")
    place, planned = ranks(), load_plan(run).phases[-1].plan
    device = pick_device(planned, place)
    join(planned, place)
    mesh = Mesh(inference(planned, length=planned.sequence_length or 1), place.rank)
    # Chosen by rank 0: a network file system may show other ranks a stale listing.
    path = run / "checkpoints" / mesh.control.broadcast_json(list_checkpoints(run / "checkpoints")[-1].name)
    head = head_of(read_checkpoint_manifest(path))
    length = head.spec.sequence_length
    held_out = HeldOut(Path(prepared["result"]["folder"]), settings, seed=seed, progress=progress)
    model = PlannedModel(
        inference(planned, length=length),
        lambda plan: load_executor(path, plan, mesh, device=device),
        length=length,
        held_out=held_out,
    )
    measured = evaluate(model, held_out)
    if place.rank == 0:
        write_evaluation(run, measured, step=head.step)
    mesh.control.gather_numbers(place.rank)  # barrier: rank 0 has written the results
    return read_results(run)


def load_generator(path: Path, *, precision: Literal["fp32", "bf16"] = "fp32") -> tuple[Executor, bytes]:
    """(executor for generation on this launch's ranks, tokenizer file) of the checkpoint `path`. All ranks must
    call."""
    place = ranks()
    device = _device(place)
    with advise_on_damage(path):
        check_weights(read_checkpoint_manifest(path), path)
        plan = generation_plan(path, processes=place.world, device=device, precision=precision)
        tokenizer = CheckpointReader(path).file(TOKENIZER)
    join(plan, place)
    mesh = Mesh(plan, place.rank)
    here = torch.device("cuda", place.local_rank) if device == "cuda" else torch.device("cpu")
    return load_executor(path, plan, mesh, device=here), tokenizer


def load_executor(path: Path, plan: Plan, mesh: Mesh, *, device: torch.device) -> Executor:
    """An executor without optimizer; each rank reads its own shards of the checkpoint `path` and verifies every byte
    read. All ranks must call, and fail together."""
    with advise_on_damage(path):
        reader = CheckpointReader(path)
        check_weights(reader.manifest, path)
        stored = next(iter(reader.manifest.tensors["model"].values())).dtype
        with torch.device("meta"):
            model = build_stage(head_of(reader.manifest).spec).to(getattr(torch, stored))
        executor = apply(plan, model, mesh, None, device=device, trained=(), init_seed=None)
        weights = LazyTensors(reader, "model", executor.wants())
        executor.load_state(weights, {})
        sound = mesh.control.all_reduce(torch.tensor([int(weights.problem is None)]), operation="min")
        weights.check()
        if not sound.item():
            raise DamagedCheckpoint(f"{path}: another rank cannot read its part of this checkpoint")
    return executor


def _device(place: Ranks) -> Literal["cpu", "cuda"]:
    """`cuda` with one GPU per process, or `cpu` if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < count < place.local_world:
        raise UserError(
            f"{place.local_world} processes want a GPU each, but torch sees {count}; start at most {count}, or hide "
            "the GPUs (`CUDA_VISIBLE_DEVICES=`) to compute on the CPU"
        )
    return "cuda" if count else "cpu"
