"""Context parallelism: attention over sequences whose positions are sharded over ranks, as an `Attend` for the model.

`ring` (Liu et al. 2023): queries stay; keys and values rotate around the ring, and the next chunk's transfer overlaps
with compute on the current one. Only key and value heads are sent. `ulysses` (Jacobs et al. 2023): one all-to-all turns
position shards into head shards of whole sequences, another turns the outputs back. Compiled blocks call both as opaque
operators (collectives.py), which run eagerly inside.

Shapes: B sequences, H query heads, G key and value heads, T positions of this rank, S keys, D head size.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropewalk.model.attend import Attend, additive_mask, attend_for
from ropewalk.model.spec import Spec
from ropewalk.plan.config import ContextKind

from ..collectives import swap_along
from ..comm import Group, group_of
from .tiles import attend_tile, attend_tile_backward, wide_type

TILE_EDGE = {"cpu": 256, "cuda": 1024}
"""Maximum queries and keys of a masked tile. Smaller tiles skip more of what a window or documents mask and fit a CPU's
cache: with 8192 positions ALiBi takes 4.5 s at 256, 5.8 at 128, 6.0 at 1024 (4 heads of 64, one core). Larger ones need
fewer launches: with 16,384 positions 279 ms at 1024, 891 at 512, 249 at 2048, where a window of 1000 takes 81 instead
of 51 (16 heads of 128, H200)."""
TILE_SCORES = 1 << 26
"""Maximum scores of such a tile, over the batch and heads: 256 MB in float32, held several times."""

MOST_RINGS = 16
"""Cached rings of compiled code: one per microbatch between its forward and its backward pass."""


def positions_of(length: int, group: Group, kind: ContextKind) -> Tensor:
    """Returns this rank's positions, ascending, of a sequence of `length` tokens; all ranks have equally many.

    Ring: rank r of w has chunks r and 2w - 1 - r of 2w (zig-zag). Pairing an early chunk (few visible keys) with a late
    one (many) balances causal work over ranks and rounds. Ulysses: contiguous chunks.
    """
    if kind == "ulysses":
        assert length % group.size == 0, f"{group.size} ranks cannot share {length} places"
        side = length // group.size
        return torch.arange(group.rank * side, (group.rank + 1) * side)
    side = _side(length, group)
    return torch.cat([torch.arange(start, start + side) for start in _starts(group.rank, group.size, side)])


def attend_over(
    spec: Spec,
    group: Group,
    *,
    kind: ContextKind,
    length: int,
    documents_BT: Tensor | None = None,
    first_head: int = 0,
) -> Attend:
    """Returns `attend_for` under context parallelism, on this rank's positions. For one forward pass; all ranks must
    call.

    `length` and `documents_BT` are those of whole sequences; `first_head` is the first head on this process, as in
    `attend_for`. From documents on the CPU, the ring derives which tiles to skip; reading them from a GPU would block
    the host.
    """
    if spec.documents == "ignore":
        documents_BT = None
    if kind == "ulysses":
        return UlyssesAttend(spec, group, documents_BT=documents_BT, first_head=first_head)
    return RingAttend(spec, group, length=length, documents_BT=documents_BT, first_head=first_head)


class UlyssesAttend:
    """Each rank attends over whole sequences with its shard of the heads, a multiple of the ranks.

    Key and value heads are repeated to the least number that the ranks divide: with G heads and w > G ranks that divide
    evenly, each is sent w / G times. Otherwise the backward pass saves as much as in a ring. A spec that needs a mask
    builds it for whole sequences.
    """

    def __init__(self, spec: Spec, group: Group, *, documents_BT: Tensor | None, first_head: int) -> None:
        self._spec, self._group = spec, group
        self._documents_BT, self._first_head = documents_BT, first_head
        self._attend: Attend | None = None

    def __call__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        group, heads, kv_heads = self._group, q_BHTD.shape[1], k_BGTD.shape[1]
        assert heads % group.size == 0, f"{group.size} ranks cannot share {heads} heads"
        if self._attend is None:
            first, documents_BT = self._first_head + group.rank * (heads // group.size), self._documents_BT
            if documents_BT is not None:
                documents_BT = documents_BT.to(q_BHTD.device, non_blocking=True)
            self._attend = attend_for(self._spec, documents_BT=documents_BT, first_head=first)
        copies = math.lcm(kv_heads, group.size) // kv_heads
        if copies > 1:
            k_BGTD, v_BGTD = (x.repeat_interleave(copies, dim=1) for x in (k_BGTD, v_BGTD))
        whole = [swap_along(x, group, split=1, join=2) for x in (q_BHTD, k_BGTD, v_BGTD)]
        return swap_along(self._attend(*whole), group, split=2, join=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Queries of this rank against keys of another, with at least one visible pair."""

    queries: slice
    """Range in this rank's T."""
    keys: slice
    """Range in the other rank's T."""
    query_place: int
    """Position of the first query in the sequence."""
    key_place: int
    kind: Literal["full", "causal", "masked"]


class RingAttend:
    """Ring attention: keys and values of all ranks rotate past this rank's queries.

    Bytes sent per rank, with n bytes for the keys of whole sequences: 2n (w-1)/w forward, the same backward, and as
    much in `wide_type` for their gradients, which rotate along to their owner. Saved for the backward pass: queries,
    keys, values, outputs and the log-sum-exp, of this rank's positions alone.
    """

    def __init__(self, spec: Spec, group: Group, *, length: int, documents_BT: Tensor | None, first_head: int) -> None:
        self.group = group
        self._spec, self.documents_BT, self._first_head = spec, documents_BT, first_head
        self._length, self._side = length, _side(length, group)
        self._at_hand_BT: Tensor | None = None  # the documents on the queries' device
        self._tiles: dict[tuple[int, int], list[Tile]] = {}
        self._bounds: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._key = f"ring of {length} positions, heads from {first_head}, {spec!r}"
        if self._key not in group.kept:
            make = functools.partial(RingAttend, spec, length=length, first_head=first_head)
            group.kept[self._key] = make, deque[RingAttend](maxlen=MOST_RINGS)

    def __call__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        assert q_BHTD.shape[2] * self.group.size == self._length, f"{q_BHTD.shape[2]} places of {self._length}"
        if torch.compiler.is_compiling():
            return _ring(q_BHTD, k_BGTD, v_BGTD, self.documents_BT, self.group.key, self._key)[0]
        return _Ring.apply(q_BHTD, k_BGTD, v_BGTD, self)

    def tiles(self, source: int, q_BHTD: Tensor) -> list[Tile]:
        """Returns the tiles of this rank's queries and the keys of rank `source`; those on the diagonal come first."""
        rows, heads = q_BHTD.shape[:2]
        edge = max(1, min(TILE_EDGE[q_BHTD.device.type], math.isqrt(TILE_SCORES // (rows * heads))))
        if (source, edge) not in self._tiles:
            queries, keys = (_starts(rank, self.group.size, self._side) for rank in (self.group.rank, source))
            found = [
                tile
                for number, query in enumerate(queries)
                for other, key in enumerate(keys)
                for tile in self._between(number * self._side, query, other * self._side, key, edge)
            ]
            self._tiles[source, edge] = sorted(found, key=lambda tile: tile.query_place != tile.key_place)
        return self._tiles[source, edge]

    def mask(self, tile: Tile, q_BHTD: Tensor) -> Tensor | None:
        """Returns the additive mask for the scores of `tile`, or None."""
        if tile.kind != "masked":
            return None
        query_T, key_S = (
            torch.arange(place, place + part.stop - part.start, device=q_BHTD.device)
            for place, part in ((tile.query_place, tile.queries), (tile.key_place, tile.keys))
        )
        if self.documents_BT is not None and self._at_hand_BT is None:
            self._at_hand_BT = self.documents_BT.to(q_BHTD.device, non_blocking=True)
        return additive_mask(
            self._spec,
            query_T,
            key_S,
            heads=range(self._first_head, self._first_head + q_BHTD.shape[1]),
            dtype=wide_type(q_BHTD),
            documents_BT=self._at_hand_BT,
        )

    def _between(self, query_at: int, query: int, key_at: int, key: int, edge: int) -> list[Tile]:
        """Returns the tiles of a query and a key chunk, given their offsets on the ranks and in the sequence: none,
        one, or smaller ones where a mask is needed, some of which need none."""
        side = self._side
        kind = self._kind(range(query, query + side), range(key, key + side))
        if kind == "empty":
            return []
        if kind != "masked":
            edge = side
        tiles = []
        for i in range(0, side, edge):
            for j in range(0, side, edge):
                queries, keys = slice(i, min(i + edge, side)), slice(j, min(j + edge, side))
                kind = self._kind(range(query, query + side)[queries], range(key, key + side)[keys])
                if kind != "empty":
                    tiles.append(
                        Tile(
                            queries=slice(query_at + queries.start, query_at + queries.stop),
                            keys=slice(key_at + keys.start, key_at + keys.stop),
                            query_place=query + i,
                            key_place=key + j,
                            kind=kind,
                        )
                    )
        return tiles

    def _kind(self, queries: range, keys: range) -> Literal["empty", "full", "causal", "masked"]:
        window = self._spec.window or self._length
        nearest, farthest = queries[0] - keys[-1], queries[-1] - keys[0]
        documents = self._documents_between(queries, keys)
        if farthest < 0 or nearest >= window or documents == "other":
            return "empty"
        if self._spec.position == "alibi" or documents == "mixed" or farthest >= window:
            return "masked"
        if nearest >= 0:
            return "full"
        return "causal" if queries == keys else "masked"

    def _documents_between(self, queries: range, keys: range) -> Literal["same", "other", "mixed"]:
        """Whether these queries and keys share one document, share none, or neither is known."""
        if self.documents_BT is None:
            return "same"
        if self.documents_BT.device.type != "cpu":
            return "mixed"
        (low_B, high_B), (least_B, most_B) = self._documents_of(queries), self._documents_of(keys)
        if bool(((high_B < least_B) | (most_B < low_B)).all()):
            return "other"
        same = (low_B == high_B) & (least_B == most_B) & (low_B == least_B)
        return "same" if bool(same.all()) else "mixed"

    def _documents_of(self, places: range) -> tuple[Tensor, Tensor]:
        """Returns the minimum and maximum document number at `places`, per sequence."""
        assert self.documents_BT is not None
        edges = (places.start, places.stop)
        if edges not in self._bounds:
            least_B, most_B = self.documents_BT[:, places.start : places.stop].aminmax(dim=1)
            self._bounds[edges] = (least_B, most_B)
        return self._bounds[edges]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, ring: RingAttend) -> Tensor:
        # Contiguous copies: views would keep the whole fused projection alive.
        here = [x.contiguous() for x in (q_BHTD, k_BGTD, v_BGTD)]
        with torch.autocast(q_BHTD.device.type, enabled=False):
            out_BHTD, logsum_BHT = ring_forward(ring, *here)
        ctx.save_for_backward(*here, out_BHTD, logsum_BHT)
        ctx.ring = ring
        return out_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad_BHTD.device.type, enabled=False):
            return *ring_backward(ctx.ring, grad_BHTD.contiguous(), *ctx.saved_tensors), None


def _ring_of(group: str, key: str, documents_BT: Tensor | None) -> RingAttend:
    """Returns the ring for these documents, all that differs between microbatches. The latest stay cached: layers and
    the backward pass share their tiles."""
    found = group_of(group)
    make, rings = found.kept[key]
    for ring in rings:
        if ring.documents_BT is documents_BT:
            return ring
    rings.append(make(found, documents_BT=documents_BT))
    return rings[-1]


@torch.library.custom_op(
    "ropewalk::ring",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? documents, str group, str ring) -> (Tensor, Tensor)",
)
def _ring(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, documents_BT: Tensor | None, group: str, ring: str
) -> tuple[Tensor, Tensor]:
    """`_Ring` for compiled code: returns the attention output and the log-sum-exp for the backward pass."""
    with torch.autocast(q_BHTD.device.type, enabled=False):
        here = [x.contiguous() for x in (q_BHTD, k_BGTD, v_BGTD)]
        return ring_forward(_ring_of(group, ring, documents_BT), *here)


@_ring.register_fake
def _(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, documents_BT: Tensor | None, group: str, ring: str
) -> tuple[Tensor, Tensor]:
    return q_BHTD.new_empty(q_BHTD.shape), q_BHTD.new_empty(q_BHTD.shape[:3], dtype=wide_type(q_BHTD))


@torch.library.custom_op(
    "ropewalk::ring_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsum, Tensor? documents, str group,"
    " str ring) -> (Tensor, Tensor, Tensor)",
)
def _ring_backward(
    grad_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    out_BHTD: Tensor,
    logsum_BHT: Tensor,
    documents_BT: Tensor | None,
    group: str,
    ring: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q_BHTD.device.type, enabled=False):
        here = [x.contiguous() for x in (grad_BHTD, q_BHTD, k_BGTD, v_BGTD, out_BHTD, logsum_BHT)]
        return ring_backward(_ring_of(group, ring, documents_BT), *here)


@_ring_backward.register_fake
def _(
    grad_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    out_BHTD: Tensor,
    logsum_BHT: Tensor,
    documents_BT: Tensor | None,
    group: str,
    ring: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q_BHTD.new_empty(q_BHTD.shape), k_BGTD.new_empty(k_BGTD.shape), v_BGTD.new_empty(v_BGTD.shape)


def _keep_ring(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BHTD, k_BGTD, v_BGTD, documents_BT, ctx.group, ctx.ring = inputs
    ctx.save_for_backward(q_BHTD, k_BGTD, v_BGTD, *output, documents_BT)


def _ring_gradients(ctx: Any, grad_BHTD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_ring_backward(grad_BHTD, *ctx.saved_tensors, ctx.group, ctx.ring), None, None, None


_ring.register_autograd(_ring_gradients, setup_context=_keep_ring)


def ring_forward(ring: RingAttend, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the attention output of this rank's positions and the log-sum-exp, B H T."""
    group = ring.group
    out_BHTD = torch.zeros_like(q_BHTD, dtype=wide_type(q_BHTD))
    logsum_BHT = torch.full_like(out_BHTD[..., 0], float("-inf"))
    parts = [k_BGTD, v_BGTD]
    for step in range(group.size):
        coming = group.start_shift(parts) if step < group.size - 1 else None
        for tile in ring.tiles((group.rank - step) % group.size, q_BHTD):
            some_q, (some_k, some_v) = q_BHTD[:, :, tile.queries], (x[:, :, tile.keys] for x in parts)
            found = attend_tile(some_q, some_k, some_v, causal=tile.kind == "causal", mask=ring.mask(tile, q_BHTD))
            _merge(out_BHTD[:, :, tile.queries], logsum_BHT[:, :, tile.queries], *found)
        if coming:
            parts = coming.wait()
    return out_BHTD.to(q_BHTD.dtype), logsum_BHT


def ring_backward(
    ring: RingAttend,
    grad_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    out_BHTD: Tensor,
    logsum_BHT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of this rank's queries, keys and values.

    Key and value gradients follow one step behind, each rank adding its own; their last transfer, to the owner,
    overlaps with the remaining tiles of the owner's own keys, so that none is exposed.
    """
    group, wide = ring.group, wide_type(q_BHTD)
    dq_BHTD = torch.zeros_like(q_BHTD, dtype=wide)

    def add(tiles: list[Tile], parts: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
        for tile in tiles:
            some_k, some_v = (x[:, :, tile.keys] for x in parts)
            of_queries = [x[:, :, tile.queries] for x in (grad_BHTD, q_BHTD, out_BHTD, logsum_BHT)]
            some_grad, some_q, some_out, some_logsum = of_queries
            dq, dk, dv = attend_tile_backward(
                some_grad, some_q, some_k, some_v, some_out, some_logsum,
                causal=tile.kind == "causal", mask=ring.mask(tile, q_BHTD),
            )  # fmt: skip
            dq_BHTD[:, :, tile.queries] += dq
            sums[0][:, :, tile.keys] += dk
            sums[1][:, :, tile.keys] += dv
        return sums

    mine = ring.tiles(group.rank, q_BHTD)
    half = (len(mine) + 1) // 2  # for causal attention the two triangles, the work of one full tile
    last, first = mine[:half], mine[half:]
    parts = [k_BGTD, v_BGTD]
    coming = group.start_shift(parts) if group.size > 1 else None
    home = add(first, parts, [torch.zeros_like(x, dtype=wide) for x in parts])
    travelling = None
    for step in range(1, group.size):
        assert coming is not None
        parts = coming.wait()
        coming = group.start_shift(parts) if step < group.size - 1 else None
        tiles = ring.tiles((group.rank - step) % group.size, q_BHTD)
        sums = add(tiles, parts, [torch.zeros_like(x, dtype=wide) for x in parts])
        if travelling:
            for total, before in zip(sums, travelling.wait(), strict=True):
                total += before
        travelling = group.start_shift(sums)
    add(last, [k_BGTD, v_BGTD], home)
    if travelling:
        for total, others in zip(home, travelling.wait(), strict=True):
            total += others
    return dq_BHTD.to(q_BHTD.dtype), home[0].to(k_BGTD.dtype), home[1].to(v_BGTD.dtype)


def _merge(out_BHTD: Tensor, logsum_BHT: Tensor, more_BHTD: Tensor, their_BHT: Tensor) -> None:
    """Merges a tile's result into `out` and `logsum`, in place. Every query must have seen a key: diagonal tiles come
    first."""
    total_BHT = torch.logaddexp(logsum_BHT, their_BHT)
    out_BHTD.mul_(torch.exp(logsum_BHT - total_BHT).unsqueeze(-1))
    out_BHTD.add_(more_BHTD * torch.exp(their_BHT - total_BHT).unsqueeze(-1))
    logsum_BHT.copy_(total_BHT)


def _side(length: int, group: Group) -> int:
    """Returns the length of each of a rank's two chunks."""
    assert length % (2 * group.size) == 0, f"{2 * group.size} parts cannot share {length} places"
    return length // (2 * group.size)


def _starts(rank: int, size: int, side: int) -> tuple[int, int]:
    """Returns the first positions of a rank's two chunks."""
    return rank * side, (2 * size - 1 - rank) * side
