"""Generation under a plan: forward passes over new tokens alone, with a key-value cache on every rank.

All ranks compute the same rows. Tensor ranks cache the keys and values of their heads, pipeline ranks those of their
layers; data and context ranks cache the same as each other. The first rank of the last stage has the whole logits and
chooses.

Shapes: B rows, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ropewalk.model.attend import CachedAttend
from ropewalk.model.decoder import Decoder
from ropewalk.plan.plan import Plan

from .mesh import Mesh
from .pipeline import run_forward
from .placement import Placement, chunk_sizes, whole_placement
from .precision import autocast


class ModelDecoding:
    """Generation with a whole model on one device."""

    def __init__(self, model: Decoder, *, room: int) -> None:
        self.spec, self.device = model.spec, model.head_weight.device
        self._model, self._room = model, room
        self.restart()

    @property
    def seen(self) -> int:
        return self._cache.seen

    def restart(self) -> None:
        self._cache = CachedAttend(self.spec, self._room)

    def logits(self, new_BT: Tensor) -> Tensor:
        hidden_BTC = decode(self._model, new_BT, _positions(new_BT, self.seen), self._cache)
        return self._model.logits(hidden_BTC[:, -1:]).squeeze(1)

    def share(self, token_B: Tensor | None, *, rows: int) -> Tensor:
        assert token_B is not None, "one device chooses"
        return token_B


class RankDecoding:
    """A rank's part in generation under `plan`, with its `stages` by their number in the whole."""

    def __init__(self, plan: Plan, stages: Mapping[int, Decoder], mesh: Mesh, *, room: int) -> None:
        """`room` is the length of the longest row."""
        assert not plan.sequence, "generation has one position at a time; `inference(plan)` does without `sequence`"
        self._plan, self._stages, self._mesh, self._room = plan, stages, mesh, room
        some = next(iter(stages.values()))
        self.spec = some.spec
        parameter = next(some.parameters())
        self.device, self._dtype = parameter.device, parameter.dtype
        self._last = plan.pipeline * plan.chunks - 1
        self._tensor = mesh.group("tensor")
        # Ranks are numbered with the pipeline outermost.
        self._chooser = (plan.pipeline - 1) * (plan.world // plan.pipeline)
        self.restart()

    @property
    def seen(self) -> int:
        return next(iter(self._caches.values())).seen

    def restart(self) -> None:
        first_head = self._tensor.rank * (self.spec.heads // self._tensor.size)
        self._caches = {
            stage: CachedAttend(self.spec, self._room, first_head=first_head) for stage in sorted(self._stages)
        }

    def logits(self, new_BT: Tensor) -> Tensor | None:
        found = self._pass(new_BT)
        return found if self._mesh.rank == self._chooser else None

    def share(self, token_B: Tensor | None, *, rows: int) -> Tensor:
        # Between hosts, which need the tokens anyway: a receive on a GPU would spin while others load kernels.
        if token_B is None:
            token_B = torch.empty(rows, dtype=torch.int64)
        return self._mesh.control.broadcast(token_B.cpu(), source=self._chooser).to(self.device)

    def _pass(self, new_BT: Tensor) -> Tensor | None:
        """Logits B V on ranks of the last stage."""
        work = _StagePass(self, new_BT, self.seen)
        if self._plan.pipeline == 1:
            return work.forward(0, 0, None)
        found = run_forward(
            work,
            1,
            ranks=self._plan.pipeline,
            chunks=self._plan.chunks,
            rank=self._mesh.place["pipeline"],
            channels=self._mesh.channels,
            # Every length of the cache may ask for another kernel; parallel/pipeline.py says why these then relay.
            relay=self._mesh.relay,
        )
        return found[0] if found else None


class _StagePass:
    """One forward pass as a pipeline asks for it."""

    def __init__(self, decoding: RankDecoding, new_BT: Tensor, seen: int) -> None:
        self._of, self._new_BT = decoding, new_BT
        self._positions_BT = _positions(new_BT, seen)

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        it = self._of
        model = it._stages[stage]
        with autocast(it._plan.precision, it.device):
            x = self._new_BT if x is None else x
            hidden_BTC = decode(model, x, self._positions_BT, it._caches[stage])
            if stage < it._last:
                return hidden_BTC.to(it._dtype)
            logits_BV = model.logits(hidden_BTC[:, -1:]).squeeze(1)
        return self._vocabulary().gather(logits_BV)

    def like(self, microbatch: int) -> Tensor:
        it = self._of
        return torch.empty(*self._new_BT.shape, it.spec.width, dtype=it._dtype, device=it.device)

    def begin_last_backward(self, stage: int) -> None:
        """Generation has no backward pass."""

    def end_last_backward(self, stage: int) -> None:
        """Neither."""

    def _vocabulary(self) -> Placement:
        """Which logits a tensor rank computes."""
        side, group = self._of.spec.vocabulary, self._of._tensor
        return whole_placement((side,)).further(0, chunk_sizes(side, group.size), group)


@torch.no_grad()
def decode(model: Decoder, x: Tensor, positions_BT: Tensor, cache: CachedAttend) -> Tensor:
    """Hidden states B T C of tokens, or of the stage before, that the cache holds afterwards."""
    hidden_BTC = model(x, positions_BT=positions_BT, attend=cache)
    cache.advance(positions_BT.shape[1])
    return hidden_BTC


def _positions(new_BT: Tensor, seen: int) -> Tensor:
    return torch.arange(seen, seen + new_BT.shape[1], device=new_BT.device).expand(new_BT.shape[0], -1)
