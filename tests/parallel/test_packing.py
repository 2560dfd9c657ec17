"""Activations kept in fewer bits: masks cost nothing, bytes cost little, and what is kept is what was said."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ropewalk.model.activations import GROUP, saved_bytes
from ropewalk.model.attend import attend_for
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.dropout import Dropout, dropout_key
from ropewalk.model.loss import token_losses, weighted_loss
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.memory.activation_packing import ActivationPacking
from ropewalk.parallel.memory.recompute import BlockRunner, always
from ropewalk.plan.layout import problems
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.model.specs import freeze, small, specs, trained
from tests.tiny import random_batch

SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "dropped, masked": {"dropout": 0.1, "window": 5, "documents": "separate", "qk_norm": True},
    "GPT-2": {"norm": "layer", "mlp": "gelu", "position": "learned", "bias": True, "kv_heads": 4},
    "ALiBi, after": {"position": "alibi", "norm_position": "post", "dropout": 0.2, "mlp": "relu2"},
}
ROWS, LENGTH = 4, 32


def gradients(model: Decoder, packing: ActivationPacking | None = None, *, narrow: bool = False) -> list[Tensor]:
    """Of the mean loss of four fixed rows."""
    spec, device = model.spec, model.head_weight.device
    tokens_BT = torch.randint(spec.vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).to(device)
    key = dropout_key(0, torch.tensor(0, device=device))
    dropout = Dropout(spec.dropout, key, torch.arange(ROWS, device=device)) if spec.dropout else None
    attend = attend_for(spec, documents_BT=(torch.arange(LENGTH, device=device) // 9).expand(ROWS, -1))
    model.run_block = BlockRunner(packing=packing)
    with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
        hidden_BTC = model(tokens_BT, attend=packing.exactly(attend) if packing else attend, dropout=dropout)
        losses = token_losses(hidden_BTC.flatten(0, 1), model.head_weight, tokens_BT.flatten())
    return list(torch.autograd.grad(losses.mean(), list(model.parameters())))


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Of two whole gradients, relative to the length of the second."""
    off = math.sqrt(sum(float((a - b).double().square().sum()) for a, b in zip(found, wanted, strict=True)))
    return off / math.sqrt(sum(float(b.double().square().sum()) for b in wanted))


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_masks_of_a_bit_leave_every_bit_of_the_gradients(name: str, narrow: bool) -> None:
    model = build(small(layers=2, sequence_length=LENGTH, **SHAPES[name]), seed=1)
    packing = ActivationPacking("packed")
    found = gradients(model, packing, narrow=narrow)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(model, narrow=narrow), strict=True))
    assert packing.packed_bytes * 8 == packing.whole_bytes


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_bytes_instead_of_numbers_move_the_gradient_by_less_than_a_hundredth(name: str, narrow: bool) -> None:
    model = build(small(layers=3, width=64, mlp_width=128, sequence_length=LENGTH, **SHAPES[name]), seed=1)
    packing = ActivationPacking("8-bit")
    found, wanted = gradients(model, packing, narrow=narrow), gradients(model, narrow=narrow)
    assert 0 < distance(found, wanted) < 0.01
    # Half of what bf16 keeps, a quarter of what float32 does; the stream is float32 in both.
    assert packing.packed_bytes < (0.52 if narrow else 0.27) * packing.whole_bytes


def test_the_loss_itself_is_exact() -> None:
    """What is kept narrow is only looked at in the backward pass."""
    spec = small(layers=2)
    losses = []
    for kind in ("whole", "packed", "8-bit"):
        plan = Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=2, saved_activations=kind)
        executor = apply(plan, build(spec, seed=0), None, lambda named, placements: make_optimizer(named, Optimizer()))
        losses.append(float(executor.step(random_batch(spec, rows=4), lr=0.0).loss))
    assert losses[0] == losses[1] == losses[2]


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
    seed=st.integers(0, 99),
)
def test_every_number_comes_back_within_half_a_step_of_its_group(
    shape: list[int], kind: torch.dtype, seed: int
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x = x > 0 if kind == torch.bool else x.to(kind)
    packing = ActivationPacking("8-bit")
    packed = packing.open(nn.Module(), torch.empty(0))  # type: ignore[arg-type]
    back = packed.unpack(packed.pack(x))
    assert back.dtype == x.dtype
    assert back.shape == x.shape
    if kind == torch.bool:
        assert torch.equal(back, x)
        assert packing.packed_bytes == -(-x.numel() // 8)
        return
    for group, other in zip(x.float().flatten().split(GROUP), back.float().flatten().split(GROUP), strict=True):
        step = group.abs().max() / 127
        rounding = group.abs().max() * 2**-8 if kind == torch.bfloat16 else 1e-7 * group.abs().max()
        assert (group - other).abs().max() <= step / 2 + rounding
    groups = -(-x.numel() // GROUP)
    assert packing.packed_bytes == groups * (GROUP + 4)


def test_a_storage_is_packed_once_however_many_views_of_it_are_saved() -> None:
    packing = ActivationPacking("8-bit")
    packed = packing.open(nn.Module(), torch.empty(0))  # type: ignore[arg-type]
    x = torch.randn(6, 4, 8)
    views = [x, x[:, 1], x.transpose(0, 2), x.flatten(0, 1)[3:7]]
    tickets = [packed.pack(view) for view in views]
    assert packing.whole_bytes == x.nbytes
    whole = packed.unpack(tickets[0])
    again = [whole, whole[:, 1], whole.transpose(0, 2), whole.flatten(0, 1)[3:7]]
    assert all(torch.equal(packed.unpack(t), view) for t, view in zip(tickets, again, strict=True))


def test_weights_small_tensors_and_what_attention_keeps_stay() -> None:
    spec = small(layers=1, width=64, mlp_width=128)
    model = build(spec, seed=0)
    kept: list[Tensor] = []
    packing = ActivationPacking("8-bit")

    def watching(block: Any, x: Tensor, forward: Any) -> Tensor:
        packed = packing.open(block, x)

        def pack(tensor: Tensor) -> Any:
            answer = packed.pack(tensor)
            kept.extend([tensor.detach()] if isinstance(answer, Tensor) else [])
            return answer

        with saved_tensors_hooks(pack, packed.unpack):
            return forward(block, x)

    model.run_block = watching
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(ROWS, LENGTH, dtype=torch.long), attend=packing.exactly(attend_for(spec)))
    shapes = {tuple(sorted(shape)) for shape in spec.shapes().values()}
    small_numel = ROWS * LENGTH * spec.width // 2
    stray = [t for t in kept if t.numel() > small_numel and tuple(sorted(t.shape)) not in shapes]
    assert stray == []


def kept_bytes(spec: Spec, *, rows: int, precision: str, trained: Any, kind: Any) -> int:
    """Bytes of all that autograd keeps for the loss, each storage and each packed one counted once; weights left
    out."""
    model = build(spec, seed=0)
    freeze(model, trained)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[Any] = []
    packing = ActivationPacking(kind)

    def hold(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    class Watched:
        """Notes what stands for each tensor."""

        def __init__(self, packed: Any) -> None:
            self.packed, self.unpack = packed, packed.unpack

        def pack(self, x: Tensor) -> Any:
            kept.append(self.packed.pack(x))
            return kept[-1]

    class Noting:
        def open(self, block: Any, x: Tensor) -> Watched:
            return Watched(packing.open(block, x))

    def attend_noted(*heads: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda x: hold(packing._keep_exact(x)), lambda x: x):
            return attend(*heads)

    length = spec.sequence_length
    tokens_BT, targets_BT = torch.randint(spec.vocabulary, (2, rows, length)).unbind()
    positions_BT = torch.arange(length).repeat(rows, 1)
    attend = attend_for(spec, documents_BT=positions_BT // 3)
    dropout = Dropout(spec.dropout, dropout_key(0, torch.tensor(0)), torch.arange(rows)) if spec.dropout else None
    model.run_block = BlockRunner(packing=Noting())  # type: ignore[arg-type]
    with saved_tensors_hooks(hold, lambda x: x), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        hidden = model(tokens_BT.clone(), positions_BT=positions_BT, attend=attend_noted, dropout=dropout)
        weighted_loss(hidden.flatten(0, 1), model.head_weight, targets_BT.flatten(), torch.ones(targets_BT.numel()))
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept if isinstance(x, Tensor)}
    packed = {id(ticket.kept): ticket.kept.bytes for ticket in kept if not isinstance(ticket, Tensor)}
    return sum(size for place, size in storages.items() if place not in weights) + sum(packed.values())


@settings(max_examples=100, deadline=None)
@given(
    spec=specs(least_length=4),
    rows=st.integers(1, 3),
    precision=st.sampled_from(["fp32", "bf16"]),
    kind=st.sampled_from(["packed", "8-bit"]),
    data=st.data(),
)
def test_what_is_kept_is_what_the_spec_foresees(spec, rows, precision, kind, data):
    names = data.draw(trained(spec))
    # Below the lowest trained parameter, inputs that look like a frozen weight stay as they are.
    assume(names is None or rows * spec.sequence_length not in {side for s in spec.shapes().values() for side in s})
    foreseen = saved_bytes(spec, rows=rows, precision=precision, trained=names, activations=kind)
    assert kept_bytes(spec, rows=rows, precision=precision, trained=names, kind=kind) == foreseen


def test_a_block_that_is_computed_again_keeps_its_input_as_it_is() -> None:
    model = build(small(layers=2), seed=1)
    wanted = gradients(model)
    packing = ActivationPacking("8-bit")
    found = gradients_of(model, BlockRunner(choose=always, packing=packing))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert packing.whole_bytes == 0


def gradients_of(model: Decoder, runner: BlockRunner) -> list[Tensor]:
    tokens_BT = torch.randint(model.spec.vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    model.run_block = runner
    hidden_BTC = model(tokens_BT, attend=attend_for(model.spec))
    losses = token_losses(hidden_BTC.flatten(0, 1), model.head_weight, tokens_BT.flatten())
    return list(torch.autograd.grad(losses.mean(), list(model.parameters())))


def test_what_is_packed_goes_with_the_last_ticket_for_it() -> None:
    packed = ActivationPacking("8-bit").open(nn.Module(), torch.empty(0))  # type: ignore[arg-type]
    x = torch.randn(20, 30)
    one, other = packed.pack(x), packed.pack(x[3:])
    kept = weakref.ref(one.kept)
    del one
    assert kept() is not None
    del other
    assert kept() is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"recompute": "full"}, "recompute"),
        ({"recompute": "auto"}, "recompute"),
        ({"offload": ("activations",)}, "offload"),
        ({"devices": 2}, "devices"),
        ({"pipeline": 2, "schedule": "zero-bubble", "stages": ((0,), (1,))}, "zero-bubble"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_runs(changes: dict[str, Any], word: str) -> None:
    plan = Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=1, saved_activations="8-bit", **changes)
    assert any("parallel.saved_activations" in each and word in each for each in problems(plan, small()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SHAPES)
def test_on_a_gpu_gradients_are_as_near(name: str) -> None:
    model = build(
        small(layers=4, width=256, mlp_width=512, sequence_length=LENGTH, **SHAPES[name]), seed=1, device="cuda"
    )
    wanted = gradients(model, narrow=True)
    assert 0 < distance(gradients(model, ActivationPacking("8-bit"), narrow=True), wanted) < 0.01
    exact = gradients(model, ActivationPacking("packed"), narrow=True)
    assert distance(exact, wanted) < 1e-3  # the same but for the order of atomic additions


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_less_memory_is_held_between_the_passes() -> None:
    spec = small(layers=6, width=256, heads=4, kv_heads=4, mlp_width=1024, sequence_length=512, dropout=0.1)
    model = build(spec, seed=1, device="cuda")
    tokens_BT = torch.zeros(8, 512, dtype=torch.long, device="cuda")
    dropout = Dropout(0.1, dropout_key(0, torch.tensor(0, device="cuda")), torch.arange(8, device="cuda"))

    def held(packing: ActivationPacking | None) -> int:
        model.run_block = BlockRunner(packing=packing)
        attend = packing.exactly(attend_for(spec)) if packing else attend_for(spec)
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            hidden = model(tokens_BT, attend=attend, dropout=dropout)
        kept = torch.cuda.memory_allocated() - before
        hidden.sum().backward()
        model.zero_grad()
        return kept

    held(None)  # libraries take their memory at the first call
    whole, packed, bytes_kept = held(None), held(ActivationPacking("packed")), held(ActivationPacking("8-bit"))
    assert packed <= whole
    assert bytes_kept < 0.75 * whole
