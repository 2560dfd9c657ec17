"""Inference in worker processes: evaluation of a run, generation from a checkpoint. All ranks must call."""

from __future__ import annotations

from pathlib import Path

import torch

from ropewalk.base.files import read_json
from ropewalk.base.progress import Progress
from ropewalk.evaluate.from_checkpoint import generate_text
from ropewalk.evaluate.sharded_model import evaluate_run
from ropewalk.parallel.mesh import leave

from .settings import REQUEST, read_settings


def evaluate(run: Path, *, progress: Progress) -> None:
    """Measures the newest checkpoint of `run` under its plan."""
    threads = read_settings(run).train.threads
    if threads:
        torch.set_num_threads(threads)
    evaluate_run(run, progress=progress)
    leave()


def generate(folder: Path, *, progress: Progress) -> None:
    """Reports the pieces of the text for the request in `folder`, the arguments of `generate_text`."""
    request = read_json(folder / REQUEST, what="request")
    path = Path(request.pop("path"))
    for piece in generate_text(path, **request):
        progress.say(piece)
    leave()
