"""`bench train`: how fast models of well-known sizes train on this machine, how far that is from what the machine could
do, and how fast others are in the same run."""

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
from ropewalk.model.spec import Optimizer, Spec, resolve
from ropewalk.plan.forecast import Precision, memory
from ropewalk.plan.machine import Machine, this_machine
from ropewalk.plan.roofline import Ceilings, breakdown, step_work

PEERS: dict[str, tuple[str, ...]] = {"transformers": ("transformers", "transformers compiled")}
"""What runs for each `--peer`; a compiler is left out on a CPU, where it takes longer than the bench."""
Again = Literal["none", "attention", "full"]
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
    optimizer: Optimizer = "adamw",
    recompute: Again | None = None,
    peers: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Trains each size on random rows, and each peer beside it: speed, memory and where the time goes.

    Without `sizes` 124M on a GPU and `tiny` on a CPU; rows and their length are those of the size unless given.
    `compile`, `optimizer` and `recompute` are for our steps, a peer has torch's AdamW. None: compiled on a GPU, unless
    attention alone is computed again, as `plan.compile = "auto"`; computed again what the size says. Every contender
    has a process of its own.
    What a peer cannot do is told as its `error`; what we cannot do is raised.
    """
    machine, progress = this_machine(), progress or Silent()
    device = ("cuda" if machine.gpus else "cpu") if device == "auto" else device
    if compile and recompute == "attention":
        raise UserError("--compile hides what is inside a block, which --recompute attention must see; leave one out")
    strange = sorted(set(peers) - PEERS.keys())
    if strange:
        raise UserError(f"no peer `{strange[0]}`; there are {', '.join(PEERS)}")
    for package in ("torch", *peers):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(package, "bench", "train" if package == "torch" else "dev")
    share_cores()
    jobs = [
        _job(
            size,
            batch_size=batch_size,
            microbatch_size=microbatch_size,
            sequence_length=sequence_length,
            precision=_precision(machine, device) if precision == "auto" else precision,
            device=device,
            steps=steps,
            compile=device == "cuda" and recompute != "attention" if compile is None else compile,
            optimizer=optimizer,
            recompute=recompute or size_of(size).recompute,
        )
        for size in sizes or [("124M" if device == "cuda" else "tiny")]
    ]
    others = [who for peer in peers for who in PEERS[peer] if device == "cuda" or "compiled" not in who]
    found = [_contest(job, others, machine, progress) for job in jobs]
    return {"format": FORMAT, "machine": str(machine), "sizes": found}


def step_figures(
    spec: Spec,
    measured: Mapping[str, Any],
    *,
    rows: int,
    precision: Precision,
    ceilings: Ceilings,
    peak_flops: float,
    optimizer: Optimizer = "adamw",
    trained: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """What was measured of a step, with what follows: tokens a second, both MFUs, and the distance of each kind of work
    from the roofline."""
    speed = rows * spec.sequence_length / (measured["step_ms"] / 1e3)
    work = step_work(spec, rows=rows, precision=precision, optimizer=optimizer, trained=trained)
    kinds = breakdown(measured["kinds"], work, ceilings)
    least_ms = sum(each.least_ms for each in kinds)
    return {
        "tokens_per_s": speed,
        "mfu_full": speed * spec.flops_per_token("full", trained=trained) / peak_flops,
        "mfu_causal": speed * spec.flops_per_token("causal", trained=trained) / peak_flops,
        **{key: measured[key] for key in ("step_ms", "spread", "profiled_ms", "memory_bytes", "loss", "steps")},
        "least_ms": least_ms,
        "distance": measured["step_ms"] / least_ms,
        "kinds": [dataclasses.asdict(each) for each in kinds],
    }


def device_summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """The device of a measurement: its ceilings, and the peak that MFU refers to."""
    nominal = measured["nominal_flops"]
    return {
        **{key: measured[key] for key in ("device", "device_name", "torch")},
        **{key: measured[key] for key in ("ceilings", "nominal_flops", "nominal_bytes")},
        "peak_flops": nominal or measured["ceilings"]["flops"],
        "peak_from": "data sheet" if nominal else "measured",
    }


def _job(
    name: str,
    *,
    batch_size: int | None,
    microbatch_size: int | None,
    sequence_length: int | None,
    precision: Precision,
    device: str,
    steps: int,
    compile: bool,
    optimizer: Optimizer,
    recompute: Again,
) -> dict[str, Any]:
    """What `ropewalk.train.measure.bench_worker` reads, without the contender."""
    size = size_of(name)
    length = sequence_length or size.sequence_length
    rows = batch_size or size.batch_size
    # As many tokens at once as the size has, in a number of rows that divides the batch.
    most = max(1, size.microbatch_size * size.sequence_length // length)
    at_once = microbatch_size or next(n for n in range(min(most, rows), 0, -1) if rows % n == 0)
    if rows % at_once:
        raise UserError(
            f"{at_once} rows a microbatch do not divide the {counted(rows, 'row')} of the batch; choose a divisor"
        )
    return {
        "size": name,
        "sequence_length": length,
        "batch_size": rows,
        "microbatch_size": at_once,
        "precision": precision,
        "device": device,
        "steps": steps,
        "compile": compile,
        "optimizer": optimizer,
        "recompute": recompute,
    }


def _contest(job: dict[str, Any], others: Sequence[str], machine: Machine, progress: Progress) -> dict[str, Any]:
    """One size: ours, then the others."""
    size, precision = size_of(job["size"]), job["precision"]
    spec = resolve(size.model, vocabulary=size.vocabulary, sequence_length=job["sequence_length"])
    if job["device"] == "cpu":
        # A CPU has no error for this: the system would kill us, or somebody else.
        needed = _needed(job, spec, rows=job["microbatch_size"])
        if needed > machine.memory_bytes:
            raise UserError(_does_not_fit(job, spec, machine.memory_bytes, needed=needed))
    measured = {who: _measured(who, job, progress) for who in ("ropewalk", *others)}
    ours = measured["ropewalk"]
    if ours.get("error") == "out of memory":
        raise UserError(_does_not_fit(job, spec, ours["memory_bytes"]))
    if "error" in ours:
        raise UserError(f"{job['size']}: {ours['error']}")
    device = device_summary(ours)
    contenders: list[dict[str, Any]] = []
    for who, each in measured.items():
        if "error" in each:
            contenders.append({"contender": who, "error": each["error"]})
            continue
        figures = step_figures(
            spec,
            each,
            rows=job["batch_size"],
            precision=precision,
            ceilings=Ceilings(**ours["ceilings"]),
            peak_flops=device["peak_flops"],
            optimizer=job["optimizer"] if who == "ropewalk" else "adamw",
        )
        contenders.append({"contender": who, "error": None, **figures})
    return {
        **{key: value for key, value in job.items() if key != "device"},
        "model": _written(size.model),
        "vocabulary": size.vocabulary,
        "parameters": spec.parameters(),
        **device,
        "contenders": contenders,
    }


def _measured(contender: str, job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The answer of a contender's process; one that failed otherwise than by an error of ours has its last words."""
    progress.say(f"{job['size']}: {contender}, {_rows(job, 'batch_size')}")
    asked = json.dumps({"contender": contender, **job})
    command = [sys.executable, "-m", "ropewalk.train.measure.bench_worker", asked, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer
    if contender == "ropewalk":
        raise WorkersFailed(f"{job['size']}: the bench failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return {"error": last[0]}


def _needed(job: Mapping[str, Any], spec: Spec, *, rows: int) -> int:
    """Bytes by the forecast with `rows` rows a microbatch."""
    settings = {key: job[key] for key in ("precision", "optimizer", "recompute", "device")}
    return memory(spec, rows=rows, **settings).total


def _does_not_fit(job: Mapping[str, Any], spec: Spec, memory_bytes: int, *, needed: int | None = None) -> str:
    """For a job that ran out of memory; or with `needed`, for one that was not tried because of this forecast."""
    rows = [n for n in range(1, job["microbatch_size"]) if job["batch_size"] % n == 0]
    fitting = [n for n in rows if _needed(job, spec, rows=n) <= memory_bytes]
    remedy = "choose a smaller --size or --length"
    if fitting:
        remedy = f"{fitting[-1]} would fit by the forecast: --microbatch {fitting[-1]}"
    elif rows:
        remedy = f"not even a smaller microbatch would by the forecast; {remedy}"
    what = "forecast not to fit, and not tried," if needed else "out of memory"
    wanted = f"{amount(needed, 'B')} needed, " if needed else ""
    return (
        f"{job['size']}: {what} with {_rows(job, 'microbatch_size')} a microbatch "
        f"({wanted}{amount(memory_bytes, 'B')} there); {remedy}"
    )


def _rows(job: Mapping[str, Any], which: str) -> str:
    return f"{counted(job[which], 'row')} of {counted(job['sequence_length'], 'token')}"


def _written(model: Model) -> dict[str, Any]:
    """What one writes under `[model]` for it: all that is not the default."""
    default = dataclasses.asdict(Model())
    return {key: value for key, value in dataclasses.asdict(model).items() if value != default[key]}


def _precision(machine: Machine, device: str) -> Precision:
    """As `train.precision = "auto"`."""
    hardware = machine.gpus[0].capability >= 8.0 if device == "cuda" and machine.gpus else machine.bf16
    return "bf16" if hardware else "fp32"
