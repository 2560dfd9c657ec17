"""Evaluates and generates under a parallel plan: each rank loads its own shards, so that the model may be larger than
one device."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ropewalk.base.errors import DamagedCheckpoint, UserError
from ropewalk.base.progress import Progress
from ropewalk.checkpoint.format import TOKENIZER, identity, list_checkpoints, read_checkpoint_manifest
from ropewalk.checkpoint.read.load import CheckpointReader, LazyTensors
from ropewalk.checkpoint.read.model_check import advise_on_damage, check_weights
from ropewalk.checkpoint.run_state import head_of
from ropewalk.config.ranks import Ranks, ranks
from ropewalk.config.resolved import load_section, load_value
from ropewalk.config.stages import read_stage
from ropewalk.model.protocol import ModelStage, build_stage
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor
from ropewalk.parallel.mesh import Mesh, join, pick_device
from ropewalk.plan.inference_plan import inference
from ropewalk.plan.plan import Plan, load_plan

from .answers import Answers, Identity, answers_of
from .config import Evaluate
from .evaluation import evaluate_on_ranks, write_evaluation
from .generate import generate
from .generation_plan import generation_plan
from .held_out import HeldOut
from .results import read_results
from .score import score_continuations, score_documents
from .task import Likelihood, Sampling, TaskModel

CHUNK_S = 5.0
"""Seconds of work per call, after which answers are saved."""
_FLOPS = {"cpu": 5e10, "cuda": 1e14}
"""Rough speed of one process."""
_TOKENS = {"cpu": 2048, "cuda": 65_536}
"""Most tokens of a forward pass per rank, within the plan's microbatch."""
_LEAST_TOKENS = 1024


class PlannedModel:
    """A model under a plan, for tasks. All ranks must call its methods. Scores in the plan's precision and generates in
    float32, so that every plan samples the same tokens. Weights are loaded when they are first needed."""

    def __init__(
        self,
        plan: Plan,
        load: Callable[[Plan], Executor | ModelStage],
        *,
        spec: Spec,
        held_out: HeldOut,
    ) -> None:
        """`load` loads the model under a plan of any precision; one is in memory at a time."""
        self._plan, self._load, self._held_out = plan, load, held_out
        self.length = spec.sequence_length
        self._budget = min(_TOKENS[plan.device], max(_LEAST_TOKENS, plan.microbatch_size * self.length))
        self.chunk_tokens = _chunk_tokens(plan, spec)
        self._loaded: tuple[Plan, Executor | ModelStage] | None = None

    def rolling(self, documents: Sequence[np.ndarray]) -> list[Likelihood]:
        return score_documents(
            self._scorer(),
            self._plan,
            documents,
            sequence_length=self.length,
            budget=self._budget,
            before=self._held_out.texts.before,
        )

    def loglikelihood(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Likelihood]:
        return score_continuations(self._scorer(), self._plan, pairs, sequence_length=self.length, budget=self._budget)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seeds: Sequence[int]
    ) -> list[list[int]]:
        # Passes of generation have as many shapes as prompts; blocks compiled for training would compile for each.
        with torch.compiler.set_stance("force_eager") if self._plan.compile else contextlib.nullcontext():
            return generate(
                self._under(dataclasses.replace(self._plan, precision="fp32")),
                prompts,
                sampling,
                seeds=seeds,
                end=self._held_out.end_of_text,
                vocabulary=self._held_out.detokenizer.vocabulary,
                text=self._held_out.detokenizer.text,
            )

    def _scorer(self) -> Executor:
        executor = self._under(self._plan)
        assert not isinstance(executor, ModelStage), "an executor scores"
        return executor

    def _under(self, plan: Plan) -> Executor | ModelStage:
        if self._loaded is None or self._loaded[0] != plan:
            self._loaded = None
            gc.collect()
            self._loaded = plan, self._load(plan)
        return self._loaded[1]


def _chunk_tokens(plan: Plan, spec: Spec) -> int:
    """Tokens that one call should score: some seconds of work. A function of the plan and not of a clock, so that an
    interrupted evaluation forms the same batches again."""
    flops = _FLOPS[plan.device] * plan.world * CHUNK_S
    return int(min(1 << 22, max(1 << 12, flops / (2 * spec.parameters()))))


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
    manifest = read_checkpoint_manifest(path)
    head = head_of(manifest)
    held_out = HeldOut(Path(prepared["result"]["folder"]), settings, seed=seed, progress=progress)
    plan = inference(planned, length=head.spec.sequence_length)
    model = PlannedModel(
        plan, lambda plan: load_executor(path, plan, mesh, device=device), spec=head.spec, held_out=held_out
    )
    evaluate_together(model, held_out, run, answers_of(identity(manifest), plan, seed=seed), mesh, {"step": head.step})
    return read_results(run)


def evaluate_together(
    model: TaskModel, held_out: HeldOut, folder: Path, of: Identity, mesh: Mesh, facts: Mapping[str, Any]
) -> None:
    """Evaluates on all ranks of `mesh`; rank 0 keeps answers and writes the results in `folder`. All ranks must
    call."""
    answers = Answers(folder, of) if mesh.rank == 0 else None
    found = evaluate_on_ranks(model, held_out, answers=answers, share=mesh.control.broadcast_json, rank=mesh.rank)
    if found is not None:
        write_evaluation(folder, found, **facts)
    mesh.control.gather_numbers(mesh.rank)  # barrier: rank 0 has written the results


def load_generator(path: Path, *, precision: Literal["fp32", "bf16"] = "fp32") -> tuple[Executor, bytes]:
    """(executor for generation on this launch's ranks, tokenizer file) of the checkpoint `path`. All ranks must
    call."""
    place = ranks()
    device = device_kind(place)
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


def device_kind(place: Ranks) -> Literal["cpu", "cuda"]:
    """`cuda` with one GPU per process, or `cpu` if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < count < place.local_world:
        raise UserError(
            f"{place.local_world} processes want a GPU each, but torch sees {count}; start at most {count}, or hide "
            "the GPUs (`CUDA_VISIBLE_DEVICES=`) to compute on the CPU"
        )
    return "cuda" if count else "cpu"
