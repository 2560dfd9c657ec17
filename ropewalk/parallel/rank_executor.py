"""One rank's part in every step, under any plan: the executor of one device is that of a mesh of one.

A step: deal the rows, run the microbatches (one after the other, or as a pipeline's schedule says), bring the gradients
together (parallel/data/replicas.py, parallel/data/shards.py), judge, clip and update what this rank keeps.

Shapes: B rows, T tokens, C width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model.attend import Attend, Kernel, attend_for
from ropewalk.model.decoder import Decoder
from ropewalk.model.dropout import Dropout, dropout_key
from ropewalk.model.loss import token_scores, weighted_loss
from ropewalk.model.sharding import whole_name
from ropewalk.plan.plan import Plan
from ropewalk.plan.schedules import Shape, make_schedule

from .anomaly_guard import SpikeRule, Watch
from .context.context_attention import attend_over, places_of
from .data.buckets import BinaryCounter
from .data.replicas import Replicas
from .data.sequence_balance import Dealer, numbers_of
from .data.sequence_losses import RowLosses
from .data.shards import Shards
from .decoding import RankDecoding
from .executor import Decoding, Named, Points, Scores, StepResult, bit_sum, guards
from .grad_norm import exact_norm, global_norm, global_norms, sum_partial
from .kernels.kernel_choice import Contest
from .labels import label
from .memory.host_optimizer import HostOptimizer
from .memory.recompute import BlockRunner
from .mesh import Mesh
from .multi_device import Devices
from .optimizer_state import moment_placement, moment_shard, whole_moment_placement
from .pipeline import DeferredWeightGrads, Pipeline, StageTimer, run_forward
from .placement import Choose, LocalShard, Placement, whole_placement
from .precision import LossScale, Masters, autocast
from .stage_work import Microbatch, StageWork
from .tensor import SplitHead, has_partial_gradient, tensor_placement


class RankExecutor:
    """The executor of a plan on one of its ranks; without an optimizer it can only score."""

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Decoder],
        mesh: Mesh,
        optimizer: torch.optim.Optimizer | None,
        *,
        data: Replicas | Shards,
        host: HostOptimizer | None = None,
        masters: Sequence[Masters] = (),
        later: DeferredWeightGrads | None = None,
        devices: Devices | None = None,
        contests: Sequence[Contest] = (),
        attention: Callable[[Attend], Attend] | None = None,
        clip_norm: float = 0.0,
        spike: SpikeRule | None = None,
        points: Points | None = None,
        seed: int = 0,
        draws: bool = False,
    ) -> None:
        """With `draws` rows come with the weight of their draw: the loss is the sum of the weighted losses over the
        number of targets that count, not over the sum of their weights, which would be biased."""
        self._plan, self._mesh, self._stages, self._data, self._masters = plan, mesh, stages, data, masters
        self.model = next(iter(stages.values()))
        self.points = points or Points()
        self.replicas = mesh.group("replicate", "context")
        self.spec = self.model.spec
        self._seed, self._clip_norm, self._later, self._attention = seed, clip_norm, later, attention
        self._devices = devices
        self.contests = contests
        self._kernel = next((cast(Kernel, c.winner) for c in contests if c.what == "attention"), None)
        some = next(self.model.parameters())
        self.device, self._dtype = some.device, some.dtype
        self._loss_scale = LossScale(self.device) if plan.precision == "fp16" else None
        self._row_losses = RowLosses(mesh, self.device) if draws else None
        self._watch = Watch(spike, self.device)
        self._optimizer, self._host = optimizer, host
        assert optimizer is None or guards(optimizer), "this optimizer would follow a broken gradient"
        self._parameters = data.parameters | (host.parameters if host else {})
        """What the optimizer updates and a checkpoint keeps, on the device or on the host."""
        self._trained = {name: self._parameters[name] for name, p in data.parameters.items() if p.requires_grad}
        self._narrow = any(p.grad_dtype != p.dtype for p in self._trained.values())
        self._tensor = mesh.group("tensor")
        self._head: SplitHead | None = None
        if self._tensor.size > 1:
            begin = tensor_placement("embedding.weight", self.spec, self._tensor).offset[0]
            self._head = SplitHead(self._tensor, plan.sequence, begin)
        self._is_last = plan.pipeline * plan.chunks - 1 in stages
        self._partial = [n for n in self._trained if has_partial_gradient(n, self.spec, sequence=plan.sequence)]
        self._pipelines: dict[int, Pipeline] = {}
        self._loaded: set[tuple[str, frozenset[torch.Size]]] = set()
        self._names_of = {number: [name for name, _ in stage.named_parameters()] for number, stage in stages.items()}
        self._busy = StageTimer(self.device)
        self._dealer = Dealer(mesh.rows, self.spec) if plan.balance else None
        self._changed = False
        if host:
            data.listen(self._hand_over)

    def step(self, batch: Batch, *, lr: float) -> StepResult:
        # Copied before anything is computed from it: a number made on the host would have to be waited for.
        with label("copy"):
            pieces, total = self._deal(*self._own_rows(batch))
        self._set_rate(lr)
        self._begin()
        scale = self._loss_scale.value if self._loss_scale else None
        parts = self._run_within_memory(pieces, total, scale)
        rows = len(batch) * self._mesh.data.size
        sequence_losses = self._row_losses.finish(rows) if self._row_losses else None
        gradients = self._data.finish()
        with label("clip and guard"):
            sum_partial([gradients[name] for name in self._partial if name in gradients], self._tensor)
            self._sum_tied(gradients)
            if self._loss_scale:
                self._loss_scale.divide(list(gradients.values()))
            _announce(self.points.on_gradients, gradients)
            loss, norm = self._loss_and_norm(parts, gradients)
            factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0) if self._clip_norm else None
            if factor is not None and not self._host and not self._narrow:
                torch._foreach_mul_(list(gradients.values()), factor)
            _announce(self.points.before_update, gradients)
            self._before_change()
            anomaly, skipped = self._watch.judge(loss, norm, scale)
        with label("update"):
            self._update(skipped, factor, overflowed=~torch.isfinite(norm))
        return StepResult(loss, norm, skipped, anomaly, scale, sequence_losses)

    @torch.no_grad()
    def score(self, batch: Batch) -> Scores:
        group, rows = self._mesh.data, len(batch)
        # Every data rank takes its share; rows that are missing for an even share are scored twice.
        share = -(-rows // group.size)
        numbers = torch.arange(share) * group.size + group.rank
        mine = batch.rows(numbers % rows)
        pieces = self._pieces(mine.to(self.device), numbers.to(self.device))
        with self._data.whole():
            found = self._score_pieces(pieces)
        if self._plan.pipeline > 1:
            shape = (2, share, len(self._places(batch.tokens.shape[1])))
            wide = torch.promote_types(self._dtype, torch.float32)
            found = found if self._is_last else torch.empty(shape, dtype=wide, device=self.device)
            found = self._mesh.group("pipeline").broadcast(found.contiguous(), source=self._plan.pipeline - 1)
        context = self._mesh.group("context")
        if context.size > 1:
            found = context.all_gather(found, dim=2)
            found = found[:, :, context.all_gather(self._places(batch.tokens.shape[1])).argsort()]
        if group.size > 1:
            found = group.start_all_gather(found.contiguous()).wait().transpose(0, 2).transpose(0, 1)
            found = found.flatten(1, 2)[:, :rows]
        return Scores(found[0], found[1].bool())

    @contextlib.contextmanager
    def decoding(self, *, room: int) -> Iterator[Decoding]:
        # Gathered once for all tokens where that is how parameters come together: outside of blocks, and in a pipeline.
        with self._data.whole():
            yield RankDecoding(self._plan, self._stages, self._mesh, room=room)

    def digest(self, batch: Batch) -> int:
        batch = batch.to(self.device)
        pieces, _ = self._deal(batch, numbers_of(batch, self._mesh.data))
        count = min(len(pieces), self._plan.pipeline)
        with self._data.whole():
            parts = self._run_alone(pieces[:count])
        found = [p.grad for stage in self._stages.values() for p in stage.parameters() if p.grad is not None]
        found += [] if not self._masters else [p.grad for p in self._data.parameters.values() if p.grad is not None]
        total = bit_sum([*parts, *found])
        for stage in self._stages.values():
            stage.zero_grad()
        for parameter in self._data.parameters.values():
            parameter.grad = None
        return total

    def model_state(self) -> dict[str, LocalShard]:
        return {
            name: LocalShard(parameter.detach(), self._data.placements[name])
            for name, parameter in self._parameters.items()
            if not self._is_copy(name)
        }

    def optimizer_state(self) -> dict[str, LocalShard]:
        state = self._need_optimizer().state
        found = {
            f"{moment}/{name}": LocalShard(tensor, moment_placement(moment, tensor, self._data.placements[name]))
            for name, parameter in self._trained.items()
            if not self._is_copy(name)
            for moment, tensor in state.get(parameter, {}).items()
        }
        others = {"guard": self._watch.state, "loss_scale": self._loss_scale.state if self._loss_scale else {}}
        for kind, tensors in others.items():
            for name, tensor in tensors.items():
                found[f"{kind}/{name}"] = LocalShard(tensor, whole_placement(tensor.shape, first=self._mesh.rank == 0))
        if isinstance(self._data, Replicas):
            found |= {f"compression/{name}": part for name, part in self._data.owed().items()}
        return found

    def stage_seconds(self) -> dict[int, float]:
        return self._busy.take()

    def lengths(self, parts: Named) -> list[Tensor]:
        return global_norms(parts, self._data.placements, self._mesh)

    def wants(self) -> Choose:
        parameters, trained = self._holders(self._parameters), self._holders(self._trained)

        def choose(group: str, name: str, shape: tuple[int, ...]) -> Placement | None:
            kind, parameter = name.split("/", 1) if group == "optimizer" else ("", name)
            if kind in ("guard", "loss_scale", "compression", "sampler"):
                return whole_placement(shape, first=self._mesh.rank == 0)
            held = next(iter((trained if kind else parameters).get(parameter, ())), None)
            if held is None:
                return None
            placement = self._data.placements[held]
            placement = dataclasses.replace(placement, first=placement.first and not self._is_copy(held))
            return whole_moment_placement(kind, shape, placement) if kind else placement

        return choose

    @torch.no_grad()
    def load_state(
        self, model: Mapping[str, Tensor | LocalShard], optimizer: Mapping[str, Tensor | LocalShard]
    ) -> None:
        strange = model.keys() - self.spec.shapes().keys()
        assert not strange, f"{min(strange)}: the state is of another model"
        for name, parameter in self._parameters.items():
            whole = whole_name(name, self.spec)
            assert whole in model, f"{whole}: the state is of another model"
            parameter.copy_(self._data.placements[name].take(model[whole]))
        holders = self._holders(self._trained)
        for key, tensor in optimizer.items():
            kind, name = key.split("/", 1)
            whole_tensor = tensor.local if isinstance(tensor, LocalShard) else tensor
            if kind == "guard":
                # A run may have been saved under another rule for spikes.
                if name in self._watch.state:
                    self._watch.state[name] = whole_tensor.to(self.device, copy=True)
            elif kind == "sampler":
                continue  # the loader's, which takes it over by itself
            elif kind == "compression":
                if isinstance(self._data, Replicas):
                    self._data.owe(name, whole_tensor)
            elif kind == "loss_scale":
                assert self._loss_scale, "the state is of another precision"
                self._loss_scale.state[name] = whole_tensor.to(self.device, copy=True)
            else:
                for held in holders.get(name, ()):
                    self._load_moment(kind, held, tensor)
        if self._host:
            self._host.publish()
        for each in self._masters:
            each.publish()
        self._data.publish(everything=True)
        if self._devices:
            self._devices.publish()

    def _holders(self, names: Iterable[str]) -> dict[str, list[str]]:
        """By the names of a state's tensors, the parameters of this rank that are parts of them."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(whole_name(name, self.spec), []).append(name)
        return found

    def _load_moment(self, kind: str, name: str, tensor: Tensor | LocalShard) -> None:
        parameter, placement = self._trained[name], self._data.placements[name]
        part, state = moment_shard(kind, tensor, placement), self._need_optimizer().state[parameter]
        # `step` counts live where the optimizer keeps them; moments live with their parameter.
        device = parameter.device if part.dim() or self.device.type == "cuda" else torch.device("cpu")
        if self._host and kind in state:
            state[kind].copy_(part)  # it may lie in a file
        else:
            state[kind] = part.to(device, copy=True).contiguous()

    def _own_rows(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The rows that this rank computes, and their numbers in the global batch, on the device."""
        if self._dealer is None:
            batch = batch.to(self.device)
            return batch, numbers_of(batch, self._mesh.data)
        rows, numbers = self._dealer(batch)
        if self.device.type == "cuda":
            rows, numbers = rows.pinned(), numbers.pin_memory()
        return rows.to(self.device), numbers.to(self.device, non_blocking=True)

    def _deal(self, batch: Batch, numbers: Tensor) -> tuple[list[Microbatch], Tensor]:
        """This rank's part of the step's microbatches, and the weight of all tokens of the step.

        Of n microbatches of all data ranks, number i has rows i, i + n, i + 2 n, ... however many ranks there are.
        """
        size = self._plan.microbatch_size_of(batch.tokens.shape[1])
        count = -(-len(batch) // size)
        pieces = self._pieces(batch, numbers, count=count)
        # In float64: uneven weights added up in another order would otherwise be another loss.
        sums = [self._counted(piece.batch.weight) for piece in pieces]
        total = self._exact_sum(sums) if self._plan.exact else self._mesh.tokens.all_reduce(torch.stack(sums).sum())
        total = torch.where(total > 0, total, 1)  # a batch in which nothing counts has loss 0, not 0 / 0
        return pieces, total.to(torch.promote_types(self._dtype, torch.float32))

    def _counted(self, weight: Tensor) -> Tensor:
        return (weight.ne(0) if self._row_losses else weight).sum(dtype=torch.float64)

    def _exact_sum(self, terms: Sequence[Tensor]) -> Tensor:
        """One number for each microbatch of every data rank, added up in the order of the gradients."""
        tree = BinaryCounter()
        for term in self._mesh.data.all_reduce(torch.stack(list(terms))).unbind(0):
            tree.add(term)
        return tree.total()

    def _pieces(self, batch: Batch, numbers: Tensor, *, count: int | None = None) -> list[Microbatch]:
        length = batch.tokens.shape[1]
        count = count or -(-len(batch) // self._plan.microbatch_size_of(length))
        places = self._places(length) if self._plan.context > 1 else None
        found = []
        for first in range(count):
            rows = batch.strided(first, count)
            here = rows if places is None else rows.at(places)
            found.append(Microbatch(here, rows.documents, numbers[first::count]))
        return found

    def _places(self, length: int) -> Tensor:
        """The places of a row that this rank works on."""
        group = self._mesh.group("context")
        if group.size == 1:
            return torch.arange(length, device=self.device)
        return places_of(length, group, self._plan.context_method).to(self.device)

    def _run_within_memory(self, pieces: list[Microbatch], total: Tensor, scale: Tensor | None) -> list[Tensor]:
        """`_run`, again with less kept when the memory did not suffice and a plan for it can be changed. With several
        ranks the others would wait for collectives that do not come."""
        while True:
            try:
                return self._run(pieces, total, scale)
            except torch.OutOfMemoryError:
                runners = [stage.run_block for stage in self._stages.values()]
                if self._mesh.world.size > 1 or not any(isinstance(r, BlockRunner) and r.tighten() for r in runners):
                    raise
            for parameter in self._data.parameters.values():
                parameter.grad = None
            self._begin()

    def _begin(self) -> None:
        """A step begins, or begins again."""
        self._changed = False
        if self._row_losses:
            self._row_losses.begin()
        if self._host:
            self._host.begin()
        self._data.begin()

    def _run(self, pieces: list[Microbatch], total: Tensor, scale: Tensor | None) -> list[Tensor]:
        """Forward and backward of all microbatches; this rank's parts of the loss."""
        if self._plan.pipeline > 1:
            # `StageWork` says when gradients are final: during the last backward pass of each stage.
            with self._data.microbatch(last=False):
                stages, relayed = StageWork(self, pieces, total, reduces=True), self._is_first_of("train", pieces)
                return self._pipeline(len(pieces)).run(stages, scale=scale, relayed=relayed)
        work = functools.partial(self._train_on, total=total, scale=scale)
        if self._devices:
            parts = self._devices.each(work, pieces)
            self._devices.gather()
            return parts
        parts = []
        for number, piece in enumerate(pieces):
            with self._data.microbatch(last=number == len(pieces) - 1):
                parts.append(work(self.model, piece))
        return parts

    def _train_on(self, model: Decoder, piece: Microbatch, *, total: Tensor, scale: Tensor | None) -> Tensor:
        """Forward and backward of a microbatch where `model` and it are; its part of the loss."""
        loss = self._loss_of(model, self._forward(model, piece, piece.batch.tokens), piece)
        part = loss / total.to(loss.device)
        with label("backward"):
            (part * scale.to(loss.device) if scale is not None else part).backward()
        return part.detach()

    def _run_alone(self, pieces: list[Microbatch]) -> list[Tensor]:
        """The same with nothing brought together."""
        one = torch.ones((), device=self.device)
        if self._plan.pipeline > 1:
            relayed = self._is_first_of("train", pieces)
            return self._pipeline(len(pieces)).run(StageWork(self, pieces, one), relayed=relayed)
        part = self._loss_of(self.model, self._forward(self.model, pieces[0], pieces[0].batch.tokens), pieces[0])
        part.backward()
        return [part.detach()]

    def _score_pieces(self, pieces: list[Microbatch]) -> Tensor:
        """(log-probability, first choice) of this rank's rows and places, 2 B T; nothing but on the last stage."""
        if self._plan.pipeline > 1:
            found = run_forward(
                StageWork(self, pieces, None),
                len(pieces),
                ranks=self._plan.pipeline,
                chunks=self._plan.chunks,
                rank=self._mesh.place["pipeline"],
                channels=self._mesh.channels,
                relay=self._mesh.relay if self._is_first_of("score", pieces) else None,
            )
        elif self._devices:
            found = self._devices.each(self._score_on, pieces)
        else:
            found = [self._score_on(self.model, piece) for piece in pieces]
        if not found:
            return torch.empty(0, device=self.device)
        # Microbatches took every n-th row.
        joined = found[0].new_empty(2, sum(f.shape[1] for f in found), found[0].shape[2])
        for first, each in enumerate(found):
            joined[:, first :: len(found)] = each
        return joined

    def _score_on(self, model: Decoder, piece: Microbatch) -> Tensor:
        return self._scores_of(model, self._forward(model, piece, piece.batch.tokens), piece)

    def _forward(self, model: Decoder, piece: Microbatch, x: Tensor) -> Tensor:
        """Hidden states of a stage."""
        # Scoring is part of a block that has its own name.
        named = label("forward") if torch.is_grad_enabled() else contextlib.nullcontext()
        with autocast(self._plan.precision, self.device), named:
            return model(
                x, positions_BT=piece.batch.positions, attend=self._attend(piece), dropout=self._dropout(piece)
            )

    def _loss_of(self, model: Decoder, hidden_BTC: Tensor, piece: Microbatch) -> Tensor:
        """The weighted sum of this rank's losses, with the head of `model`."""
        with autocast(self._plan.precision, self.device), label("loss"):
            if self._head is None:
                targets, weights = piece.batch.targets.flatten(), piece.batch.weight.flatten()
                each = torch.empty_like(weights) if self._row_losses else None
                loss = weighted_loss(hidden_BTC.flatten(0, 1), model.head_weight, targets, weights, each_N=each)
                if self._row_losses and each is not None:
                    self._row_losses.hear(piece, each)
                return loss
            losses = self._head.losses(hidden_BTC, model.head_weight, piece.batch.targets).flatten()
        losses = losses * piece.batch.weight.flatten().to(losses.dtype)
        if self._row_losses:
            self._row_losses.hear(piece, losses)
        return losses.sum()

    def _scores_of(self, model: Decoder, hidden_BTC: Tensor, piece: Microbatch) -> Tensor:
        targets = piece.batch.targets
        with autocast(self._plan.precision, self.device):
            if self._head:
                score, choice = self._head.scores(hidden_BTC, model.head_weight, targets)
            else:
                score, choice = token_scores(hidden_BTC.flatten(0, 1), model.head_weight, targets.flatten())
        return torch.stack([score.view(targets.shape), choice.view(targets.shape).to(score.dtype)])

    def _attend(self, piece: Microbatch) -> Attend:
        first_head = self._tensor.rank * (self.spec.heads // self._tensor.size)
        context = self._mesh.group("context")
        if context.size > 1:
            attend = attend_over(
                self.spec,
                context,
                kind=self._plan.context_method,
                documents_BT=piece.documents,
                first_head=first_head,
                length=piece.documents.shape[1],
            )
        else:
            attend = attend_for(
                self.spec,
                documents_BT=piece.documents,
                first_head=first_head,
                kernel=self._kernel,
                tiles=self._plan.compile and self.device.type == "cuda",
            )
        return self._attention(attend) if self._attention else attend

    def _dropout(self, piece: Microbatch) -> Dropout | None:
        """The masks of these rows of the step at hand. The step is the optimizer's own count of updates, which every
        checkpoint holds already: masks go on after a kill, and are drawn again after a skipped update."""
        rate = self.spec.dropout
        if not rate or self._optimizer is None or not torch.is_grad_enabled():
            return None
        counts, device = (state["step"] for state in self._optimizer.state.values()), piece.rows_B.device
        step = torch.as_tensor(next(counts, 0), device=device)
        places = self._places(piece.documents.shape[1]).to(device)
        if self._plan.sequence:
            places = places.chunk(self._tensor.size)[self._tensor.rank]
        key = dropout_key(self._seed, step)
        return Dropout(rate, key, piece.rows_B, places, positions_first=self._plan.sequence)

    def _pipeline(self, microbatches: int) -> Pipeline:
        """The schedule for so many microbatches; the group's numbers of stages are the plan's."""
        if microbatches not in self._pipelines:
            plan = self._plan
            self._pipelines[microbatches] = Pipeline(
                make_schedule(plan.schedule, Shape(ranks=plan.pipeline, microbatches=microbatches, chunks=plan.chunks)),
                stages=plan.pipeline * plan.chunks,
                rank=self._mesh.place["pipeline"],
                channels=self._mesh.channels,
                relay=self._mesh.relay,
                later=self._later,
                busy=self._busy,
            )
        return self._pipelines[microbatches]

    def _is_first_of(self, what: str, pieces: Sequence[Microbatch]) -> bool:
        """Whether kernels may have to be loaded: nothing was done yet with microbatches of these shapes."""
        key = (what, frozenset(piece.batch.tokens.shape for piece in pieces))
        if self._mesh.relay is None or key in self._loaded:
            return False
        self._loaded.add(key)
        return True

    def _hand_over(self, names: Collection[str]) -> None:
        """During the backward pass: gives the host's optimizer gradients of the global batch to begin with, unless they
        are still to be scaled, looked at or added up over the tensor axis."""
        assert self._host
        if self._loss_scale or self.points.on_gradients or self.points.before_update:
            return
        if not self._host.waits:
            self._before_change()
        self._host.ready([name for name in names if name not in self._partial])

    def _before_change(self) -> None:
        """Announces the first change of a step."""
        if not self._changed:
            self._changed = True
            for callback in self.points.before_change:
                callback()

    def _sum_tied(self, gradients: dict[str, Tensor]) -> None:
        """The first stage looks tokens up in the matrix that the last one ends with: their gradients are of one."""
        if self._mesh.ends.size > 1 and self.spec.tie_embeddings:
            for name in ("embedding.weight", "head.weight"):
                if name in gradients:
                    self._mesh.ends.all_reduce(gradients[name])

    def _loss_and_norm(self, parts: Sequence[Tensor], gradients: Named) -> tuple[Tensor, Tensor]:
        """The loss of the global batch and the length of its gradient, on every rank."""
        wide = torch.promote_types(self._dtype, torch.float32)
        if self._plan.exact:
            return self._exact_sum(parts), exact_norm(gradients, self._data.placements, self._mesh).to(wide)
        local = torch.stack(list(parts)).sum() if parts else torch.zeros((), dtype=wide, device=self.device)
        # All ranks of the tensor axis have the same loss.
        share = local.double() / self._tensor.size
        counted = {name: g for name, g in gradients.items() if not self._is_copy(name)}
        copies = {name: self._copies(name) for name in counted}
        loss, norm = global_norm(counted, self._mesh, copies=copies, loss=share)
        return loss.to(local.dtype), norm.to(local.dtype)

    def _copies(self, name: str) -> int:
        """How many ranks hold this very part of a gradient."""
        whole_on_tensor = all(slicing.group is not self._tensor for slicing in self._data.placements[name].shards)
        return self.replicas.size * (self._tensor.size if whole_on_tensor else 1)

    def _set_rate(self, lr: float) -> None:
        for group in self._need_optimizer().param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)

    def _update(self, skipped: Tensor, factor: Tensor | None, *, overflowed: Tensor) -> None:
        """The guarded update: where `skipped` is 1 nothing changes, decided on the device. The host's optimizer takes
        gradients before clipping, and the `factor`; so does one whose gradients are too narrow to be rounded again."""
        if self._host:
            self._host.step(skipped, scale=factor)
        else:
            optimizer = self._need_optimizer()
            vars(optimizer).update(
                found_inf=skipped, grad_scale=1 / factor if factor is not None and self._narrow else None
            )
            optimizer.step()
        if not getattr(self._optimizer, "rounds", False):
            for each in self._masters:
                each.publish()
        self._data.publish()
        if self._devices:
            self._devices.publish()
        if self._loss_scale:
            self._loss_scale.update(overflowed.float())

    def _is_copy(self, name: str) -> bool:
        """Whether this parameter is the last stage's copy of the embedding."""
        return whole_name(name, self.spec) != name

    def _need_optimizer(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "an executor made without an optimizer only scores"
        return self._optimizer


def _announce(callbacks: list[Callable[[Named], None]], gradients: Named) -> None:
    for callback in callbacks:
        callback(gradients)
