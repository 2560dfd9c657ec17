"""The training worker: `python -m ropewalk.train RUN [TASK]`. Instead of training, `--verify` compares the plan with
one device, `--evaluate` evaluates the newest checkpoint, `--generate` generates text and `--evaluate-folder` evaluates
a model without a run (RUN holds the request of these two).

A single process locks the run; with several, the launcher holds the lock.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path

from ropewalk.base.blame import explain, with_traceback
from ropewalk.base.errors import RopewalkError, UserError
from ropewalk.base.events import EventLog
from ropewalk.base.files import locked, read_json
from ropewalk.base.progress import Lines, Progress, Silent
from ropewalk.base.relay import LOGS, PROGRESS, Relay
from ropewalk.base.rendezvous import Rendezvous
from ropewalk.config.ranks import Ranks, ranks
from ropewalk.config.read import parse_tree
from ropewalk.config.resolved import import_model_plugins
from ropewalk.config.threads import share_cores
from ropewalk.evaluate.config import Evaluate

from .failures import meet
from .settings import REQUEST, read_settings

REQUESTED = ("--generate", "--evaluate-folder")
TASKS = ("--verify", "--evaluate", *REQUESTED)


def main(arguments: list[str]) -> int:
    """Trains the run of the first argument, or performs the task of the second; returns the exit status."""
    run, task = (*arguments, "", "")[:2]
    if not 1 <= len(arguments) <= 2 or task not in ("", *TASKS):
        print(f"usage: python -m ropewalk.train RUN_DIRECTORY [{' | '.join(TASKS)}]", file=sys.stderr)
        return 2
    return _run(Path(run), task, ranks())


def _run(run: Path, task: str, place: Ranks) -> int:
    try:
        if task not in REQUESTED:
            read_settings(run)  # before the lock, which would make a folder of any name
        with locked(run) if place.world == 1 else contextlib.nullcontext(), meet(run, place) as rendezvous:
            _work(run, place, rendezvous, task=task)
    except RopewalkError as error:
        return _fail(error, run, place)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    except BaseException as error:
        line = explain(error)
        if line is None:
            raise
        return _fail(UserError(with_traceback(line, error, run)), run, place, kind=type(error).__name__)
    return 0


def _fail(error: RopewalkError, run: Path, place: Ranks, *, kind: str = "") -> int:
    print(error, file=sys.stderr)
    if error.exit_code and run.is_dir():
        # The error may be that this disk is not writable.
        with contextlib.suppress(RopewalkError), EventLog(run, rank=place.rank) as events:
            events.write("failed", error=kind or type(error).__name__, message=str(error))
    return error.exit_code


def _work(run: Path, place: Ranks, rendezvous: Rendezvous, *, task: str) -> None:
    share_cores()
    progress = _progress(run, place)
    # After `share_cores`: torch reads the environment when it is imported.
    if task == "--verify":
        from .verify import verify

        verify(run, progress=progress)
    elif task == "--evaluate":
        _evaluate(run, progress)
    elif task == "--generate":
        _generate(run, progress if place.rank == 0 else Silent())
    elif task == "--evaluate-folder":
        _evaluate_folder(run, progress)
    else:
        from .loop import train

        # Excludes the 200,000 objects of imported modules from collections, each of which would take 0.24 s longer.
        gc.freeze()
        train(run, progress=progress, rendezvous=rendezvous)


def _evaluate(run: Path, progress: Progress) -> None:
    """Evaluates the newest checkpoint of `run` under its plan."""
    import torch

    from ropewalk.evaluate.sharded_model import evaluate_run
    from ropewalk.parallel.mesh import leave

    threads = read_settings(run).train.threads
    if threads:
        torch.set_num_threads(threads)
    evaluate_run(run, progress=progress)
    leave()


def _generate(folder: Path, progress: Progress) -> None:
    """Generates what the request in `folder` asks for (arguments of `generate_text` or `generate_texts`) and reports it
    as progress."""
    from ropewalk.evaluate.from_checkpoint import generate_text, generate_texts
    from ropewalk.parallel.mesh import leave

    request = read_json(folder / REQUEST, what="request")
    path, named = Path(request.pop("path")), Path(request.pop("named"))
    import_model_plugins(named)
    pieces = generate_texts(path, **request) if "prompts" in request else generate_text(path, **request)
    for piece in pieces:
        progress.say(piece)
    leave()


def _evaluate_folder(folder: Path, progress: Progress) -> None:
    """Evaluates the model that the request in `folder` names; results go there."""
    from ropewalk.evaluate.model_folder import evaluate_folder
    from ropewalk.parallel.mesh import leave

    request = read_json(folder / REQUEST, what="request")
    settings = parse_tree(Evaluate, request["settings"], str(folder / REQUEST), folders=[Path.cwd()])
    evaluate_folder(Path(request["path"]), out=folder, settings=settings, seed=request["seed"], progress=progress)
    leave()


def _progress(run: Path, place: Ranks) -> Progress:
    """Progress as log lines; with several processes, rank 0 also relays it to the launcher."""
    if place.world == 1 or place.rank > 0:
        return Lines()
    progress = Relay(run / LOGS / PROGRESS, Lines())
    if place.restart:
        progress.say(f"a worker ended; all of them start again ({place.restart})")
    return progress


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if ranks().world > 1:
        # Threads of torch's collectives sometimes abort a process at normal exit, after all work is done (torch 2.13:
        # 5 of 60 runs of four processes).
        os._exit(status)
    sys.exit(status)
