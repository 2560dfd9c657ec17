"""A training step on a row of 114,688 tokens over eight ranks, against one process that attends by chunks.

Shapes: B rows, H heads, T places, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model.attend import Attend, attend_for
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.loss import token_losses
from ropewalk.parallel.context.context_attention import attend_over, positions_of
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.plan import Plan
from tests.parallel.pool import POOL
from tests.tiny import random_batch, small_spec

pytestmark = [pytest.mark.xdist_group("pool"), pytest.mark.slow]

LENGTH, WORLD = 114_688, 8
QUERIES, KEYS = 256, 2048
SPEC = small_spec(sequence_length=LENGTH, layers=1, width=8, heads=1, mlp_width=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    loss: float
    gradients: dict[str, Tensor]
    kept_bytes: int
    """Kept by the forward pass for the backward pass, parameters not counted."""


def model() -> Decoder:
    """A model whose queries choose: a fresh one's scores are next to nothing, and attention an average."""
    made = build(SPEC, seed=0, dtype=torch.float64)
    for name, parameter in made.named_parameters():
        if name.endswith("attention.qkv.weight"):
            parameter.data *= 30
    return made


def forward(model: Decoder, attend: Attend, places_T: Tensor) -> tuple[Tensor, int]:
    """What these places add to the mean loss of the row, and the bytes kept."""
    batch, kept = random_batch(SPEC, rows=1), {}
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        if x.data_ptr() not in weights:
            kept[x.data_ptr(), x.nbytes] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = model(batch.tokens[:, places_T], positions_BT=batch.positions[:, places_T], attend=attend)
        losses = token_losses(hidden.flatten(0, 1), model.head_weight, batch.targets[0, places_T])
    return losses.sum() / LENGTH, sum(kept.values())


def split_step(rank: int) -> Step:
    plan = Plan(device="cpu", precision="fp32", batch_size=1, microbatch_size=1, context=WORLD)
    group, split = Mesh(plan, rank).group("context"), model()
    attend = attend_over(SPEC, group, kind="ring", length=LENGTH)
    loss, kept = forward(split, attend, positions_of(LENGTH, group, "ring"))
    loss.backward()
    gradients = {name: group.all_reduce(p.grad) for name, p in split.named_parameters() if p.grad is not None}
    return Step(loss=group.all_reduce(loss.detach()).item(), gradients=gradients, kept_bytes=kept)


def by_chunks(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """Causal attention of whole rows, some queries at a time."""
    return ByChunks.apply(q_BHTD, k_BHTD, v_BHTD)


class ByChunks(torch.autograd.Function):
    """Keeps nothing but its inputs; each chunk is computed again, and derived by autograd, in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        ctx.save_for_backward(*qkv)
        return torch.cat([some_queries(*chunk) for chunk in chunks(*qkv)], dim=2)

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor, ...]:
        gradients = [torch.zeros_like(x) for x in ctx.saved_tensors]
        places = zip(chunks(*ctx.saved_tensors), grad_BHTD.split(QUERIES, dim=2), chunks(*gradients), strict=True)
        for chunk, grad, totals in places:
            leaves = [x.detach().requires_grad_() for x in chunk]
            with torch.enable_grad():
                out = some_queries(*leaves)
            for total, found in zip(totals, torch.autograd.grad(out, leaves, grad), strict=True):
                total += found
        return tuple(gradients)


def chunks(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some queries with all the keys and values up to the last of them."""
    for end in range(QUERIES, LENGTH + 1, QUERIES):
        yield q_BHTD[:, :, end - QUERIES : end], k_BHTD[:, :, :end], v_BHTD[:, :, :end]


def some_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by its definition. Scores here are far from what overflows: exponentials are added up as they are, of
    so many keys at a time as stay in the cache."""
    above, below = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    parts = list(zip(k.split(KEYS, dim=2), v.split(KEYS, dim=2), strict=True))
    for number, (keys, values) in enumerate(parts):
        weights = ((q * q.shape[-1] ** -0.5) @ keys.mT).exp()
        if number == len(parts) - 1:  # the queries' own places are the last
            weights = weights.tril(keys.shape[2] - QUERIES)
        above, below = above + weights @ values, below + weights.sum(-1, keepdim=True)
    return above / below


def test_a_step_on_a_long_row_over_eight_ranks_equals_one_process_and_keeps_an_eighth() -> None:
    steps = POOL.run(split_step, world=WORLD, timeout_s=400)
    whole, every_T = model(), torch.arange(LENGTH)
    loss, _ = forward(whole, by_chunks, every_T)
    loss.backward()
    assert len(steps[0].gradients) == len(SPEC.shapes())
    for step in steps:
        assert step.loss == pytest.approx(loss.item(), abs=1e-12)
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            difference = (step.gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert difference.item() < 1e-12, name
    _, kept = forward(whole, attend_for(SPEC), every_T)
    assert all(step.kept_bytes == pytest.approx(kept / WORLD, rel=0.1) for step in steps)
