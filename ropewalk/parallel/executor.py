"""One training step under any plan: one device is a mesh of one rank.

    batch -> microbatches (microbatch.py) -> reduced gradients (data/) -> norm, guard, clipping -> update (state.py)

Nothing in a step waits for the device: results are tensors on it, which the loop reads only when it logs.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model.protocol import MakeAttend
from ropewalk.model.slot_cache import SlotPositions
from ropewalk.model.spec import Spec
from ropewalk.plan.plan import Plan

from .decoding import RankDecoding
from .grad_norm import exact_norm, exact_sum, global_norm, global_norms, sum_partial
from .kernels.kernel_choice import Contest
from .kernels.matmul_tuning import Tuning
from .labels import label
from .memory.recompute import BlockRunner
from .mesh import Mesh
from .microbatch import Microbatch, MicrobatchRunner, MicrobatchSplitter
from .placement import Choose, LocalShard, Placement
from .state import Named, RankState
from .tensor import has_partial_gradient

MakeOptimizer = Callable[[dict[str, torch.nn.Parameter], Mapping[str, Placement]], torch.optim.Optimizer]
"""Makes the optimizer from the parameter shards that this rank updates and their placements."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did; device tensors of one number each."""

    loss: Tensor
    """Weighted mean over the global batch, before the update."""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping."""
    skipped: Tensor
    """1 when the update was left out and the weights stayed as they were, else 0."""
    anomaly: Tensor
    """What went wrong, a code of parallel/anomaly_guard.py; 0 for a sound step."""
    loss_scale: Tensor | None = None
    """What the loss was multiplied by for the backward pass; only in fp16."""
    sequence_losses: Tensor | None = None
    """Mean loss of each sequence of the global batch, on every rank; NaN where nothing counts. Only in a run that draws
    its sequences by importance."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of the targets of a batch, B T each."""

    log_probabilities: Tensor
    first_choice: Tensor


@dataclass(slots=True)
class StepHooks:
    """Called inside a step, on every rank; those about gradients receive them by name."""

    on_gradients: list[Callable[[Named], None]] = field(default_factory=list)
    """The gradients of the global batch are complete and not yet clipped; they may be changed in place. An optimizer on
    the host then starts no earlier than these hooks, here or before the update."""
    before_update: list[Callable[[Named], None]] = field(default_factory=list)
    """The update follows. Gradients are clipped, unless the update clips: an optimizer on the host, and gradients
    narrower than the weights."""
    before_change: list[Callable[[], None]] = field(default_factory=list)
    """Weights and moments are about to change for the first time in this step: with the update, or during the backward
    pass where an optimizer on the host starts then."""
    before_tuning: list[Callable[[], None]] = field(default_factory=list)
    """An executor is made, and kernels for its matmuls are about to be measured. On ranks that measure (`decide`)."""
    after_tuning: list[Callable[[Tuning], None]] = field(default_factory=list)
    """Some kernels were measured then, or left out for lack of time."""


class Decoding(Protocol):
    """Forward passes over new tokens of several sequences, with a key-value cache: what generation asks of a model."""

    spec: Spec
    device: torch.device
    slots: int
    """Maximum sequences at once."""

    @property
    def has_cache(self) -> bool:
        """Whether passes read new tokens only; otherwise whole sequences, of one length in a pass."""

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, tokens: int) -> None:
        """Copies the first `tokens` cached tokens of slots. All ranks must call."""

    def logits(self, new_BT: Tensor, at: SlotPositions | None) -> Tensor | None:
        """Logits B V of the token after `new_BT`, which the cache holds afterwards; None on ranks that choose no token.
        Valid until the next call. `at` is None without a cache. All ranks must call, with the same tokens."""

    def share(self, token_B: Tensor | None, *, rows: int) -> Tensor:
        """The tokens chosen from these logits, on every rank; None on ranks that chose none. All ranks must call: ranks
        that chose by themselves could differ by a rounding and would then wait for each other forever."""


class Executor:
    """A model and its optimizer under a plan; without an optimizer it only scores."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        splitter: MicrobatchSplitter,
        runner: MicrobatchRunner,
        state: RankState,
        *,
        clip_norm: float = 0.0,
        hooks: StepHooks | None = None,
        contests: Sequence[Contest] = (),
    ) -> None:
        self.model = runner.model
        """This rank's part of the model; with several stages per rank, its first."""
        self.spec, self.device = runner.model.spec, runner.device
        self.hooks = hooks or StepHooks()
        self.replicas = mesh.group("replicate", "context")
        """The ranks that hold the same parts of every parameter."""
        self.contests = contests
        """Which kernels were tried for this plan, and how long they took."""
        self.state = state
        self._plan, self._mesh, self._splitter, self._runner = plan, mesh, splitter, runner
        self._data, self._clip_norm = runner.data, clip_norm
        self._tensor = mesh.group("tensor")
        self._partial = [n for n in state.trained if has_partial_gradient(n, self.spec, sequence=plan.sequence)]
        self._changed = False
        if state.host:
            self._data.listen(self._hand_over)

    def step(self, batch: Batch, *, lr: float) -> StepResult:
        """All microbatches, reduction, guard, clipping and update with learning rate `lr`. All ranks must call."""
        # Copied before anything is computed from it: a number made on the host would have to be waited for.
        with label("copy"):
            microbatches, total = self._splitter.split(batch)
        state = self.state
        state.set_rate(lr)
        self._begin()
        scale = state.loss_scale.value if state.loss_scale else None
        parts = self._run_within_memory(microbatches, total, scale)
        each = self._runner.sequence_losses
        sequence_losses = each.finish(len(batch) * self._mesh.data.size) if each else None
        gradients = self._data.finish()
        with label("clip and guard"):
            sum_partial([gradients[name] for name in self._partial if name in gradients], self._tensor)
            self._sum_tied(gradients)
            if state.loss_scale:
                state.loss_scale.divide(list(gradients.values()))
            _call(self.hooks.on_gradients, gradients)
            loss, norm = self._loss_and_norm(parts, gradients)
            factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0) if self._clip_norm else None
            if factor is not None and not state.clips:
                torch._foreach_mul_(list(gradients.values()), factor)
            _call(self.hooks.before_update, gradients)
            self._before_change()
            anomaly, skipped = state.guard.judge(loss, norm, scale)
        with label("update"):
            state.update(skipped, factor, overflowed=~torch.isfinite(norm))
        return StepResult(loss, norm, skipped, anomaly, scale, sequence_losses)

    @torch.no_grad()
    def score(
        self,
        batch: Batch,
        *,
        microbatches: int | None = None,
        attention: MakeAttend | None = None,
        counted_only: bool = False,
    ) -> Scores:
        """Log-probabilities of the targets. All ranks must call.

        `microbatches` is the most per rank (None: as many as the plan's size makes), `attention` replaces the plan's
        where no context ranks share sequences, and with `counted_only` targets of weight 0 cost no logits and get 0.
        """
        assert attention is None or self._plan.context == 1, "context ranks have an attention of their own"
        group, count, length = self._mesh.data, len(batch), batch.tokens.shape[1]
        divided = self._splitter.split_for_scores(batch, count=microbatches)
        parts = [dataclasses.replace(each, attention=attention, counted_only=counted_only) for each in divided]
        with self._data.whole():
            found = self._runner.score(parts)
        positions = self._splitter.positions(length)
        if self._plan.pipeline > 1:
            shape = (2, sum(len(each.batch) for each in parts), len(positions))
            wide = torch.promote_types(self._runner.dtype, torch.float32)
            found = torch.empty(shape, dtype=wide, device=self.device) if found is None else found.contiguous()
            found = self._mesh.group("pipeline").broadcast(found, source=self._plan.pipeline - 1)
        assert found is not None
        context = self._mesh.group("context")
        if context.size > 1:
            found = context.all_gather(found, dim=2)
            found = found[:, :, context.all_gather(positions).argsort()]
        if group.size > 1:
            found = group.start_all_gather(found.contiguous()).wait().transpose(0, 2).transpose(0, 1)
            found = found.flatten(1, 2)[:, :count]
        return Scores(found[0], found[1].bool())

    @contextlib.contextmanager
    def decoding(self, *, sequences: int, room: int) -> Iterator[Decoding]:
        """Generation of so many sequences of at most `room` tokens, in the block. All ranks must call."""
        # Gathered once for all tokens where that is how parameters come together: outside of blocks, and in a pipeline.
        with self._data.whole():
            yield RankDecoding(self._plan, self._runner.stages, self._mesh, sequences=sequences, room=room)

    def digest(self, batch: Batch) -> int:
        """A number that any flipped bit changes in the loss and gradients of the batch's first microbatch. Waits for
        the device; weights, gradients and optimizer stay as they are."""
        with self._data.whole():
            parts = self._runner.train_alone(self._splitter.split_alone(batch))
        parameters = [p for stage in self._runner.stages.values() for p in stage.parameters()]
        known = {id(parameter) for parameter in parameters}
        # float32 masters take gradients over.
        masters = [p for p in self._data.parameters.values() if id(p) not in known]
        total = bit_sum([*parts, *(p.grad for p in (*parameters, *masters) if p.grad is not None)])
        for parameter in (*parameters, *masters):
            parameter.grad = None
        return total

    def model_state(self) -> dict[str, LocalShard]:
        """As `RankState.model_state`."""
        return self.state.model_state()

    def optimizer_state(self) -> dict[str, LocalShard]:
        """As `RankState.optimizer_state`."""
        return self.state.optimizer_state()

    def wants(self) -> Choose:
        """As `RankState.wants`."""
        return self.state.wants()

    def load_state(
        self, model: Mapping[str, Tensor | LocalShard], optimizer: Mapping[str, Tensor | LocalShard]
    ) -> None:
        """As `RankState.load`."""
        self.state.load(model, optimizer)

    def stage_seconds(self) -> dict[int, float]:
        """Seconds in which each pipeline stage of this rank computed since the last call; empty without a pipeline."""
        return self._runner.stage_seconds()

    def norms(self, parts: Named) -> list[Tensor]:
        """The Euclidean norms of whole tensors of which every rank brings its parts, by the names of parameters. All
        ranks must call."""
        return global_norms(parts, self._data.placements, self._mesh)

    def _begin(self) -> None:
        """A step begins, or begins again."""
        self._changed = False
        if self._runner.sequence_losses:
            self._runner.sequence_losses.begin()
        if self.state.host:
            self.state.host.begin()
        self._data.begin()

    def _run_within_memory(self, microbatches: list[Microbatch], total: Tensor, scale: Tensor | None) -> list[Tensor]:
        """Runs the microbatches; after an out-of-memory error, retries with more recompute if the plan allows it. Not
        with several ranks: the others would wait for collectives that never start."""
        while True:
            try:
                return self._runner.train(microbatches, total, scale)
            except torch.OutOfMemoryError:
                runners = [stage.run_block for stage in self._runner.stages.values()]
                if self._mesh.world.size > 1 or not any(isinstance(r, BlockRunner) and r.tighten() for r in runners):
                    raise
            for parameter in self._data.parameters.values():
                parameter.grad = None
            self._begin()

    def _hand_over(self, names: Collection[str]) -> None:
        """During the backward pass: passes reduced gradients to the optimizer on the host, except those that are still
        to be unscaled, shown to hooks or summed over the tensor axis."""
        assert self.state.host
        if self.state.loss_scale or self.hooks.on_gradients or self.hooks.before_update:
            return
        if not self.state.host.waits:
            self._before_change()
        self.state.host.ready([name for name in names if name not in self._partial])

    def _before_change(self) -> None:
        """Calls the hooks of the first change of a step."""
        if not self._changed:
            self._changed = True
            for hook in self.hooks.before_change:
                hook()

    def _sum_tied(self, gradients: dict[str, Tensor]) -> None:
        """Sums the gradients of the two copies of a tied embedding: in the first stage, and as head of the last."""
        if self._mesh.ends.size > 1 and self.spec.tie_embeddings:
            for name in ("embedding.weight", "head.weight"):
                if name in gradients:
                    self._mesh.ends.all_reduce(gradients[name])

    def _loss_and_norm(self, parts: Sequence[Tensor], gradients: Named) -> tuple[Tensor, Tensor]:
        """The loss of the global batch and the norm of its gradient, on every rank."""
        wide = torch.promote_types(self._runner.dtype, torch.float32)
        if self._plan.exact:
            norm = exact_norm(gradients, self._data.placements, self._mesh)
            return exact_sum(parts, self._mesh.data), norm.to(wide)
        local = torch.stack(list(parts)).sum() if parts else torch.zeros((), dtype=wide, device=self.device)
        # All ranks of the tensor axis have the same loss.
        share = local.double() / self._tensor.size
        counted = {name: g for name, g in gradients.items() if not self.state.is_tied_copy(name)}
        copies = {name: self._copies(name) for name in counted}
        loss, norm = global_norm(counted, self._mesh, copies=copies, loss=share)
        return loss.to(local.dtype), norm.to(local.dtype)

    def _copies(self, name: str) -> int:
        """How many ranks hold the same part of a gradient."""
        whole_on_tensor = all(shard.group is not self._tensor for shard in self._data.placements[name].shards)
        return self._data.replicas_of(name).size * (self._tensor.size if whole_on_tensor else 1)


def bit_sum(tensors: Iterable[Tensor]) -> int:
    """A checksum: all values reinterpreted as integers and summed, each tensor with an odd weight. The sum is exact in
    any order, and any single flipped bit changes it. Stays on the device until the end."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        tensor.detach().contiguous().reshape(-1).view(kinds[tensor.element_size()]).sum(dtype=torch.int64)
        * (2 * index + 1)
        for index, tensor in enumerate(tensors)
    ]
    return int(torch.stack(sums).sum())


def _call(hooks: list[Callable[[Named], None]], gradients: Named) -> None:
    for hook in hooks:
        hook(gradients)
