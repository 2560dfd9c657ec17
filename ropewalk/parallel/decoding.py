"""Generation under a plan: forward passes over new tokens with a key-value cache on every rank.

All ranks generate the same sequences. Tensor ranks cache the keys and values of their heads, pipeline ranks those of
their layers; data and context ranks hold identical caches. The first rank of the last stage has the full logits and
samples. A model without a cache reads all tokens in every pass.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ropewalk.model.protocol import Cache, Edge, Edges, ForwardPass, ModelStage
from ropewalk.model.slot_cache import SlotPositions
from ropewalk.plan.plan import Plan
from ropewalk.plan.schedules import Action

from .mesh import Mesh
from .pipeline import Result, run_forward
from .placement import Placement, chunk_sizes, whole_placement
from .precision import autocast
from .static_step import StaticStep

SLOTS = {"cpu": 64, "cuda": 256}
"""Maximum sequences at once. More share the weights that a step reads, but a CPU computes no faster."""
CPU_BYTES = 4 << 30
"""For the cache on a CPU. On a GPU: half of the free memory."""


class ModelDecoding:
    """Generation with a whole model on one device."""

    def __init__(self, model: ModelStage, *, sequences: int, room: int, static: bool | None = None) -> None:
        """`room` is the maximum length of a sequence. `static` steps have fixed buffers (parallel/static_step.py);
        None: on a GPU, as CUDA graphs."""
        parameter = next(model.parameters())
        self.spec, self.device = model.spec, parameter.device
        self.slots = _fitting_slots([model], parameter, sequences=sequences, room=room)
        self._model = model
        self._cache = model.cache(slots=self.slots, room=room)
        on_gpu = self.device.type == "cuda"
        self._step: StaticStep | None = None
        if self._cache and (on_gpu if static is None else static):
            self._step = StaticStep(
                self._forward, slots=self.slots, room=self._cache.room, device=self.device, capture=on_gpu
            )

    @property
    def has_cache(self) -> bool:
        return self._cache is not None

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, tokens: int) -> None:
        assert self._cache
        self._cache.copy(sources, targets, tokens=tokens)

    def logits(self, new_BT: Tensor, at: SlotPositions | None) -> Tensor:
        if self._step and at and new_BT.shape[1] == 1 and isinstance(at.slots, slice) and at.slots.start == 0:
            return self._step(new_BT, at)
        return self._forward(new_BT, at)

    def _forward(self, new_BT: Tensor, at: SlotPositions | None) -> Tensor:
        return self._model.next_logits(decode(self._model, (), new_BT, at, self._cache))

    def share(self, token_B: Tensor | None, *, rows: int) -> Tensor:
        assert token_B is not None, "one device chooses"
        return token_B


class RankDecoding:
    """One rank's part of generation under `plan`; `stages` are keyed by global stage number."""

    def __init__(self, plan: Plan, stages: Mapping[int, ModelStage], mesh: Mesh, *, sequences: int, room: int) -> None:
        """`room` is the maximum length of a sequence. All ranks must call."""
        assert not plan.sequence, "generation has one position at a time; `inference(plan)` does without `sequence`"
        self._plan, self._stages, self._mesh = plan, stages, mesh
        some = next(iter(stages.values()))
        self.spec = some.spec
        parameter = next(some.parameters())
        self.device, self._dtype = parameter.device, parameter.dtype
        self._tensor = mesh.group("tensor")
        # Pipeline is the outermost axis of rank numbers.
        self._chooser = (plan.pipeline - 1) * (plan.world // plan.pipeline)
        fitting = _fitting_slots(
            list(stages.values()), parameter, sequences=sequences, room=room, ranks=self._tensor.size
        )
        self.slots = int(mesh.control.all_reduce(torch.tensor([fitting]), operation="min").item())
        first_head = self._tensor.rank * (self.spec.heads // self._tensor.size)
        self._caches = {
            number: stage.cache(slots=self.slots, room=room, first_head=first_head)
            for number, stage in sorted(stages.items())
        }

    @property
    def has_cache(self) -> bool:
        return all(cache is not None for cache in self._caches.values())

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, tokens: int) -> None:
        for cache in self._caches.values():
            assert cache
            cache.copy(sources, targets, tokens=tokens)

    def logits(self, new_BT: Tensor, at: SlotPositions | None) -> Tensor | None:
        found = self._pass(new_BT, at)
        return found if self._mesh.rank == self._chooser else None

    def share(self, token_B: Tensor | None, *, rows: int) -> Tensor:
        # Between hosts, which need the tokens: a receive on a GPU would spin while other ranks load kernels.
        if token_B is None:
            token_B = torch.empty(rows, dtype=torch.int64)
        return self._mesh.control.broadcast(token_B.cpu(), source=self._chooser)

    def _pass(self, new_BT: Tensor, at: SlotPositions | None) -> Tensor | None:
        """Returns logits B V on ranks of the last stage."""
        work = _StagePass(self, new_BT, at)
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

    def __init__(self, decoding: RankDecoding, new_BT: Tensor, at: SlotPositions | None) -> None:
        self._of, self._new_BT, self._at = decoding, new_BT, at

    def forward(self, action: Action, inputs: tuple[Tensor, ...]) -> Result:
        it, stage = self._of, self._of._stages[action.stage]
        with autocast(it._plan.precision, it.device):
            outputs = decode(stage, inputs, self._new_BT, self._at, it._caches[action.stage])
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
def decode(
    stage: ModelStage, inputs: tuple[Tensor, ...], new_BT: Tensor, at: SlotPositions | None, cache: Cache | None
) -> tuple[Tensor, ...]:
    """Runs a stage on new tokens and adds them to the cache; without a cache, on whole sequences of equal lengths."""
    if cache is None:
        return stage.run(inputs, ForwardPass(tokens_BT=new_BT))
    assert at, "a cache needs the positions of the new tokens"
    cache.begin(at)
    return stage.run(inputs, ForwardPass(tokens_BT=new_BT, positions_BT=at.embedded_BT, cache=cache))


def _fitting_slots(
    stages: Sequence[ModelStage], parameter: Tensor, *, sequences: int, room: int, ranks: int = 1
) -> int:
    """Slots for so many sequences, as far as the memory for the cache and SLOTS allow; `ranks` share the heads."""
    spec, device = stages[0].spec, parameter.device
    layers = sum(len(stage.blocks) for stage in stages)
    each = 2 * layers * spec.kv_heads * spec.head_size * room * parameter.element_size() // ranks
    memory = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else CPU_BYTES
    return max(1, min(sequences, SLOTS.get(device.type, 64), memory // max(1, each)))
