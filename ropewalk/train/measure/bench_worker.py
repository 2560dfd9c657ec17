"""One contender of `ropewalk bench train`, in its own process:
`python -m ropewalk.train.measure.bench_worker JOB PARENT`.

Each contender has a process, because the peak memory of one would count for the next. The job is a JSON object; so is
the answer, on the last line of stdout. The worker ends when the process PARENT ends.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ropewalk.base.errors import RopewalkError
from ropewalk.base.parent import die_with_parent
from ropewalk.config.ranks import ranks
from ropewalk.model.sizes import size_of
from ropewalk.model.spec import Spec, resolve
from ropewalk.parallel.mesh import pick_device
from ropewalk.plan.config import Recompute
from ropewalk.plan.forecast import Precision
from ropewalk.plan.plan import Plan

from ..config import Optimizer
from .hf_baseline import transformers_step
from .step_benchmark import device_figures, own_step
from .step_profiler import StepFunction, profile_steps

Contender = Literal["ropewalk", "transformers", "transformers compiled"]
CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The model and the settings that a contender trains."""

    contender: Contender
    size: str
    sequence_length: int
    batch_size: int
    microbatch_size: int
    precision: Precision
    device: Literal["cpu", "cuda"]
    steps: int
    compile: bool
    """Of ropewalk's blocks; for a peer, the contender's name says whether it is compiled."""
    optimizer: str
    """Ropewalk's optimizer; a peer uses torch's AdamW."""
    recompute: Recompute

    @property
    def spec(self) -> Spec:
        size = size_of(self.size)
        return resolve(size.model, vocabulary=size.vocabulary, sequence_length=self.sequence_length)

    @property
    def plan(self) -> Plan:
        return Plan(
            device=self.device,
            precision=self.precision,
            batch_size=self.batch_size,
            microbatch_size=self.microbatch_size,
            sequence_length=self.sequence_length,
            recompute=self.recompute,
            compile=self.compile,
        )


def answer(job: Job) -> dict[str, Any]:
    """The measurement; or `error`, with the device's `memory_bytes` if it ran out of memory."""
    if job.device == "cuda" and not torch.cuda.is_available():
        return {"error": "torch sees no GPU; drop --device or use --device cpu"}
    device = pick_device(job.plan, ranks())
    try:
        found = device_figures(device, job.precision) if job.contender == "ropewalk" else {}
        step = _STEPS[job.contender](job, device)
        return found | dataclasses.asdict(profile_steps(step, device=device, steps=job.steps))
    except torch.OutOfMemoryError:
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        return {"error": "out of memory", "memory_bytes": memory_bytes}
    except RopewalkError as error:
        return {"error": str(error)}


def _own(job: Job, device: torch.device) -> StepFunction:
    return own_step(job.spec, job.plan, device=device, optimizer=Optimizer(kind=job.optimizer), clip_norm=CLIP_NORM)


def _peer(job: Job, device: torch.device) -> StepFunction:
    compiled = job.contender == "transformers compiled"
    return transformers_step(
        job.spec, job.plan, device=device, optimizer=Optimizer(), clip_norm=CLIP_NORM, compiled=compiled
    )


_STEPS: dict[Contender, Callable[[Job, torch.device], StepFunction]] = {
    "ropewalk": _own,
    "transformers": _peer,
    "transformers compiled": _peer,
}


def main(job: str, parent: str) -> None:
    """Writes the answer to a job to stdout."""
    die_with_parent(int(parent))
    sys.stdout.write(json.dumps(answer(Job(**json.loads(job)))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
