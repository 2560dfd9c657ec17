"""Generates text from a checkpoint: in this process, in several of this machine, or in those of a launcher.

Several processes share the model under its run's plan if that has as many ranks, otherwise as plan/inference_plan.py
decides. Workers of this machine get the request in a temporary folder; rank 0 sends its text to this process.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.base.errors import MissingPackage, UserError
from ropewalk.base.files import write_json
from ropewalk.checkpoint.format import read_checkpoint_manifest
from ropewalk.checkpoint.policy.lease import leased
from ropewalk.checkpoint.read.model_check import advise_on_damage
from ropewalk.config.ranks import ranks
from ropewalk.evaluate.generation_plan import generation_plan
from ropewalk.launch.worker import command
from ropewalk.launch.worker_group import WorkerGroup, follow_workers
from ropewalk.prepare.chat import TEMPLATES
from ropewalk.train.settings import REQUEST

from .plan_recipe import needs_torch

if TYPE_CHECKING:
    from ropewalk.evaluate.conversation import Conversation

PLAIN = "plain"
"""The template that works with any tokenizer."""


def draw_text(checkpoint: Path, request: dict[str, Any], *, nproc: int | None) -> Iterator[str]:
    """Yields the text after a prompt, or the answer to a question, in pieces as they are sampled; or the text after
    each of several prompts. Checks checkpoint and plan before it returns."""
    place = ranks()
    if place.world > 1 and nproc not in (None, place.world):
        raise UserError(f"{place.launcher} started {place.world} processes; leave out --nproc")
    several = place.world == 1 and nproc is not None and nproc > 1
    with leased(checkpoint) as path, advise_on_damage(path):
        if several:
            assert nproc is not None
            generation_plan(path, processes=nproc, device="cpu")  # before processes are started
        if "question" in request and not request["template"]:
            request = {**request, "template": _own_template(path)}
    if several:
        assert nproc is not None
        team = functools.partial(_draw_in_a_team, named=checkpoint, request=request, processes=nproc)
        return _leased(checkpoint, team)
    module = needs_torch("ropewalk.evaluate.from_checkpoint", "generation")
    if "prompts" in request:
        return _leased(checkpoint, lambda path: iter(module.generate_texts(path, **request)))
    return _leased(checkpoint, lambda path: module.generate_text(path, **request))


def open_conversation(checkpoint: Path, *, template: str, system: str, **settings: Any) -> Conversation:
    """A conversation with the model of the checkpoint; the chat template is `template`, else the model's own, else
    `plain`."""
    if ranks().world > 1:
        raise UserError("chat is for one process; start it without torchrun, srun or mpirun")
    with leased(checkpoint) as path, advise_on_damage(path):
        own = read_checkpoint_manifest(path).chat
        module = needs_torch("ropewalk.evaluate.conversation", "chat")
        opened: Conversation = module.Conversation(
            path, template=template or own or PLAIN, own_template=own, system=checked_text(system), **settings
        )
        return opened


def checked_text(text: str) -> str:
    """`text`, if it can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not UTF-8 text; give it in that encoding") from None
    return text


def _leased(checkpoint: Path, draw: Callable[[Path], Iterator[str]]) -> Iterator[str]:
    """Samples from the checkpoint, which is resolved and leased at the first piece: loading torch takes seconds, in
    which a run may prune."""
    with leased(checkpoint) as path:
        yield from draw(path)


def _own_template(path: Path) -> str:
    chosen = read_checkpoint_manifest(path).chat
    if not chosen:
        raise UserError(
            f"{path}: this model was trained without dialogues, so its chat template is not known; name one with "
            f"--template ({', '.join(TEMPLATES)})"
        )
    return chosen


class _Heard:
    """A `Progress` that collects the text pieces of rank 0."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def begin(self, task: str, total: float | None, unit: str) -> None: ...
    def advance(self, done: float, note: str = "") -> None: ...
    def end(self, note: str = "") -> None: ...

    def say(self, text: str) -> None:
        self._pieces.append(text)

    def take(self) -> list[str]:
        taken, self._pieces = self._pieces, []
        return taken


def _draw_in_a_team(path: Path, named: Path, request: dict[str, Any], processes: int) -> Iterator[str]:
    if importlib.util.find_spec("torch") is None:
        raise MissingPackage("torch", "generation", "train")
    with tempfile.TemporaryDirectory(prefix="ropewalk-generate-") as name:
        folder, heard = Path(name), _Heard()
        write_json(folder / REQUEST, {"path": str(path.resolve()), "named": str(named.resolve()), **request})
        team = WorkerGroup(processes=processes, max_restarts=0, worker=[*command(folder), "--generate"])
        # Workers emit only text; an interruption loses no saved data.
        for _ in follow_workers(folder, team, progress=heard, say=lambda _: None):
            yield from heard.take()
        yield from heard.take()
