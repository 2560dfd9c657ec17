"""What each way of keeping fewer activations saves and costs: memory and time of one forward and backward pass.

On a GPU the peak above weights and gradients is measured, and torch's own `save_on_cpu` runs beside our offload; on a
CPU what is kept is the count of the spec, which tests prove to be what autograd keeps.

    make bench NAME=recompute
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import finish
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from ropewalk.model.activations import saved_bytes
from ropewalk.model.attend import attend_for
from ropewalk.model.config import Model
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.loss import token_losses
from ropewalk.model.modules import Block
from ropewalk.model.protocol import RunBlock, run_plainly
from ropewalk.model.spec import Spec, resolve
from ropewalk.parallel.memory.activation_offload import ActivationOffload
from ropewalk.parallel.memory.recompute import AutoRecompute, BlockRunner, always, recomputed
from ropewalk.plan.recompute_planner import Estimator, Foreseen, Planner, foresee

ROUNDS = 9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    large = Model(layers=12, width=768, heads=12) if on_gpu else Model(layers=6, width=256, heads=4)
    length, rows = (1024, 16) if on_gpu else (256, 4)
    spec = resolve(large, vocabulary=8192, sequence_length=length)
    model = build(spec, seed=0, device=device)
    rounds = 3 if quick else ROUNDS
    ours: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run_block in runners(spec, rows, Path(folder)).items():
            again = recomputed if name == "attention" else None
            record(ours, name, measure(model, run_block, rows=rows, rounds=rounds, again=again))
    for kind in ("none", "attention", "full"):
        ours[f"{kind}_kept_mb"] = saved_bytes(spec, rows=rows, precision="bf16", recompute=kind) / 1e6
    peers: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    if on_gpu:
        peers["save_on_cpu"] = {}
        record(peers["save_on_cpu"], "host", measure(model, torch_offload(spec), rows=rows, rounds=rounds))
        ratios["save_on_cpu"] = peers["save_on_cpu"]["host_ms"] / ours["host_ms"]
    finish("recompute", ours=ours, peers=peers, ratios=ratios, quality=f"{device}, {rows} rows of {length}, {large}")


def runners(spec: Spec, rows: int, folder: Path) -> dict[str, RunBlock]:
    """The ways, by name."""

    def prior(rows: int, length: int) -> Foreseen:
        return foresee(spec, rows=rows, length=length, precision="bf16")

    all_kept = prior(rows, spec.sequence_length)
    everything, least = all_kept.peak(()), all_kept.peak(all_kept.blocks)
    half = AutoRecompute(Planner((everything + least) // 2, Estimator(prior)))
    movable = range(spec.layers - 1)
    return {
        "none": run_plainly,
        "attention": run_plainly,
        "auto": BlockRunner(choose=half),
        "full": BlockRunner(choose=always),
        "host": BlockRunner(offload=ActivationOffload(movable)),
        "disk": BlockRunner(offload=ActivationOffload(movable, folder=folder)),
        "full_host": BlockRunner(choose=always, offload=ActivationOffload(movable)),
    }


def torch_offload(spec: Spec) -> RunBlock:
    """The same blocks' activations moved by torch itself."""

    def run(block: Block, x: Tensor, forward: Callable[[Block, Tensor], Tensor]) -> Tensor:
        moves = block.layer < spec.layers - 1
        with save_on_cpu(pin_memory=True) if moves else contextlib.nullcontext():
            return forward(block, x)

    return run


def measure(
    model: Decoder, run_block: RunBlock, *, rows: int, rounds: int, again: Callable | None = None
) -> tuple[float, float]:
    """(Median milliseconds, peak megabytes above weights and gradients or 0 on a CPU) of a forward and backward."""
    spec, device = model.spec, model.head_weight.device
    tokens_BT = torch.randint(spec.vocabulary, (rows, spec.sequence_length), device=device)
    attend = attend_for(spec)
    attend = again(attend) if again else attend
    model.run_block = run_block
    times, peak = [], 0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for number in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        # A CPU may be shared: what counts is the work, on all threads.
        begin = time.perf_counter() if device.type == "cuda" else time.process_time()
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model(tokens_BT, attend=attend)
            loss = token_losses(hidden.flatten(0, 1), model.head_weight, tokens_BT.flatten()).mean()
        del hidden
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        end = time.perf_counter() if device.type == "cuda" else time.process_time()
        # The first two warm up and count sizes.
        times += [end - begin] if number > 1 else []
    return 1000 * statistics.median(times), peak / 1e6


def record(figures: dict[str, float], name: str, measured: tuple[float, float]) -> None:
    figures[f"{name}_ms"] = measured[0]
    if measured[1]:
        figures[f"{name}_peak_mb"] = measured[1]


if __name__ == "__main__":
    main()
