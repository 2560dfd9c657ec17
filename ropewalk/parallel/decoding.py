"""Generation under a plan: incremental forward passes with a key-value cache on every rank.

All ranks generate the same sequences. Tensor ranks cache the keys and values of their heads, pipeline ranks those of
their layers; data and context ranks hold identical caches. The first rank of the last stage has the full logits and
samples. A model without a cache reads all tokens in every pass.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ropewalk.model.protocol import Cache, Edge, Edges, ForwardPass, ModelStage
from ropewalk.plan.plan import Plan
from ropewalk.plan.schedules import Action

from .mesh import Mesh
from .pipeline import Result, run_forward
from .placement import Placement, chunk_sizes, whole_placement
from .precision import autocast


class ModelDecoding:
    """Generation with a whole model on one device."""

    def __init__(self, model: ModelStage, *, room: int) -> None:
        self.spec, self.device = model.spec, next(model.parameters()).device
        self._model, self._room = model, room
        self.restart()

    @property
    def seen(self) -> int:
        return self._cache.seen if self._cache else 0

    def restart(self) -> None:
        self._cache = self._model.cache(room=self._room)

    def logits(self, new_BT: Tensor) -> Tensor:
        outputs = decode(self._model, (), new_BT, self._cache)
        return self._model.next_logits(outputs)

    def share(self, token_B: Tensor | None, *, rows: int) -> Tensor:
        assert token_B is not None, "one device chooses"
        return token_B


class RankDecoding:
    """One rank's part of generation under `plan`; `stages` are keyed by global stage number."""

    def __init__(self, plan: Plan, stages: Mapping[int, ModelStage], mesh: Mesh, *, room: int) -> None:
        """`room` is the maximum sequence length."""
        assert not plan.sequence, "generation has one position at a time; `inference(plan)` does without `sequence`"
        self._plan, self._stages, self._mesh, self._room = plan, stages, mesh, room
        some = next(iter(stages.values()))
        self.spec = some.spec
        parameter = next(some.parameters())
        self.device, self._dtype = parameter.device, parameter.dtype
        self._tensor = mesh.group("tensor")
        # Pipeline is the outermost axis of rank numbers.
        self._chooser = (plan.pipeline - 1) * (plan.world // plan.pipeline)
        self.restart()

    @property
    def seen(self) -> int:
        cache = next(iter(self._caches.values()))
        return cache.seen if cache else 0

    def restart(self) -> None:
        first_head = self._tensor.rank * (self.spec.heads // self._tensor.size)
        self._caches = {
            number: stage.cache(room=self._room, first_head=first_head)
            for number, stage in sorted(self._stages.items())
        }

    def logits(self, new_BT: Tensor) -> Tensor | None:
        found = self._pass(new_BT)
        return found if self._mesh.rank == self._chooser else None

    def share(self, token_B: Tensor | None, *, rows: int) -> Tensor:
        # Between hosts, which need the tokens anyway: a receive on a GPU would spin while other ranks load kernels.
        if token_B is None:
            token_B = torch.empty(rows, dtype=torch.int64)
        return self._mesh.control.broadcast(token_B.cpu(), source=self._chooser).to(self.device)

    def _pass(self, new_BT: Tensor) -> Tensor | None:
        """Returns logits B V on ranks of the last stage."""
        work = _StagePass(self, new_BT)
        if self._plan.pipeline == 1:
            return work.forward(Action("F", 0, 0), ()).loss
        found = run_forward(
            work,
            1,
            ranks=self._plan.pipeline,
            chunks=self._plan.chunks,
            rank=self._mesh.place["pipeline"],
            channels=self._mesh.channels,
            # Any cache length may need a new kernel; parallel/pipeline.py says why such steps use the relay.
            relay=self._mesh.relay,
        )
        return found[0] if found else None


class _StagePass:
    """One forward pass, as the pipeline's `Work`."""

    def __init__(self, decoding: RankDecoding, new_BT: Tensor) -> None:
        self._of, self._new_BT = decoding, new_BT

    def forward(self, action: Action, inputs: tuple[Tensor, ...]) -> Result:
        it, stage = self._of, self._of._stages[action.stage]
        with autocast(it._plan.precision, it.device):
            outputs = decode(stage, inputs, self._new_BT, it._caches[action.stage])
            if not stage.last:
                return Result(tuple(y.to(it._dtype) if y.is_floating_point() else y for y in outputs))
            logits_BV = stage.next_logits(outputs)
        return Result((), self._vocabulary().gather(logits_BV))

    def edges(self, stage: int, microbatch: int) -> Edges:
        return self._of._stages[stage].edges(*self._new_BT.shape)

    def empty(self, edge: Edge) -> Tensor:
        return torch.empty(edge.shape, dtype=edge.dtype or self._of._dtype, device=self._of.device)

    def begin_last_backward(self, stage: int) -> None:
        """Generation has no backward pass."""

    def end_last_backward(self, stage: int) -> None:
        """Generation has no backward pass."""

    def _vocabulary(self) -> Placement:
        """Returns the placement of this tensor rank's logits."""
        side, group = self._of.spec.vocabulary, self._of._tensor
        return whole_placement((side,)).further(0, chunk_sizes(side, group.size), group)


@torch.no_grad()
def decode(stage: ModelStage, inputs: tuple[Tensor, ...], new_BT: Tensor, cache: Cache | None) -> tuple[Tensor, ...]:
    """Runs a stage on new tokens and appends them to the cache."""
    seen = cache.seen if cache else 0
    positions_BT = torch.arange(seen, seen + new_BT.shape[1], device=new_BT.device).expand(new_BT.shape[0], -1)
    outputs = stage.run(inputs, ForwardPass(tokens_BT=new_BT, positions_BT=positions_BT, cache=cache))
    if cache:
        cache.advance(new_BT.shape[1])
    return outputs
