"""One process with several devices, here threads of the CPU, is equal to one device."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ropewalk.parallel.apply as apply_module
from ropewalk.model.decoder import Decoder, build
from ropewalk.parallel.multi_device import Devices, other_devices
from ropewalk.train.config import Optimizer
from ropewalk.train.loop import train as train_run
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import MODELS, Case, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import RATE, Outcome, Proof, batches, compare, train, wrong
from tests.tiny import make_run, small_spec
from tests.train.runs import quick

pytestmark = pytest.mark.xdist_group("pool")

PROOF = Proof()
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "local",
    [
        case("2 devices", devices=2),
        case("2 devices, rich, 2 rows a microbatch", "rich", devices=2, microbatch_size=2),
        case("4 devices, recompute full", "alibi", devices=4, recompute="full"),
        case("4 devices, recompute attention", "rich", devices=4, recompute="attention"),
        case("8 devices, adapters", "adapters", devices=8),
        case("more devices than microbatches", "post", devices=3, microbatch_size=4),
        case("2 devices, muon", "rich", devices=2, optimizer="muon"),
    ],
    ids=lambda each: each.name,
)
def test_devices_are_equal_to_one(local: Case) -> None:
    """Loss, norm, gradients, weights, moments and scores in float64, and what one device left loads."""
    found = PROOF.differences(local)
    assert not wrong(found), found


def forgetful(rank: int, local: Case) -> Outcome:
    """Training in which the other devices are not told of updates."""
    sound = Devices.publish
    Devices.publish = lambda devices: None  # type: ignore[method-assign]
    try:
        return train(rank, local)
    finally:
        Devices.publish = sound  # type: ignore[method-assign]


def test_stale_copies_are_noticed() -> None:
    local = case("2 devices", devices=2)
    found = compare(POOL.run(forgetful, local, world=1), PROOF.reference(local))
    assert {"loss", "weights"} <= set(wrong(found))


def test_microbatches_go_to_the_devices_in_turn_and_results_come_in_order() -> None:
    models: list[Decoder] = []
    meeting = threading.Barrier(3, timeout=60)

    def work(model: Decoder, x: Tensor) -> Tensor:
        meeting.wait()  # passes only when all devices are at work at once
        models.append(model)
        return x.sum()

    devices = Devices(build(small_spec(), seed=1), other_devices(CPU, 3))
    found = devices.each(work, [torch.tensor([float(number)]) for number in range(6)])
    assert [result.item() for result in found] == [0, 1, 2, 3, 4, 5]
    assert len({id(model) for model in models}) == 3


def test_gradients_are_added_to_those_of_the_first_and_forgotten_elsewhere() -> None:
    model = build(small_spec(), seed=1)
    devices = Devices(model, other_devices(CPU, 3))

    def work(model: Decoder, x: Tensor) -> Tensor:
        (model.head_weight.sum() * x).backward()
        return x

    devices.each(work, [torch.tensor(float(number)) for number in (1, 10, 100, 1000)])
    devices.gather()
    devices.gather()  # nothing is left to add
    assert model.head_weight.grad is not None
    assert model.head_weight.grad.unique().tolist() == [1111]


def test_failure_on_one_device_is_heard_after_all_have_ended() -> None:
    ended = threading.Event()

    def work(model: Decoder, x: Tensor) -> Tensor:
        if x.item() == 0:
            raise ValueError("broken device")
        ended.wait(0.1)
        ended.set()
        return x

    with pytest.raises(ValueError, match="broken device"):
        Devices(build(small_spec(), seed=1), other_devices(CPU, 2)).each(work, [torch.zeros(1), torch.ones(1)])
    assert ended.is_set()


def test_a_run_with_two_devices_ends_where_one_device_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", parallel__devices=2)
    figures = train_run(two)
    # In float32, where sums in another order differ by about 1e-7 and eight updates let that grow.
    assert figures == pytest.approx(train_run(one), rel=1e-4)
    assert figures["step"] == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_on_a_gpu_are_equal_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both copies on the same GPU where there is one: what threads and streams could do wrong they do there too."""
    gpu = torch.device("cuda", 0)
    if torch.cuda.device_count() == 1:
        monkeypatch.setattr(apply_module, "other_devices", lambda device, count: [device] * (count - 1))
    spec = MODELS["rich"]

    def losses(devices: int) -> list[float]:
        plan = dataclasses.replace(case("", "rich", devices=devices).plan, device="cuda")
        model = build(spec, seed=1, device=gpu, dtype=torch.float64)
        made = apply_module.apply(plan, model, None, lambda p, _: make_optimizer(p, Optimizer(), spec=spec), seed=3)
        results = [made.step(batch, lr=RATE) for batch in batches(spec, 4)]
        scores = made.score(batches(spec, 1)[0]).log_probabilities
        return [float(number) for r in results for number in (r.loss, r.grad_norm)] + scores.flatten().tolist()

    assert losses(2) == pytest.approx(losses(1), abs=1e-11)
