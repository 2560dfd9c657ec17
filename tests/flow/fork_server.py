"""Runs the command line in forked children that die at a labelled point or after a delay.

Torch is imported once; a child costs what its work costs. Usage: python fork_server.py < JOBS, one JSON object a line:
{"folder": ..., "arguments": [...], "kill_label": LABEL or null, "kill_after_s": SECONDS or null}. Each job answers with
one JSON line: {"status": ..., "labels": [...]}; a child killed by itself has status -9.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import torch
import torch._dynamo  # the optimizer imports it at its first step: 1 s that children need not repeat

import ropewalk.evaluate.from_checkpoint
import ropewalk.flow.verbs
import ropewalk.train.loop
from ropewalk.cli.main import main
from ropewalk.prepare.statistics import measure


def child(job: dict, labels: Path) -> None:
    os.chdir(job["folder"])
    torch.set_num_threads(1)
    quiet = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    record = os.open(labels, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def hook(event: str, arguments: tuple) -> None:
        if event == "ropewalk.point":
            os.write(record, (arguments[0] + "\n").encode())
            if arguments[0] == job.get("kill_label"):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    if job.get("kill_after_s") is not None:
        threading.Thread(target=lambda: (time.sleep(job["kill_after_s"]), os.kill(os.getpid(), 9)), daemon=True).start()
    try:
        main(job["arguments"])
    except SystemExit as stop:
        os._exit(int(stop.code or 0))
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def serve() -> None:
    # A first kernel: numba takes 0.4 s to get ready, which children need not repeat.
    measure(pa.array(["rope"], pa.large_string()))
    gc.freeze()  # children look for garbage among their own objects alone
    for line in sys.stdin:
        job = json.loads(line)
        labels = Path(job["folder"]) / "labels.txt"
        pid = os.fork()
        if pid == 0:
            child(job, labels)
        _, status = os.waitpid(pid, 0)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        found = labels.read_text().split("\n")[:-1] if labels.exists() else []
        print(json.dumps({"status": code, "labels": found}), flush=True)


if __name__ == "__main__":
    assert ropewalk.evaluate.from_checkpoint
    assert ropewalk.flow.verbs
    assert ropewalk.train.loop
    serve()
