"""Computing again, sharing and moving activations: gradients keep their bits, and what is kept is what was foreseen."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropewalk.base.errors import StorageError
from ropewalk.model.activations import Division, Recompute, block_bytes, saved_bytes, saved_logit_bytes
from ropewalk.model.attend import Attend, attend_for
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.dropout import Dropout, dropout_key
from ropewalk.model.loss import token_losses, weighted_loss
from ropewalk.model.protocol import RunBlock, run_plainly
from ropewalk.model.spec import Spec
from ropewalk.parallel.comm import Group
from ropewalk.parallel.compat import deterministic
from ropewalk.parallel.memory.activation_offload import ActivationOffload
from ropewalk.parallel.memory.recompute import (
    AutoRecompute,
    BlockRunner,
    always,
    inner_bytes,
    make_run_block,
    recomputed,
)
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.tensor import SplitHead, split_model, tensor_placement
from ropewalk.plan.plan import Plan
from ropewalk.plan.recompute_planner import Estimator, Planner, foresee
from tests.model.specs import freeze, small, specs, trained
from tests.parallel.pool import POOL

pytestmark = pytest.mark.xdist_group("pool")

SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "dropped, masked": {"dropout": 0.1, "window": 5, "documents": "separate", "qk_norm": True},
    "GPT-2": {"norm": "layer", "mlp": "gelu", "position": "learned", "bias": True, "kv_heads": 4},
    "ALiBi, after": {"position": "alibi", "norm_position": "post", "dropout": 0.2},
}


def gradients(
    model: Decoder,
    run_block: RunBlock = run_plainly,
    *,
    attention: Callable[[Attend], Attend] = lambda attend: attend,
    length: int = 8,
    head: SplitHead | None = None,
) -> dict[str, Tensor]:
    """Of the mean loss of three fixed rows."""
    spec = model.spec
    generator = torch.Generator().manual_seed(length)
    tokens_BT, targets_BT = torch.randint(spec.vocabulary, (2, 3, length), generator=generator).unbind()
    dropout = Dropout(spec.dropout, dropout_key(0, torch.tensor(0)), torch.arange(3)) if spec.dropout else None
    documents_BT = (torch.arange(length) // 4).expand(3, -1)
    first_head = head.group.rank * spec.heads // head.group.size if head else 0
    attend = attention(attend_for(spec, documents_BT=documents_BT, first_head=first_head))
    model.run_block = run_block
    hidden_BTC = model(tokens_BT, attend=attend, dropout=dropout)
    if head:
        losses = head.losses(hidden_BTC, model.head_weight, targets_BT)
    else:
        losses = token_losses(hidden_BTC.flatten(0, 1), model.head_weight, targets_BT.flatten())
    names, weights = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True)
    return dict(zip(names, torch.autograd.grad(losses.mean(), weights), strict=True))


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_keep_their_bits_when_blocks_or_attention_are_computed_again(name: str, dtype: torch.dtype) -> None:
    model = build(small(layers=3, **SHAPES[name]), seed=1, dtype=dtype)
    wanted = gradients(model)
    assert_same_bits(gradients(model, BlockRunner(choose=always)), wanted)
    assert_same_bits(gradients(model, attention=recomputed), wanted)
    assert_same_bits(gradients(model, BlockRunner(choose=lambda block, x, forward: block.layer == 1)), wanted)
    assert_same_bits(gradients(model, BlockRunner(choose=always), attention=recomputed), wanted)


def test_gradients_keep_their_bits_when_narrow_products_are_computed_again() -> None:
    model = build(small(layers=3), seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gradients(model)
        assert_same_bits(gradients(model, BlockRunner(choose=always), attention=recomputed), wanted)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("choose", [always, lambda block, x, forward: block.layer == 1])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_keep_their_bits_when_activations_leave(
    name: str, choose: Any, on_disk: bool, tmp_path: Path
) -> None:
    model = build(small(layers=3, **SHAPES[name]), seed=1)
    offload = ActivationOffload(range(2), folder=tmp_path / "fast" if on_disk else None, small_bytes=64)
    runner = BlockRunner(choose=choose, offload=offload)
    for length in (8, 6):
        assert_same_bits(gradients(model, runner, length=length), gradients(model, length=length))
    assert list(tmp_path.rglob("*.*")) == []


class Kept:
    """What autograd holds in place of a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Ledger:
    """Stands where activations would leave, and counts the storages that autograd holds; nothing leaves."""

    def __init__(self, model: Decoder) -> None:
        self._kept: list[weakref.ref[Kept]] = []
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def open(self, block: Any) -> Ledger:
        return self

    def pack(self, x: Tensor) -> Kept:
        kept = Kept(x)
        self._kept.append(weakref.ref(kept))
        return kept

    def unpack(self, kept: Kept) -> Tensor:
        return kept.x

    @property
    def bytes(self) -> int:
        alive = [kept.x.untyped_storage() for reference in self._kept if (kept := reference()) is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in alive}
        return sum(size for place, size in sizes.items() if place not in self._weights)


def counted_bytes(
    model: Decoder,
    recompute: Recompute,
    *,
    rows: int,
    partition: Group | None = None,
    head: SplitHead | None = None,
    precision: str = "fp32",
) -> int:
    """Bytes of all storages, each counted once, that are kept for the backward pass of the loss; weights left out."""
    spec = model.spec
    ledger = Ledger(model)
    again = recompute if isinstance(recompute, frozenset) else range(spec.layers) if recompute == "full" else ()
    runner = BlockRunner(choose=lambda block, x, f: block.layer in again, partition=partition, offload=ledger)

    length = spec.sequence_length
    tokens_BT, targets_BT = torch.randint(spec.vocabulary, (2, rows, length)).unbind()
    positions_BT = torch.arange(length).repeat(rows, 1)
    attend = attend_for(spec, documents_BT=positions_BT // 3)
    shared: list[weakref.ref[Tensor]] = []
    masks = weakref.ref(attend)

    def run_block(block: Any, x: Tensor, forward: Any) -> Tensor:
        y = runner(block, x, forward)
        shared.extend(weakref.ref(tensor) for tensor in inspect.getclosurevars(forward).nonlocals["angles"] or ())
        mask = getattr(masks(), "_mask", None)
        shared.extend([] if mask is None else [weakref.ref(mask)])
        return y

    attend = recomputed(attend) if recompute == "attention" else attend
    dropout = Dropout(spec.dropout, dropout_key(0, torch.tensor(0)), torch.arange(rows)) if spec.dropout else None
    model.run_block = run_block
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(ledger.pack, ledger.unpack), autocast:
        hidden = model(tokens_BT.clone(), positions_BT=positions_BT, attend=attend, dropout=dropout)
        if head:
            losses = head.losses(hidden, model.head_weight, targets_BT.clone())
        else:
            weights_N = torch.ones(targets_BT.numel())
            losses = weighted_loss(hidden.flatten(0, 1), model.head_weight, targets_BT.flatten(), weights_N)
    del attend
    # What blocks share is kept if those that are computed again hold it.
    held = [ledger.pack(tensor) for reference in shared if (tensor := reference()) is not None]
    assert losses.requires_grad
    assert len(held) <= len(shared)
    return ledger.bytes


KINDS = ["none", "attention", "full", frozenset([0, 2])]


@settings(max_examples=100, deadline=None)
@given(
    spec=specs(least_length=4),
    rows=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    precision=st.sampled_from(["fp32", "bf16"]),
    data=st.data(),
)
def test_what_is_kept_is_what_the_spec_foresees(spec, rows, kind, precision, data):
    names = data.draw(trained(spec))
    model = build(spec, seed=0)
    freeze(model, names)
    foreseen = saved_bytes(spec, rows=rows, precision=precision, trained=names, recompute=kind)
    assert counted_bytes(model, kind, rows=rows, precision=precision) == foreseen


@settings(max_examples=50, deadline=None)
@given(spec=specs(least_length=4), rows=st.integers(1, 3), precision=st.sampled_from(["fp32", "bf16"]))
def test_what_a_block_gives_up_is_what_the_spec_foresees(spec, rows, precision):
    model = build(spec, seed=0)
    counts = {}

    def run_block(block: Any, x: Tensor, forward: Any) -> Tensor:
        counts[block.layer] = inner_bytes(block, x, forward)
        return BlockRunner(choose=always)(block, x, forward)

    model.run_block = run_block
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        # Its mask is held by the pass, as in a step.
        positions_BT = torch.arange(spec.sequence_length).repeat(rows, 1)
        attend = attend_for(spec, documents_BT=positions_BT // 3)
        dropout = Dropout(spec.dropout, dropout_key(0, torch.tensor(0)), torch.arange(rows)) if spec.dropout else None
        model(torch.zeros_like(positions_BT), attend=attend, dropout=dropout)
    foreseen = block_bytes(spec, rows=rows, precision=precision)
    # Copies of weights are left out, but the two small ones of the norms of queries and keys go with the block.
    copies = 2 * 2 * spec.head_size if spec.qk_norm and precision == "bf16" else 0
    assert [counts[layer] - copies for layer in range(spec.layers)] == [block.inner for block in foreseen]


def split_job(rank: int, spec: Spec, sequence: bool) -> dict[str, Any]:
    """On one of several tensor ranks: bytes kept by kind, and the largest difference that sharing makes."""
    ranks = torch.distributed.get_world_size()
    mesh = Mesh(Plan(device="cpu", precision="fp32", batch_size=2, microbatch_size=2, tensor=ranks), rank)
    group = mesh.group("tensor")
    model = build(spec, seed=0)
    split_model(model, group, sequence=sequence)
    head = SplitHead(group, sequence, tensor_placement("embedding.weight", spec, group).offset[0])
    bytes_kept = {}
    for kind in ("none", "attention", "full"):
        for partition in [None] if sequence else [None, group]:
            found = counted_bytes(model, kind, rows=2, partition=partition, head=head)
            bytes_kept[kind, partition is not None] = found
    if sequence:
        return {"bytes": bytes_kept}
    wanted = gradients(model, head=head)
    mesh.traffic.take()
    runner = BlockRunner(choose=always, partition=group)
    found = gradients(model, runner, head=head)
    sent = mesh.traffic.take()
    same = all(torch.equal(found[name], wanted[name]) for name in wanted)
    return {"bytes": bytes_kept, "same": same, "sent": sent["tensor", "all_gather"].bytes}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        (2, {"norm": "layer", "mlp": "gelu", "position": "learned", "bias": True}),
        (4, {"heads": 4, "kv_heads": 4, "qk_norm": True, "norm_position": "both"}),
    ],
    ids=str,
)
def test_tensor_ranks_keep_what_the_spec_foresees(ranks: int, changes: dict[str, Any], sequence: bool) -> None:
    spec = small(layers=3, vocabulary=40, sequence_length=12, mlp_width=64, **changes)
    for answer in POOL.run(split_job, spec, sequence, world=ranks):
        for (kind, partition), counted in answer["bytes"].items():
            division = Division(tensor=ranks, sequence=sequence, partition=partition)
            foreseen = saved_bytes(spec, rows=2, precision="fp32", recompute=kind, division=division)
            foreseen += saved_logit_bytes(spec, tokens=2 * 12) // ranks
            assert counted == foreseen, (kind, partition)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shared_inputs_of_blocks_come_back_bit_for_bit(ranks: int) -> None:
    spec = small(layers=3, vocabulary=40, heads=4, kv_heads=4, width=40, dropout=0.1)
    for answer in POOL.run(split_job, spec, False, world=ranks):
        assert answer["same"]
        # Each of 3 blocks gathers its input of 3 x 8 x 40 float32 once.
        assert answer["sent"] == 3 * (3 * 8 * 40 * 4) * (ranks - 1) / ranks


def test_activations_leave_once_and_what_blocks_share_stays(tmp_path: Path) -> None:
    spec = small(layers=3, sequence_length=8)
    blocks = block_bytes(spec, rows=3, precision="fp32")
    wanted = sum(block.input + block.inner for block in blocks[:2])
    rotations = 4 * 3 * 8 * spec.head_size
    for folder in (None, tmp_path):
        offload = ActivationOffload(range(2), folder=folder, small_bytes=0)
        gradients(build(spec, seed=1), BlockRunner(offload=offload))
        # Rotations leave with the first block, and stay for the others.
        assert offload.moved_bytes == wanted + rotations


def test_small_activations_and_those_of_other_layers_stay() -> None:
    spec = small(layers=3, sequence_length=8)
    model = build(spec, seed=1)
    offload = ActivationOffload([1], small_bytes=4 * 3 * 8 * spec.width)
    gradients(model, BlockRunner(choose=always, offload=offload))
    assert offload.moved_bytes == 4 * 3 * 8 * spec.width  # the input of one block
    offload = ActivationOffload([1], small_bytes=4 * 3 * 8 * spec.width + 1)
    gradients(model, BlockRunner(choose=always, offload=offload))
    assert offload.moved_bytes == 0


def test_what_waits_for_the_disk_is_bounded(tmp_path: Path) -> None:
    spec = small(layers=6, sequence_length=8)
    largest = 4 * 3 * 8 * 2 * spec.mlp_width
    offload = ActivationOffload(range(6), folder=tmp_path, small_bytes=0, waiting_bytes=2 * largest)
    model = build(spec, seed=1)
    assert_same_bits(gradients(model, BlockRunner(offload=offload)), gradients(model))
    assert offload.most_waiting_bytes <= 2 * largest < offload.moved_bytes / 6


def test_files_of_activations_have_no_name_and_go_with_the_graph(tmp_path: Path) -> None:
    model = build(small(layers=3), seed=1)
    model.run_block = BlockRunner(offload=ActivationOffload(range(2), folder=tmp_path, small_bytes=0))

    def opened() -> int:
        found = 0
        for link in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # another thread has closed it
                found += str(tmp_path) in os.readlink(f"/proc/self/fd/{link}")
        return found

    hidden = model(torch.zeros(2, 8, dtype=torch.long))
    assert list(tmp_path.iterdir()) == []
    assert opened() == 2
    del hidden
    for _ in range(6000):  # until the last one is written
        if not opened():
            break
        time.sleep(0.01)
    assert opened() == 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    model = build(small(layers=3), seed=1)
    offload = ActivationOffload(range(2), folder=tmp_path / "taken", small_bytes=0)
    with pytest.raises(StorageError, match=r"taken.*choose another folder"):
        gradients(model, BlockRunner(offload=offload))


def shared_and_away_job(rank: int, folder: str) -> bool:
    ranks = torch.distributed.get_world_size()
    mesh = Mesh(Plan(device="cpu", precision="fp32", batch_size=2, microbatch_size=2, tensor=ranks), rank)
    spec, group = small(layers=3, vocabulary=40), mesh.group("tensor")
    model = build(spec, seed=0)
    split_model(model, group, sequence=False)
    head = SplitHead(group, False, tensor_placement("embedding.weight", spec, group).offset[0])
    offload = ActivationOffload(range(2), folder=Path(folder), small_bytes=0)
    found = gradients(model, BlockRunner(choose=always, partition=group, offload=offload), head=head)
    wanted = gradients(model, head=head)
    assert offload.moved_bytes == 2 * 4 * 3 * 8 * spec.width // ranks
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_shares_of_inputs_leave_too(tmp_path: Path) -> None:
    assert POOL.run(shared_and_away_job, str(tmp_path), world=2) == [True, True]


def auto_for(spec: Spec, budget_bytes: int) -> AutoRecompute:
    def prior(rows: int, length: int) -> Any:
        return foresee(spec, rows=rows, length=length, precision="fp32")

    return AutoRecompute(Planner(budget_bytes, Estimator(prior)))


def test_microbatches_that_are_alive_together_share_what_may_be_kept() -> None:
    spec = small(layers=4, sequence_length=32)
    room = foresee(spec, rows=3, length=32, precision="fp32").peak([])

    def again(budget_bytes: int, live: int) -> frozenset[int]:
        sizes = {"batch_size": 3, "microbatch_size": 3, "recompute_bytes": budget_bytes}
        plan = Plan(device="cpu", precision="fp32", recompute="auto", **sizes)  # type: ignore[arg-type]
        runner = make_run_block(plan, spec, Mesh(plan), layers=range(4), live_microbatches=live)
        assert isinstance(runner.choose, AutoRecompute)
        return runner.choose.planner.plan_for(3, 32)

    assert again(room, 1) == again(2 * room, 2) == frozenset()
    assert again(room, 2) == again(room // 2, 1) != frozenset()


def test_a_size_is_counted_once_and_then_follows_its_plan() -> None:
    spec = small(layers=4, sequence_length=32)
    foreseen = foresee(spec, rows=3, length=32, precision="fp32")
    auto = auto_for(spec, budget_bytes=foreseen.peak([0, 1]))
    chosen: list[int] = []

    def choose(block: Any, x: Tensor, forward: Any) -> bool:
        again = auto(block, x, forward)
        chosen.extend([block.layer] if again else [])
        return again

    model = build(spec, seed=1)
    for length, layers in [(32, [0, 1, 2, 3]), (32, [0, 1]), (8, [0, 1, 2, 3]), (8, []), (32, [0, 1])]:
        chosen.clear()
        assert_same_bits(gradients(model, BlockRunner(choose=choose), length=length), gradients(model, length=length))
        assert chosen == layers
    # On a CPU the count is exact, so that there was nothing to correct.
    assert auto.planner.estimator.estimate(3, 32) == foreseen


def test_the_peak_of_a_planned_pass_is_within_its_budget_and_a_plan_with_less_is_above_it() -> None:
    spec = small(layers=4, sequence_length=32)
    foreseen = foresee(spec, rows=3, length=32, precision="fp32")
    budget = foreseen.peak([0, 1]) - foreseen.rest
    model = build(spec, seed=1)
    saved_at_the_start = saved_bytes(spec, rows=3, precision="fp32", recompute="full")
    outside = saved_at_the_start - sum(block.input for block in foreseen.blocks.values())
    for layers, fits in ((frozenset([0, 1]), True), (frozenset([0]), False)):
        counted = counted_bytes(model, layers, rows=3) - outside
        assert (counted <= budget) == fits


def test_after_running_out_of_memory_the_same_size_is_planned_to_need_less() -> None:
    spec = small(layers=4, sequence_length=32)
    foreseen = foresee(spec, rows=3, length=32, precision="fp32")
    auto = auto_for(spec, budget_bytes=foreseen.peak([0]))
    model = build(spec, seed=1)
    wanted = gradients(model, length=32)
    runner = BlockRunner(choose=auto)
    gradients(model, runner, length=32)
    sizes = []
    while True:
        assert_same_bits(gradients(model, runner, length=32), wanted)
        sizes.append(auto.planner.planned_bytes(3, 32))
        if not auto.tighten():
            break
    assert sizes == [foreseen.peak(range(count)) for count in (1, 2, 3)]


def test_scoring_computes_nothing_again() -> None:
    def refuse(block: Any, x: Tensor, forward: Any) -> bool:
        raise AssertionError("no gradients are asked for")

    model = build(small(), seed=1)
    model.run_block = BlockRunner(choose=refuse)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))


def plan_with(**changes: Any) -> Plan:
    return Plan(device="cpu", precision="fp32", batch_size=3, microbatch_size=3, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "none"},
        {"recompute": "full", "partition_activations": True},
        {"recompute": "auto", "recompute_bytes": 100_000},
        {"recompute": "auto", "recompute_bytes": 0, "offload": ("activations",)},
    ],
    ids=str,
)
def test_every_plan_gives_the_same_gradients(changes: dict[str, Any], tmp_path: Path) -> None:
    spec = small(layers=3, dropout=0.1)
    plan = plan_with(**changes, offload_path=str(tmp_path))
    runner = make_run_block(plan, spec, Mesh(plan), layers=range(3))
    model = build(spec, seed=1)
    for _ in range(2):
        assert_same_bits(gradients(model, runner), gradients(model))
    assert isinstance(runner.tighten(), bool)


def auto_job(rank: int, spec: Spec, budget_bytes: int) -> Any:
    """On one of two tensor ranks: the layers that are computed again, and the sizes that were counted."""
    plan = plan_with(tensor=2, sequence=True, recompute="auto", recompute_bytes=budget_bytes)
    mesh = Mesh(plan, rank)
    group = mesh.group("tensor")
    model = build(spec, seed=0)
    split_model(model, group, sequence=True)
    head = SplitHead(group, True, tensor_placement("embedding.weight", spec, group).offset[0])
    runner = make_run_block(plan, spec, mesh, layers=range(spec.layers))
    wanted = gradients(model, head=head)
    for _ in range(2):
        found = gradients(model, runner, head=head)
    same = all(torch.equal(found[name], wanted[name]) for name in wanted)
    planner = runner.choose.planner
    return same, planner.plan_for(3, 8), list(planner.estimator.sizes(0)), planner.estimator.estimate(3, 8)


def test_ranks_that_share_blocks_choose_alike_from_exact_counts() -> None:
    spec = small(layers=3, vocabulary=40)
    division = Division(tensor=2, sequence=True)
    foreseen = foresee(spec, rows=3, length=8, precision="fp32", division=division)
    for answer in POOL.run(auto_job, spec, foreseen.peak([0]), world=2):
        assert answer == (True, frozenset([0]), [(3, 8)], foreseen)


def gpu_gradients(run_block: RunBlock, attention: Callable[[Attend], Attend] | None = None) -> tuple[Any, int]:
    """(Gradients on a GPU in bf16, peak bytes of the pass)."""
    spec = small(layers=6, width=256, heads=4, kv_heads=4, mlp_width=1024, sequence_length=512, dropout=0.1)
    model = build(spec, seed=1, device="cuda")
    tokens_BT = torch.arange(4 * 512, device="cuda").view(4, 512) % spec.vocabulary
    dropout = Dropout(0.1, dropout_key(0, torch.tensor(0, device="cuda")), torch.arange(4, device="cuda"))
    attend = attention(attend_for(spec)) if attention else attend_for(spec)
    model.run_block = run_block
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16), deterministic(torch.device("cuda")):
            hidden = model(tokens_BT, attend=attend, dropout=dropout)
            loss = token_losses(hidden.flatten(0, 1), model.head_weight, tokens_BT.flatten()).mean()
            del hidden
            found = torch.autograd.grad(loss, list(model.parameters()))
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del loss
    return found, peak


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_gradients_keep_their_bits_and_every_way_needs_less(tmp_path: Path) -> None:
    wanted, most = gpu_gradients(run_plainly)
    ways = {
        "attention": (run_plainly, recomputed),
        "full": (BlockRunner(choose=always), None),
        "half": (BlockRunner(choose=lambda block, x, forward: block.layer < 3), None),
        "host": (BlockRunner(offload=ActivationOffload(range(5))), None),
        "disk": (BlockRunner(offload=ActivationOffload(range(5), folder=tmp_path)), None),
        "full, host": (BlockRunner(choose=always, offload=ActivationOffload(range(5))), None),
    }
    peaks = {}
    for name, (run_block, attention) in ways.items():
        found, peaks[name] = gpu_gradients(run_block, attention)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), name
    assert all(peak < most for peak in peaks.values()), (most, peaks)
    assert peaks["full, host"] <= peaks["full"] < peaks["half"] < peaks["attention"]
