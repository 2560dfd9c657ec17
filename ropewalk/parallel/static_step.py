"""A decode step with fixed buffers, which a GPU replays as a CUDA graph.

Launched one by one, the kernels of a step take a GPU longer than the bytes they read. A graph needs the same tensors of
the same shapes each time: rows are rounded up to a power of two, and keys to a multiple of `KEYS`; rows without a token
have position -1, as padding. One graph per pair of both, captured when it is first needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.model.slot_cache import SlotPositions

logger = logging.getLogger(__name__)
KEYS = 256


class StaticStep:
    """Runs `forward` for one new token of each of the first slots."""

    def __init__(
        self,
        forward: Callable[[Tensor, SlotPositions], Tensor],
        *,
        slots: int,
        room: int,
        device: torch.device,
        capture: bool,
    ) -> None:
        """`room` limits the keys. Without `capture` steps run eagerly on the same buffers."""
        self._forward, self._slots, self._room, self._capture = forward, slots, room, capture
        self._tokens_B1 = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self._positions_B1 = torch.full_like(self._tokens_B1, -1)
        self._graphs: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        self._pool: Any = None

    def __call__(self, new_B1: Tensor, at: SlotPositions) -> Tensor:
        """Logits B V, valid until the next step."""
        count = len(new_B1)
        rows = min(1 << (count - 1).bit_length(), self._slots)
        keys = min(-(-at.keys // KEYS) * KEYS, self._room)
        self._tokens_B1[:count].copy_(new_B1)
        self._positions_B1[:count].copy_(at.positions_BT)
        self._positions_B1[count:rows].fill_(-1)
        if not self._capture:
            return self._run(rows, keys)[:count]
        if (rows, keys) not in self._graphs:
            try:
                self._graphs[rows, keys] = self._captured(rows, keys)
            except RuntimeError as error:
                logger.warning("decode steps run without CUDA graphs, which makes them slower: %s", error)
                self._capture = False
                torch.cuda.synchronize()
                return self._run(rows, keys)[:count]
        graph, logits_BV = self._graphs[rows, keys]
        graph.replay()
        return logits_BV[:count]

    def _run(self, rows: int, keys: int) -> Tensor:
        at = SlotPositions(slice(0, rows), self._positions_B1[:rows], keys)
        return self._forward(self._tokens_B1[:rows], at)

    def _captured(self, rows: int, keys: int) -> tuple[Any, Tensor]:
        """A graph and the tensor of its logits."""
        # Kernels are loaded and tuned, and the cache allocated, before the capture. Running the step several times
        # writes the same keys and values.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._run(rows, keys)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits_BV = self._run(rows, keys)
        self._pool = self._pool or graph.pool()
        return graph, logits_BV
