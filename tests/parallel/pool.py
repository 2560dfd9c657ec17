"""One pool of processes for all distributed tests: started once, given one job after another.

A job is a function of a module, called on the first `world` processes with their rank and picklable arguments inside a
fresh gloo world of that size. What rank 0..n-1 return comes back in a list.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 240


class Pool:
    """Up to eight processes, each started when it is first needed."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        atexit.register(self.close)

    def run(self, job: Callable[..., Any], *arguments: Any, world: int, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """`job(rank, *arguments)` on ranks 0..world-1, each of which has `timeout_s` after the one before to answer."""
        while len(self._workers) < world:
            self._workers.append(_start())
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self._workers[:world]):
                pipe.send((job, arguments, rank, world, f"file://{folder}/store"))
            answers = [self._receive(rank, timeout_s) for rank in range(world)]
        wrong = [answer for kind, answer in answers if kind == "error"]
        if wrong:
            self.close()  # the others may hang in a collective
            raise AssertionError("\n".join(wrong))
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []

    def _receive(self, rank: int, timeout_s: float) -> tuple[str, Any]:
        process, pipe = self._workers[rank]
        if not pipe.poll(timeout_s):
            return "error", f"rank {rank} did not answer within {timeout_s} s"
        try:
            return pipe.recv()
        except EOFError:
            return "error", f"rank {rank} ended with status {process.exitcode}"


POOL = Pool()
"""The pool of this test process."""


def _start() -> tuple[Any, Connection]:
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_work, args=(there,), daemon=True)
    process.start()
    return process, here


def _work(pipe: Connection) -> None:
    os.environ.pop("RANK", None)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            job, arguments, rank, world, store = pipe.recv()
        except EOFError:
            os._exit(0)
        # Modules stay: `gc.collect` below looks at what the job left and not at all of torch, 0.17 s a rank and job.
        gc.freeze()
        try:
            if world > 1:
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
            pipe.send(("result", job(rank, *arguments)))
        except BaseException:
            pipe.send(("error", f"rank {rank} of {world}:\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # Groups that a job held end with it, and so do their threads, which look for work all the time.
            gc.collect()
