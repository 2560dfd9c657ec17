"""Data parallelism, ZeRO-3 and a 1F1B pipeline on NCCL: ours and torch's, same model, same ranks, in turns in one run.

    make bench NAME=nccl                                  two ranks, on one GPU where there is only one
    python benchmarks/nccl.py --cases ddp --profile       and where the time goes
    python benchmarks/nccl.py --device cpu --quick        the same path with gloo and a small model

Aims: at least 0.97 of the peer's speed, no more memory, no more bytes sent. `contenders.py` says who the peers are and
why both do the same work. Of each case, the processes hold both contenders at once:

- speed: turns of a few steps, ours and the peer's one after the other, the order changing from round to round; the
  median of the rounds' ratios and their spread.
- memory: the most that torch's allocator held in a contender's first steps, above what it held before the contender was
  built. Ours is built and measured first; that it stays is the same for all steps of the peer.
- bytes: what the network interface `lo` counted in the turns, for all ranks together, headers and acknowledgements
  included (`/proc/net/dev`). Nobody else may use it meanwhile. Where every rank has a GPU of its own, NCCL does not use
  it, and there is no such figure.

Ranks that share one GPU over sockets are not a cluster: what is seen is the order of operations, what a step waits for,
memory and bytes, and nothing about NVLink or InfiniBand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import finish
from ranks import SHARED, launch, sharing

CASES = ("ddp", "zero3", "1f1b")
LEAST_SPEED, MOST = 0.97, 1.005
"""Aims. Bytes and memory may differ by half a percent: barriers between turns, and how tensors are rounded up."""
OPTIONS = ("ranks", "rows", "microbatches", "size", "device", "rounds", "steps")
WARMUP = 3
LIMIT_S = 240
"""For one case."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32, help="of a step, over all ranks")
    parser.add_argument("--size", default="350M", help="a model of `ropewalk bench train`, or `small`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step of one rank; pipelines have 4 per rank")
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds")
    parser.add_argument("--profile", action="store_true", help="print where the time of both contenders goes")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "ANSWER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.size, options.rows, options.rounds, options.steps = "small", 16, 2, 2
    if options.worker:
        work_on(*options.worker, options)
        return
    with sharing(options.ranks, options.device) as shares:
        place = SHARED if shares else "one rank per GPU" if options.device == "cuda" else "processes on CPUs, gloo"
        print(f"{options.ranks} ranks: {place}", flush=True)
        found = {case: run(case, options) for case in options.cases}
    tell(found, place)


def run(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 measured of a case."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        flags = [f"--{name}={getattr(options, name)}" for name in OPTIONS]
        flags += ["--profile"] if options.profile else []
        command = [sys.executable, __file__, *flags, "--worker", case, str(answer)]
        seconds = launch(command, ranks=options.ranks, device=options.device, logs=Path(folder), timeout_s=LIMIT_S)
        found: dict[str, Any] = json.loads(answer.read_text())
        told = (Path(folder) / "rank-0.log").read_text(errors="replace").splitlines()
    if options.profile and told:
        print(f"\n{case}, last lines of rank 0's log", *told[-15:], sep="\n  ")
    for who, text in found.pop("profile").items():
        print(f"\n{case}, {who}, rank 0\n{text}", flush=True)
    found["seconds"] = seconds
    print(f"\n{case} ({seconds:.0f} s)", *lines(found), sep="\n  ", flush=True)
    return found


def work_on(case: str, answer: str, options: argparse.Namespace) -> None:
    """One rank's part in a case."""
    import torch
    import torch.distributed as dist

    from ropewalk.base.parent import die_with_parent

    die_with_parent()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    found = measure(case, rank, device, options)
    if rank == 0:
        Path(answer).write_text(json.dumps(found))
    # Rank 0 ends last: a rank whose neighbour ends inside a collective of NCCL fails, a barrier of NCCL included.
    if on_gpu:
        torch.cuda.synchronize(device)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"end of rank {rank}", "")
    if rank == 0:
        store.wait([f"end of rank {other}" for other in range(options.ranks)])
    # Threads of torch's collectives now and then abort a process that ends in the ordinary way.
    sys.stdout.flush()
    os._exit(0)


def measure(case: str, rank: int, device: Any, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from contenders import PEERS, Contender, Work, ours, peer

    work = Work(
        case=case,
        size=options.size,
        rank=rank,
        ranks=options.ranks,
        rows=options.rows,
        microbatches=4 * options.ranks if case == "1f1b" else options.microbatches,
        compiled=device.type == "cuda",
        device=device,
    )
    meter = Meter(device)
    meter.warm_up()
    contenders: dict[str, Contender] = {}
    memory: dict[str, dict[str, float]] = {}
    losses: dict[str, list[float]] = {}
    for who in ("ropewalk", PEERS[case]):
        before = meter.held()
        kernel = contenders["ropewalk"].kernel if contenders else None
        contenders[who] = peer(work, kernel) if contenders else ours(work)
        meter.restart()
        step, loss = contenders[who].step, contenders[who].loss
        losses[who] = [loss(step()) for _ in range(WARMUP)]
        memory[who] = meter.memory(before)
    turns: dict[str, list[float]] = {who: [] for who in contenders}
    sent: dict[str, list[float]] = {who: [] for who in contenders}
    for number in range(options.rounds):
        for who in list(contenders) if number % 2 == 0 else reversed(list(contenders)):
            seconds, sizes = meter.turn(contenders[who].step, options.steps)
            turns[who].append(seconds)
            sent[who].append(sizes)
    profiles = {}
    if options.profile:
        from profiled import STEPS, table

        for who, contender in contenders.items():
            dist.barrier()
            if rank == 0:
                profiles[who] = table(contender.step, device=device)
            else:
                for _ in range(STEPS):
                    contender.step()
                meter.wait()
    tokens = work.rows * work.spec.sequence_length
    return {
        "peer": PEERS[case],
        "parameters": work.spec.parameters(),
        "precision": work.plan.precision,
        "rows": work.rows,
        "microbatches": work.microbatches,
        "tokens_s": {who: tokens / statistics.median(each) for who, each in turns.items()},
        "step_s": turns,
        "ratio": [b / a for a, b in zip(turns["ropewalk"], turns[PEERS[case]], strict=True)],
        "memory_gb": memory,
        "sent_gb": {who: statistics.median(each) / 1e9 for who, each in sent.items()},
        "loss": losses,
        "attention": contenders["ropewalk"].kernel,
        "versions": f"torch {torch.__version__}" + (f", NCCL {torch.cuda.nccl.version()}" if meter.on_gpu else ""),
        "device": torch.cuda.get_device_name(device) if meter.on_gpu else "cpu",
        "profile": profiles,
    }


class Meter:
    """Time, memory and bytes of one rank."""

    def __init__(self, device: Any) -> None:
        self._device, self.on_gpu = device, device.type == "cuda"

    def warm_up(self) -> None:
        """Has libraries take their workspaces, which would count for the first contender: of both passes, since a
        backward pass has a thread of its own."""
        import torch
        import torch.distributed as dist

        x = torch.randn(256, 256, device=self._device, requires_grad=True)
        for dtype in (torch.bfloat16, torch.float32):
            (x.to(dtype) @ x.to(dtype)).sum().backward()
        dist.all_reduce(x.detach())
        self.wait()

    def wait(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize(self._device)

    def held(self) -> int:
        import gc

        import torch

        gc.collect()
        return torch.cuda.memory_allocated(self._device) if self.on_gpu else 0

    def restart(self) -> None:
        """Building is over: what it took for a while does not count."""
        import torch

        if self.on_gpu:
            self.wait()
            torch.cuda.reset_peak_memory_stats(self._device)

    def memory(self, before: int) -> dict[str, float]:
        """The most since `restart`, and what stays between steps, in GB; empty without a GPU."""
        import torch

        if not self.on_gpu:
            return {}
        self.wait()
        peak = torch.cuda.max_memory_allocated(self._device)
        return {"peak": (peak - before) / 1e9, "between steps": (self.held() - before) / 1e9}

    def turn(self, step: Any, steps: int) -> tuple[float, float]:
        """Seconds of a step, and bytes that all ranks sent in it."""
        import torch.distributed as dist

        self.wait()
        dist.barrier()
        self.wait()
        before, begin = loopback_bytes(), time.perf_counter()
        for _ in range(steps):
            step()
        self.wait()
        # The slowest rank ends the turn.
        dist.barrier()
        self.wait()
        seconds = (time.perf_counter() - begin) / steps
        return seconds, (loopback_bytes() - before) / steps


def loopback_bytes() -> int:
    """What processes of this machine have sent each other so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:")), 0)


def lines(found: dict[str, Any]) -> list[str]:
    """A case for people."""
    ours, peer = "ropewalk", found["peer"]
    speed = found["tokens_s"]
    text = [
        f"speed   {speed[ours]:,.0f} tokens/s, {peer} {speed[peer]:,.0f}: {statistics.median(found['ratio']):.3f} "
        f"({min(found['ratio']):.3f} to {max(found['ratio']):.3f} in {len(found['ratio'])} rounds), aim {LEAST_SPEED}"
    ]
    memory = found["memory_gb"]
    for key in memory[ours]:
        text.append(f"memory  {memory[ours][key]:.3f} GB, {peer} {memory[peer][key]:.3f} ({key}, rank 0)")
    text += [] if memory[ours] else ["memory  measured on GPUs only"]
    sent = found["sent_gb"]
    if min(sent.values()) > 0:
        text.append(f"bytes   {sent[ours]:.4f} GB/step of all ranks over lo, {peer} {sent[peer]:.4f}")
    else:
        text.append("bytes   nothing went over lo")
    text.append(
        "loss    "
        + "; ".join(f"{who} " + ", ".join(f"{loss:.5f}" for loss in each) for who, each in found["loss"].items())
    )
    return [*text, f"aims    {verdict(found)}"]


def verdict(found: dict[str, Any]) -> str:
    """Which aims are met."""
    ratios = compared(found)
    wrong = [key for key, ratio in ratios.items() if ratio < (LEAST_SPEED if key == "speed" else 1 / MOST)]
    wrong += [] if same_work(found) else ["the same losses"]
    return f"not met: {', '.join(wrong)}" if wrong else f"met ({', '.join(ratios)})"


def compared(found: dict[str, Any]) -> dict[str, float]:
    """Ours to the peer, above 1 where ours is better; what could not be measured is left out."""
    ours, peer = "ropewalk", found["peer"]
    ratios = {"speed": statistics.median(found["ratio"])}
    if found["memory_gb"][ours]:
        ratios["memory"] = found["memory_gb"][peer]["peak"] / found["memory_gb"][ours]["peak"]
    if min(found["sent_gb"].values()) > 0:
        ratios["bytes"] = found["sent_gb"][peer] / found["sent_gb"][ours]
    return ratios


def same_work(found: dict[str, Any]) -> bool:
    """Whether the losses of the first steps agree as far as bfloat16 lets them."""
    ours, theirs = found["loss"].values()
    return all(abs(a - b) <= 2e-3 * abs(b) for a, b in zip(ours, theirs, strict=True))


def tell(found: dict[str, dict[str, Any]], place: str) -> None:
    """The table, and the JSON line."""
    ours = {case: each["tokens_s"]["ropewalk"] for case, each in found.items()}
    peers = {each["peer"]: {case: each["tokens_s"][each["peer"]]} for case, each in found.items()}
    ratios = {f"{each['peer']}, {key}": ratio for each in found.values() for key, ratio in compared(each).items()}
    quality = {"place": place} | {case: each | {"aims": verdict(each)} for case, each in found.items()}
    print()
    finish("nccl", ours=ours, peers=peers, ratios=ratios, quality=quality)


if __name__ == "__main__":
    main()
