"""Builds an executor from a plan and a model.

The order is fixed: pipeline stages, tensor slices, values of empty parameters (with ZeRO one shard group at a time, as
the data axes take them), recomputation, data axes, kernels (chosen by shapes alone), optimizer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from ropewalk.base.errors import UserError
from ropewalk.base.files import storage
from ropewalk.model.attend import Attend, Kernel
from ropewalk.model.init import initial_values
from ropewalk.model.protocol import ModelStage, build_stage
from ropewalk.model.sharding import whole_name
from ropewalk.model.spec import Spec
from ropewalk.plan.forecast import PURE
from ropewalk.plan.plan import Plan
from ropewalk.plan.schedules import PIPELINE_SCHEDULES, Shape, peak_live

from .anomaly_guard import SpikeRule
from .comm import Group
from .compat import KEPT_BYTES, keep_freed_memory
from .data.gradient_compression import make_compressor
from .data.reducers import ParameterGroup, Reducer, Reducers
from .data.replicas import Replicas
from .data.shard_group import Fill, hollow
from .data.shards import Shards
from .executor import Executor, MakeOptimizer, StepHooks
from .kernels.kernel_choice import Timer, gpu_milliseconds
from .kernels.selection import choose_kernels
from .memory.activation_packing import ActivationPacking
from .memory.host_optimizer import BUCKET_BYTES, HostOptimizer
from .memory.recompute import make_run_block, recomputed
from .mesh import Mesh
from .microbatch import ForwardPasses, MicrobatchRunner, MicrobatchSplitter, SequenceLosses
from .multi_device import Devices, other_devices
from .pipeline import DeferredWeightGrads
from .placement import LocalShard, Placement
from .precision import PRODUCTS, Masters
from .state import RankState
from .tensor import split_model, tensor_placement


def apply(
    plan: Plan,
    model: ModelStage,
    mesh: Mesh | None,
    make_optimizer: MakeOptimizer | None,
    *,
    device: torch.device | None = None,
    trained: Collection[str] | None = None,
    clip_norm: float = 0.0,
    spike: SpikeRule | None = None,
    hooks: StepHooks | None = None,
    seed: int = 0,
    init_seed: int | None = 0,
    run_s: float = math.inf,
    timer: Timer = gpu_milliseconds,
    draws: bool = False,
) -> Executor:
    """Returns the executor of `plan` on this rank of `mesh` (None: a single process). All ranks must call.

    `model` is the whole model: with values, of which each rank takes its shard, or on torch's `meta` device, where each
    rank initializes its shard from `init_seed` on `device`; None leaves it uninitialized, for a checkpoint to load.
    `make_optimizer` gets the sharded parameters named by `trained` (default: all); without it the executor only scores.
    `spike` defines loss anomalies; `seed` is the phase's, for dropout. `run_s` is the expected time of its steps, which
    bounds the time for measuring kernels; `timer` measures them. With `draws`, sequences are importance-sampled and
    carry the weight of their draw.
    """
    here = mesh.world.size if mesh else 1
    if plan.world != here:
        raise UserError(f"the plan is for {plan.world} processes, {here} are here")
    mesh = mesh or Mesh(plan)
    if plan.device == "cpu":
        keep_freed_memory(up_to_bytes=_largest_kept(plan, model.spec))
    empty = next(model.parameters()).is_meta
    stages = _stages(plan, model, mesh, device=device, init_seed=init_seed)
    names = [name for stage in stages.values() for name, _ in stage.named_parameters()]
    chosen = {name for name in names if trained is None or whole_name(name, model.spec) in trained}
    packing = None if plan.saved_activations == "whole" else ActivationPacking(plan.saved_activations)
    for number, stage in stages.items():
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(name in chosen)
        stage.run_block = make_run_block(
            plan,
            model.spec,
            mesh,
            layers=[int(layer) for layer in stage.blocks],
            last=number == plan.pipeline * plan.chunks - 1,
            trained=trained,
            live_microbatches=_live(plan, mesh),
            packing=packing,
        )
    later = _later(plan, stages)
    pure = make_optimizer is not None and plan.precision in PURE
    masters: list[Masters] = []
    if pure and plan.zero == 0:
        masters = [Masters(stage, one_microbatch=_is_alone(plan)) for stage in stages.values()]
    fill = functools.partial(_first_values, spec=model.spec, group=mesh.group("tensor"), seed=init_seed)
    data = make_reducers(
        plan,
        stages,
        mesh,
        [_one_group(stages, mesh)],
        masters=masters,
        trained=chosen,
        pure=pure,
        seed=seed,
        fill=fill if empty and plan.zero else None,
    )
    hooks = hooks or StepHooks()
    contests = choose_kernels(
        plan,
        stages,
        mesh,
        device=device,
        trains=make_optimizer is not None,
        hooks=hooks,
        run_s=run_s,
        timer=timer,
    )
    optimizer = None
    if make_optimizer:
        mine = {name: p for name, p in data.parameters.items() if name in chosen}
        optimizer = _optimizer(plan, mesh, mine, data.placements, make_optimizer, clips=clip_norm > 0)
    devices = _devices(plan, stages)
    where = next(next(iter(stages.values())).parameters()).device
    state = RankState(
        model.spec,
        mesh,
        data,
        device=where,
        optimizer=optimizer,
        copies=[*masters, *([devices] if devices else [])],
        spike=spike,
        scales_loss=plan.precision == "fp16",
    )
    splitter = MicrobatchSplitter(plan, mesh, next(iter(stages.values())), counts_draws=draws)
    passes = ForwardPasses(
        plan,
        mesh,
        model.spec,
        splitter,
        kernel=next((cast(Kernel, c.winner) for c in contests if c.what == "attention"), None),
        wrap_attention=_attention(plan, packing),
        seed=seed,
        count_updates=state.count_updates if optimizer else None,
    )
    sequence_losses = SequenceLosses(mesh, where) if draws else None
    runner = MicrobatchRunner(
        plan, mesh, stages, data, passes, later=later, devices=devices, sequence_losses=sequence_losses
    )
    return Executor(plan, mesh, splitter, runner, state, clip_norm=clip_norm, hooks=hooks, contests=contests)


def local(parts: Mapping[str, LocalShard]) -> dict[str, Tensor]:
    """Returns the local tensors of an executor's state."""
    return {name: part.local for name, part in parts.items()}


def _stages(
    plan: Plan, model: ModelStage, mesh: Mesh, *, device: torch.device | None, init_seed: int | None
) -> dict[int, ModelStage]:
    """Returns this rank's stages by global stage number, sliced along the tensor axis and filled; with ZeRO, a model on
    `meta` stays without storage."""
    spec, count = model.spec, plan.pipeline * plan.chunks
    group = mesh.group("tensor")
    empty = next(model.parameters()).is_meta
    whole = dict(model.named_parameters())
    found = {}
    for number in range(mesh.place["pipeline"], count, plan.pipeline):
        stage = model
        if count > 1:
            with torch.device("meta"):
                stage = build_stage(spec, layers=plan.stages[number], first=number == 0, last=number == count - 1)
            for name, _ in list(stage.named_parameters()):
                place, _, attribute = name.rpartition(".")
                value = whole[whole_name(name, spec)].detach()
                # A copy: otherwise the first and last stage of one process would share a tied matrix. ZeRO-3 copies
                # its shards anyway.
                shared = empty or plan.zero == 3
                setattr(stage.get_submodule(place), attribute, nn.Parameter(value if shared else value.clone()))
        split_model(stage, group, sequence=plan.sequence)
        if empty and plan.zero:
            for name, parameter in list(stage.named_parameters()):
                place, _, attribute = name.rpartition(".")
                made = hollow(parameter, device=device or torch.device("cpu"))
                setattr(stage.get_submodule(place), attribute, nn.Parameter(made))
        elif empty:
            stage = stage.to_empty(device=device or "cpu")
            parameters = dict(stage.named_parameters())
            with torch.no_grad():
                for name, value in _first_values(parameters, spec=spec, group=group, seed=init_seed):
                    parameters[name].copy_(value)
        found[number] = stage
    return found


def _first_values(
    names: Collection[str], *, spec: Spec, group: Group, seed: int | None
) -> Iterator[tuple[str, Tensor]]:
    """Yields initial parameter values for a rank of the tensor axis `group`, one at a time; without a seed,
    uninitialized memory, of which the system commits only written pages."""
    placements = {name: tensor_placement(name, spec, group) for name in names}
    if seed is None:
        yield from ((name, torch.empty(placement.local_shape)) for name, placement in placements.items())
        return
    for name, value in initial_values({n: placement.shape for n, placement in placements.items()}, spec, seed=seed):
        yield name, placements[name].take(value)


def make_reducers(
    plan: Plan,
    stages: Mapping[int, ModelStage],
    mesh: Mesh,
    groups: Sequence[ParameterGroup],
    *,
    masters: Sequence[Masters] = (),
    trained: Collection[str],
    pure: bool = False,
    seed: int = 0,
    fill: Fill | None = None,
) -> Reducers:
    """Builds the reducers of `groups`, which partition the parameters of `stages`."""
    spec = next(iter(stages.values())).spec
    weights: dict[str, nn.Parameter] = {n: p for stage in stages.values() for n, p in stage.named_parameters()}
    parameters = {n: p for each in masters for n, p in each.parameters.items()} if masters else weights
    dtype = next(iter(weights.values())).dtype
    narrow = _narrow(plan, weights, pure=pure)

    def make(group: ParameterGroup) -> Reducer:
        mine = {name: weight for name, weight in weights.items() if name in group.names}
        first = group.replicas.rank == 0
        placements = {n: tensor_placement(n, spec, mesh.group("tensor"), first=first) for n in mine}
        if plan.zero == 0:
            return Replicas(
                mine,
                {name: parameters[name] for name in mine},
                placements,
                group.replicas,
                trained=trained,
                bucket_bytes=plan.bucket_bytes,
                compressor=make_compressor(plan, group.replicas, seed=seed),
            )
        return Shards(
            mine,
            placements,
            group.shard,
            group.replicas,
            stage=plan.zero,
            bucket_bytes=plan.bucket_bytes,
            trained=trained,
            modules={f"blocks.{k}": b for stage in stages.values() for k, b in stage.blocks.items()},
            masters=dtype,
            narrow=narrow,
            held=plan.pipeline > 1,
            host="parameters" in plan.offload,
            folder=_folder(plan, mesh),
            fill=fill,
        )

    return Reducers(groups, make, order=list(weights))


def _one_group(stages: Mapping[int, ModelStage], mesh: Mesh) -> ParameterGroup:
    """Returns one group of all parameters, replicated or sharded over the data ranks."""
    names = frozenset(name for stage in stages.values() for name, _ in stage.named_parameters())
    return ParameterGroup(names, replicas=mesh.group("replicate", "context"), shard=mesh.group("shard"))


def _narrow(plan: Plan, weights: Mapping[str, nn.Parameter], *, pure: bool) -> dict[str, torch.dtype]:
    """Returns the gather dtype of each parameter, where it differs from the master weights'."""
    if pure:
        return dict.fromkeys(weights, torch.bfloat16)
    if plan.precision not in PRODUCTS:
        return {}
    # Autocast would round these anyway: half the bytes to gather, and no narrow copy for the backward pass. The head
    # stays wide: its gradient is a float32 sum, which a narrow head would round.
    matrices = [n for n, w in weights.items() if n.startswith("blocks.") and w.dim() == 2]
    return dict.fromkeys(matrices, PRODUCTS[plan.precision])


def _optimizer(
    plan: Plan,
    mesh: Mesh,
    parameters: dict[str, nn.Parameter],
    placements: Mapping[str, Placement],
    make: MakeOptimizer,
    *,
    clips: bool,
) -> torch.optim.Optimizer | HostOptimizer:
    mine = {name: placements[name] for name in parameters}
    if "optimizer" not in plan.offload:
        return make(parameters, mine)
    # When gradients become final only at the end of a step, memory for rollback is of no use.
    waits = clips or plan.pipeline > 1 or plan.exact or plan.precision == "fp16"
    # At most the size of the buckets in which gradients arrive.
    size = min(BUCKET_BYTES, plan.bucket_bytes)
    return HostOptimizer(
        parameters, lambda there: make(there, mine), waits=waits, bucket_bytes=size, folder=_folder(plan, mesh)
    )


def _largest_kept(plan: Plan, spec: Spec) -> int:
    """Returns the maximum size of host tensors whose memory the allocator reuses.

    Reused memory fragments between live tensors: as much as ZeRO saves (21 M parameters on four ranks, ZeRO-3: 440 MB
    with reuse, 228 without). Large models therefore reuse small tensors only; returning pages costs a step of 21 M
    parameters 0.2 to 0.4 s of system time.
    """
    state_bytes = 16 * spec.parameters()  # weights, gradients and two moments of float32
    return 1 << 20 if plan.zero and state_bytes > KEPT_BYTES else 1 << 25


def _is_alone(plan: Plan) -> bool:
    """Whether gradients on a GPU are final after one backward pass, and updated in place."""
    return plan.device == "cuda" and plan.world == 1 and plan.microbatches == 1 and "optimizer" not in plan.offload


def _attention(plan: Plan, packing: ActivationPacking | None) -> Callable[[Attend], Attend] | None:
    """Returns the wrapper that makes attention save less, if any."""
    again = recomputed if plan.recompute == "attention" else None
    if packing is None:
        return again
    return packing.exactly if again is None else lambda attend: packing.exactly(again(attend))


def _live(plan: Plan, mesh: Mesh) -> int:
    """Returns the number of microbatches whose activations this rank holds at once."""
    if plan.pipeline == 1:
        return 1
    shape = Shape(ranks=plan.pipeline, microbatches=max(1, plan.microbatches), chunks=plan.chunks)
    return peak_live(plan.schedule, rank=mesh.place["pipeline"], shape=shape)


def _folder(plan: Plan, mesh: Mesh) -> Path | None:
    """Returns this rank's folder for state and activations on disk."""
    if not plan.offload_path:
        return None
    folder = Path(plan.offload_path) / f"rank-{mesh.rank:05d}"
    with storage(f"making {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _later(plan: Plan, stages: Mapping[int, ModelStage]) -> DeferredWeightGrads | None:
    if plan.pipeline == 1 or not PIPELINE_SCHEDULES[plan.schedule].splits_backward:
        return None
    later = DeferredWeightGrads()
    for stage in stages.values():
        later.serve(stage)
    return later


def _devices(plan: Plan, stages: Mapping[int, ModelStage]) -> Devices | None:
    if plan.devices == 1:
        return None
    (model,) = stages.values()
    return Devices(model, other_devices(next(model.parameters()).device, plan.devices))
