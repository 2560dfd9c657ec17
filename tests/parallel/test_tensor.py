"""Tensor parallelism copies no activations, communicates while it computes, and sends the bytes of its formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk.model.attend import attend_for
from ropewalk.model.decoder import build
from ropewalk.model.positions import rotation
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.collectives import leave_split
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.tensor import split_model
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.pool import POOL
from tests.parallel.test_overlap import collectives
from tests.tiny import random_batch, small_spec

pytestmark = pytest.mark.xdist_group("pool")

ROWS, LENGTH = 5, 8
SPEC = small_spec(sequence_length=LENGTH, kv_heads=2, bias=True)
SIZE = ROWS * LENGTH * SPEC.width
"""Numbers of an activation of all positions."""
COPIES = {"clone", "copy_", "_to_copy", "cat", "stack", "_foreach_copy_"}


class Recorder(TorchDispatchMode):
    """Notes what copies as much as an activation, and matmuls whose results have the shape of a weight."""

    def __init__(self, events: list[str], weights: list[tuple[int, ...]]) -> None:
        super().__init__()
        self._events, self._weights = events, weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # Gradients of fused projections are put together with or without other ranks; they have other last sides.
        if name in COPIES and isinstance(out, Tensor) and out.numel() >= SIZE and out.shape[-1] == SPEC.width:
            self._events.append(f"copy by {name}")
        if name in ("mm", "addmm", "bmm") and tuple(out.shape) in self._weights:
            self._events.append("weight gradient")
        return out


def plan_of(**settings: Any) -> Plan:
    return Plan(device="cpu", precision="fp32", batch_size=ROWS, microbatch_size=ROWS, **settings)


def block_events(rank: int, sequence: bool) -> tuple[list[str], list[str]]:
    """What happens in the forward pass and in the backward pass of one block of two tensor ranks."""
    mesh = Mesh(plan_of(tensor=2, sequence=sequence), rank)
    model = build(SPEC, seed=0)
    split_model(model, mesh.group("tensor"), sequence=sequence)
    block = model.blocks["0"]
    weights = [tuple(p.shape) for name, p in block.named_parameters() if name.endswith(("qkv.weight", "up.weight"))]
    shape = (LENGTH // 2, ROWS) if sequence else (ROWS, LENGTH)
    x = torch.randn(*shape, SPEC.width, generator=torch.Generator().manual_seed(rank if sequence else 0))
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    angles = rotation(positions.t() if sequence else positions, SPEC)
    events: list[str] = []
    with collectives(events), Recorder(events, weights):
        # A stream that needs a gradient itself, as between blocks.
        y = block(x.requires_grad_() * 1, angles=angles, attend=attend_for(SPEC))
        forward = list(events)
        events.clear()
        y.backward(torch.ones_like(y))
    return forward, list(events)


def test_the_recorder_sees_copies() -> None:
    events: list[str] = []
    x = torch.randn(ROWS, LENGTH, SPEC.width)
    with Recorder(events, []):
        x.transpose(0, 1).contiguous()
        torch.cat(x.chunk(2, 1), 1)
        x[:, :2].clone()
    assert events == ["copy by clone", "copy by cat"]


@pytest.mark.parametrize("sequence", [False, True])
def test_no_activation_is_copied(sequence: bool) -> None:
    kinds = ("all_gather", "reduce_scatter") if sequence else ("all_reduce",)
    for forward, backward in POOL.run(block_events, sequence, world=2):
        assert not [event for event in (*forward, *backward) if "copy" in event]
        for events in (forward, backward):
            assert sum(event.endswith("begins") for event in events) == 2 * len(kinds)
            assert all(any(kind in event for event in events) for kind in kinds)


@pytest.mark.parametrize("sequence", [False, True])
def test_the_gradient_by_the_input_travels_while_that_by_the_weight_is_computed(sequence: bool) -> None:
    kind = "reduce_scatter" if sequence else "all_reduce"
    first = 2  # two are of the forward pass
    for _, backward in POOL.run(block_events, sequence, world=2):
        assert backward.count("weight gradient") == 2
        for number in (first, first + 1):
            begins = backward.index(f"{kind} {number} begins")
            assert backward[begins : begins + 3][1:] == ["weight gradient", f"{kind} {number} waited for"]


def kept_output(rank: int) -> str:
    """What is said when partial sums are added up that somebody keeps."""
    group = Mesh(plan_of(tensor=2), rank).group("tensor")
    x = torch.ones(4, requires_grad=True)
    try:
        leave_split(x.exp(), group).sum().backward()  # the backward pass of exp reads its output
    except RuntimeError as error:
        return str(error)
    return ""


def test_adding_up_what_somebody_keeps_is_an_error() -> None:
    for said in POOL.run(kept_output, world=2):
        assert "modified by an inplace operation" in said


def sent_in_a_step(rank: int, plan: Plan, spec: Spec) -> dict[str, float]:
    mesh = Mesh(plan, rank)
    executor = apply(
        plan,
        build(spec, seed=0),
        mesh,
        lambda named, placements: make_optimizer(named, Optimizer(), spec=spec, placements=placements),
    )
    mesh.traffic.take()
    executor.step(random_batch(spec, rows=ROWS, seed=0), lr=1e-3)
    return {kind: sent.bytes for (group, kind), sent in mesh.traffic.take().items() if group == "tensor"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sequence", [False, True])
def test_bytes_are_those_of_the_formulas(sequence: bool, precision: str) -> None:
    """Korthikanti et al. 2022: four collectives of an activation a layer in each pass, or their halves; once each for
    the embedding and the head, in float32; three numbers a token for the loss; gradients of what all ranks hold."""
    narrow = 2 if precision == "bf16" else 4
    plan = dataclasses.replace(plan_of(tensor=2, sequence=sequence), precision=precision)  # type: ignore[arg-type]
    activations = SIZE * (4 * SPEC.layers * narrow + 2 * 4)
    loss = 3 * ROWS * LENGTH * 4
    whole = [n for n in SPEC.shapes() if "norm" in n or n.endswith(("out.bias", "down.bias"))]
    partial = sum(4 * torch.Size(SPEC.shapes()[name]).numel() for name in whole) if sequence else 0
    for sent in POOL.run(sent_in_a_step, plan, SPEC, world=2):
        if sequence:
            halves = activations / 2
            assert sent == {"all_gather": halves, "reduce_scatter": halves, "all_reduce": loss + partial}
        else:
            assert sent == {"all_reduce": activations + loss}


def test_hidden_states_are_the_same_with_positions_first() -> None:
    spec = small_spec(sequence_length=LENGTH, kv_heads=2, position="learned", qk_norm=True)
    tokens = torch.randint(0, spec.vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    for each in (spec, dataclasses.replace(spec, position="rope"), dataclasses.replace(spec, position="sinusoidal")):
        model: nn.Module = build(each, seed=0, dtype=torch.float64)
        expected = model(tokens)
        model.set_positions_first(True)  # type: ignore[operator]
        torch.testing.assert_close(model(tokens).transpose(0, 1), expected, rtol=1e-14, atol=1e-14)
