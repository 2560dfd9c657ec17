"""Evaluates the model in a folder, a checkpoint or a Hugging Face directory, without a run and without its corpus.

Weights are read in full when an answer is missing, and not at all otherwise. One process loads the model on its
device; several share it (plan/inference_plan.py). Scores are in float32.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from ropewalk.base.errors import DamagedModel
from ropewalk.base.progress import Progress
from ropewalk.checkpoint.format import TOKENIZER, identity, is_checkpoint, read_checkpoint_manifest
from ropewalk.checkpoint.policy.lease import leased
from ropewalk.checkpoint.read.load import CheckpointReader
from ropewalk.checkpoint.read.model_check import advise_on_damage
from ropewalk.checkpoint.run_state import head_of
from ropewalk.config.ranks import ranks
from ropewalk.model.hugging_face.description import TOKENIZER_CONFIG, describe_directory, link_roots, weight_files
from ropewalk.model.hugging_face.directory import read_directory
from ropewalk.model.protocol import ModelStage, build_stage
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.directory_shards import DirectoryShards
from ropewalk.parallel.executor import Executor
from ropewalk.parallel.mesh import Mesh, join
from ropewalk.plan.inference_plan import generation, inference
from ropewalk.plan.plan import Plan
from ropewalk.prepare.foreign import load_foreign, read_foreign
from ropewalk.prepare.tokenizer import end_of_text

from .answers import Answers, answers_of
from .config import Evaluate
from .evaluation import evaluate, write_evaluation
from .from_checkpoint import load_model, one_device
from .generation_plan import generation_plan
from .held_out import HeldOut
from .results import read_results
from .sharded_model import PlannedModel, device_kind, evaluate_together, load_executor
from .text import Detokenizer
from .text_encoder import TextEncoder

CHAT_TEMPLATE = "chat_template.jinja"
_SAMPLED, _EVERY = 1 << 16, 1 << 24
"""Bytes of a weight file that its hash reads, and how far apart: 140 GB take a second, and no training leaves these
bytes as they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """A model on disk, not yet loaded."""

    spec: Spec
    texts: TextEncoder
    identity: str
    """Hash of its content."""
    facts: dict[str, Any]
    """What its results say of it."""
    load: Callable[[torch.device], ModelStage]
    load_shards: Callable[[Plan, Mesh, torch.device], Executor]
    """All ranks must call."""
    plan: Callable[[int, Literal["cpu", "cuda"]], Plan]
    """For so many processes."""
    chat_template: str = ""
    """As Jinja."""

    def held_out(self, settings: Evaluate, *, seed: int, progress: Progress | None = None) -> HeldOut:
        """What tasks are made with."""
        return HeldOut(None, settings, seed=seed, progress=progress, texts=self.texts, chat_template=self.chat_template)


def evaluate_folder(
    path: Path, *, out: Path, settings: Evaluate, seed: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Evaluates the model in `path`, writes answers and results below `out` and returns the results. Under a launcher
    all ranks must call; the process group stays initialized."""
    place = ranks()
    with leased(path) if is_checkpoint(path) else contextlib.nullcontext(path) as folder:
        found = open_model_folder(folder)
        held_out = found.held_out(settings, seed=seed, progress=progress)
        plan = found.plan(place.world, device_kind(place))
        of = answers_of(found.identity, plan, seed=seed)
        if place.world == 1:
            model = PlannedModel(plan, one_device(plan, found.load), spec=found.spec, held_out=held_out)
            write_evaluation(out, evaluate(model, held_out, answers=Answers(out, of)), **found.facts)
            return read_results(out)
        join(plan, place)
        mesh = Mesh(plan, place.rank)
        device = torch.device("cuda", place.local_rank) if plan.device == "cuda" else torch.device("cpu")
        model = PlannedModel(
            plan, lambda wanted: found.load_shards(wanted, mesh, device), spec=found.spec, held_out=held_out
        )
        evaluate_together(model, held_out, out, of, mesh, found.facts)
        return read_results(out)


def open_model(path: Path, *, settings: Evaluate | None = None, seed: int = 0) -> tuple[PlannedModel, HeldOut]:
    """The model in `path` on this process's device, and what its tasks are made with."""
    found = open_model_folder(path)
    plan = found.plan(1, "cuda" if torch.cuda.is_available() else "cpu")
    held_out = found.held_out(settings or Evaluate(), seed=seed)
    return PlannedModel(plan, one_device(plan, found.load), spec=found.spec, held_out=held_out), held_out


def open_model_folder(path: Path) -> ModelFolder:
    """The model in `path`: a checkpoint, or a Hugging Face directory of our export or from elsewhere."""
    return _checkpoint(path) if is_checkpoint(path) else _directory(path)


def _checkpoint(path: Path) -> ModelFolder:
    with advise_on_damage(path):
        manifest = read_checkpoint_manifest(path)
        head = head_of(manifest)
        file = path / TOKENIZER
        tokenizer = load_foreign(CheckpointReader(path).file(TOKENIZER), path=file, vocabulary=head.spec.vocabulary)
    end = end_of_text(tokenizer, path=file)
    return ModelFolder(
        spec=head.spec,
        texts=TextEncoder(Detokenizer.of(tokenizer, end_of_text=end), end),
        identity=identity(manifest),
        facts={"step": head.step, "model": str(path)},
        load=lambda device: load_model(path, device=device)[0],
        load_shards=lambda plan, mesh, device: load_executor(path, plan, mesh, device=device),
        plan=lambda processes, device: (
            generation_plan(path, processes=processes, device=device)
            if processes > 1
            else _alone(device, head.spec.sequence_length)
        ),
    )


def _directory(path: Path) -> ModelFolder:
    spec = describe_directory(path).spec
    file = path / TOKENIZER
    tokenizer = read_foreign(file, vocabulary=spec.vocabulary, roots=link_roots(path))
    end = end_of_text(tokenizer, path=file)
    begin = _token(path, "bos_token")
    texts = TextEncoder(
        Detokenizer.of(tokenizer, end_of_text=end),
        end,
        foreign=True,
        begin_of_text=tokenizer.token_to_id(begin) if begin else None,
    )

    def load(device: torch.device) -> ModelStage:
        weights = read_directory(path, dtype="float32").weights
        with torch.device("meta"):
            model = build_stage(spec)
        model.load_state_dict(dict(weights), assign=True)
        return model.to(device)

    def load_shards(plan: Plan, mesh: Mesh, device: torch.device) -> Executor:
        weights = read_directory(path, dtype="float32").weights
        with torch.device("meta"):
            model = build_stage(spec)
        executor = apply(plan, model, mesh, None, device=device, trained=(), init_seed=None)
        executor.load_state(DirectoryShards(weights, executor.wants()), {})
        return executor

    return ModelFolder(
        spec=spec,
        texts=texts,
        identity=_hash(path),
        facts={"model": str(path)},
        load=load,
        load_shards=load_shards,
        plan=lambda processes, device: (
            generation(None, spec, processes=processes, device=device)
            if processes > 1
            else _alone(device, spec.sequence_length)
        ),
        chat_template=_chat_template(path),
    )


def _alone(device: Literal["cpu", "cuda"], length: int) -> Plan:
    return inference(Plan(device=device, precision="fp32", batch_size=1, microbatch_size=1), length=length)


def _token(folder: Path, name: str) -> str:
    """A special token of `tokenizer_config.json`, as text; empty without one."""
    value = _tokenizer_config(folder).get(name)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _chat_template(folder: Path) -> str:
    """The directory's chat template, where transformers keeps it: a file, or an entry of `tokenizer_config.json`, which
    may have several by name. Empty without one."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / CHAT_TEMPLATE).read_text("utf-8", errors="replace")
    found = _tokenizer_config(folder).get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """The settings of the tokenizer; empty if there is no file."""
    try:
        tree = json.loads((folder / TOKENIZER_CONFIG).read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise DamagedModel(f"{folder / TOKENIZER_CONFIG}: this tokenizer config is damaged: not JSON") from None
    return tree if isinstance(tree, dict) else {}


def _hash(folder: Path) -> str:
    """A hash of config, tokenizer and a sample of the weights."""
    digest = xxhash.xxh3_128()
    for name in ("config.json", TOKENIZER, TOKENIZER_CONFIG):
        if (folder / name).exists():
            digest.update(f"{name}\0".encode())
            digest.update((folder / name).read_bytes())
    for name in weight_files(folder).names:
        size = (folder / name).stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        with open(folder / name, "rb") as file:
            for begin in (*range(0, size, _EVERY), max(0, size - _SAMPLED)):
                file.seek(begin)
                digest.update(file.read(_SAMPLED))
    return digest.hexdigest()
