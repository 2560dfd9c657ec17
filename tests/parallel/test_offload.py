"""An optimizer on the host takes the step of the optimizer on the device, bit for bit, from memory or from files."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ropewalk.base.errors import StorageError
from ropewalk.model.decoder import build
from ropewalk.parallel.memory.host_optimizer import HostOptimizer
from ropewalk.parallel.memory.state_files import PAGE, StateFiles
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.placement import Placement, chunk_sizes, whole_placement
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from ropewalk.train.optim.table import OPTIMIZERS
from tests.parallel.pool import POOL
from tests.tiny import small_spec

pytestmark = pytest.mark.xdist_group("pool")

SPEC = small_spec(position="learned", norm="layer", bias=True, kv_heads=2, tie_embeddings=False, vocabulary=200)
BUCKET = 8 * 2048
"""Bytes; a dozen buckets in float64."""
STEPS = 4
SKIPPED = (0, 2)
"""Steps that are left out: the first, before anything is known, and one in the middle."""

Parameters = dict[str, nn.Parameter]


def parameters(dtype: torch.dtype = torch.float64, device: str = "cpu") -> Parameters:
    return dict(build(SPEC, seed=0, dtype=dtype, device=device).named_parameters())


def make(kind: str, named: Parameters, placements: Any = None) -> torch.optim.Optimizer:
    return make_optimizer(named, Optimizer(kind=kind), spec=SPEC, placements=placements)


def steps(named: Parameters) -> Iterator[tuple[int, dict[str, Tensor]]]:
    draw = torch.Generator().manual_seed(3)
    for number in range(STEPS):
        grads = {n: torch.randn(p.shape, generator=draw, dtype=torch.float64) for n, p in named.items()}
        if number in SKIPPED:
            grads["norm.weight"][0] = float("nan")
        yield number, {n: grad.to(named[n]) for n, grad in grads.items()}


def set_rates(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * group.get("lr_ratio", 1.0)


def on_device(
    optimizer: torch.optim.Optimizer, named: Parameters, *, like: Parameters | None = None, scale: float | None = None
) -> torch.optim.Optimizer:
    """The ordinary way, with gradients of the type of `like`."""
    for number, grads in steps(like or named):
        set_rates(optimizer)
        for name, grad in grads.items():
            named[name].grad = (grad if scale is None else grad * scale).to(named[name].dtype)
        skipped = torch.tensor(float(number in SKIPPED), device=named[name].device)
        vars(optimizer).update(found_inf=skipped, grad_scale=None)
        optimizer.step()
    return optimizer


def on_host(host: HostOptimizer, named: Parameters, *, scale: float | None = None) -> None:
    """Gradients arrive last ones first, as in a backward pass; those of the embedding are announced by nobody."""
    for number, grads in steps(named):
        set_rates(host.optimizer)
        host.begin()
        for name in reversed(named):
            named[name].grad = grads[name]
            if name != "embedding.weight":
                host.ready([name])
        skipped = torch.tensor(float(number in SKIPPED), device=grads[name].device)
        host.step(skipped, scale=None if scale is None else torch.tensor(scale, dtype=torch.float64))


def assert_same(
    host: HostOptimizer, weights: Parameters, reference: torch.optim.Optimizer, expected: Parameters
) -> None:
    for name, parameter in expected.items():
        assert torch.equal(weights[name].cpu(), parameter.cpu()), name
        assert torch.equal(host.parameters[name], weights[name].cpu()), name
        for kind, tensor in reference.state[parameter].items():
            assert torch.equal(host.optimizer.state[host.parameters[name]][kind], tensor.cpu()), (kind, name)


@pytest.mark.parametrize("where", ["as they arrive", "in step", "in files"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_host_takes_the_step_of_the_device(kind: str, where: str, tmp_path: Path) -> None:
    expected, weights = parameters(), parameters()
    reference = on_device(make(kind, expected), expected)
    folder = tmp_path if where == "in files" else None
    host = HostOptimizer(
        weights, functools.partial(make, kind), waits=where == "in step", bucket_bytes=BUCKET, folder=folder
    )
    on_host(host, weights)
    assert_same(host, weights, reference, expected)
    host.close()


@pytest.mark.parametrize("in_files", [False, True])
def test_gradients_are_scaled_as_on_the_device(in_files: bool, tmp_path: Path) -> None:
    expected, weights = parameters(), parameters()
    reference = on_device(make("adamw", expected), expected, scale=0.37)
    host = HostOptimizer(
        weights,
        functools.partial(make, "adamw"),
        waits=True,
        bucket_bytes=BUCKET,
        folder=tmp_path if in_files else None,
    )
    on_host(host, weights, scale=0.37)
    assert_same(host, weights, reference, expected)
    host.close()


def test_narrow_weights_have_wide_ones_on_the_host() -> None:
    wide, narrow = parameters(torch.float32), parameters(torch.float32)
    for name in wide:
        narrow[name].data = narrow[name].data.bfloat16()
        wide[name].data = narrow[name].data.float()
    host = HostOptimizer(narrow, functools.partial(make, "adamw"), waits=False, dtype=torch.float32)
    on_host(host, narrow)
    on_device(make("adamw", wide), wide, like=narrow)
    for name, parameter in wide.items():
        assert torch.equal(host.parameters[name], parameter)
        assert torch.equal(narrow[name], parameter.bfloat16())
    host.close()


class Watched(torch.optim.Optimizer):
    """Subtracts gradients, and tells which when and where."""

    found_inf: Tensor

    def __init__(self, named: Parameters) -> None:
        super().__init__(list(named.values()), {"lr": 0.0})
        self._named = named
        self.updates: list[tuple[list[str], str]] = []
        self.began = threading.Event()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.found_inf:
            return
        moved = {name: p for name, p in self._named.items() if p.grad is not None}
        for parameter in moved.values():
            parameter -= parameter.grad
        self.updates.append((list(moved), threading.current_thread().name))
        self.began.set()


def test_updates_are_made_while_other_gradients_are_still_to_come() -> None:
    weights = {name: nn.Parameter(torch.ones(4)) for name in ("a", "b", "c")}
    host = HostOptimizer(weights, Watched, waits=False, bucket_bytes=16)
    watched: Any = host.optimizer
    host.begin()
    for parameter in weights.values():
        parameter.grad = torch.ones(4)
    host.ready(["c"])
    assert watched.began.wait(60)
    assert torch.equal(host.parameters["c"], torch.zeros(4))
    assert torch.equal(weights["c"], torch.ones(4)), "the device computes with the old ones until the end"
    host.ready(["b", "a"])
    host.step(torch.zeros(()))
    assert [names for names, _ in watched.updates] == [["c"], ["b"], ["a"]]
    assert all(thread.startswith("host-optimizer") for _, thread in watched.updates)
    assert all(torch.equal(weight, torch.zeros(4)) for weight in weights.values())
    host.close()


def test_updates_that_wait_begin_with_the_step() -> None:
    weights = {name: nn.Parameter(torch.ones(4)) for name in ("a", "b")}
    host = HostOptimizer(weights, Watched, waits=True, bucket_bytes=16)
    watched: Any = host.optimizer
    host.begin()
    for parameter in weights.values():
        parameter.grad = torch.ones(4)
    host.ready(["b", "a"])
    assert not watched.updates
    host.step(torch.zeros(()), scale=torch.tensor(0.5))
    assert [names for names, _ in watched.updates] == [["b"], ["a"]]
    assert all(torch.equal(weight, torch.full((4,), 0.5)) for weight in weights.values())
    host.close()


def test_a_step_that_never_ended_is_taken_back() -> None:
    expected, weights = parameters(), parameters()
    reference = on_device(make("adamw", expected), expected)
    host = HostOptimizer(weights, functools.partial(make, "adamw"), waits=False, bucket_bytes=BUCKET)
    set_rates(host.optimizer)
    for _ in range(2):
        host.begin()
        for name in reversed(weights):
            weights[name].grad = torch.randn_like(weights[name])
            host.ready([name] if name != "embedding.weight" else [])
    on_host(host, weights)
    assert_same(host, weights, reference, expected)
    host.close()


def test_an_optimizer_that_communicates_waits_for_the_step() -> None:
    class Talking(Watched):
        communicates = True

    weights = {name: nn.Parameter(torch.ones(4)) for name in ("a", "b")}
    host = HostOptimizer(weights, Talking, waits=False, bucket_bytes=16)
    assert host.waits
    host.close()


def test_an_error_of_an_update_reaches_the_step(tmp_path: Path) -> None:
    class Failing(Watched):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            if not self.found_inf:
                raise ZeroDivisionError

    for folder in (None, tmp_path):
        weights = {str(name): nn.Parameter(torch.ones(4)) for name in range(9)}
        host = HostOptimizer(weights, Failing, waits=False, bucket_bytes=16, folder=folder)
        host.begin()
        for parameter in weights.values():
            parameter.grad = torch.ones(4)
        with pytest.raises(ZeroDivisionError):
            host.step(torch.zeros(()))
        host.close()


def mapped_bytes() -> int:
    """Pages of files in the memory of this process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssFile")) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process's memory")
def test_files_keep_a_few_buckets_in_memory_and_leave_no_name(tmp_path: Path) -> None:
    weights = {str(i): nn.Parameter(torch.randn(64, 4 * PAGE)) for i in range(12)}
    size = weights["0"].nbytes
    make_adam = functools.partial(make, "adamw")
    before = mapped_bytes()
    host = HostOptimizer(weights, make_adam, waits=True, bucket_bytes=2 * size, folder=tmp_path)
    for _ in range(2):
        host.begin()
        for parameter in weights.values():
            parameter.grad = torch.randn_like(parameter)
        host.step(torch.zeros(()))
    assert host._files
    # Of twelve matrices with two moments each, three buckets of two.
    assert host._files.memory_bytes == 3 * 2 * 3 * size
    assert mapped_bytes() - before < 3 * size
    assert list(tmp_path.iterdir()) == []
    host.close()


def test_the_host_can_be_set_from_elsewhere(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        weights, others = parameters(), parameters()
        reference = on_device(make("adamw", others), others)
        host = HostOptimizer(weights, functools.partial(make, "adamw"), waits=True, bucket_bytes=BUCKET, folder=folder)
        with torch.no_grad():
            for name, parameter in others.items():
                host.parameters[name].copy_(parameter)
                for kind, tensor in reference.state[parameter].items():
                    host.optimizer.state[host.parameters[name]][kind].copy_(tensor)
        host.publish()
        assert_same(host, weights, reference, others)
        on_host(host, weights)
        again = {name: nn.Parameter(p.detach().clone()) for name, p in others.items()}
        optimizer = make("adamw", again)
        for name, parameter in others.items():
            optimizer.state[again[name]] = {k: t.clone() for k, t in reference.state[parameter].items()}
        on_device(optimizer, again)
        assert_same(host, weights, optimizer, again)
        host.close()


def test_a_disk_that_has_no_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(StorageError, match="optimizer state does not fit"):
        StateFiles(tmp_path / "fast").add(0, [torch.ones(3)])


def test_units_come_back_as_they_were_written(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, buffers=2)
    start = {unit: [torch.randn(unit, 3), torch.arange(unit, dtype=torch.int16), torch.ones(0)] for unit in range(7)}
    views = {unit: files.add(unit, tensors[:1]) + files.add(unit, tensors[1:]) for unit, tensors in start.items()}
    for _ in range(2):
        for unit in start:
            files.start_read(unit)
        for unit in start:
            for tensor in files.take(unit):
                tensor += 1
            files.start_write(unit)
        files.settle()
    for unit, tensors in start.items():
        assert all(torch.equal(view, t + 1 + 1) for view, t in zip(views[unit], tensors, strict=True))
    files.close()


def parts_on_host(rank: int, kind: str, folder: Path | None) -> float:
    """The greatest difference from one process that holds everything."""
    plan = Plan(device="cpu", precision="fp32", batch_size=2, microbatch_size=1, shard=2, zero=1)
    group = Mesh(plan, rank).group("shard")
    whole, expected = parameters(), parameters()
    on_device(make(kind, expected), expected)
    placements: dict[str, Placement] = {
        n: whole_placement(p.shape).further(0, chunk_sizes(len(p), 2), group) for n, p in whole.items()
    }
    weights = {name: nn.Parameter(placements[name].take(p.detach()).clone()) for name, p in whole.items()}
    host = HostOptimizer(
        weights, lambda named: make(kind, named, placements), waits=True, bucket_bytes=BUCKET // 2, folder=folder
    )
    for number, grads in steps(whole):
        set_rates(host.optimizer)
        host.begin()
        for name in reversed(weights):
            weights[name].grad = placements[name].take(grads[name]).clone()
            host.ready([name])
        host.step(torch.tensor(float(number in SKIPPED)))
    host.close()
    return max(float((weights[n] - placements[n].take(p)).detach().abs().max()) for n, p in expected.items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parts_on_the_host_take_the_step_of_the_whole(kind: str, tmp_path: Path) -> None:
    assert max(POOL.run(parts_on_host, kind, None, world=2)) <= 1e-12
    assert max(POOL.run(parts_on_host, kind, tmp_path, world=2)) <= 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", ["as they arrive", "in step", "in files"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gpu_gets_the_weights_that_it_would_have_made(kind: str, where: str, tmp_path: Path) -> None:
    expected, weights = parameters(device="cuda"), parameters(device="cuda")
    on_device(make(kind, expected), expected)
    folder = tmp_path if where == "in files" else None
    host = HostOptimizer(
        weights, functools.partial(make, kind), waits=where == "in step", bucket_bytes=BUCKET, folder=folder
    )
    on_host(host, weights)
    for name, parameter in expected.items():
        # float64 on another processor: other sums inside a product, and another root.
        torch.testing.assert_close(weights[name], parameter, rtol=1e-12, atol=1e-12)
    host.close()
