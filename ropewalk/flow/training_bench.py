"""`bench train`: training speed of well-known model sizes on this machine, beside its limits and other libraries."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ropewalk.base.errors import MissingPackage, UserError, WorkersFailed
from ropewalk.base.progress import Progress, Silent, amount, counted
from ropewalk.config.threads import share_cores
from ropewalk.model.config import Model
from ropewalk.model.sizes import size_of
from ropewalk.model.spec import Spec, StateBytes, resolve, two_moments
from ropewalk.plan.forecast import Precision, memory
from ropewalk.plan.machine import Machine, this_machine
from ropewalk.plan.roofline import Ceilings, breakdown, step_work
from ropewalk.train.optim.table import OPTIMIZERS

PEERS: dict[str, tuple[str, ...]] = {"transformers": ("transformers", "transformers compiled")}
"""Contenders per `--peer`. Compiled contenders are left out on a CPU, where compiling takes longer than the bench."""
Recomputed = Literal["none", "attention", "full"]
FORMAT = 1


def bench_train(
    sizes: Sequence[str] = (),
    *,
    batch_size: int | None = None,
    microbatch_size: int | None = None,
    sequence_length: int | None = None,
    precision: Precision | Literal["auto"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    steps: int = 12,
    compile: bool | None = None,
    optimizer: str = "adamw",
    recompute: Recomputed | None = None,
    peers: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Trains each size on random tokens, and each peer beside it: speed, memory and where the time goes.

    Without `sizes`, 124M on a GPU and `tiny` on a CPU; batch size and sequence length default to those of the size.
    `compile`, `optimizer` and `recompute` apply to ropewalk's steps; a peer uses torch's AdamW. By default blocks are
    compiled on a GPU unless only attention is recomputed (as `plan.compile = "auto"`), and `recompute` is that of the
    size. Every contender runs in its own process. A failing peer is reported as its `error`; a failure of ropewalk
    is raised.
    """
    machine, progress = this_machine(), progress or Silent()
    device = ("cuda" if machine.gpus else "cpu") if device == "auto" else device
    if compile and recompute == "attention":
        raise UserError("--compile does not work with --recompute attention, which needs uncompiled blocks; drop one")
    unknown = sorted(set(peers) - PEERS.keys())
    if unknown:
        raise UserError(f"no peer `{unknown[0]}`; there are {', '.join(PEERS)}")
    for package in ("torch", *peers):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(package, "bench", "train" if package == "torch" else "dev")
    share_cores()
    shared = {
        "precision": _precision(machine, device) if precision == "auto" else precision,
        "device": device,
        "steps": steps,
        "compile": device == "cuda" and recompute != "attention" if compile is None else compile,
        "optimizer": optimizer,
    }
    jobs = [
        _shape(size, batch_size=batch_size, microbatch_size=microbatch_size, sequence_length=sequence_length)
        | {**shared, "recompute": recompute or size_of(size).recompute}
        for size in sizes or [("124M" if device == "cuda" else "tiny")]
    ]
    others = [name for peer in peers for name in PEERS[peer] if device == "cuda" or "compiled" not in name]
    found = [_compare(job, others, machine, progress) for job in jobs]
    return {"format": FORMAT, "machine": str(machine), "sizes": found}


def step_figures(
    spec: Spec,
    measured: Mapping[str, Any],
    *,
    rows: int,
    precision: Precision,
    device: Mapping[str, Any],
    optimizer: StateBytes = two_moments,
    trained: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """A measured step with derived figures: tokens/s, both MFUs, and each op class's distance from the roofline of
    `device` (`device_summary`)."""
    speed = rows * spec.sequence_length / (measured["step_ms"] / 1e3)
    work = step_work(spec, rows=rows, precision=precision, optimizer=optimizer, trained=trained)
    kinds = breakdown(measured["kinds"], work, Ceilings(**device["ceilings"]))
    least_ms = sum(each.least_ms for each in kinds)
    return {
        "tokens_per_s": speed,
        "mfu_full": speed * spec.flops_per_token("full", trained=trained) / device["peak_flops"],
        "mfu_causal": speed * spec.flops_per_token("causal", trained=trained) / device["peak_flops"],
        **{key: measured[key] for key in ("step_ms", "spread", "profiled_ms", "memory_bytes", "loss", "steps")},
        "least_ms": least_ms,
        "distance": measured["step_ms"] / least_ms,
        "kinds": [dataclasses.asdict(each) for each in kinds],
    }


def device_summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """The device of a measurement: its ceilings, and the peak used for MFU."""
    nominal = measured["nominal_flops"]
    return {
        **{key: measured[key] for key in ("device", "device_name", "torch")},
        **{key: measured[key] for key in ("ceilings", "nominal_flops", "nominal_bytes")},
        "peak_flops": nominal or measured["ceilings"]["flops"],
        "peak_from": "data sheet" if nominal else "measured",
    }


def _shape(
    name: str, *, batch_size: int | None, microbatch_size: int | None, sequence_length: int | None
) -> dict[str, Any]:
    """Size and batch of a job (`Job` in train/measure/bench_worker.py)."""
    size = size_of(name)
    length = sequence_length or size.sequence_length
    rows = batch_size or size.batch_size
    # As many tokens per microbatch as the size has, in a number of sequences that divides the batch.
    most = max(1, size.microbatch_size * size.sequence_length // length)
    micro = microbatch_size or next(n for n in range(min(most, rows), 0, -1) if rows % n == 0)
    if rows % micro:
        raise UserError(f"--microbatch {micro} does not divide --batch {rows}; choose a divisor")
    return {"size": name, "sequence_length": length, "batch_size": rows, "microbatch_size": micro}


def _compare(job: dict[str, Any], others: Sequence[str], machine: Machine, progress: Progress) -> dict[str, Any]:
    """One size: ropewalk, then the others."""
    size, precision = size_of(job["size"]), job["precision"]
    spec = resolve(size.model, vocabulary=size.vocabulary, sequence_length=job["sequence_length"])
    if job["device"] == "cpu":
        # On a CPU the operating system would kill this process, or another one.
        needed = _needed(job, spec, rows=job["microbatch_size"])
        if needed > machine.memory_bytes:
            raise UserError(_does_not_fit(job, spec, machine.memory_bytes, needed=needed))
    measured = {name: _measured(name, job, progress) for name in ("ropewalk", *others)}
    ours = measured["ropewalk"]
    if ours.get("error") == "out of memory":
        raise UserError(_does_not_fit(job, spec, ours["memory_bytes"]))
    if "error" in ours:
        raise UserError(f"{job['size']}: {ours['error']}")
    device = device_summary(ours)
    contenders: list[dict[str, Any]] = []
    for name, each in measured.items():
        if "error" in each:
            contenders.append({"contender": name, "error": each["error"]})
            continue
        figures = step_figures(
            spec,
            each,
            rows=job["batch_size"],
            precision=precision,
            device=device,
            optimizer=OPTIMIZERS[job["optimizer"] if name == "ropewalk" else "adamw"].state_bytes,
        )
        contenders.append({"contender": name, "error": None, **figures})
    return {
        **{key: value for key, value in job.items() if key != "device"},
        "model": _written(size.model),
        "vocabulary": size.vocabulary,
        "parameters": spec.parameters(),
        **device,
        "contenders": contenders,
    }


def _measured(contender: str, job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The result of a contender's process; for a crashed peer, the last line of its stderr as `error`."""
    progress.say(f"{job['size']}: {contender}, {_sequences(job, 'batch_size')}")
    request = json.dumps({"contender": contender, **job})
    command = [sys.executable, "-m", "ropewalk.train.measure.bench_worker", request, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer
    if contender == "ropewalk":
        raise WorkersFailed(f"{job['size']}: the bench failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return {"error": last[0]}


def _needed(job: Mapping[str, Any], spec: Spec, *, rows: int) -> int:
    """Forecast bytes with `rows` sequences per microbatch."""
    settings = {key: job[key] for key in ("precision", "recompute", "device")}
    return memory(spec, rows=rows, optimizer=OPTIMIZERS[job["optimizer"]].costs, **settings).total


def _does_not_fit(job: Mapping[str, Any], spec: Spec, memory_bytes: int, *, needed: int | None = None) -> str:
    """The error for a job that ran out of memory or, with `needed`, was not tried because of its forecast."""
    rows = [n for n in range(1, job["microbatch_size"]) if job["batch_size"] % n == 0]
    fitting = [n for n in rows if _needed(job, spec, rows=n) <= memory_bytes]
    remedy = "choose a smaller --size or --length"
    if fitting:
        remedy = f"the forecast fits with --microbatch {fitting[-1]}"
    elif rows:
        remedy = f"no smaller microbatch fits by the forecast; {remedy}"
    what = "not started, because the forecast does not fit" if needed else "out of memory"
    needs = f"{amount(needed, 'B')} needed, " if needed else ""
    return (
        f"{job['size']}: {what}, with {_sequences(job, 'microbatch_size')} per microbatch "
        f"({needs}{amount(memory_bytes, 'B')} available); {remedy}"
    )


def _sequences(job: Mapping[str, Any], key: str) -> str:
    return f"{counted(job[key], 'sequence')} of {counted(job['sequence_length'], 'token')}"


def _written(model: Model) -> dict[str, Any]:
    """The size's `[model]` section: settings that differ from the default."""
    default = dataclasses.asdict(Model())
    return {key: value for key, value in dataclasses.asdict(model).items() if value != default[key]}


def _precision(machine: Machine, device: str) -> Precision:
    """The same choice as `train.precision = "auto"`."""
    hardware = machine.gpus[0].capability >= 8.0 if device == "cuda" and machine.gpus else machine.bf16
    return "bf16" if hardware else "fp32"
