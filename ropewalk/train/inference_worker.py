"""What a worker does with a trained model: evaluation of a run, generation from a checkpoint. All ranks must call."""

from __future__ import annotations

from pathlib import Path

import torch

from ropewalk.base.files import read_json
from ropewalk.base.progress import Progress
from ropewalk.evaluate.from_checkpoint import answer_text, continue_text
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
    """Says the pieces of the text that the request in `folder` asks for, the arguments of `answer_text` or of
    `continue_text`."""
    request = read_json(folder / REQUEST, what="request")
    path = Path(request.pop("path"))
    draw = answer_text if "question" in request else continue_text
    for piece in draw(path, **request):
        progress.say(piece)
    leave()
