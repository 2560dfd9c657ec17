"""Attention over a row whose places are split between ranks: an `Attend` for the model, with communication inside.

`ring` (Liu et al. 2023): every rank keeps its queries; keys and values go round, and while a rank works on one part the
next is already on its way. Only key and value heads travel. `ulysses` (Jacobs et al. 2023): one all-to-all gives every
rank whole rows of a part of the heads, another gives the places back. Compiled blocks call both as opaque operators
(collectives.py): what is inside runs as in eager code.

Shapes: B rows, H query heads, G key and value heads, T places of this rank, S keys, D head size.
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
"""Most queries and keys of a tile that needs a mask. Smaller ones leave out more of what a window or documents hide and
stay in a CPU's cache: with 8192 places ALiBi takes 4.5 s at 256, 5.8 at 128, 6.0 at 1024 (4 heads of 64, one core).
Larger ones are fewer launches: with 16,384 places 279 ms at 1024, 891 at 512, 249 at 2048, where a window of 1000 takes
81 instead of 51 (16 heads of 128, H200)."""
TILE_SCORES = 1 << 26
"""Most scores, over all rows and heads, of such a tile: 256 MB in float32, a few times over."""

MOST_RINGS = 16
"""Rings of compiled code that are remembered: one for each microbatch between its forward and its backward pass."""


def positions_of(length: int, group: Group, kind: ContextKind) -> Tensor:
    """The places, ascending, of a row of `length` tokens that this rank works on; all ranks have equally many.

    A ring's rank r of w has the parts r and 2w - 1 - r of 2w: an early one, which sees little, and a late one, which
    sees much, so that causal work is the same for all and in every round (zig-zag). Ulysses' parts are contiguous.
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
    """What `attend_for` gives on whole rows, on this rank's places of them. For one forward pass; all ranks must call.

    `length` counts the places of a whole row; `documents_BT` numbers the documents of whole rows and `first_head` is
    the first of the heads that this process holds, as in `attend_for`. Documents that lie on the CPU tell the ring
    which parts it need not compare; reading them from a GPU would make the host wait.
    """
    if spec.documents == "ignore":
        documents_BT = None
    if kind == "ulysses":
        return UlyssesAttend(spec, group, documents_BT=documents_BT, first_head=first_head)
    return RingAttend(spec, group, length=length, documents_BT=documents_BT, first_head=first_head)


class UlyssesAttend:
    """Every rank attends over whole rows with its part of the heads, of which there must be a multiple of the ranks.

    Key and value heads that ranks cannot share evenly are repeated to the least number that they can: with G heads and
    w > G ranks that divide evenly, each travels w / G times. Otherwise as much is kept for the backward pass as in a
    ring. A spec that needs a mask makes that of whole rows.
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
    """Queries of this rank against keys of another, which see each other at least in part."""

    queries: slice
    """Among the T of this rank."""
    keys: slice
    """Among the T of theirs."""
    query_place: int
    """Where the first query stands in the row."""
    key_place: int
    kind: Literal["full", "causal", "masked"]


class RingAttend:
    """Keys and values of all ranks pass by the queries of this one, a part at a time.

    Bytes sent by a rank, with n those of the keys of whole rows: 2n (w-1)/w forward, the same backward and as much in
    `wide_type` for their gradients, which travel along and end where they belong. Kept for the backward pass: queries,
    keys, values, outputs and one number a query, of this rank's places alone.
    """

    def __init__(self, spec: Spec, group: Group, *, length: int, documents_BT: Tensor | None, first_head: int) -> None:
        self.group = group
        self._spec, self.documents_BT, self._first_head = spec, documents_BT, first_head
        self._length, self._side = length, _side(length, group)
        self._at_hand_BT: Tensor | None = None  # the documents where the queries are
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
        """What the queries of this rank have to do with the keys of rank `source`; where they meet their own comes
        first."""
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
        """What is added to the scores of `tile`; None: nothing."""
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
        """The tiles of one part of queries and one of keys, which begin at these places among the rank's own and in
        the row: one, none, or where a mask is needed smaller ones, as some of them need none."""
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
        """Whether all of these queries and keys are of one document, none of the same, or it is not known."""
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
        """The least and greatest number of a document there, in every row."""
        assert self.documents_BT is not None
        edges = (places.start, places.stop)
        if edges not in self._bounds:
            least_B, most_B = self.documents_BT[:, places.start : places.stop].aminmax(dim=1)
            self._bounds[edges] = (least_B, most_B)
        return self._bounds[edges]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, ring: RingAttend) -> Tensor:
        # Views of the fused projection would keep all of it alive.
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
    """The ring over these documents, which are all that differs between microbatches. The last ones stay: layers and
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
    """`_Ring` for compiled code: the attended values, and what the backward pass needs of their softmax."""
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
    """The attended values of this rank's places, and the logarithms B H T of the sums in their softmax."""
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
    """The gradients of this rank's queries, keys and values.

    Gradients of keys and values follow them one step behind, each rank adding its own; they make their last step home
    while the rank is busy with the rest of its own part, so that no transfer is without work beside it.
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
    half = (len(mine) + 1) // 2  # of a causal row the two triangles, which are the work of one full tile
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
    """Adds what a tile found to `out` and `logsum`, in place. Not for a query that has seen no key on either side: its
    own comes first."""
    total_BHT = torch.logaddexp(logsum_BHT, their_BHT)
    out_BHTD.mul_(torch.exp(logsum_BHT - total_BHT).unsqueeze(-1))
    out_BHTD.add_(more_BHTD * torch.exp(their_BHT - total_BHT).unsqueeze(-1))
    logsum_BHT.copy_(total_BHT)


def _side(length: int, group: Group) -> int:
    """Places of each of the two parts of a ring's rank."""
    assert length % (2 * group.size) == 0, f"{2 * group.size} parts cannot share {length} places"
    return length // (2 * group.size)


def _starts(rank: int, size: int, side: int) -> tuple[int, int]:
    """Where the two parts of a ring's rank begin in the row."""
    return rank * side, (2 * size - 1 - rank) * side
