"""Training under a plan on real processes, beside the same training written out on one.

`Proof` runs a case and says how far each rank is from one device; the reference of a model and optimizer is made once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ropewalk.load.batch import Batch
from ropewalk.model.attend import attend_for
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.dropout import Dropout, dropout_key
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor, StepHooks
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.placement import LocalShard
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import MODELS, ROWS, Case
from tests.parallel.pool import POOL, Pool

STEPS, RATE, CLIP, SEED = 3, 1e-2, 0.5, 3
LIMITS = {"loss": 1e-12, "norm": 1e-12, "gradients": 1e-13, "weights": 1e-10, "moments": 1e-10, "scores": 1e-12}
"""Greatest differences in float64 that are rounding: gradients in units of max(1, the largest of them).

Sums of n numbers in another order differ by about n * 1e-16; AdamW divides a gradient by its own size, and so lets the
rounding of very small ones grow.
"""

Arrays = dict[str, np.ndarray]


@dataclass(slots=True)
class Outcome:
    """What a training left, as a rank sees it; tensors are whole."""

    losses: list[float]
    norms: list[float]
    gradients: Arrays
    """Of the first step, before clipping."""
    weights: Arrays
    moments: Arrays
    scores: np.ndarray
    identical: bool = True
    """Whether a state that was loaded came back with the same bits."""


def batches(spec: Spec, count: int) -> list[Batch]:
    """Random rows of several documents each. Weights are uneven numbers, a fifth of them 0, and the first row is all 0:
    ranks have different sums, one microbatch has none."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, spec.vocabulary, (ROWS, spec.sequence_length + 1), generator=draw)
        shape = (ROWS, spec.sequence_length)
        weight = torch.rand(shape, generator=draw) * (torch.rand(shape, generator=draw) < 0.8)
        weight[0] = 0
        found.append(
            Batch(
                tokens=tokens[:, :-1],
                targets=tokens[:, 1:],
                weight=weight,
                positions=torch.arange(spec.sequence_length).expand(shape),
                documents=(torch.rand(shape, generator=draw) < 0.1).cumsum(1).int(),
            )
        )
    return found


def train(rank: int, case: Case, state: tuple[Arrays, Arrays] | None = None) -> Outcome:
    """A rank's job: some steps under the case's plan. With a whole `state` of weights and moments, loads it afterwards
    and looks whether the same comes out again."""
    mesh = Mesh(case.plan, rank)
    executor, first = start(case, mesh)
    losses, norms = [], []
    for batch in batches(case.spec, STEPS):
        result = executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=RATE)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    placements = {name: part.placement for name, part in executor.model_state().items()}
    gradients = gathered(
        {name: LocalShard(gradient, placements[name]) for name, gradient in first.items() if name in placements}
    )
    scores = executor.score(batches(case.spec, 1)[0]).log_probabilities
    weights, moments = gathered(executor.model_state()), gathered(executor.optimizer_state())
    outcome = Outcome(losses, norms, gradients, weights, moments, scores.cpu().numpy().copy())
    if state:
        executor.load_state(*({name: torch.from_numpy(array) for name, array in part.items()} for part in state))
        again = gathered(executor.model_state()), gathered(executor.optimizer_state())
        outcome.identical = all(
            after[name].tobytes() == before[name].tobytes()
            for after, before in zip(again, state, strict=True)
            for name in after
        )
    return outcome


def start(case: Case, mesh: Mesh) -> tuple[Executor, dict[str, Tensor]]:
    """The executor of a case, and where it will put the gradients of its first step."""
    first: dict[str, Tensor] = {}

    def look(gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            first.setdefault(name, gradient.clone())

    executor = apply(
        case.plan,
        build(case.spec, seed=1, dtype=torch.float64).to(case.plan.device),
        mesh,
        functools.partial(_optimizer, case.optimizer, case.spec),
        trained=case.trained,
        clip_norm=CLIP,
        hooks=StepHooks(on_gradients=[look]),
        seed=SEED,
    )
    return executor, first


def gathered(parts: Mapping[str, LocalShard]) -> Arrays:
    """The whole tensors; all ranks must call."""
    return {name: part.placement.gather(_on_device(part)).cpu().numpy().copy() for name, part in parts.items()}


def _on_device(part: LocalShard) -> Tensor:
    """What a rank holds, where its groups communicate: the state of an offloaded optimizer is on the host."""
    communicates = any(slicing.group.size > 1 for slicing in part.placement.shards)
    return part.local.cuda() if communicates and dist.get_backend() == "nccl" else part.local


def by_hand(rank: int, model: str, kind: str, trained: list[str] | None) -> Outcome:
    """The same on one process: whole batches, no microbatches, nothing of `parallel`."""
    spec = MODELS[model]
    decoder = build(spec, seed=1, dtype=torch.float64)
    named = {n: p for n, p in decoder.named_parameters() if trained is None or n in trained}
    optimizer = _optimizer(kind, spec, named, {})
    losses, norms, first = [], [], {}
    for number, batch in enumerate(batches(spec, STEPS)):
        dropout = None
        if spec.dropout:
            dropout = Dropout(spec.dropout, dropout_key(SEED, torch.tensor(number)), torch.arange(ROWS))
        weight = batch.weight.double()
        loss = -(_log_probabilities(decoder, batch, dropout) * weight).sum() / weight.sum()
        gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        first = first or {name: gradient.numpy().copy() for name, gradient in gradients.items()}
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        for name, parameter in named.items():
            parameter.grad = gradients[name] * min(1.0, CLIP / (float(norm) + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = RATE * group.get("lr_ratio", 1.0)
        vars(optimizer).update(found_inf=torch.tensor(0.0), grad_scale=None)
        optimizer.step()
        losses.append(loss.item())
        norms.append(float(norm))
    with torch.no_grad():
        scores = _log_probabilities(decoder, batches(spec, 1)[0], None)
    weights = {name: p.detach().numpy() for name, p in decoder.named_parameters()}
    moments = {f"{kind}/{name}": t.numpy() for name, p in named.items() for kind, t in optimizer.state[p].items()}
    return Outcome(losses, norms, first, weights, moments, scores.numpy())


def _log_probabilities(decoder: Decoder, batch: Batch, dropout: Dropout | None) -> Tensor:
    attend = attend_for(decoder.spec, documents_BT=batch.documents)
    hidden = decoder(batch.tokens, positions_BT=batch.positions, attend=attend, dropout=dropout)
    logits = hidden @ decoder.head_weight.T
    return logits.log_softmax(-1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)


def _optimizer(
    kind: str, spec: Spec, parameters: dict[str, nn.Parameter], placements: Mapping[str, object]
) -> torch.optim.Optimizer:
    return make_optimizer(parameters, Optimizer(kind=kind), spec=spec, placements=placements)  # type: ignore[arg-type]


class Proof:
    """Runs cases in a pool; remembers references, and the state that each model was last left in."""

    def __init__(self, pool: Pool = POOL) -> None:
        self._pool = pool
        self._references: dict[tuple[str, str], Outcome] = {}
        self._states: dict[tuple[str, str], tuple[Arrays, Arrays]] = {}

    def differences(self, case: Case) -> dict[str, float]:
        """How far the worst rank of a case is from one device, in each of `LIMITS`; `missing` counts tensors that no
        rank has, `changed` ranks that did not give back what they loaded: the state that the plan before left."""
        key = (case.model, case.optimizer)
        reference = self.reference(case)
        state = self._states.get(key, (reference.weights, reference.moments))
        ranks = self._pool.run(train, case, state, world=case.plan.world)
        found = compare(ranks, reference)
        found["changed"] = sum(not rank.identical for rank in ranks)
        self._states[key] = _joined(ranks, "weights"), _joined(ranks, "moments")
        return found

    def reference(self, case: Case) -> Outcome:
        key = (case.model, case.optimizer)
        if key not in self._references:
            (self._references[key],) = self._pool.run(by_hand, *key, case.trained, world=1)
        return self._references[key]


def compare(ranks: list[Outcome], reference: Outcome) -> dict[str, float]:
    """The greatest differences of any rank from the reference; infinite where something is not a number."""
    largest = max(1.0, *(float(np.abs(g).max()) for g in reference.gradients.values()))
    found = dict.fromkeys(LIMITS, 0.0)

    def note(what: str, left: np.ndarray, right: np.ndarray, unit: float = 1.0) -> None:
        away = float(np.abs(left - right).max()) / unit if left.size else 0.0
        found[what] = max(found[what], away if np.isfinite(away) else float("inf"))

    for rank in ranks:
        note("loss", np.array(rank.losses), np.array(reference.losses))
        note("norm", np.array(rank.norms), np.array(reference.norms))
        note("scores", rank.scores, reference.scores)
        for name, gradient in rank.gradients.items():
            note("gradients", gradient, reference.gradients[name], largest)
        for name, weight in rank.weights.items():
            note("weights", weight, reference.weights[name])
        for name, moment in rank.moments.items():
            note("moments", moment, reference.moments[name])
    kinds = ("gradients", "weights", "moments")
    found["missing"] = sum(len(getattr(reference, kind).keys() - _joined(ranks, kind).keys()) for kind in kinds)
    return found


def wrong(found: Mapping[str, float]) -> dict[str, float]:
    """What of `found` is more than rounding."""
    return {what: value for what, value in found.items() if value > LIMITS.get(what, 0.0)}


def _joined(ranks: list[Outcome], kind: str) -> Arrays:
    """What all ranks have together."""
    return {name: array for rank in ranks for name, array in getattr(rank, kind).items()}
