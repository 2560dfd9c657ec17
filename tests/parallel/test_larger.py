"""Models larger than one device: with ZeRO-3 no rank ever holds more than its own state and two shard groups."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model.decoder import Decoder
from ropewalk.model.init import initial_value
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply, local
from ropewalk.parallel.compat import MMAP_THRESHOLD
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import case
from tests.parallel.pool import POOL
from tests.parallel.worlds import batches
from tests.tiny import small_spec

pytestmark = pytest.mark.xdist_group("pool")

RANKS = 4
SPEC = small_spec(width=768, heads=12, mlp_width=2048, layers=8, sequence_length=16)
"""57 M numbers in eight blocks: a rank's part is 57 MB, two blocks are 57 MB, the whole is 226 MB."""


class Memory:
    """The peak of this process's resident memory above what it was."""

    def __init__(self) -> None:
        gc.collect()
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)  # or memory that others gave back would hide what is taken now
            library.mallopt(MMAP_THRESHOLD, 1 << 16)  # a mapping for each tensor, or holes between them would count
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
        self._before = self._read("VmRSS")

    def growth(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, key: str) -> int:
        found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return 1024 * int(found[1])


class Stored(Mapping[str, Tensor]):
    """Whole tensors that exist while they are looked at, as those of a file do."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], value: float) -> None:
        self._shapes, self._value = shapes, value

    def __getitem__(self, name: str) -> Tensor:
        return torch.full(self._shapes[name], self._value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def started(rank: int, plan: Plan, spec: Spec) -> dict[str, Any]:
    """Growth of memory while a model is built and while a state is loaded, beside the bytes of this rank's state."""
    mesh = Mesh(plan, rank)
    with torch.device("meta"):
        model = Decoder(spec)
    memory = Memory()
    executor = apply(
        plan,
        model,
        mesh,
        lambda parameters, placements: make_optimizer(parameters, Optimizer(), spec=spec, placements=placements),
        init_seed=5,
    )
    found: dict[str, Any] = {"building": memory.growth()}
    parts = executor.model_state()
    found["parameters"] = sum(part.local.nbytes for part in parts.values())
    found["right"] = all(
        torch.equal(parts[name].local, parts[name].placement.take(initial_value(name, shape, spec, seed=5)))
        for name, shape in spec.shapes().items()
        if "blocks" not in name or "blocks.7" in name
    )
    shapes = spec.shapes()
    moments = {f"{kind}/{name}": shape for kind in ("exp_avg", "exp_avg_sq") for name, shape in shapes.items()}
    memory = Memory()
    executor.load_state(Stored(shapes, 2.0), Stored(moments, 3.0))
    found["loading"] = memory.growth()
    found["moments"] = sum(t.nbytes for name, t in local(executor.optimizer_state()).items() if "exp_avg" in name)
    found["loaded"] = all(bool((part == 2).all()) for part in local(executor.model_state()).values())
    return found


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a while")
def test_no_rank_holds_more_than_its_state_and_two_groups() -> None:
    sizes = {layer: 0 for layer in range(SPEC.layers)}
    for name, shape in SPEC.shapes().items():
        if name.startswith("blocks."):
            sizes[int(name.split(".")[1])] += 4 * prod(shape)
    groups = sum(sorted(sizes.values())[-2:])
    plan = case("", shard=RANKS, zero=3).plan
    POOL.run(started, plan, small_spec(layers=8), world=RANKS)  # what libraries take when they are first used
    for found in POOL.run(started, plan, SPEC, world=RANKS):
        assert found["building"] <= 1.2 * (found["parameters"] + groups)
        assert found["loading"] <= 1.2 * (found["moments"] + groups)
        assert found["right"]
        assert found["loaded"]


def most_blocks_present(rank: int, plan: Plan, spec: Spec) -> tuple[int, int]:
    """Blocks whose parameters are whole at once while rows are scored, before the first step and after it."""
    mesh = Mesh(plan, rank)
    model = Decoder(spec)
    executor = apply(
        plan,
        model,
        mesh,
        lambda parameters, placements: make_optimizer(parameters, Optimizer(), spec=spec, placements=placements),
    )
    blocks = [model.blocks[layer] for layer in model.blocks]
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        whole = [block for block in blocks if any(p.untyped_storage().nbytes() for p in block.parameters())]
        most = max(most, len(whole))

    (batch,) = (each.strided(mesh.data.rank, mesh.data.size) for each in batches(spec, 1))
    handles = [block.register_forward_pre_hook(count) for block in blocks]
    executor.score(batches(spec, 1)[0])
    before, most = most, 0
    for handle in handles:
        handle.remove()
    executor.step(batch, lr=1e-3)
    for block in blocks:
        block.register_forward_pre_hook(count)
    executor.score(batches(spec, 1)[0])
    return before, most


def test_validation_after_a_step_holds_no_more_blocks_than_before_it() -> None:
    """The backward pass leaves marks on blocks; one that is kept for the next validation is a whole model too much."""
    plan = case("", shard=2, zero=3).plan
    assert POOL.run(most_blocks_present, plan, small_spec(layers=8), world=2) == [(1, 1), (1, 1)]
