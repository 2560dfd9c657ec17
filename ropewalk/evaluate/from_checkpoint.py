"""Evaluates a checkpoint, or generates text from it.

A single process loads the whole model on its device. Processes of a launcher shard it (evaluate/sharded_model.py).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer

from ropewalk.base.progress import Progress
from ropewalk.checkpoint.format import TOKENIZER, identity, read_checkpoint_manifest
from ropewalk.checkpoint.read.load import load_weights
from ropewalk.checkpoint.read.model_check import advise_on_damage
from ropewalk.checkpoint.run_state import head_of
from ropewalk.config.ranks import Ranks, ranks
from ropewalk.model.protocol import ModelStage, build_stage
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor
from ropewalk.parallel.mesh import pick_device
from ropewalk.plan.inference_plan import inference
from ropewalk.plan.plan import Plan, alone, load_plan
from ropewalk.prepare.chat import ChatEncoder, Turn, template_named
from ropewalk.prepare.foreign import encoding, load_foreign
from ropewalk.prepare.tokenizer import encode, end_of_text, vocabulary_size

from .answers import Answers, answers_of
from .config import Evaluate
from .decode.stop_strings import cut, pieces_before
from .decode.token_choice import prompt_seed
from .evaluation import evaluate, write_evaluation
from .generate import generate, stream
from .held_out import HeldOut
from .results import read_results
from .sharded_model import PlannedModel, load_generator
from .task import Sampling


def evaluate_checkpoint(
    path: Path, *, run: Path, data: Path, settings: Evaluate, seed: int, progress: Progress
) -> dict[str, Any]:
    """Evaluates the checkpoint with the held-out text in `data`, writes the results into `run` and returns them."""
    with advise_on_damage(path):
        manifest = read_checkpoint_manifest(path)
    head = head_of(manifest)
    held_out = HeldOut(data, settings, seed=seed, progress=progress)
    plan = inference(alone(load_plan(run).phases[-1].plan), length=head.spec.sequence_length)
    model = PlannedModel(
        plan, one_device(plan, lambda device: load_model(path, device=device)[0]), spec=head.spec, held_out=held_out
    )
    answers = Answers(run, answers_of(identity(manifest), plan, seed=seed))
    write_evaluation(run, evaluate(model, held_out, answers=answers), step=head.step)
    return read_results(run)


def one_device(plan: Plan, load: Callable[[torch.device], ModelStage]) -> Callable[[Plan], Executor | ModelStage]:
    """Loads a model once, for scoring under `plan` and for generation."""

    @functools.cache
    def model() -> ModelStage:
        return load(pick_device(plan, Ranks()))

    @functools.cache
    def executor() -> Executor:
        return apply(plan, model(), None, None)

    return lambda wanted: executor() if wanted == plan else model()


def generate_text(
    path: Path,
    *,
    prompt: str = "",
    question: str | None = None,
    template: str = "",
    sampling: Mapping[str, Any],
    seed: int,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> Iterator[str]:
    """Generates the text after `prompt`, or the answer to `question` in the chat `template`, piece by piece; `sampling`
    has the fields of `Sampling`. In `fp32` every plan gives the same text; `bf16` is faster. Under a launcher all ranks
    must call and get the same text."""
    model, tokenizer = _open(path, texts=[prompt if question is None else question], precision=precision)
    how = read_sampling(sampling)
    end, chat = end_of_text(tokenizer, path=path / TOKENIZER), None
    with encoding(path / TOKENIZER):
        if question is not None:
            chat = chat_encoder(template, tokenizer, end=end)
            text = chat.prompt([Turn("user", question)])
        else:
            text = tokenizer.encode(prompt, add_special_tokens=False).ids
    drawn = stream(
        model,
        # Prompts follow an end-of-text token, like every training document.
        [end, *text],
        how,
        seed=seed,
        end=end,
        vocabulary=vocabulary_size(tokenizer),
    )
    yield from pieces_before(spelled(until(drawn, chat.closing) if chat else drawn, tokenizer), how.stop)


def generate_texts(
    path: Path,
    *,
    prompts: Sequence[str],
    sampling: Mapping[str, Any],
    seed: int,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> list[str]:
    """Generates the text after each of many prompts, which share forward passes. Under a launcher all ranks must
    call."""
    model, tokenizer = _open(path, texts=prompts, precision=precision)
    end, how = end_of_text(tokenizer, path=path / TOKENIZER), read_sampling(sampling)
    with encoding(path / TOKENIZER):
        encoded = [[end, *tokenizer.encode(each, add_special_tokens=False).ids] for each in prompts]
    repeats: Counter[tuple[int, ...]] = Counter()
    seeds = []
    for each in map(tuple, encoded):
        seeds.append(prompt_seed(seed, each, repeats[each]))
        repeats[each] += 1
    drawn = generate(
        model,
        encoded,
        how,
        seeds=seeds,
        end=end,
        vocabulary=vocabulary_size(tokenizer),
        text=tokenizer.decode,
    )
    return [cut(tokenizer.decode(tokens), how.stop) for tokens in drawn]


def read_sampling(fields: Mapping[str, Any]) -> Sampling:
    """`Sampling` from its fields, whose `stop` may be a list."""
    return Sampling(**{**fields, "stop": tuple(stop for stop in fields.get("stop", ()) if stop)})


def chat_encoder(template: str, tokenizer: Tokenizer, *, end: int) -> ChatEncoder:
    """The encoder of dialogues in the template named `template`."""
    return ChatEncoder(
        template_named(template), tokenizer, lambda texts: encode(tokenizer, texts, dtype="uint32"), end=end
    )


def until(tokens: Iterable[int], closing: list[int]) -> Iterator[int]:
    """`tokens` before the first occurrence of `closing`; a possible prefix of it is held back."""
    held: list[int] = []
    for token in tokens:
        held.append(token)
        while held and held != closing[: len(held)]:
            yield held.pop(0)
        if held == closing:
            return
    yield from held


def spelled(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Decodes `tokens` incrementally."""
    drawn: list[int] = []
    shown = ""
    for token in tokens:
        drawn.append(token)
        text = tokenizer.decode(drawn)
        # A character may take several tokens: no output until it is complete.
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text


def load_model(path: Path, *, device: torch.device, texts: Sequence[str] = ()) -> tuple[ModelStage, int, Tokenizer]:
    """(model of the checkpoint on `device`, its step, its tokenizer). The tokenizer may be foreign: it is tested on
    `texts` first."""
    with advise_on_damage(path):
        state = load_weights(path)
    with torch.device("meta"):
        model = build_stage(state.spec)
    model.load_state_dict(dict(state.model), assign=True)
    tokenizer = load_foreign(state.tokenizer, path=path / TOKENIZER, vocabulary=state.spec.vocabulary, texts=texts)
    return model.to(device), state.step, tokenizer


def _open(
    path: Path, *, texts: Sequence[str], precision: Literal["fp32", "bf16"]
) -> tuple[ModelStage | Executor, Tokenizer]:
    """The model, on one device or sharded, and its tokenizer, tested on `texts`. In `fp32` its weights are as saved."""
    if ranks().world > 1:
        executor, file = load_generator(path, precision=precision)
        vocabulary = executor.spec.vocabulary
        return executor, load_foreign(file, path=path / TOKENIZER, vocabulary=vocabulary, texts=texts)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, _, tokenizer = load_model(path, device=device, texts=texts)
    return model.to(torch.bfloat16) if precision == "bf16" else model, tokenizer
