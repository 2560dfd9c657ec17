"""`train --verify`: compares a run's parallel plan with one device, over a few steps in float64.

Rank 0 runs the single-device reference first, then all ranks run the plan. Rank 0 broadcasts the reference one
parameter at a time and every rank compares its shard: extra memory is one parameter, and errors are located by rank.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.base.files import write_json
from ropewalk.base.progress import Progress, Silent, amount
from ropewalk.config.ranks import ranks
from ropewalk.model.spec import Spec
from ropewalk.parallel.mesh import Mesh, join, leave, pick_device
from ropewalk.parallel.placement import LocalShard
from ropewalk.plan.forecast import OptimizerCosts, memory
from ropewalk.plan.machine import available_memory
from ropewalk.plan.memory_per_rank import of_rank
from ropewalk.plan.plan import PhasePlan, Plan

from .equality_check import STEPS, Outcome, Trial, make_trial, run_plainly, run_plan, trial_plan
from .mesh_coordinator import MeshCoordinator
from .optim.table import OPTIMIZERS
from .reduced import candidates
from .settings import VERDICT, Settings, read_settings

FORMAT = 1
LIMITS = {"loss": 1e-10, "grad_norm": 1e-10, "gradient": 1e-12, "update": 1e-10, "parameter": 1e-10}
"""Tolerances for rounding, in units of max(1, the largest value of the same kind on one device). Reordering a sum of n
terms changes it by about sqrt(n) * 1e-16, and by more per layer. AdamW divides a gradient by its own magnitude, which
amplifies the rounding of tiny gradients; later steps inherit it. Measured with 6 layers of width 256 on two tensor
ranks: 3e-16, 1e-13, 3e-16, 1e-13, 2e-12. Bugs are orders of magnitude larger (`tests/train/test_verify.py`)."""
WAIT_S = 3600.0
"""Timeout of the other ranks while rank 0 runs the reference."""

NOT_HERE = -1.0
"""In a table of differences: the rank holds no shard of the parameter."""
KINDS = {"gradient": "gradients", "update": "updated", "parameter": "parameters"}
"""Compared tensors of every parameter, and their field in `Outcome`."""
FIGURES = ("loss", "grad_norm")


def verify(run: Path, *, progress: Progress | None = None, memory_bytes: int | None = None) -> dict[str, Any]:
    """Checks that the plan of the run directory `run` computes the same as one device; writes and returns the verdict
    (`verify.json`, docs/formats.md). All ranks must call and get the same verdict; the run itself is not changed.

    A model that exceeds the free memory of rank 0, or `memory_bytes`, is reduced (train/reduced.py)."""
    settings, place, progress = read_settings(run), ranks(), progress or Silent()
    plan = settings.planned.phases[0].plan
    device = pick_device(plan, place)
    if settings.train.threads:
        torch.set_num_threads(settings.train.threads)
    start = time.perf_counter()
    join(plan, place, timeout_s=WAIT_S)
    phases = []
    for phase in _different(settings):
        mesh = Mesh(
            trial_plan(settings.planned.phases[phase].plan, length=settings.phases[phase].sequence_length)[0],
            place.rank,
        )
        number = 0
        if place.rank == 0:
            number = choose_candidate(
                settings, phase, room_for(device, memory_bytes), local_world=place.local_world, progress=progress
            )
        chosen = list(candidates(settings.planned.phases[phase]))[mesh.control.broadcast_json(number)]
        trial = make_trial(settings, phase, chosen.planned)
        verdict = _verify_phase(trial, mesh, device=device, progress=progress)
        phases.append({**verdict, "compared": chosen.compared})
    leave()
    verdict = {
        "format": FORMAT,
        "equal": all(phase["equal"] for phase in phases),
        "processes": plan.world,
        "steps": STEPS,
        "limits": LIMITS,
        "phases": phases,
        "seconds": round(time.perf_counter() - start, 3),
    }
    if place.rank == 0:
        write_json(run / VERDICT, verdict)
    return verdict


@dataclass(frozen=True, slots=True)
class PinnedBuffer:
    """Memory budget of rank 0, in bytes."""

    device: int
    host: int


def room_for(device: torch.device, memory_bytes: int | None = None) -> PinnedBuffer:
    """Free memory of rank 0, at most `memory_bytes`."""
    host = available_memory()
    there = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
    return PinnedBuffer(*(free if memory_bytes is None else min(free, memory_bytes) for free in (there, host)))


def choose_candidate(
    settings: Settings, phase: int, room: PinnedBuffer, *, local_world: int, progress: Progress
) -> int:
    """The index of the largest candidate whose reference and plan fit in float64; reports a reduced model."""
    optimizer = OPTIMIZERS[settings.train.optimizer.kind].costs
    on_gpu = settings.planned.phases[phase].plan.device == "cuda"
    whole = 0
    for number, candidate in enumerate(candidates(settings.planned.phases[phase])):
        need = _memory_of(candidate.planned, optimizer, local_world=local_world)
        whole = whole or need
        fits = not on_gpu or _left_by_plain_side(candidate.planned, optimizer) <= room.host
        if need <= room.device and fits:
            if number:
                progress.say(
                    f"verify: the whole model needs about {amount(whole, 'B')} in float64, on one device and under the "
                    f"plan; {amount(room.device, 'B')} are free: comparing {candidate.compared}"
                )
            return number
    raise UserError(
        f"--verify needs about {amount(need, 'B')} in float64 even for {candidate.compared}; "
        f"{amount(min(room.device, room.host), 'B')} are free. Free some memory, or verify on another machine"
    )


def _memory_of(planned: PhasePlan, optimizer: OptimizerCosts, *, local_world: int) -> int:
    plan, spec = _short_trial(planned)
    single, whole = (
        memory(spec, rows=1, precision="fp32", optimizer=optimizer, trained=planned.trained, recompute=again)
        for again in ("none", plan.recompute)
    )
    rank = of_rank(whole, plan, spec, trained=planned.trained) if plan.world > 1 else whole
    # Plus gradients of step 1 and parameters after it; the reference also keeps the final parameters.
    of_ranks = rank.total + rank.gradients + rank.weights
    # Twice: float64 instead of float32.
    if plan.device == "cuda":
        return 2 * max(single.total, of_ranks)
    return _left_by_plain_side(planned, optimizer) + 2 * max(single.total, of_ranks * local_world)


def _left_by_plain_side(planned: PhasePlan, optimizer: OptimizerCosts) -> int:
    """Bytes kept by the reference: gradients, and parameters after the first and the last step."""
    _, spec = _short_trial(planned)
    single = memory(spec, rows=1, precision="fp32", optimizer=optimizer, trained=planned.trained, recompute="none")
    return 2 * (single.gradients + 2 * single.weights)


def _short_trial(planned: PhasePlan) -> tuple[Plan, Spec]:
    plan, _ = trial_plan(planned.plan, length=planned.spec.sequence_length)
    length = plan.sequence_length or planned.spec.sequence_length
    return plan, dataclasses.replace(planned.spec, sequence_length=length)


def _different(settings: Settings) -> list[int]:
    """Phases that differ in model, plan or trained parameters from all earlier ones."""
    seen = set()
    found = []
    for phase, planned in enumerate(settings.planned.phases):
        what = (settings.model(phase), planned.plan, planned.trained)
        if what not in seen:
            found.append(phase)
        seen.add(what)
    return found


def _verify_phase(trial: Trial, mesh: Mesh, *, device: torch.device, progress: Progress) -> dict[str, Any]:
    coordinator = MeshCoordinator(mesh.control)
    plain = None
    if mesh.rank == 0:
        progress.say(f"verify: {STEPS} steps on one device, in float64")
        plain = run_plainly(trial, device=device)
        progress.say("verify: the same under the plan")
    coordinator.barrier()
    outcome = run_plan(trial, mesh, device=device)
    away = _differences(trial, outcome, plain, mesh)
    figures = mesh.control.start_all_gather(torch.tensor([outcome.losses, outcome.norms], dtype=torch.float64)).wait()
    verdict: dict[str, Any] = coordinator.broadcast(_verdict(trial, plain, figures, away) if plain else None)
    return verdict


def _differences(trial: Trial, outcome: Outcome, plain: Outcome | None, mesh: Mesh) -> Tensor:
    """Maximum absolute difference to the reference on rank 0, by rank, parameter and kind."""
    away = torch.full((len(trial.names), len(KINDS)), NOT_HERE, dtype=torch.float64)
    shapes = trial.spec.shapes()
    for number, name in enumerate(trial.names):
        for kind, field in enumerate(KINDS.values()):
            if field == "gradients" and not trial.is_trained(name):
                continue
            true: Mapping[str, LocalShard] = getattr(plain, field) if plain else {}
            whole = true[name].local if plain else torch.empty(shapes[name], dtype=torch.float64)
            mesh.control.broadcast(whole)
            held: LocalShard | None = getattr(outcome, field).get(name)
            if held:
                away[number, kind] = _distance(held.local.cpu(), held.placement.take(whole))
    return mesh.control.start_all_gather(away).wait()


def _verdict(trial: Trial, plain: Outcome, figures_RFS: Tensor, away_RPK: Tensor) -> dict[str, Any]:
    """The verdict on one phase. Shapes: R ranks, F figures, S steps, P parameters, K kinds of tensors."""
    true_FS = torch.tensor([plain.losses, plain.norms], dtype=torch.float64)
    beside_RF = (figures_RFS - true_FS).abs().amax(2) / true_FS.abs().amax(1).clamp(min=1.0)
    beside_RF = beside_RF.nan_to_num(nan=math.inf)
    sizes = [_largest(getattr(plain, field)) for field in KINDS.values()]
    unit_K = torch.tensor(sizes, dtype=torch.float64).clamp(min=1.0)
    away_RPK = torch.where(away_RPK == NOT_HERE, away_RPK, away_RPK / unit_K)
    largest = [*beside_RF.amax(0).tolist(), *away_RPK.amax((0, 1)).tolist()]
    first = next(_wrong(trial, beside_RF, away_RPK), None)
    return {
        "phase": trial.settings.phases[trial.phase].name,
        "equal": first is None,
        "rows": trial.plan.batch_size,
        "tokens": trial.plan.sequence_length,
        "left_out": list(trial.left_out),
        "largest": {kind: _number(value) for kind, value in zip((*FIGURES, *KINDS), largest, strict=True)},
        "first": first,
    }


def _wrong(trial: Trial, beside_RF: Tensor, away_RPK: Tensor) -> Iterator[dict[str, Any]]:
    """Differences above the limits, in causal order: gradients of step 1, parameters after step 1, final parameters,
    then loss and norm; each in model order."""
    for kind, what in enumerate(KINDS):
        for number, name in enumerate(trial.names):
            away_R = away_RPK[:, number, kind]
            expected = what != "gradient" or trial.is_trained(name)
            if expected and (away_R.max() > LIMITS[what] or away_R.max() < 0):
                yield {"what": what, "parameter": name, **_worst(away_R, LIMITS[what])}
    for figure, what in enumerate(FIGURES):
        if beside_RF[:, figure].max() > LIMITS[what]:
            yield {"what": what, "parameter": None, **_worst(beside_RF[:, figure], LIMITS[what])}


def _worst(away_R: Tensor, limit: float) -> dict[str, Any]:
    """The rank with the largest difference and all ranks above `limit`; None if no rank holds the parameter."""
    if away_R.max() < 0:
        return {"difference": None, "rank": None, "ranks": []}
    rank, too_far = int(away_R.argmax()), (away_R > limit).nonzero()[:, 0]
    return {"difference": _number(float(away_R[rank])), "rank": rank, "ranks": too_far.tolist()}


def _largest(parts: Mapping[str, LocalShard]) -> float:
    return max(float(part.local.abs().max()) for part in parts.values())


def _distance(held: Tensor, true: Tensor) -> float:
    if held.shape != true.shape:
        return math.inf
    away = float((held - true).abs().max()) if held.numel() else 0.0
    return away if math.isfinite(away) else math.inf


def _number(value: float) -> float | str:
    """`value` for JSON, which has no infinity."""
    return max(0.0, value) if math.isfinite(value) else "inf"
