"""Saving a model of 1.36 B parameters with AdamW's moments from a GPU while it trains.

    make bench NAME=saving          on a machine with a GPU, 40 GB of host memory and 40 GB of disk; seven minutes

The model trains on random tokens in bfloat16; weights and moments are 16.3 GB of float32 on the device. Ours and DCP's
`async_save` with its default stager, each in a process of its own, save after a step and train on until the checkpoint
is durable. Ours makes its buffers while the first steps run, as in a run. A step is timed to the end of its work on the
GPU. Told, as medians of the saves:

- *blocked*: seconds that the save keeps training waiting: its call, and for ours the fence before the next update
- *delay*: how much longer the steps took from a save until all of it is done than as many steps beside no save
- *dip*: how much longer a step takes meanwhile, by the median and by the mean
- the rate of the copy to the host (ours), and how long until the files are durable

The delay over 300 s is the share of the time that saving every five minutes takes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from harness import ROOT, finish

sys.path.insert(0, str(ROOT))

from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.run_state import State
from ropewalk.model.config import Model
from ropewalk.model.decoder import Decoder
from ropewalk.model.spec import Spec, resolve
from ropewalk.train.checkpointer import Checkpointer

LIMIT_S = 250.0
"""For each contender: both together end within nine minutes. No save begins that would not end in time."""
INTERVAL_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model and how it is trained."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    rows: int
    length: int
    alone: int
    """Steps beside no save, before the first and after the last."""


FULL = Size(layers=24, width=2048, heads=16, vocabulary=71_168, rows=8, length=2048, alone=40)
SMALL = Size(layers=4, width=256, heads=4, vocabulary=4096, rows=2, length=128, alone=20)


class Training:
    """A model, its optimizer, and steps."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.spec = spec_of(size)
        torch.manual_seed(0)
        with torch.device(device):
            self._model = Decoder(self.spec)
            shape = (size.rows, size.length + 1)
            self._tokens = torch.randint(0, size.vocabulary, shape)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._device = device

    def step(self, *, before_update: Callable[[], None] = lambda: None) -> float:
        """Seconds of one step, to the end of its work on the device."""
        start = time.perf_counter()
        with torch.autocast(self._device.type, torch.bfloat16):
            hidden = self._model(self._tokens[:, :-1])
            loss = F.cross_entropy(self._model.logits(hidden).flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()
        before_update()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What is saved."""
        weights = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        state = self._optimizer.state
        moments = {
            f"{kind}/{name}": state[parameter][kind]
            for name, parameter in self._model.named_parameters()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        return {"model": weights, "optimizer": moments}


class Saver(Protocol):
    """A way of saving in the background."""

    def prepare(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> Callable[[], bool]:
        """Begins what can be done before the first save; whether that is done."""
        ...

    def save(self, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Begins a save; the state may change when this returns and `fence` has been called."""

    def fence(self) -> None: ...

    def done(self) -> bool:
        """Whether nothing is left to do for the last save."""
        ...

    def told(self) -> dict[str, float]:
        """What it says of the last save, and forgets it."""
        ...


class Ours:
    """As a run saves: snapshot, hash, write, sync, commit, publish, delete the one before."""

    def __init__(self, folder: Path, spec: Spec) -> None:
        self._checkpointer = Checkpointer(folder, Checkpoints(keep_last=1, save_every_steps=1), warn=print)
        self._spec, self._told = spec, dict[str, float]()

    def prepare(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> Callable[[], bool]:
        return self._checkpointer.prepare(self._state(0, tensors)).done

    def save(self, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._checkpointer.save(self._state(step, tensors))

    def _state(self, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> State:
        return State(
            step=step,
            tokens=0,
            seed=0,
            spec=self._spec,
            data={},
            model=tensors["model"],
            optimizer=tensors["optimizer"],
            tokenizer=b"{}",
        )

    def fence(self) -> None:
        self._checkpointer.fence()

    def done(self) -> bool:
        for saved in self._checkpointer.finished():
            assert saved.error is None, saved.error
            self._told = {
                "gpu_and_host_blocked_s": saved.blocked_s,
                "copy_gb_per_s": saved.bytes / saved.copy_s / 1e9,
                "durable_s": saved.copy_s + saved.persist_s,
                "read_back_s": saved.after_s,
            }
        return bool(self._told)

    def told(self) -> dict[str, float]:
        told, self._told = self._told, {}
        return told


class Dcp:
    """torch's distributed checkpoint, of one process, with the stager it takes by default; synced as ours is."""

    def __init__(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        self._dcp, self._folder = dcp, folder

    def prepare(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> Callable[[], bool]:
        return lambda: True

    def save(self, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        if step > 1:
            shutil.rmtree(self._folder / str(step - 1))
        # `no_dist`: a group of one process would wait for a network that this machine may not have.
        self._future = self._dcp.async_save(dict(tensors), checkpoint_id=str(self._folder / str(step)), no_dist=True)

    def fence(self) -> None:
        """Nothing: the call returned after the copy."""

    def done(self) -> bool:
        return bool(self._future.done())

    def told(self) -> dict[str, float]:
        """Nothing: it deletes nothing and reads nothing back, so done is durable."""
        self._future.result()
        return {}


@dataclass(slots=True)
class Measured:
    """One save."""

    call_s: float = 0.0
    fence_s: float = 0.0
    """Within the first step."""
    done_s: float = 0.0
    """Until nothing is left to do for it."""
    steps: list[float] = field(default_factory=list)
    """Seconds of the steps until then, the one that waits for the copy first."""
    told: dict[str, float] = field(default_factory=dict)


def save_once(training: Training, saver: Saver, step: int) -> Measured:
    """Saves and trains on until all of it is done."""
    one = Measured()

    def fence() -> None:
        start = time.perf_counter()
        saver.fence()
        one.fence_s += time.perf_counter() - start

    tensors = training.tensors()
    begin = time.perf_counter()
    saver.save(step, tensors)
    one.call_s = time.perf_counter() - begin
    while not saver.done():
        one.steps.append(training.step(before_update=fence))
    one.done_s, one.told = time.perf_counter() - begin, saver.told()
    return one


def contend(name: str, size: Size, device: torch.device, *, count: int) -> dict[str, float]:
    """One contender in this process."""
    start = time.perf_counter()
    training = Training(size, device)
    alone = [training.step() for _ in range(size.alone + 5)][5:]
    total = sum(tensor.nbytes for group in training.tensors().values() for tensor in group.values())
    tell(name, state_gb=total / 1e9, step_s=statistics.median(alone))
    found: list[Measured] = []
    scratch = ROOT / ".bench"  # which git ignores, should a run be cut short
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        saver: Saver = Ours(Path(place), training.spec) if name == "ropewalk" else Dcp(Path(place))
        begin, preparing = time.perf_counter(), list[float]()
        prepared = saver.prepare(training.tensors())
        while not prepared():
            preparing.append(training.step())
        prepare_s = time.perf_counter() - begin
        tell(name, prepare_s=prepare_s, steps=len(preparing), slowest_s=max(preparing, default=0.0))
        while len(found) < count and (not found or time.perf_counter() - start + 2 * found[-1].done_s < LIMIT_S):
            one = save_once(training, saver, len(found) + 1)
            found.append(one)
            tell(name, call_s=one.call_s, fence_s=one.fence_s, done_s=one.done_s, steps=len(one.steps), **one.told)
        # What the machine does of itself in these minutes belongs to both sides.
        alone += [training.step() for _ in range(size.alone)]
    # Who makes its buffers with the first save is not judged by that one.
    figures = summary(found if preparing else found[1:] or found, alone)
    if preparing:
        # What making the buffers costs in all, once a run.
        figures["prepare_delay_s"] = sum(preparing) - statistics.mean(alone) * len(preparing)
        figures["prepare_s"] = prepare_s
    return figures | {"state_gb": total / 1e9, "first_call_s": found[0].call_s, "saves": len(found)}


def summary(found: list[Measured], alone: list[float]) -> dict[str, float]:
    usual = statistics.mean(alone)
    # The first step of each waits for the copy: it belongs to the delay, not to the dip.
    during = [seconds for one in found for seconds in one.steps[1:]] or alone
    figures = {
        "blocked_s": statistics.median(one.call_s + one.fence_s for one in found),
        "delay_s": statistics.median(one.call_s + sum(one.steps) - usual * len(one.steps) for one in found),
        "durable_s": statistics.median(one.done_s for one in found),
        "step_s": statistics.median(alone),
        "dip_percent": 100 * (statistics.median(during) / statistics.median(alone) - 1),
        "dip_mean_percent": 100 * (statistics.mean(during) / usual - 1),
    }
    figures["percent_of_5_minutes"] = 100 * max(0.0, figures["delay_s"]) / INTERVAL_S
    for key in found[0].told:
        figures[key] = statistics.median(one.told[key] for one in found)
    return figures


def tell(name: str, **figures: float) -> None:
    """A line as soon as something is known: a run that is cut short has said what it found."""
    print(name, "  ".join(f"{key} {value:.4g}" for key, value in figures.items()), file=sys.stderr, flush=True)


def spec_of(size: Size) -> Spec:
    settings = Model(layers=size.layers, width=size.width, heads=size.heads)
    return resolve(settings, vocabulary=size.vocabulary, sequence_length=size.length)


def in_process(name: str, options: argparse.Namespace) -> dict[str, float] | None:
    """A contender in a process of its own; None when it does not end in time or fails."""
    command = [sys.executable, __file__, "--contender", name, "--device", options.device, "--saves", str(options.saves)]
    command += ["--quick"] * options.quick
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S + 15, check=True, env=environment
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        print(f"{name}: no figures: {error}", file=sys.stderr, flush=True)
        return None
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = SMALL if options.quick else FULL
    if options.contender:
        figures = contend(options.contender, size, torch.device(options.device), count=options.saves)
        print(json.dumps(figures), flush=True)
        os._exit(0)  # a peer's threads would be waited for
    ours = in_process("ropewalk", options)
    assert ours, "ours must run"
    peer = in_process("dcp", options)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    bars = {
        "blocked <= 0.5 s": ours["blocked_s"] <= 0.5,
        "at most 1 % of five minutes": ours["percent_of_5_minutes"] <= 1.0,
        "a step dips by at most 5 %": ours["dip_mean_percent"] <= 5.0,
        "copy at 80 % of 53 GB/s or more": ours["copy_gb_per_s"] >= 0.8 * 53,
    }
    finish(
        "saving",
        ours=ours,
        peers={"dcp async_save": peer} if peer else {},
        ratios={"dcp async_save": peer["delay_s"] / max(ours["delay_s"], 1e-3)} if peer else {},
        quality={"device": where, "torch": torch.__version__, **bars},
    )


if __name__ == "__main__":
    main()
