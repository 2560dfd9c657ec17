"""One process with several devices, here threads of the CPU, is equal to one device."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from ropewalk.model.decoder import Decoder, build
from ropewalk.parallel.local import Devices, other_devices
from tests.parallel.plans import Case, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import CLIP, Proof, compare, train, wrong
from tests.tiny import small_spec

pytestmark = pytest.mark.xdist_group("pool")

PROOF = Proof()
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "local",
    [
        case("2 devices", devices=2),
        case("2 devices, rich, 2 rows a microbatch", "rich", devices=2, microbatch_rows=2),
        case("4 devices, recompute full", "alibi", devices=4, recompute="full"),
        case("4 devices, recompute attention", "rich", devices=4, recompute="attention"),
        case("8 devices, adapters", "adapters", devices=8),
        case("more devices than microbatches", "post", devices=3, microbatch_rows=4),
        case("2 devices, muon", "rich", devices=2, optimizer="muon"),
    ],
    ids=lambda each: each.name,
)
def test_devices_are_equal_to_one(local: Case) -> None:
    """Loss, norm, gradients, weights, moments and scores in float64, and what one device left loads."""
    found = PROOF.differences(local)
    assert not wrong(found), found


def forgetful(rank: int, local: Case) -> object:
    """Training in which the other devices are not told of updates."""
    Devices.publish = lambda devices: None  # type: ignore[method-assign]
    return train(rank, local)


def test_stale_copies_are_noticed() -> None:
    local = case("2 devices", devices=2)
    try:
        found = compare(POOL.run(forgetful, local, world=1), PROOF.reference(local))  # type: ignore[arg-type]
    finally:
        POOL.close()  # its first process has the broken class
    assert {"loss", "weights"} <= set(wrong(found)), f"clipped at {CLIP}"


def test_microbatches_go_to_the_devices_in_turn_and_results_come_in_order() -> None:
    models: list[Decoder] = []
    meeting = threading.Barrier(3, timeout=20)

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
