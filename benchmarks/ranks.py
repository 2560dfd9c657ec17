"""Starts the processes of a benchmark as torchrun would, one rank per GPU where there are enough of them.

Where there are not, ranks share GPUs. NCCL refuses two ranks on one device by comparing host and bus, so each rank gets
an `NCCL_HOSTID` of its own: NCCL takes the ranks for different machines and talks over sockets. CUDA MPS lets their
kernels run at the same time (an all-reduce of 4 MiB over four ranks takes 2.5 ms with it and 27 ms without, H200).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness import ROOT

SHARED = "ranks share a GPU and talk over sockets: this is no cluster, and says nothing about NVLink or InfiniBand"

MPS_ENDS_S = 10
"""For an MPS server whose clients were killed; then its daemon ends it."""


def gpus() -> int:
    """GPUs of this machine, counted without a context on any of them."""
    if not shutil.which("nvidia-smi"):
        return 0
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return found.stdout.count("GPU ")


def environments(ranks: int, device: str) -> list[dict[str, str]]:
    """The environment of each rank of one launch, on a free port of this machine."""
    count = gpus() if device == "cuda" else ranks
    if not count:
        sys.exit("no GPU here; say --device cpu for the same path on gloo")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))  # ours may not be installed
    shared |= {"PYTHONPATH": path}
    if device == "cpu":
        shared |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if count >= ranks:
        return [
            shared | {"RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
            for r in range(ranks)
        ]
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    # All clients of an MPS server share 128 channels; eight ranks with torch's default take more ("device is busy").
    own |= {"CUDA_DEVICE_MAX_CONNECTIONS": "2"} if ranks > 4 else {}
    # One socket of one thread is what such a step would wait for most.
    own |= {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"}
    # Each takes itself for alone on its machine.
    own |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))}
    return [
        shared
        | own
        | {"RANK": str(r), "GROUP_RANK": str(r), "NCCL_HOSTID": f"host-{r}"}
        | ({"CUDA_VISIBLE_DEVICES": str(r % count)} if count > 1 else {})
        for r in range(ranks)
    ]


@contextlib.contextmanager
def sharing(ranks: int, device: str) -> Iterator[bool]:
    """Whether ranks share GPUs; in the block an MPS daemon runs where they do. A block for each launch: a server may
    not survive a client that is killed inside a kernel."""
    shares = device == "cuda" and gpus() < ranks
    started = False
    if shares and shutil.which("nvidia-cuda-mps-control"):
        # Fails where one runs already: whoever started that one ends it.
        begun = subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True, check=False)
        started = begun.returncode == 0
    elif shares:
        print("no nvidia-cuda-mps-control here: the contexts of the ranks take turns", file=sys.stderr)
    try:
        yield shares
    finally:
        if started:
            _tell_mps(f"quit -t {MPS_ENDS_S}")
            late = time.monotonic() + 2 * MPS_ENDS_S
            while _tell_mps("get_server_list") and time.monotonic() < late:
                time.sleep(0.2)  # another daemon does not start before this one has ended


def _tell_mps(command: str) -> bool:
    """Whether an MPS daemon is there to hear it."""
    told = subprocess.run(["nvidia-cuda-mps-control"], input=f"{command}\n".encode(), capture_output=True, check=False)
    return told.returncode == 0


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    device: str,
    logs: Path,
    timeout_s: float,
    folder: Path | None = None,
    watch: Callable[[], bool] = lambda: False,
) -> float:
    """Runs `command` on every rank, in `folder`; seconds until all have ended. Output goes to `logs/rank-R.log`.

    `watch` is called twice a second; when it returns true the ranks are killed, and that counts as their end. When a
    rank fails or the time is up, the others are killed and the ends of the logs printed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    begin, processes, files = time.perf_counter(), [], []
    try:
        for rank, own in enumerate(environments(ranks, device)):
            files.append(open(logs / f"rank-{rank}.log", "wb"))  # noqa: SIM115
            output = {"stdout": files[-1], "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen(command, env=os.environ | own, cwd=folder, **output))
        while any(process.poll() is None for process in processes):
            time.sleep(0.5 if device == "cuda" else 0.05)
            late = time.perf_counter() - begin > timeout_s
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed or late:
                why = f"not done within {timeout_s:.0f} s" if late else f"rank {failed[0]} failed"
                raise SystemExit(f"{' '.join(command)}: {why}\n{_tails(logs, failed or range(ranks))}")
            if watch():
                break
        else:
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed:
                raise SystemExit(f"{' '.join(command)}: rank {failed[0]} failed\n{_tails(logs, failed)}")
        return time.perf_counter() - begin
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for file in files:
            file.close()


def _tails(logs: Path, ranks: Sequence[int]) -> str:
    """The last lines of some ranks."""
    found = [(rank, (logs / f"rank-{rank}.log").read_text(errors="replace").splitlines()[-40:]) for rank in ranks]
    return "\n".join(f"--- rank {rank}\n" + "\n".join(lines) for rank, lines in found)
