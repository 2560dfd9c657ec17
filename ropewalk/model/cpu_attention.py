"""Tiled bfloat16 attention for CPUs: matmul, softmax and matmul of a tile stay in cache.

torch's CPU kernel takes 1.3 to 2 times as long at 64 to 1024 tokens, 1.8 to 3.5 times with a mask, forward plus
backward (docs/log.md, 2026-11-16). Price: scores are rounded to bfloat16.

Shapes: B sequences, H query heads, G key and value heads, T tokens, D head size; N query heads of some sequences, Q
queries, S keys of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

QUERIES = 128
"""Per tile. Smaller tiles skip more masked pairs, larger ones make larger matmuls."""
TILE_BYTES = 1 << 22
"""Bytes of scores per tile and thread, which limit the heads per tile to what fits the cache of a core."""


def attend_in_tiles(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention that saves only its inputs for the backward pass.

    `mask` is added to the scores, T x T or with leading dimensions for sequences and heads; it must be causal: tiles
    above the diagonal are skipped.
    """
    rows, heads, tokens, _ = q_BHTD.shape
    out: Tensor = _forward(q_BHTD, k_BGTD, v_BGTD, None if mask is None else mask.expand(rows, heads, tokens, tokens))
    return out


@torch.library.custom_op(
    "ropewalk::cpu_attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v, Tensor? mask) -> Tensor"
)
def _forward(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor | None) -> Tensor:
    out_BHTD = _room(q_BHTD)
    tiles = _Tiles(q_BHTD, k_BGTD, mask)
    for heads in tiles.groups():
        v_NTD = tiles.shared(v_BGTD, heads)
        attended = [torch.bmm(weights, v_NTD[:, :end]) for _, end, weights in tiles.weights(heads)]
        out_BHTD[heads] = torch.cat(attended, dim=1).view(out_BHTD[heads].shape)
    return out_BHTD


@_forward.register_fake
def _room_for(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor | None) -> Tensor:
    return _room(q_BHTD)


@torch.library.custom_op(
    "ropewalk::cpu_attention_back",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad_BHTD: Tensor, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tiles = _Tiles(q_BHTD, k_BGTD, mask)
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    by_q, by_k, by_v = (_room(x) for x in (q_BHTD, k_BGTD, v_BGTD))
    for heads in tiles.groups():
        q_NTD, grad_NTD = _flat(q_BHTD[heads]), _flat(grad_BHTD[heads])
        k_NTD, v_NTD = tiles.shared(k_BGTD, heads), tiles.shared(v_BGTD, heads)
        # Each query tile accumulates into the gradients of earlier keys.
        k_sums, v_sums = (torch.zeros_like(x, dtype=wide) for x in (k_NTD, v_NTD))
        q_tiles = []
        for first, end, weights_NQS in tiles.weights(heads):
            grad_NQD = grad_NTD[:, first:end]
            v_sums[:, :end] += torch.bmm(weights_NQS.transpose(1, 2), grad_NQD)
            grad_NQS = torch.bmm(grad_NQD, v_NTD[:, :end].transpose(1, 2), out=tiles.scores(weights_NQS.shape))
            torch._softmax_backward_data(grad_NQS, weights_NQS, -1, weights_NQS.dtype, grad_input=grad_NQS)
            q_tiles.append(torch.bmm(grad_NQS, k_NTD[:, :end]))
            k_sums[:, :end] += torch.bmm(grad_NQS.transpose(1, 2), q_NTD[:, first:end])
        torch.mul(torch.cat(q_tiles, dim=1).view(by_q[heads].shape), tiles.scale, out=by_q[heads])
        tiles.add_up(k_sums.mul_(tiles.scale), by_k, heads)
        tiles.add_up(v_sums, by_v, heads)
    return by_q, by_k, by_v


@_backward.register_fake
def _rooms_for(
    grad_BHTD: Tensor, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _room(q_BHTD), _room(k_BGTD), _room(v_BGTD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _derive(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad_BHTD, *ctx.saved_tensors), None


_forward.register_autograd(_derive, setup_context=_keep)


def _room(x_BHTD: Tensor) -> Tensor:
    """An empty tensor like `x_BHTD`, laid out B T H D as the next linear layer reads it."""
    rows, heads, tokens, size = x_BHTD.shape
    return x_BHTD.new_empty(rows, tokens, heads, size).transpose(1, 2)


def _flat(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.reshape(-1, *x_BHTD.shape[2:])


class _Tiles:
    """Iterates over tiles of scores and attention weights, reusing one buffer."""

    def __init__(self, q_BHTD: Tensor, k_BGTD: Tensor, mask: Tensor | None) -> None:
        self._q_BHTD, self._k_BGTD, self._mask = q_BHTD, k_BGTD, mask
        rows, heads, tokens, size = q_BHTD.shape
        self.scale = 1 / math.sqrt(size)
        queries = min(QUERIES, tokens)
        room = TILE_BYTES * torch.get_num_threads() // q_BHTD.element_size()
        self._each = heads // k_BGTD.shape[1]
        fitting = max(1, room // (queries * tokens * self._each)) * self._each
        self._rows, self._heads = min(rows, max(1, fitting // heads)), min(fitting, heads)
        numbers = self._rows * self._heads * queries * tokens
        self._scores, self._weights = (q_BHTD.new_empty(numbers) for _ in range(2))
        self._unseen_QQ = q_BHTD.new_full((queries, queries), float("-inf")).triu_(1)

    def groups(self) -> Iterator[tuple[slice, slice]]:
        """Slices whose tiles fit: sequences with all query heads, or groups of one sequence."""
        rows, heads = self._q_BHTD.shape[:2]
        for row in range(0, rows, self._rows):
            for head in range(0, heads, self._heads):
                yield slice(row, row + self._rows), slice(head, head + self._heads)

    def weights(self, heads: tuple[slice, slice]) -> Iterator[tuple[int, int, Tensor]]:
        """Yields first query, end, and attention weights N Q S of each tile."""
        q_NTD, k_NTD = _flat(self._q_BHTD[heads]), self.shared(self._k_BGTD, heads)
        count, tokens, _ = q_NTD.shape
        for first in range(0, tokens, QUERIES):
            end = min(first + QUERIES, tokens)
            scores_NQS = self.scores((count, end - first, end))
            keys_NDS = k_NTD[:, :end].transpose(1, 2)
            torch.baddbmm(scores_NQS, q_NTD[:, first:end], keys_NDS, beta=0, alpha=self.scale, out=scores_NQS)
            if self._mask is None:
                scores_NQS[:, :, first:] += self._unseen_QQ[: end - first, : end - first]
            else:
                tile = self._mask[heads][..., first:end, :end]
                scores_NQS.view(tile.shape).add_(tile)
            weights_NQS = self._weights[: scores_NQS.numel()].view(scores_NQS.shape)
            yield first, end, torch.softmax(scores_NQS, dim=-1, out=weights_NQS)

    def shared(self, x_BGTD: Tensor, heads: tuple[slice, slice]) -> Tensor:
        """Keys or values of these query heads, N T D."""
        x = x_BGTD[self._groups(heads)]
        return _flat(x if self._each == 1 else x.repeat_interleave(self._each, dim=1))

    def add_up(self, sums_NTD: Tensor, out_BGTD: Tensor, heads: tuple[slice, slice]) -> None:
        """Writes sums over the query heads of each group to `out_BGTD`."""
        out = out_BGTD[self._groups(heads)]
        sums = sums_NTD.view(*out.shape[:2], self._each, *out.shape[2:])
        out.copy_(sums.squeeze(2) if self._each == 1 else sums.sum(2))

    def _groups(self, heads: tuple[slice, slice]) -> tuple[slice, slice]:
        rows, queries = heads
        return rows, slice(queries.start // self._each, queries.stop // self._each)

    def scores(self, shape: Sequence[int]) -> Tensor:
        return self._scores[: math.prod(shape)].view(shape)
