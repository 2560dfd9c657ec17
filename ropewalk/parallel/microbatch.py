"""Microbatches: how a rank's sequences are divided into them, and how they run through the stages of this rank.

Without a pipeline they run one after the other, with one as its schedule says; several devices of one process take
them in turn.

Shapes: B sequences, T tokens, N tokens of a microbatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model.attend import Attend, Kernel, attend_for
from ropewalk.model.dropout import Dropout, dropout_key
from ropewalk.model.protocol import Edge, Edges, ForwardPass, LanguageModel, Losses, MakeAttend, ModelStage
from ropewalk.model.spec import Spec
from ropewalk.plan.plan import Plan
from ropewalk.plan.schedules import Action, Shape, make_schedule

from .context.context_attention import attend_over, positions_of
from .data.reducers import Reducers
from .data.sequence_balance import SequenceBalancer, numbers_of
from .grad_norm import exact_sum
from .labels import label
from .mesh import Mesh
from .multi_device import Devices
from .pipeline import DeferredWeightGrads, Pipeline, Result, StageTimer, run_forward
from .precision import autocast
from .tensor import SplitHead, tensor_placement


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences that are computed together, and what this rank works on of them."""

    batch: Batch
    """This rank's positions of each sequence."""
    documents: Tensor
    """Of the whole sequences."""
    numbers_B: Tensor
    """Numbers of the sequences in the global batch."""
    attention: MakeAttend | None = None
    """Attention in place of the plan's."""
    counted_only: bool = False
    """Score only targets of weight above 0; the others get 0."""

    def to(self, device: torch.device) -> Microbatch:
        """The microbatch on `device`."""
        return dataclasses.replace(
            self,
            batch=self.batch.to(device),
            documents=self.documents.to(device),
            numbers_B=self.numbers_B.to(device),
        )


class MicrobatchSplitter:
    """Divides the sequences that the loader gives this rank into microbatches on the device."""

    def __init__(self, plan: Plan, mesh: Mesh, model: ModelStage, *, counts_draws: bool = False) -> None:
        """With `counts_draws` a target counts as one whatever its weight: sequences are drawn by importance, and the
        weight of their draw would bias a loss that was divided by the sum of weights."""
        self._plan, self._mesh, self._counts_draws = plan, mesh, counts_draws
        some = next(model.parameters())
        self._device, self._dtype = some.device, some.dtype
        self._balancer = SequenceBalancer(mesh.sequences, model.spec) if plan.balance else None

    def split(self, batch: Batch) -> tuple[list[Microbatch], Tensor]:
        """This rank's microbatches of a step, and the weight of all tokens of the step."""
        return self._weighed(*self._assigned(batch))

    def split_alone(self, batch: Batch) -> list[Microbatch]:
        """The same microbatches where sequences are not balanced over ranks."""
        batch = batch.to(self._device)
        return self._weighed(batch, numbers_of(batch, self._mesh.data))[0]

    def split_for_scores(self, batch: Batch, *, count: int | None = None) -> list[Microbatch]:
        """Microbatches of this rank's share of `batch`, which every rank has whole; at most `count` (None: of the
        plan's size). Sequences that are missing for an even share are scored twice."""
        group = self._mesh.data
        numbers = torch.arange(-(-len(batch) // group.size)) * group.size + group.rank
        mine = batch.rows(numbers % len(batch))
        count = min(count, len(mine)) if count else None
        return self._microbatches(mine.to(self._device), numbers.to(self._device), count=count)

    def positions(self, length: int) -> Tensor:
        """The positions of a sequence that this rank works on."""
        group = self._mesh.group("context")
        if group.size == 1:
            return torch.arange(length, device=self._device)
        return positions_of(length, group, self._plan.context_method).to(self._device)

    def _assigned(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The sequences that this rank computes, and their numbers in the global batch, on the device."""
        if self._balancer is None:
            batch = batch.to(self._device)
            return batch, numbers_of(batch, self._mesh.data)
        sequences, numbers = self._balancer(batch)
        if self._device.type == "cuda":
            sequences, numbers = sequences.pinned(), numbers.pin_memory()
        return sequences.to(self._device), numbers.to(self._device, non_blocking=True)

    def _weighed(self, batch: Batch, numbers: Tensor) -> tuple[list[Microbatch], Tensor]:
        """Of n microbatches of all data ranks, number i has sequences i, i + n, i + 2 n, ... on any number of ranks."""
        count = -(-len(batch) // self._plan.microbatch_size_of(batch.tokens.shape[1]))
        microbatches = self._microbatches(batch, numbers, count=count)
        # In float64: uneven weights added up in another order would otherwise be another loss.
        sums = [self._counted(each.batch.weight) for each in microbatches]
        if self._plan.exact:
            total = exact_sum(sums, self._mesh.data)
        else:
            total = self._mesh.tokens.all_reduce(torch.stack(sums).sum())
        total = torch.where(total > 0, total, 1)  # a batch in which nothing counts has loss 0, not 0 / 0
        return microbatches, total.to(torch.promote_types(self._dtype, torch.float32))

    def _counted(self, weight: Tensor) -> Tensor:
        return (weight.ne(0) if self._counts_draws else weight).sum(dtype=torch.float64)

    def _microbatches(self, batch: Batch, numbers: Tensor, *, count: int | None = None) -> list[Microbatch]:
        length = batch.tokens.shape[1]
        count = count or -(-len(batch) // self._plan.microbatch_size_of(length))
        positions = self.positions(length) if self._plan.context > 1 else None
        found = []
        for first in range(count):
            whole = batch.strided(first, count)
            mine = whole if positions is None else whole.at(positions)
            found.append(Microbatch(mine, whole.documents, numbers[first::count]))
        return found


class SequenceLosses:
    """Collects the loss of each sequence of a step, for drawing by importance. Nothing waits for the device."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._added: list[tuple[Tensor, Tensor, Tensor]] = []

    def begin(self) -> None:
        """A step begins, or begins again."""
        self._added = []

    @torch.no_grad()
    def add(self, microbatch: Microbatch, losses_N: Tensor) -> None:
        """Adds the weighted losses of this rank's positions of a microbatch."""
        weight = microbatch.batch.weight
        losses_B = losses_N.detach().view(weight.shape).sum(1, dtype=torch.float64)
        self._added.append((microbatch.numbers_B, losses_B, weight.sum(1, dtype=torch.float64)))

    @torch.no_grad()
    def finish(self, sequences: int) -> Tensor:
        """The mean loss of each of the global batch's `sequences`, NaN where nothing counts. All ranks must call."""
        sums = torch.zeros(2, sequences, dtype=torch.float64, device=self._device)
        for numbers_B, losses_B, weights_B in self._added:
            sums[:, numbers_B.to(self._device)] += torch.stack([losses_B, weights_B]).to(self._device)
        self._added = []
        sums = self._mesh.tokens.all_reduce(sums)
        pipeline = self._mesh.group("pipeline")
        if pipeline.size > 1:
            sums = pipeline.broadcast(sums, source=pipeline.size - 1)
        return sums[0] / sums[1]


class ForwardPasses:
    """Makes the `ForwardPass` of each microbatch: its attention across ranks, its dropout, its auxiliary losses."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        spec: Spec,
        splitter: MicrobatchSplitter,
        *,
        kernel: Kernel | None,
        wrap_attention: Callable[[Attend], Attend] | None,
        seed: int,
        count_updates: Callable[[], Tensor | int] | None,
    ) -> None:
        """Masks of dropout are a function of `seed` and of the optimizer's own count of updates, which every checkpoint
        has: they go on after a kill, and are drawn again after a skipped update. Without the count nothing drops."""
        self._plan, self._spec, self._splitter, self._kernel = plan, spec, splitter, kernel
        self._tensor, self._context = mesh.group("tensor"), mesh.group("context")
        self._wrap_attention, self._seed, self._count_updates = wrap_attention, seed, count_updates

    def make(self, microbatch: Microbatch) -> ForwardPass:
        """The pass of `microbatch`; its `losses` collect when gradients are wanted."""
        return ForwardPass(
            tokens_BT=microbatch.batch.tokens,
            positions_BT=microbatch.batch.positions,
            documents_BT=microbatch.documents,
            attention=microbatch.attention or self._attention,
            dropout=self._dropout(microbatch),
            losses=Losses() if torch.is_grad_enabled() else None,
        )

    def _attention(self, spec: Spec, *, documents_BT: Tensor | None) -> Attend:
        first_head = self._tensor.rank * (spec.heads // self._tensor.size)
        if self._context.size > 1:
            assert documents_BT is not None, "context ranks need the documents of whole sequences"
            attend = attend_over(
                spec,
                self._context,
                kind=self._plan.context_method,
                documents_BT=documents_BT,
                first_head=first_head,
                length=documents_BT.shape[1],
            )
        else:
            attend = attend_for(
                spec,
                documents_BT=documents_BT,
                first_head=first_head,
                kernel=self._kernel,
                tiles=self._plan.compile and self._plan.device == "cuda",
            )
        return self._wrap_attention(attend) if self._wrap_attention else attend

    def _dropout(self, microbatch: Microbatch) -> Dropout | None:
        rate = self._spec.dropout
        if not rate or self._count_updates is None or not torch.is_grad_enabled():
            return None
        device = microbatch.numbers_B.device
        step = torch.as_tensor(self._count_updates(), device=device)
        positions = self._splitter.positions(microbatch.documents.shape[1]).to(device)
        if self._plan.sequence:
            positions = positions.chunk(self._tensor.size)[self._tensor.rank]
        key = dropout_key(self._seed, step)
        return Dropout(rate, key, microbatch.numbers_B, positions, positions_first=self._plan.sequence)


class MicrobatchRunner:
    """Runs microbatches through this rank's `stages`: losses and gradients, or scores."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        stages: Mapping[int, ModelStage],
        data: Reducers,
        passes: ForwardPasses,
        *,
        later: DeferredWeightGrads | None = None,
        devices: Devices | None = None,
        sequence_losses: SequenceLosses | None = None,
    ) -> None:
        self.stages, self.data, self.sequence_losses = stages, data, sequence_losses
        self._plan, self._mesh, self._passes = plan, mesh, passes
        self._later, self._devices = later, devices
        self.model = next(iter(stages.values()))
        some = next(self.model.parameters())
        self.device, self.dtype = some.device, some.dtype
        self._tensor = mesh.group("tensor")
        self._head: SplitHead | None = None
        if self._tensor.size > 1:
            begin = tensor_placement("embedding.weight", self.model.spec, self._tensor).offset[0]
            self._head = SplitHead(self._tensor, plan.sequence, begin)
        self._pipelines: dict[int, Pipeline] = {}
        self._warm: set[tuple[str, frozenset[torch.Size]]] = set()
        self._timer = StageTimer(self.device)

    def train(self, microbatches: Sequence[Microbatch], total: Tensor, scale: Tensor | None) -> list[Tensor]:
        """Forward and backward of all microbatches; this rank's parts of the loss. Gradients are reduced."""
        if self._plan.pipeline > 1:
            # `StageWork` says when gradients are final: during the last backward pass of each stage.
            with self.data.microbatch(last=False):
                work = StageWork(self, microbatches, total, reduces=not self._plan.exact)
                relayed = self._is_cold("train", microbatches)
                return self._pipeline(len(microbatches)).run(work, scale=scale, relayed=relayed)
        train = functools.partial(self._train_on, total=total, scale=scale)
        if self._devices:
            parts = self._devices.each(train, microbatches)
            self._devices.gather()
            return parts
        parts = []
        for number, microbatch in enumerate(microbatches):
            with self.data.microbatch(last=number == len(microbatches) - 1):
                parts.append(train(self.model, microbatch))
        return parts

    def train_alone(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Forward and backward of the first microbatches, as many as a pipeline has stages; nothing is reduced."""
        one = torch.ones((), device=self.device)
        if self._plan.pipeline == 1:
            return [self._train_on(self.model, microbatches[0], total=one, scale=None)]
        microbatches = microbatches[: self._plan.pipeline]
        relayed = self._is_cold("train", microbatches)
        return self._pipeline(len(microbatches)).run(StageWork(self, microbatches, one), relayed=relayed)

    def score(self, microbatches: Sequence[Microbatch]) -> Tensor | None:
        """(log-probability, first choice) of this rank's sequences and positions, 2 B T; None but on the last stage."""
        if self._plan.pipeline > 1:
            found = run_forward(
                StageWork(self, microbatches, None),
                len(microbatches),
                ranks=self._plan.pipeline,
                chunks=self._plan.chunks,
                rank=self._mesh.place["pipeline"],
                channels=self._mesh.channels,
                relay=self._mesh.relay if self._is_cold("score", microbatches) else None,
            )
        elif self._devices:
            found = self._devices.each(self._score_on, microbatches)
        else:
            found = [self._score_on(self.model, microbatch) for microbatch in microbatches]
        if not found:
            return None
        # Microbatches took every n-th sequence.
        joined = found[0].new_empty(2, sum(f.shape[1] for f in found), found[0].shape[2])
        for first, each in enumerate(found):
            joined[:, first :: len(found)] = each
        return joined

    def stage_seconds(self) -> dict[int, float]:
        """Seconds in which each stage of this rank computed since the last call."""
        return self._timer.take()

    def forward(
        self, model: ModelStage, microbatch: Microbatch, inputs: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Losses | None]:
        """The outputs of a stage, and the auxiliary losses of its layers."""
        # Scoring is part of a block that has its own name.
        named = label("forward") if torch.is_grad_enabled() else contextlib.nullcontext()
        with autocast(self._plan.precision, self.device), named:
            made = self._passes.make(microbatch)
            return model.run(inputs, made), made.losses

    def loss(self, model: ModelStage, outputs: tuple[Tensor, ...], microbatch: Microbatch) -> Tensor:
        """The weighted sum of this rank's losses, with the head of `model`."""
        weights = microbatch.batch.weight
        each = torch.empty_like(weights.flatten()) if self.sequence_losses else None
        with autocast(self._plan.precision, self.device), label("loss"):
            loss = model.loss(outputs, microbatch.batch.targets, weights, vocabulary=self._head, each_N=each)
        if self.sequence_losses and each is not None:
            self.sequence_losses.add(microbatch, each)
        return loss

    def scores(self, model: ModelStage, outputs: tuple[Tensor, ...], microbatch: Microbatch) -> Tensor:
        """(log-probability, first choice), 2 B T."""
        targets_BT, where_BT = microbatch.batch.targets, None
        if microbatch.counted_only and isinstance(model, LanguageModel) and not self._plan.sequence:
            # Scoring a question needs the logits of its few answers, not of its context.
            where_BT = microbatch.batch.weight > 0
            outputs, targets_BT = (outputs[0][where_BT].unsqueeze(0),), targets_BT[where_BT].unsqueeze(0)
        with autocast(self._plan.precision, self.device):
            score, choice = model.scores(outputs, targets_BT, vocabulary=self._head)
        found = torch.stack([score, choice.to(score.dtype)])
        if where_BT is None:
            return found
        whole = found.new_zeros(2, *where_BT.shape)
        whole[:, where_BT] = found[:, 0]
        return whole

    def auxiliary(self, losses: Losses | None) -> Tensor | None:
        """The sum of what layers reported, with its coefficients; None for nothing."""
        extra = losses.total() if losses else None
        if extra is None or not self._plan.sequence:
            return extra
        # Each tensor rank reports for its own positions; the ranks' losses are averaged as one that all have alike.
        return extra + extra.detach() * (self._tensor.size - 1)

    def edges(self, stage: int, sequences: int, positions: int) -> Edges:
        """What `stage` receives and sends for a microbatch of this size."""
        # With sequence parallelism this rank holds its part of the positions.
        return self.stages[stage].edges(sequences, positions // self._tensor.size if self._plan.sequence else positions)

    def _train_on(self, model: ModelStage, microbatch: Microbatch, *, total: Tensor, scale: Tensor | None) -> Tensor:
        """Forward and backward of a microbatch on the device of `model`; its part of the loss."""
        outputs, losses = self.forward(model, microbatch, ())
        loss = self.loss(model, outputs, microbatch)
        del outputs  # the backward pass does not need them
        extra = self.auxiliary(losses)
        part = (loss if extra is None else loss + extra) / total.to(loss.device)
        with label("backward"):
            (part * scale.to(loss.device) if scale is not None else part).backward()
        return part.detach()

    def _score_on(self, model: ModelStage, microbatch: Microbatch) -> Tensor:
        return self.scores(model, self.forward(model, microbatch, ())[0], microbatch)

    def _pipeline(self, microbatches: int) -> Pipeline:
        """The schedule of `microbatches` per step, on this rank."""
        if microbatches not in self._pipelines:
            plan = self._plan
            shape = Shape(ranks=plan.pipeline, microbatches=microbatches, chunks=plan.chunks)
            self._pipelines[microbatches] = Pipeline(
                itertools.repeat(make_schedule(plan.schedule, shape)),
                stages=plan.pipeline * plan.chunks,
                rank=self._mesh.place["pipeline"],
                channels=self._mesh.channels,
                relay=self._mesh.relay,
                later=self._later,
                timer=self._timer,
            )
        return self._pipelines[microbatches]

    def _is_cold(self, what: str, microbatches: Sequence[Microbatch]) -> bool:
        """Whether kernels may have to be loaded: nothing was done yet with microbatches of these shapes."""
        key = (what, frozenset(each.batch.tokens.shape for each in microbatches))
        if self._mesh.relay is None or key in self._warm:
            return False
        self._warm.add(key)
        return True


class StageWork:
    """What a pipeline asks of this rank's stages in one step; without `total` scores instead of losses. With `reduces`,
    the gradients of a stage are reduced as soon as they are final."""

    def __init__(
        self,
        runner: MicrobatchRunner,
        microbatches: Sequence[Microbatch],
        total: Tensor | None,
        *,
        reduces: bool = False,
    ) -> None:
        self._runner, self._microbatches, self._total, self._reduces = runner, microbatches, total, reduces

    def forward(self, action: Action, inputs: tuple[Tensor, ...]) -> Result:
        assert action.version == 0, "an executor keeps one version of its weights"
        runner, microbatch = self._runner, self._microbatches[action.microbatch]
        model = runner.stages[action.stage]
        outputs, losses = runner.forward(model, microbatch, inputs)
        if self._total is None:
            return Result((), runner.scores(model, outputs, microbatch)) if model.last else Result(outputs)
        extra = runner.auxiliary(losses)
        if not model.last:
            return Result(outputs, None if extra is None else extra / self._total)
        loss = runner.loss(model, outputs, microbatch)
        return Result((), (loss if extra is None else loss + extra) / self._total)

    def edges(self, stage: int, microbatch: int) -> Edges:
        sequences, positions = self._microbatches[microbatch].batch.tokens.shape
        return self._runner.edges(stage, sequences, positions)

    def empty(self, edge: Edge) -> Tensor:
        return torch.empty(edge.shape, dtype=edge.dtype or self._runner.dtype, device=self._runner.device)

    def begin_last_backward(self, stage: int) -> None:
        if self._reduces:
            self._runner.data.last_backward(self._names(stage))

    def end_last_backward(self, stage: int) -> None:
        if self._reduces:
            self._runner.data.complete(self._names(stage))

    def _names(self, stage: int) -> list[str]:
        return [name for name, _ in self._runner.stages[stage].named_parameters()]
