"""Runs a few small steps of a run's model twice: under its plan and on one device, for `train --verify`.

Both compute in float64, so only summation order differs. The reference does not use `parallel`: sequences one by one,
autograd, one optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ropewalk.load.batch import Batch
from ropewalk.model.dropout import Dropout, dropout_key
from ropewalk.model.protocol import ForwardPass, LanguageModel, Losses, ModelStage, build_model, build_stage
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import StepHooks
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.placement import LocalShard, Placement, whole_placement
from ropewalk.plan.plan import PhasePlan, Plan

from .data import open_data
from .optim.optimizers import make_optimizer
from .settings import Settings

STEPS = 3
"""Step 1 shows wrong gradients, step 2 a wrong first update, step 3 wrong moments."""
SHORT = 256
"""Maximum tokens per sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The inputs of both computations."""

    settings: Settings
    phase: int
    plan: Plan
    """The plan of the phase with a small batch and without lossy settings."""
    spec: Spec
    trained: tuple[str, ...] | None
    batches: Sequence[Batch]
    """The full batch of every step."""
    left_out: tuple[str, ...]
    """Lossy settings of the plan that the trial disables."""

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names in model order."""
        return tuple(self.spec.shapes())

    def is_trained(self, name: str) -> bool:
        return self.trained is None or name in self.trained

    @property
    def seed(self) -> int:
        return self.settings.phases[self.phase].seed(self.settings.seed)

    @property
    def rate(self) -> float:
        """The peak learning rate, where a wrong update shows most."""
        return self.settings.phases[self.phase].schedule.peak_lr


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results of one computation."""

    losses: list[float]
    norms: list[float]
    gradients: Mapping[str, LocalShard]
    """Of step 1, before clipping; trained parameters only."""
    updated: Mapping[str, LocalShard]
    """Parameters after step 1: locates the first wrong one before the error spreads."""
    parameters: Mapping[str, LocalShard]
    """After the last step."""


def make_trial(settings: Settings, phase: int, planned: PhasePlan | None = None) -> Trial:
    """The trial of a phase with sequences of its own data. `planned` substitutes a smaller model under the same plan;
    token ids are then taken modulo its vocabulary."""
    planned = planned or settings.planned.phases[phase]
    spec = dataclasses.replace(planned.spec, sequence_length=settings.model(phase).sequence_length)
    plan, left_out = trial_plan(planned.plan, length=settings.phases[phase].sequence_length)
    return Trial(
        settings=settings,
        phase=phase,
        plan=plan,
        spec=spec,
        trained=planned.trained,
        batches=[_folded(batch, spec.vocabulary) for batch in _batches(settings, phase, plan)],
        left_out=left_out,
    )


def trial_plan(plan: Plan, *, length: int) -> tuple[Plan, tuple[str, ...]]:
    """`plan` with the fewest and shortest sequences its degrees allow, and the names of disabled lossy settings.
    `length` is the run's sequence length. At least one microbatch per pipeline stage and per device of a process, and
    at least two if the run has several: gradient accumulation is verified too.
    """
    microbatches = min(plan.microbatches, max(2, plan.pipeline, plan.devices))
    short = _short(plan, length)
    changed = dataclasses.replace(
        plan,
        precision="fp32",  # no autocast; the model itself is float64
        batch_size=plan.data * microbatches,
        microbatch_size=1,
        sequence_length=short,
        gradient_compression="none",
        saved_activations="packed" if plan.saved_activations == "8-bit" else plan.saved_activations,  # packed is exact
    )
    left_out = {
        "compression": plan.gradient_compression != "none",
        "activations 8-bit": plan.saved_activations == "8-bit",
    }
    return changed, tuple(name for name, is_left_out in left_out.items() if is_left_out)


def run_plan(trial: Trial, mesh: Mesh, *, device: torch.device) -> Outcome:
    """Runs the trial under its plan; returns this rank's shards. All ranks must call."""
    train = trial.settings.train
    gradients: dict[str, Tensor] = {}

    def keep_first(found: Mapping[str, Tensor]) -> None:
        for name, gradient in found.items():
            gradients.setdefault(name, gradient.detach().clone())

    with torch.device("meta"):
        model = build_stage(trial.spec).double()
    executor = apply(
        trial.plan,
        model,
        mesh,
        lambda parameters, placements: make_optimizer(
            parameters, train.optimizer, spec=trial.spec, placements=placements, exact=trial.plan.exact
        ),
        device=device,
        trained=trial.trained,
        clip_norm=train.clip_norm,
        hooks=StepHooks(on_gradients=[keep_first]),
        seed=trial.seed,
        init_seed=trial.settings.seed,
    )
    losses, norms = [], []
    updated: dict[str, LocalShard] = {}
    for batch in trial.batches:
        result = executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=trial.rate)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        updated = updated or {
            n: LocalShard(part.local.clone(), part.placement) for n, part in executor.model_state().items()
        }
    parameters = executor.model_state()
    return Outcome(
        losses=losses,
        norms=norms,
        # The last stage's copy of a tied matrix is not a separate parameter.
        gradients={n: LocalShard(g, parameters[n].placement) for n, g in gradients.items() if n in parameters},
        updated=updated,
        parameters=parameters,
    )


def run_plainly(trial: Trial, *, device: torch.device) -> Outcome:
    """Runs the trial on one device; returns tensors on the CPU."""
    train, spec = trial.settings.train, trial.spec
    model = build_model(spec, seed=trial.settings.seed, device=device, dtype=torch.float64)
    mine: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trial.is_trained(name))
        if trial.is_trained(name):
            mine[name] = parameter
    optimizer = make_optimizer(mine, train.optimizer, spec=spec)
    losses, norms = [], []
    first: dict[str, LocalShard] = {}
    updated: dict[str, LocalShard] = {}
    for step, batch in enumerate(trial.batches):
        losses.append(backward_by_rows(model, batch.to(device), seed=trial.seed, step=step))
        gradients = [parameter.grad for parameter in mine.values() if parameter.grad is not None]
        assert len(gradients) == len(mine), "every parameter has a part in the loss"
        first = first or {name: _whole(p.grad) for name, p in mine.items() if p.grad is not None}
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        norms.append(float(norm))
        if train.clip_norm:
            torch._foreach_mul_(gradients, (train.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in optimizer.param_groups:
            group["lr"] = trial.rate * group.get("lr_ratio", 1.0)
        vars(optimizer).update(found_inf=torch.zeros((), device=device), grad_scale=None)
        optimizer.step()
        optimizer.zero_grad()
        updated = updated or _wholes(model)
    return Outcome(losses=losses, norms=norms, gradients=first, updated=updated, parameters=_wholes(model))


def backward_by_rows(model: ModelStage, batch: Batch, *, seed: int, step: int) -> float:
    """The loss of a step, computed one sequence at a time; accumulates gradients."""
    spec, total, loss = model.spec, batch.weight.double().sum(), 0.0
    for number in range(len(batch)):
        row = torch.tensor([number], device=batch.tokens.device)
        one = batch.rows(row)
        key = dropout_key(seed, torch.tensor(step, device=row.device))
        losses = Losses()
        forward = ForwardPass(
            tokens_BT=one.tokens,
            positions_BT=one.positions,
            documents_BT=one.documents,
            dropout=Dropout(spec.dropout, key, row) if spec.dropout else None,
            losses=losses,
        )
        part = _loss(model, model.run((), forward), one) / total
        auxiliary = losses.total()
        (part if auxiliary is None else part + auxiliary / total).backward()
        loss += float(part.detach())
    return loss


def _loss(model: ModelStage, outputs: tuple[Tensor, ...], batch: Batch) -> Tensor:
    """Cross-entropy by its definition for plain language models, so that fused and sharded losses are verified too;
    otherwise the model's own loss."""
    if not isinstance(model, LanguageModel) or type(model).loss is not LanguageModel.loss:
        return model.loss(outputs, batch.targets, batch.weight.double())
    (hidden,) = outputs
    scores = (hidden @ model.head_weight.T).log_softmax(-1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    return -(scores * batch.weight.double()).sum()


def _batches(settings: Settings, phase: int, plan: Plan) -> list[Batch]:
    """Prefixes of the first sequences of a phase."""
    data = open_data(settings, settings.phases[phase], verify=False, device=torch.device("cpu"))
    places = torch.arange(plan.sequence_length or SHORT)
    with contextlib.closing(data.loader) as loader:
        return [_counting(loader.next(plan.batch_size).at(places)) for _ in range(STEPS)]


def _folded(batch: Batch, vocabulary: int) -> Batch:
    """`batch` with token ids modulo `vocabulary`."""
    return dataclasses.replace(batch, tokens=batch.tokens % vocabulary, targets=batch.targets % vocabulary)


def _counting(batch: Batch) -> Batch:
    """`batch`, with all weights 1 if all are 0: a prefix of a dialogue may contain only the question."""
    if batch.weight.sum() > 0:
        return batch
    return dataclasses.replace(batch, weight=torch.ones_like(batch.weight))


def _short(plan: Plan, length: int) -> int:
    """The longest sequence length up to `SHORT` that context and sequence parallelism can split, if there is one."""
    halves = 2 if plan.context_method == "ring" else 1
    unit = (plan.context * halves if plan.context > 1 else 1) * (plan.tensor if plan.sequence else 1)
    short = max(unit, SHORT // unit * unit)
    return short if short < length else length


def _wholes(model: ModelStage) -> dict[str, LocalShard]:
    return {name: _whole(parameter) for name, parameter in model.named_parameters()}


def _whole(tensor: Tensor) -> LocalShard:
    placement: Placement = whole_placement(tensor.shape)
    return LocalShard(tensor.detach().to("cpu", copy=True), placement)
