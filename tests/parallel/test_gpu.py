"""On a GPU: a step never waits for the device, and its numbers are those of the CPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest
import torch

from ropewalk.load.batch import Batch
from ropewalk.model.config import Model
from ropewalk.model.decoder import build
from ropewalk.model.spec import resolve
from ropewalk.parallel.apply import apply, local
from ropewalk.parallel.comm import Group, Pending, Traffic
from ropewalk.parallel.compat import deterministic
from ropewalk.parallel.executor import Executor
from ropewalk.parallel.kernels import kernel_choice as kernels
from ropewalk.parallel.kernels import matmul_tuning as tuning
from ropewalk.parallel.kernels.kernel_choice import IN_8_BITS, gpu_milliseconds, measure_8_bits
from ropewalk.plan.forecast import Precision
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from ropewalk.train.optim.table import OPTIMIZERS

from .quick_path import LARGE, SMALL, Narrow, check_float32, check_narrow

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def executor(
    device: Literal["cpu", "cuda"], precision: Precision = "fp32", *, kind: str = "adamw", rows: int = 4
) -> Executor:
    spec = resolve(Model(layers=2, width=64, heads=4, kv_heads=2), vocabulary=128, sequence_length=32)
    plan = Plan(device=device, precision=precision, batch_size=8, microbatch_size=rows)
    model = build(spec, seed=0, device=device)
    return apply(plan, model, None, lambda p, _: make_optimizer(p, Optimizer(kind=kind), spec=spec), clip_norm=1.0)


def test_every_way_to_make_a_product_is_measured() -> None:
    stage = build(
        resolve(Model(layers=1, width=256, heads=4), vocabulary=128, sequence_length=64), seed=0, device="cuda"
    )
    for compiled in (True, False):
        plan = Plan(device="cuda", precision="fp8", batch_size=32, microbatch_size=32, compile=compiled)
        found = measure_8_bits(stage, plan, torch.device("cuda"), timer=gpu_milliseconds)
        assert len(found) == 4
        assert all(times.keys() == {"bf16", *IN_8_BITS} for times in found.values())


def batch() -> Batch:
    return Batch.of_rows(torch.randint(0, 128, (8, 33), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp16"])
def test_a_step_does_not_wait_for_the_device(precision: Precision, kind: str) -> None:
    made, rows = executor("cuda", precision, kind=kind), batch().pinned()
    with deterministic(torch.device("cuda")):
        made.step(rows, lr=1e-3)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                made.step(rows, lr=1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_on_a_gpu_equal_steps_on_the_cpu(kind: str) -> None:
    here, there = executor("cpu", kind=kind), executor("cuda", kind=kind)
    for _ in range(3):
        ours, theirs = here.step(batch(), lr=1e-3), there.step(batch(), lr=1e-3)
    # Muon orthogonalises in bfloat16 there.
    assert abs(ours.loss.item() - theirs.loss.item()) < (1e-3 if kind == "muon" else 1e-4)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp16"])
def test_narrow_numbers_follow_fp32(precision: Precision, kind: str) -> None:
    wide, narrow = executor("cuda", kind=kind), executor("cuda", precision, kind=kind)
    # LAMB's steps are in proportion to the weights, which start small.
    lr = 5e-2 if kind == "lamb" else 3e-3
    for _ in range(8):
        losses = [each.step(batch(), lr=lr).loss.item() for each in (wide, narrow)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[0] < 4.7


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str) -> None:
    made = executor("cuda", kind=kind)
    made.step(batch(), lr=1e-3)
    before = {
        name: value.clone() for name, value in {**local(made.model_state()), **local(made.optimizer_state())}.items()
    }
    made.hooks.before_update.append(lambda gradients: next(iter(gradients.values())).fill_(float("nan")))
    made.hooks.on_gradients.append(lambda gradients: next(iter(gradients.values())).fill_(float("nan")))
    assert made.step(batch(), lr=1e-3).skipped.item() == 1
    after = {**local(made.model_state()), **local(made.optimizer_state())}
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("rows", [4, 8], ids=["two microbatches", "one"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_model_computes_with_the_optimizers_weights_rounded(kind: str, rows: int) -> None:
    made = executor("cuda", "bf16-pure", kind=kind, rows=rows)
    for _ in range(2):
        made.step(batch(), lr=1e-2)
    (masters,) = made.state._copies
    for name, weight in made.model.named_parameters():
        assert torch.equal(weight, masters.parameters[name].to(torch.bfloat16)), name
    assert getattr(made.state.optimizer, "rounds", False) == (rows == 8 and kind.startswith("adamw"))


@pytest.mark.parametrize("name", SMALL)
def test_the_quick_path_has_the_loss_and_gradients_of_the_plain_one(name: str) -> None:
    check_float32(name, "cuda")


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("name", SMALL)
def test_the_quick_path_in_few_bits_is_nearer_to_the_plain_one_than_another_seed(
    name: str, precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Products as small as these are tuned too, and joined by what a tuned one takes.
    monkeypatch.setattr(tuning, "LEAST_FLOPS", 0)
    for wait in ("SETTLING", "SETTLED"):
        monkeypatch.setattr(kernels, wait, 1e-3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_narrow(name, precision, "cuda")


@pytest.mark.parametrize("precision", ["bf16-pure", "fp8", "fp8 by rows"])
@pytest.mark.parametrize("name", LARGE)
def test_the_quick_path_of_real_shapes_is_nearer_to_the_plain_one_than_another_seed(
    name: str, precision: Narrow
) -> None:
    check_narrow(name, precision, "cuda")


class OnAnotherStream:
    """A collective that takes `cycles` of the GPU's clock on a stream of its own, as NCCL's do."""

    def __init__(self, cycles: int) -> None:
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)


def test_waiting_for_collectives_is_that_of_the_stream_and_not_of_the_host() -> None:
    traffic, x, cycles = Traffic(on_gpu=True), torch.zeros(8, device="cuda"), 100_000_000
    group = Group("g", (0, 1), 0, None, traffic)
    traffic.calibrate()
    start, traffic.timeline = time.perf_counter(), []

    def waited(*, computes: int) -> float:
        """Seconds, where the stream computes for so many cycles beside the collective."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = Pending([OnAnotherStream(cycles)], x, moment=group._count("all_reduce", 32))
            torch.cuda._sleep(computes)  # type: ignore[no-untyped-call]
            pending.wait()
            assert traffic.take_waited() == 0.0, "the GPU was not there yet"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        traffic.settle(wait=True)
        return traffic.take_waited()

    idle, hidden = waited(computes=0), waited(computes=4 * cycles)
    assert idle > 10 * hidden
    first, second = traffic.timeline
    # The clocks of host and GPU agree to a millisecond.
    assert start - 1e-3 <= first.begin < first.end <= second.begin + 1e-3
    assert second.end <= time.perf_counter() + 1e-3
    assert second.end - second.begin > first.end - first.begin, "its result was waited for late"


def test_a_collective_of_hosts_beside_a_gpu_is_not_waiting_of_the_gpu() -> None:
    traffic = Traffic(on_gpu=True)
    group = Group("control", (0, 1), 0, None, traffic)
    Pending([OnAnotherStream(1_000_000)], torch.zeros(1), moment=group._count("all_reduce", 4)).wait()
    traffic.settle(wait=True)
    assert traffic.waited_s == 0.0
