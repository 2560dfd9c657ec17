"""One pool of processes for all distributed tests: started once, given one job after another.

A job is a function of a module, called on the first `world` processes with their rank and picklable arguments inside a
fresh world of that size. What rank 0..n-1 return comes back in a list.

`POOL` communicates by gloo. `NCCL` has one GPU per rank where there are enough, otherwise several ranks per GPU: with
another `NCCL_HOSTID` each, NCCL takes them for different machines and talks over sockets. That shows the order of
operations, memory and bytes, and nothing about speed.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal
from unittest import mock

TIMEOUT_S = 240
LATE_S = 20
"""For the others when one rank has failed: they may have failed, too, and tell more, or wait for it."""
LOST = "Gloo connectFullMesh failed"
"""Seen once in some thousand worlds of four ranks on a machine with a load of 8: a connection is closed while a group
is made, before any code of ours runs on it. One cause was a rank that had finished before others were connected to it,
for which ranks now wait (`_work`)."""
RANKS = 8
"""Most processes of a pool."""


class Pool:
    """Up to eight processes, each started when it is first needed."""

    def __init__(self, backend: Literal["gloo", "nccl"] = "gloo", *, timeout_s: float = TIMEOUT_S) -> None:
        self._backend, self._timeout_s = backend, timeout_s
        self._workers: list[tuple[Any, Connection]] = []
        self._shares_gpus = False
        atexit.register(self.close)

    def run(
        self, job: Callable[..., Any], *arguments: Any, world: int, timeout_s: float | None = None, again: bool = True
    ) -> list[Any]:
        """`job(rank, *arguments)` on ranks 0..world-1, each of which has `timeout_s` after the one before to answer; a
        moment only when one has failed. `again`: once more where gloo could not connect the ranks."""
        timeout_s = timeout_s or self._timeout_s
        while len(self._workers) < world:
            self._workers.append(self._start(len(self._workers)))
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self._workers[:world]):
                with contextlib.suppress(ConnectionError):  # said by `_receive`
                    pipe.send((job, arguments, rank, world, f"file://{folder}/store"))
            answers = self._receive_all(world, timeout_s)
        wrong = [answer for kind, answer in answers if kind == "error"]
        if wrong:
            self.close()  # the others may hang in a collective
            if again and any(LOST in answer for answer in wrong):
                return self.run(job, *arguments, world=world, timeout_s=timeout_s, again=False)
            raise AssertionError("\n".join(wrong))
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        if self._shares_gpus:
            # A server whose clients were killed in a kernel may refuse new ones.
            self._shares_gpus = False
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", capture_output=True, check=False)
            subprocess.run(["pkill", "-9", "-f", "nvidia-cuda-mps"], capture_output=True, check=False)

    def _start(self, rank: int) -> tuple[Any, Connection]:
        environment = {} if self._backend == "gloo" else self._nccl_environment(rank)
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_work, args=(there, self._backend, environment), daemon=True)
        process.start()
        return process, here

    def _nccl_environment(self, rank: int) -> dict[str, str]:
        if _gpus() >= RANKS:
            return {"LOCAL_RANK": str(rank)}
        if not self._shares_gpus and shutil.which("nvidia-cuda-mps-control"):
            # Otherwise the processes take turns: an all-reduce of 4 MiB over four ranks takes 27 ms instead of 2.5.
            # Fails where one runs already, which then is somebody else's to end.
            begun = subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True, check=False)
            self._shares_gpus = begun.returncode == 0
        return own_host(rank) | {"LOCAL_RANK": str(rank % _gpus())}

    def _receive_all(self, world: int, timeout_s: float) -> list[tuple[str, Any]]:
        answers: list[tuple[str, Any]] = []
        for rank in range(world):
            answers.append(self._receive(rank, timeout_s))
            if answers[-1][0] == "error":
                timeout_s = min(timeout_s, LATE_S)
        return answers

    def _receive(self, rank: int, timeout_s: float) -> tuple[str, Any]:
        process, pipe = self._workers[rank]
        if not pipe.poll(timeout_s):
            return "error", f"rank {rank} did not answer within {timeout_s} s"
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            return "error", f"rank {rank} ended with status {process.exitcode}"


POOL = Pool()
"""The pool of this test process."""
NCCL = Pool("nccl", timeout_s=60)
"""The same on GPUs."""


def own_host(rank: int) -> dict[str, str]:
    """The environment in which NCCL takes a rank for a machine of its own, so that it may share a GPU with others."""
    return {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def _gpus() -> int:
    """GPUs of this machine, counted without a context on any of them."""
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return found.stdout.count("GPU ")


def _work(pipe: Connection, backend: str, environment: dict[str, str]) -> None:
    os.environ.pop("RANK", None)
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(int(environment["LOCAL_RANK"]))
    while True:
        try:
            job, arguments, rank, world, store = pipe.recv()
        except EOFError:
            os._exit(0)
        # Modules stay: `gc.collect` below looks at what the job left, not at torch (0.17 s of a core a rank and job).
        gc.freeze()
        try:
            if world > 1:
                wait = datetime.timedelta(seconds=TIMEOUT_S)
                # A rank whose job needs no other would otherwise be gone while others still connect to it. Groups that
                # the job makes are made as a user's process makes them.
                with mock.patch.dict(os.environ, TORCH_DIST_INIT_BARRIER="1"):
                    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world, timeout=wait)
            pipe.send(("result", job(rank, *arguments)))
        except BaseException:
            pipe.send(("error", f"rank {rank} of {world}:\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
            # Groups that a job held end with it, and so do their threads, which look for work all the time.
            gc.collect()
