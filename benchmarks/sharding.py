"""Data parallelism on two processes: ours and PyTorch's, same model, tokens, float32, AdamW, clipping; gloo.

    make bench NAME=sharding            both cases, a few minutes
    python benchmarks/sharding.py --quick

Ours keep everything (DDP), or share the optimizer's state (ZeRO-1), gradients (2) and parameters (3). Against them
stand `DistributedDataParallel`, the same with `ZeroRedundancyOptimizer`, and `fully_shard` (FSDP2) that keeps
parameters between forward and backward (ZeRO-2) or not (3). `exact` is ours with `parallel.exact`, for its price. All
train the same decoder of ours. The two processes hold all contenders and give each a step in turn: what else the
machine does meets them alike. Reported are steps a second (median), the processor's seconds a step, and the bytes of
parameters, gradients and optimizer state of rank 0 at the update.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

CASES = {"4m": (4, 256, 4, 704, 8, 128, 1), "4m in 4 microbatches": (4, 256, 4, 704, 16, 128, 4)}
"""layers, width, heads, hidden, rows of both ranks, tokens a row, microbatches of a rank."""
VOCABULARY = 4096
RANKS = 2
RATE, CLIP = 1e-3, 1.0
"""Without weight decay: ours leaves vectors out of it, the plain loop would not, and losses could not be compared."""
PEERS = {
    "torch-ddp": "DDP",
    "torch-zero-optimizer": "ZeRO-1",
    "fsdp2-kept": "ZeRO-2",
    "fsdp2": "ZeRO-3",
}
"""Which of ours does the same."""


def worker(rank: int, case: str, rounds: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    makers = {
        "DDP": lambda: ours(rank, case, 0),
        "ZeRO-1": lambda: ours(rank, case, 1),
        "ZeRO-2": lambda: ours(rank, case, 2),
        "ZeRO-3": lambda: ours(rank, case, 3),
        "DDP exact": lambda: ours(rank, case, 0, exact=True),
        "ZeRO-3 exact": lambda: ours(rank, case, 3, exact=True),
        "torch-ddp": lambda: ddp(rank, case, shared=False),
        "torch-zero-optimizer": lambda: ddp(rank, case, shared=True),
        "fsdp2-kept": lambda: fsdp(rank, case, reshard=False),
        "fsdp2": lambda: fsdp(rank, case, reshard=True),
    }
    contenders = {name: make() for name, make in makers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    loss: dict[str, float] = {}
    for _ in range(rounds):
        for name, (step, _) in contenders.items():
            dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            loss[name] = step()
            seconds[name].append(time.perf_counter() - begin)
            spent[name].append(time.process_time() - used)
    found = {
        name: {
            "steps_per_s": 1 / statistics.median(seconds[name][2:]),
            "cpu_s_per_step": statistics.median(spent[name][2:]),
            "held_mb": held() / 1e6,
            "loss": loss[name],
        }
        for name, (_, held) in contenders.items()
    }
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


Contender = tuple[Callable[[], float], Callable[[], int]]
"""A step that gives the loss of all ranks, and what counts the bytes held at the last update."""


def build_model(case: str) -> Any:
    from ropewalk.model.config import Model
    from ropewalk.model.decoder import build
    from ropewalk.model.spec import resolve

    layers, width, heads, hidden, _, length, _ = CASES[case]
    settings = Model(layers=layers, width=width, heads=heads, mlp_width=hidden)
    return build(resolve(settings, vocabulary=VOCABULARY, sequence_length=length), seed=0)


def tokens(case: str) -> Any:
    import torch

    rows, length = CASES[case][4:6]
    return torch.randint(0, VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(0))


def ours(rank: int, case: str, zero: int, *, exact: bool = False) -> Contender:
    import torch

    from ropewalk.load.batch import Batch
    from ropewalk.parallel.apply import apply
    from ropewalk.parallel.executor import StepHooks
    from ropewalk.parallel.mesh import Mesh
    from ropewalk.plan.plan import Plan
    from ropewalk.train.config import Optimizer
    from ropewalk.train.optim.optimizers import make_optimizer

    rows, _, microbatches = CASES[case][4:]
    degrees: dict[str, Any] = {"shard": RANKS, "zero": zero} if zero else {"replicate": RANKS}
    plan = Plan(
        device="cpu",
        precision="fp32",
        batch_size=rows,
        microbatch_size=rows // RANKS // microbatches,
        exact=exact,
        **degrees,
    )
    kept: list[Any] = []
    gradients: list[Any] = []

    def optimizer(parameters: Any, placements: Any) -> torch.optim.Optimizer:
        settings = Optimizer(weight_decay=0.0, beta1=0.9, beta2=0.95, epsilon=1e-8)
        kept.append(make_optimizer(parameters, settings, placements=placements, exact=exact))
        return kept[0]

    points = StepHooks(before_update=[lambda named: gradients.__setitem__(slice(None), list(named.values()))])
    executor = apply(plan, build_model(case), Mesh(plan, rank), optimizer, clip_norm=CLIP, hooks=points)
    batch = Batch.of_rows(tokens(case)).strided(rank, RANKS)

    def held() -> int:
        parts = [part.local for part in executor.model_state().values()]
        return storage_bytes([*executor.model.parameters(), *parts, *gradients, *state_of(kept[0])])

    def step() -> float:
        gradients.clear()
        return executor.step(batch, lr=RATE).loss.item()

    return step, held


def ddp(rank: int, case: str, *, shared: bool) -> Contender:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(with_loss(build_model(case)), gradient_as_bucket_view=True)
    settings = {"lr": RATE, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
        if shared
        else torch.optim.AdamW(model.parameters(), **settings)
    )
    inner = optimizer.optim if shared else optimizer

    def synchronises(last: bool) -> None:
        model.require_backward_grad_sync = last

    return loop(rank, case, model, optimizer, inner, synchronises)


def fsdp(rank: int, case: str, *, reshard: bool) -> Contender:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    model = with_loss(build_model(case))
    for block in model.decoder.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    # Gradients are reduced in every microbatch: as ZeRO-2 and 3 do, so that they are never held whole.
    return loop(rank, case, model, optimizer, optimizer, lambda last: None)


def with_loss(decoder: Any) -> Any:
    """A module that gives the loss: what the wrappers of torch want to see is a forward."""
    import torch

    from ropewalk.model.loss import token_losses

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            hidden = self.decoder(inputs)
            return token_losses(hidden.flatten(0, 1), self.decoder.head_weight, targets.flatten()).mean()

    return WithLoss()


def loop(
    rank: int, case: str, model: Any, optimizer: Any, inner: Any, synchronises: Callable[[bool], None]
) -> Contender:
    import torch
    import torch.distributed as dist

    microbatches = CASES[case][6]
    data = tokens(case)[rank::RANKS].chunk(microbatches)
    gradients: list[Any] = []

    def step() -> float:
        total = torch.zeros(())
        gradients.clear()
        for number, rows in enumerate(data):
            synchronises(number == microbatches - 1)
            loss = model(rows[:, :-1], rows[:, 1:]) / microbatches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        gradients.extend(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return total.item() / RANKS

    return step, lambda: storage_bytes([*model.parameters(), *gradients, *state_of(inner)])


def state_of(optimizer: Any) -> list[Any]:
    import torch

    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Of all storages on this rank, each counted once."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach() for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


def run(case: str, rounds: int) -> dict[str, dict[str, float]]:
    """What every contender did, measured by rank 0 of two processes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (case, rounds, f"file://{folder}/store", there)
        processes = [context.Process(target=worker, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
        for process in processes:
            process.start()
        there.close()
        found: dict[str, dict[str, float]] = here.recv()
        for process in processes:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cases = ["4m"] if options.quick else list(CASES)
    found = {case: run(case, 5 if options.quick else options.rounds) for case in cases}

    from harness import finish

    speed = {who: {case: found[case][who]["steps_per_s"] for case in cases} for who in found[cases[0]]}
    ratios = {peer: min(speed[same][case] / speed[peer][case] for case in cases) for peer, same in PEERS.items()}
    mine = {f"{who}, {case}": value for who in speed if who not in PEERS for case, value in speed[who].items()}
    quality = {
        key: {who: {case: round(found[case][who][key], 6) for case in cases} for who in speed}
        for key in ("loss", "held_mb", "cpu_s_per_step")
    }
    print(json.dumps(quality, indent=1))
    finish("sharding", ours=mine, peers={peer: speed[peer] for peer in PEERS}, ratios=ratios, quality=quality)


if __name__ == "__main__":
    main()
