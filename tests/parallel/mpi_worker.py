"""Started by `mpirun`: every collective of the MPI backend against numpy, and training steps; JSON from rank 0.

Every rank can compute what every other rank holds, so each checks its own result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from ropewalk.config.ranks import ranks
from ropewalk.parallel.comm import Group, Traffic
from ropewalk.parallel.mesh import Mesh, join, leave
from ropewalk.plan.plan import Plan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def held(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What `rank` brings along: small whole numbers, exact in every type and order of summation."""
    return torch.from_numpy(np.random.default_rng(rank).integers(-8, 9, shape)).to(dtype)


def checks(group: Group, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], torch.Tensor], np.ndarray]]:
    """(name, what MPI gives, what numpy gives)."""
    n, me = group.size, group.rank
    every = np.stack([held(rank, (n, 6), dtype).double().numpy() for rank in group.ranks])
    mine = held(group.ranks[me], (n, 6), dtype)
    yield "sum", lambda: group.all_reduce(mine.clone()), every.sum(0)
    yield "sum of columns", lambda: group.all_reduce(mine.clone().t()).t(), every.sum(0)
    yield "max", lambda: group.all_reduce(mine.clone(), operation="max"), every.max(0)
    yield "min", lambda: group.all_reduce(mine.clone(), operation="min"), every.min(0)
    yield "all_gather", lambda: group.all_gather(mine), every.reshape(-1, 6)
    yield "all_gather along 1", lambda: group.all_gather(mine, dim=1), np.concatenate(list(every), 1)
    yield "reduce_scatter", lambda: group.reduce_scatter(mine), every.sum(0)[me : me + 1]
    yield "all_to_all", lambda: group.all_to_all(mine), every[:, me]
    for source in range(n):
        yield f"broadcast of {source}", lambda s=source: group.broadcast(mine.clone(), source=s), every[source]
    yield "shift", lambda: group.start_shift([mine]).wait()[0], every[me - 1]


def lists(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, np.ndarray]]:
    """The forms that only torch.distributed itself has."""
    n, me = dist.get_world_size(), dist.get_rank()
    every = np.stack([held(rank, (n, 3), dtype).double().numpy() for rank in range(n)])
    mine = held(me, (n, 3), dtype)
    gathered = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(gathered, mine)
    yield "list", torch.stack(gathered), every
    part = torch.empty_like(mine[0])
    dist.reduce_scatter(part, list(mine.unbind(0)))
    yield "reduce_scatter of a list", part, every.sum(0)[me]
    outs = [torch.empty(n * n, 3, dtype=dtype) for _ in range(2)]
    dist.group.WORLD.all_gather_single_coalesced(outs, [mine, mine]).wait()
    yield "coalesced", outs[1], every.reshape(-1, 3)
    several = [mine.clone(), mine[0].clone()]
    dist.group.WORLD.allreduce_coalesced(several).wait()
    yield "coalesced sums", several[1], every.sum(0)[0]
    # Rank r gives r + 1 rows to everyone.
    uneven = held(me, ((me + 1) * n, 2), dtype)
    rows = [rank + 1 for rank in range(n)]
    out = torch.empty(sum(rows), 2, dtype=dtype)
    dist.all_to_all_single(out, uneven, rows, [me + 1] * n)
    theirs = [held(rank, ((rank + 1) * n, 2), dtype).double().numpy() for rank in range(n)]
    yield "uneven all_to_all", out, np.concatenate([x[me * (r + 1) : (me + 1) * (r + 1)] for r, x in enumerate(theirs)])


def wrong_collectives(groups: list[Group]) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        for group in groups:
            for name, make, expected in checks(group, dtype):
                if not np.array_equal(make().double().numpy(), expected):
                    wrong.append(f"{name} of {dtype} over {group.name}")
        wrong += [
            f"{name} of {dtype}" for name, made, right in lists(dtype) if not np.array_equal(made.double(), right)
        ]
    return wrong


def gradient_steps(group: Group) -> list[float]:
    """Weights after three steps of plain gradient descent on rows dealt to the ranks, with overlapped sums."""
    draw = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    rows = torch.randn(8, 5, generator=draw, dtype=torch.float64)
    for _ in range(3):
        model.zero_grad()
        (model(rows[group.rank :: group.size]).square().sum() / len(rows)).backward()
        under_way = [group.start_all_reduce(parameter.grad) for parameter in model.parameters()]
        for pending in under_way:
            pending.wait()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


def main() -> None:
    place = ranks()
    tensor = 2 if place.world > 2 else 1
    plan = Plan(
        device="cpu",
        precision="fp32",
        batch_size=8,
        microbatch_size=1,
        replicate=place.world // tensor,
        tensor=tensor,
        backend=sys.argv[1],
    )
    join(plan, place)
    mesh = Mesh(plan, place.rank)
    world = Group("world", range(place.world), place.rank, dist.group.WORLD, Traffic())
    groups = [world] + ([mesh.group("tensor"), mesh.group("replicate")] if tensor > 1 else [])
    told: dict[str, object] = {"backend": dist.get_backend(), "wrong": wrong_collectives(groups)}
    told["weights"] = gradient_steps(world)
    every: list[object] = [None] * place.world
    dist.all_gather_object(every, told)
    leave()
    if place.rank == 0:
        print(json.dumps(every))


if __name__ == "__main__":
    main()
