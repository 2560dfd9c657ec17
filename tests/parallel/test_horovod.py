"""A Horovod script on one, two and four processes; named collectives in any order, with errors that say why."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ropewalk.parallel.horovod as hvd
from ropewalk.base.errors import ConfigError, UserError
from ropewalk.config.horovod import HorovodSettings, horovod_settings
from ropewalk.config.ranks import Ranks
from ropewalk.parallel.named.background import adasum
from ropewalk.parallel.named.negotiation import CycleMessage, FusionTuner, Request, RequestTable, fuse
from tests.parallel.pool import POOL

pytestmark = pytest.mark.xdist_group("pool")

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "horovod.md"
# A script must not depend on who is first: a rank waits this long before it asks for what others ask for first.
QUICK = HorovodSettings(stall_s=0.05)


def script() -> str:
    """The script of the guide."""
    found = re.search(r"```python\n(.+?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


@contextlib.contextmanager
def world(rank: int, size: int, settings: HorovodSettings = QUICK) -> Iterator[None]:
    hvd.init(place=Ranks(rank=rank, world=size, local_rank=rank, local_world=size), settings=settings)
    try:
        yield
    finally:
        hvd.shutdown()


def weights_of_script(rank: int, size: int, text: str) -> dict[str, np.ndarray]:
    with world(rank, size):
        names: dict[str, Any] = {}
        exec(compile(text.replace("hvd.shutdown()", ""), str(GUIDE), "exec"), names)  # `init` is made already
        state = {name: each.detach().numpy() for name, each in names["model"].state_dict().items()}
        return state | {"loss": np.array(float(names["loss"]))}


@pytest.mark.parametrize("size", [2, 4])
def test_the_script_of_the_guide_gives_the_weights_of_one_process(size: int) -> None:
    (alone,) = POOL.run(weights_of_script, 1, script(), world=1)
    assert alone["loss"] < 1.5
    for found in POOL.run(weights_of_script, size, script(), world=size):
        for name, each in alone.items():
            assert np.abs(found[name] - each).max() < 1e-12, name


@pytest.mark.slow
def test_the_script_runs_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(script())
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "line.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss \d\.\d+ on 2 processes\n", done.stdout)


def in_other_orders(rank: int, size: int) -> list[float]:
    """Every rank asks for the same sums, each in an order of its own; the last ones late."""
    with world(rank, size):
        names = [f"t{number}" for number in range(12)]
        order = names[rank * 5 % 12 :] + names[: rank * 5 % 12]
        handles = {}
        for place, name in enumerate(order[::-1] if rank % 2 else order):
            if place == 8:
                time.sleep(0.02 * rank)
            handles[name] = hvd.allreduce_async(torch.full((3,), float(name[1:]) + rank), name, hvd.Sum)
        found = [float(hvd.synchronize(handles[name])[0]) for name in names]
        assert all(hvd.poll(handle) for handle in handles.values())
        return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_may_ask_in_any_order(size: int) -> None:
    expected = [size * number + sum(range(size)) for number in range(12)]
    assert POOL.run(in_other_orders, size, world=size) == [expected] * size


def collectives(rank: int, size: int) -> dict[str, Any]:
    with world(rank, size):
        place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
        ones = torch.ones(2, dtype=torch.float64) * (rank + 1)
        target = ones.clone()
        hvd.allreduce_(target, name="in place")
        rows = hvd.allgather(torch.full((rank, 2), rank), name="rows")
        wide = torch.tensor([1.0 + 2**-12, 3.0])
        found = {
            "place": place,
            "average": hvd.allreduce(ones).tolist(),
            "sum": hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0).tolist(),
            "in place": target.tolist(),
            "integers": hvd.allreduce(torch.tensor([rank, 7]), name="integers").tolist(),
            "rows": rows.tolist(),
            "broadcast": hvd.broadcast(ones, 1, name="b").tolist(),
            "object": hvd.broadcast_object({"epoch": 3, "of": rank}, root_rank=1),
            "fp16": hvd.allreduce(wide, compression=hvd.Compression.fp16).tolist(),
            "bf16": hvd.allreduce(wide, compression=hvd.Compression.bf16).tolist(),
            "adasum": hvd.allreduce(torch.eye(size)[rank], op=hvd.Adasum).tolist(),
        }
        hvd.barrier()
        return found


def test_collectives_give_what_they_promise() -> None:
    for rank, found in enumerate(POOL.run(collectives, 2, world=2)):
        assert found == {
            "place": (rank, 2, rank, 2),
            "average": [1.5, 1.5],
            "sum": [6.0, 6.0],
            "in place": [1.5, 1.5],
            "integers": [0, 7],
            "rows": [[1, 1]],
            "broadcast": [2.0, 2.0],
            "object": {"epoch": 3, "of": 1},
            "fp16": [1.0, 3.0],  # 2^-12 is lost
            "bf16": [1.0, 3.0],
            "adasum": [1.0, 1.0],  # orthogonal: the sum
        }


def test_adasum_counts_once_what_all_agree_on() -> None:
    same = torch.tensor([[1.0, 2.0]] * 4)
    assert adasum(same).tolist() == [1.0, 2.0]
    assert adasum(torch.tensor([[1.0, 0.0], [0.0, 3.0]])).tolist() == [1.0, 3.0]
    assert adasum(torch.zeros(2, 3)).tolist() == [0.0] * 3


def uneven(rank: int, size: int) -> tuple[list[float], int]:
    """Rank r has 2 + 2 r batches."""
    with world(rank, size):
        found = [float(hvd.allreduce(torch.ones(1), name=f"b{n}", op=hvd.Sum)) for n in range(2 + 2 * rank)]
        return found, hvd.join()


def test_a_rank_without_data_joins_and_adds_zeros() -> None:
    found = POOL.run(uneven, 2, world=2)
    assert found[0][0] == [2.0, 2.0]
    assert found[1][0] == [2.0, 2.0, 1.0, 1.0]
    assert found[0][1] == found[1][1] == 1


def errors(rank: int, size: int) -> list[str]:
    told: list[str] = []

    def fails(call: Callable[[], Any]) -> None:
        with pytest.raises(UserError) as caught:
            call()
        told.append(str(caught.value))

    with world(rank, size):
        fails(lambda: hvd.allreduce(torch.ones(2 + rank), name="shape"))
        fails(lambda: hvd.broadcast(torch.ones(2), rank, name="root"))
        fails(lambda: hvd.broadcast_object({1, 2}, root_rank=rank))  # each is its own root, so each fails alone
        fails(lambda: hvd.allreduce(torch.ones(1), op=hvd.Compression))
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(1), "alone") if rank == 0 else None
        if handle:
            fails(lambda: hvd.allreduce_async(torch.ones(1), "alone"))
            fails(handle.wait)  # rank 1 shuts down
    return told


def test_what_cannot_run_fails_on_every_rank_and_says_why() -> None:
    first, second = POOL.run(errors, 2, world=2)
    assert first[:4] == second[:4] or first[2] != second[2]
    assert first[0] == second[0] == "horovod: `allreduce.shape` differs on ranks 0 and 1: shape (2,) and (3,)"
    assert "operation 0 and 1" in first[1]
    assert "not what JSON can hold" in first[2]
    assert "take Average, Sum or Adasum" in first[3]
    assert "`allreduce.alone` is under way already" in first[4]
    assert first[5] == "horovod: rank 1 has shut down"


def steps(rank: int, size: int, passes: int, compression: str) -> dict[str, Any]:
    """Three steps with a scheduler, clipping, and a parameter that rank 1 does not use."""
    with world(rank, size):
        torch.manual_seed(rank)
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(3, 2)}).double()
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if rank == 0:  # a state that the others do not have
            sum(p.sum() for p in model.parameters()).backward()
            plain.step()
            plain.zero_grad()
            plain.param_groups[0]["lr"] = 0.2
        chosen = getattr(hvd.Compression, compression)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), chosen, backward_passes_per_step=passes)
        hvd.broadcast_parameters(model.named_parameters())
        hvd.broadcast_optimizer_state(optimizer)
        begun = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        gradients = []
        for step in range(3):
            for number in range(passes):
                x = torch.full((1, 3), 1.0 + 2**-12 + step + number + rank, dtype=torch.float64)
                loss = model["a"](x).sum() + (model["b"](x).sum() if rank == 0 else 0)
                loss.backward()
            optimizer.synchronize()
            gradients.append({name: p.grad.clone().numpy() for name, p in model.named_parameters()})
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert isinstance(optimizer, torch.optim.SGD)
        momenta = [state["momentum_buffer"].numpy() for state in optimizer.state_dict()["state"].values()]
        return {
            "begun": begun,
            "gradients": gradients,
            "lr": optimizer.param_groups[0]["lr"],
            "momenta": momenta,
            "end": {name: p.detach().numpy() for name, p in model.named_parameters()},
        }


@pytest.mark.parametrize(("passes", "compression"), [(1, "none"), (2, "fp16")])
def test_the_optimizer_averages_what_backward_passes_added_up(passes: int, compression: str) -> None:
    first, second = POOL.run(steps, 2, passes, compression, world=2)
    assert first["lr"] == second["lr"] == 0.2 * 0.125
    for name in first["begun"]:
        assert np.array_equal(first["begun"][name], second["begun"][name])
        assert np.array_equal(first["end"][name], second["end"][name])
    for one, two in zip(first["momenta"], second["momenta"], strict=True):
        assert np.array_equal(one, two)
    rounded = 0 if compression == "fp16" else 2**-12
    for step, gradient in enumerate(first["gradients"]):
        of_rank = [sum(1.0 + rounded + step + number + rank for number in range(passes)) for rank in (0, 1)]
        assert gradient["a.weight"] == pytest.approx(np.full((2, 3), sum(of_rank) / 2), abs=1e-12)
        assert gradient["b.weight"] == pytest.approx(np.full((2, 3), of_rank[0] / 2), abs=1e-12)


def calls(rank: int, size: int, fusion_bytes: int) -> int:
    """All-reduces of twelve tensors of 4 kB that are asked for at once."""
    with world(rank, size, dataclasses.replace(QUICK, fusion_bytes=fusion_bytes)):
        background = hvd._WORLD[0].background
        assert background
        with background._lock:  # one cycle takes them all
            handles = [hvd.allreduce_async(torch.ones(1024), f"t{n}", hvd.Sum) for n in range(12)]
        for handle in handles:
            assert float(hvd.synchronize(handle).sum()) == 1024 * size
        return background._tensors.traffic.sent["horovod", "all_reduce"].calls


def test_small_tensors_travel_together_up_to_the_fusion_size() -> None:
    assert [POOL.run(calls, 2, size, world=2) for size in (0, 3 * 4096, 1 << 20)] == [[12, 12], [4, 4], [1, 1]]


def request(name: str, **settings: Any) -> Request:
    usual = {"kind": "allreduce", "shape": (256,), "dtype": "float32", "device": "cpu", "operation": "sum 1.0 1.0"}
    return Request(name=name, **{**usual, **settings})


def names(table: RequestTable, *asked: str) -> list[str]:
    """What is ready when each rank asks for letters."""
    messages = [CycleMessage(tuple(request(letter) for letter in each)) for each in asked]
    return [each.request.name for each in table.take(messages)]


def test_what_all_have_asked_for_is_ready_in_the_order_of_first_requests() -> None:
    table = RequestTable(2)
    assert names(table, "ab", "c") == []
    assert table.missing() == {"a": [1], "b": [1], "c": [0]}
    assert names(table, "", "b") == ["b"]
    assert names(table, "c", "a") == ["a", "c"]
    assert table.missing() == {}


def test_messages_survive_json() -> None:
    message = CycleMessage((request("a"), request("b", shape=())), joined=True, pending=True, fusion_bytes=7)
    assert CycleMessage.read(message.plain()) == message


def test_all_reduces_of_one_kind_are_fused_up_to_the_size() -> None:
    table = RequestTable(1)
    asked = [request("a"), request("b"), request("h", dtype="float16"), request("c"), request("g", kind="allgather")]
    ready = table.take([CycleMessage((*asked, request("d", operation="adasum 1.0 1.0")))])
    groups = [[each.request.name for each in group] for group in fuse(ready, 2 * 1024)]
    assert groups == [["a", "b"], ["h"], ["c"], ["g"], ["d"]]
    assert len(fuse(ready, 0)) == 6


def test_the_tuner_tries_every_size_and_stays_with_the_fastest() -> None:
    tuner, now, tried = FusionTuner(window_s=1.0), 1.0, []
    rate = {size: 100 - abs(place - 2) for place, size in enumerate(FusionTuner.CANDIDATES)}
    while not tuner.done:
        tried.append(tuner.size)
        slow = len(tried) == 20  # one moment of a best window
        tuner.saw(0 if slow else rate[tuner.size], now)
        now += 0.5
    assert set(tried) == set(FusionTuner.CANDIDATES)
    assert tuner.size == FusionTuner.CANDIDATES[2]
    tuner.saw(1, now)
    assert tuner.size == FusionTuner.CANDIDATES[2]


def tuned(rank: int, size: int) -> tuple[bool, list[int]]:
    """Whether ranks whose clocks differ agree on every fusion while one of them tunes."""
    with world(rank, size, dataclasses.replace(QUICK, autotune=True)):
        background = hvd._WORLD[0].background
        assert background
        assert background.tuner
        background.tuner = FusionTuner(window_s=0.001 * (1 + rank))
        sizes = []
        for number in range(60):
            handles = [hvd.allreduce_async(torch.ones(64), f"{number}.{n}", hvd.Sum) for n in range(2)]
            assert all(float(hvd.synchronize(handle)[0]) == size for handle in handles)
            sizes.append(background.tuner.size)
        return len(set(sizes)) > 1, sizes


def test_autotune_changes_the_size_while_training_goes_on() -> None:
    assert all(changed for changed, _ in POOL.run(tuned, 2, world=2))


def test_settings_come_from_the_variables_of_horovod() -> None:
    assert horovod_settings({}) == HorovodSettings()
    found = horovod_settings({"HOROVOD_FUSION_THRESHOLD": "1024", "HOROVOD_CYCLE_TIME": "5", "HOROVOD_AUTOTUNE": "1"})
    assert (found.fusion_bytes, found.cycle_s, found.autotune) == (1024, 0.005, True)
    with pytest.raises(ConfigError, match="HOROVOD_CYCLE_TIME is `soon`, not a number of 0 or more"):
        horovod_settings({"HOROVOD_CYCLE_TIME": "soon"})


def stalled(rank: int, size: int) -> list[str]:
    told: list[str] = []
    with world(rank, size), pytest.MonkeyPatch.context() as patch:
        patch.setattr("ropewalk.parallel.named.background.logger.warning", lambda text, *rest: told.append(text % rest))
        if rank:
            handle = hvd.allreduce_async(torch.ones(1), "late")
            while not any("late" in text for text in told):
                time.sleep(0.01)
            hvd.broadcast(torch.ones(1), 1, name="go on")
            hvd.synchronize(handle)
        else:
            hvd.broadcast(torch.ones(1), 1, name="go on")
            hvd.allreduce(torch.ones(1), "late")
    return told


def test_a_collective_that_some_ranks_do_not_ask_for_is_told() -> None:
    _, told = POOL.run(stalled, 2, world=2)
    assert any(re.search(r"`allreduce.late` has waited \d+ s for ranks 0, ", text) for text in told)


def test_calls_before_init_say_so() -> None:
    with pytest.raises(UserError, match=r"call `init\(\)` first"):
        hvd.rank()


def test_one_process_alone_gets_results_without_a_gradient() -> None:
    with world(0, 1):
        x = torch.ones(2, requires_grad=True)
        for result in (hvd.allgather(x), hvd.broadcast(x, 0), hvd.allreduce(x, op=hvd.Sum)):
            assert torch.equal(result, torch.ones(2))
            assert not result.requires_grad
        assert torch.equal(hvd.allreduce(x, prescale_factor=3.0), torch.full((2,), 3.0))
        with pytest.raises(UserError, match=r"int64 cannot be scaled; leave the factors at 1"):
            hvd.allreduce(torch.ones(2, dtype=torch.int64), prescale_factor=0.5)


def test_an_error_without_synchronization_does_not_switch_it_off() -> None:
    with world(0, 1):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
        with pytest.raises(KeyError), optimizer.skip_synchronize():
            raise KeyError
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()  # refuses while a gradient has not been waited for
        assert weight.item() == 0.0
