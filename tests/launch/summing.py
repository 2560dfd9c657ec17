"""A worker that adds up numbers with its peers, one a step, and keeps what it has in a file: a training in small.

`python -m tests.launch.summing RUN STEPS`. Files in RUN ask for accidents: `kill-RANK` holds the step at which that
rank kills itself, `kill-agent` that at which the agent is killed, `refuse` that at which rank 1 cannot go on; each
happens once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ropewalk.base.errors import RopewalkError, UserError
from ropewalk.base.events import EventLog
from ropewalk.base.files import read_json, write_json
from ropewalk.base.progress import Silent
from ropewalk.base.relay import LOGS, PROGRESS, Relay
from ropewalk.config.ranks import Ranks, ranks
from ropewalk.parallel.mesh import join, leave
from ropewalk.plan.plan import Plan
from ropewalk.train.requests import Interrupt


def work(run: Path, place: Ranks, steps: int) -> None:
    plan = Plan(device="cpu", precision="fp32", batch_size=place.world, microbatch_size=1, replicate=place.world)
    join(plan, place)
    progress = Relay(run / LOGS / PROGRESS, Silent()) if place.rank == 0 else Silent()
    state = run / "state.json"
    begun = read_json(state, what="state") if state.exists() else {"step": 0, "sum": 0, "attempts": 0}
    print(f"rank {place.rank} starts at step {begun['step']}", flush=True)
    step, total, attempts = begun["step"], begun["sum"], begun["attempts"] + 1
    progress.begin("sum", steps, "steps")
    with Interrupt() as interrupt:
        while step < steps:
            happen(run, place.rank, step)
            asked = torch.tensor([place.rank + step, int(interrupt.asked)])
            dist.all_reduce(asked)
            step, total = step + 1, total + int(asked[0])
            if place.rank == 0:
                write_json(state, {"step": step, "sum": total, "attempts": attempts, "pid": os.getpid()})
            progress.advance(step, f"step {step}")
            if asked[1]:
                raise KeyboardInterrupt
            time.sleep(0.01)
    progress.end(f"the sum is {total}")
    leave()


def happen(run: Path, rank: int, step: int) -> None:
    """The accident that is asked for, if it is time."""
    wanted = run / f"kill-{rank}"
    if wanted.exists() and int(wanted.read_text()) <= step:
        wanted.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    wanted = run / "kill-agent"
    if rank == 1 and wanted.exists() and int(wanted.read_text()) <= step:
        wanted.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
    wanted = run / "refuse"
    if rank == 1 and wanted.exists() and int(wanted.read_text()) <= step:
        raise UserError("the disk of rank 1 is full")


def main(run: Path, steps: int) -> int:
    place = ranks()
    try:
        work(run, place, steps)
    except RopewalkError as error:
        with EventLog(run, rank=place.rank) as events:
            events.write("failed", error=type(error).__name__, message=str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
