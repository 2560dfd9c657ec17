"""Asks the model for the answers that are missing: the requests of all tasks together, in chunks that are saved.

Likelihoods come first, since generation may load the model in another precision. Requests are sorted by their tokens,
so that those with a common beginning are scored together, and cut into chunks. A chunk depends on the requests alone:
where an interrupted evaluation lacks one answer of a chunk, all of it is computed again in the same batches, so that
the answers are the same bits as without interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ropewalk.base.seeds import seed_for

from .answers import Answers
from .decode.stop_strings import cut
from .held_out import HeldOut
from .sequence_scores import in_order
from .task import Answer, Generate, Generation, LogLikelihood, Request, Rolling, Sampling, TaskModel, Text

T = TypeVar("T")
Share = Callable[[Any], Any]
"""The JSON value of rank 0, on every rank."""
Asked = Mapping[str, tuple[str, Request]]
"""Task and request by request key."""
GENERATED_COST = 8
"""A generated token takes about as long as this many scored ones."""
LEAST_PROMPTS = 64
"""Fewest prompts per call, to fill batches."""
CALLS, LEAST_TOKENS = 16, 8192
"""About how many calls a short evaluation makes at least, so that its progress is seen, but none for fewer tokens."""


def ask_model(model: TaskModel, held_out: HeldOut, asked: Asked, answers: Answers, *, share: Share) -> None:
    """Adds the missing answers to `answers`, which count on rank 0. All ranks must call."""
    caller = _Caller(model, held_out, asked, answers, share)
    rolling = {key: request.text for key, (_, request) in asked.items() if isinstance(request, Rolling)}
    pairs = {
        key: (request.context, request.continuation)
        for key, (_, request) in asked.items()
        if isinstance(request, LogLikelihood)
    }
    by_sampling: dict[Sampling, dict[str, Text]] = {}
    for key, (_, request) in asked.items():
        if isinstance(request, Generate):
            by_sampling.setdefault(request.sampling, {})[key] = request.prompt
    caller.rolling(rolling)
    caller.pairs(pairs)
    for sampling, prompts in by_sampling.items():
        caller.prompts(prompts, sampling)


@dataclass(frozen=True, slots=True)
class _Caller:
    """Asks requests of one kind, by key."""

    model: TaskModel
    held_out: HeldOut
    asked: Asked
    answers: Answers
    share: Share

    def rolling(self, texts: Mapping[str, Text]) -> None:
        """Whole documents."""
        keys = list(texts)
        missing = self._missing(keys)
        if missing:
            documents = [self.held_out.texts.document(text) for text in texts.values()]
            cost = [len(each) for each in documents]
            chunks = _chunks(range(len(keys)), cost, most=self._tokens_per_call(cost))
            self._ask(
                "score", "documents", keys, missing, chunks, lambda chunk: self.model.rolling(_of(documents, chunk))
            )

    def pairs(self, pairs: Mapping[str, tuple[Text, Text]]) -> None:
        """Continuations of contexts."""
        keys = list(pairs)
        missing = self._missing(keys)
        if missing:
            tokens = self.held_out.texts.pairs(list(pairs.values()))
            order = in_order([np.array([*context, *rest], np.int64) for context, rest in tokens])
            cost = [len(context) + len(rest) for context, rest in tokens]
            chunks = _chunks(order, cost, most=self._tokens_per_call(cost))
            call = self.model.loglikelihood
            self._ask("score", "continuations", keys, missing, chunks, lambda chunk: call(_of(tokens, chunk)))

    def prompts(self, prompts: Mapping[str, Text], sampling: Sampling) -> None:
        """Completions. The random numbers of each are a function of the run's seed and the request."""
        keys = list(prompts)
        missing = self._missing(keys)
        if missing:
            tokens = self.held_out.texts.prompts(list(prompts.values()))
            seeds = [seed_for(self.held_out.seed, "generate", key) for key in keys]
            cost = [len(prompt) + GENERATED_COST * sampling.max_new_tokens for prompt in tokens]
            order = in_order([np.array(prompt, np.int64) for prompt in tokens])
            chunks = _chunks(order, cost, most=self._tokens_per_call(cost), least=LEAST_PROMPTS)

            def call(chunk: list[int]) -> list[Generation]:
                here = _of(tokens, chunk)
                drawn = self.model.generate(here, sampling, seeds=_of(seeds, chunk))
                return [self._generation(*pair, sampling.stop) for pair in zip(here, drawn, strict=True)]

            self._ask("sample", "completions", keys, missing, chunks, call)

    def _generation(self, prompt: list[int], completion: list[int], stop: Sequence[str]) -> Generation:
        data = self.held_out.detokenizer.continuation(prompt, completion)
        return Generation(completion, cut(data.decode(errors="replace"), stop))

    def _tokens_per_call(self, cost: Sequence[int]) -> int:
        return min(self.model.chunk_tokens, max(LEAST_TOKENS, sum(cost) // CALLS))

    def _missing(self, keys: Sequence[str]) -> set[int]:
        """As rank 0 finds: other ranks have no file."""
        return set(self.share([index for index, key in enumerate(keys) if key not in self.answers]))

    def _ask(
        self,
        title: str,
        unit: str,
        keys: Sequence[str],
        missing: set[int],
        chunks: Iterable[list[int]],
        call: Callable[[list[int]], Sequence[Answer]],
    ) -> None:
        progress, done = self.held_out.progress, 0
        wanted = [chunk for chunk in chunks if not missing.isdisjoint(chunk)]
        progress.begin(title, sum(map(len, wanted)), unit)
        for chunk in wanted:
            found = zip(_of(keys, chunk), call(chunk), strict=True)
            self.answers.add((key, self.asked[key][0], answer) for key, answer in found)
            done += len(chunk)
            progress.advance(done)
        progress.end()


def _chunks(order: Iterable[int], cost: Sequence[int], *, most: int, least: int = 1) -> Iterator[list[int]]:
    """Consecutive requests of at most `most` tokens together, but at least `least` requests."""
    chunk: list[int] = []
    total = 0
    for index in order:
        if len(chunk) >= least and total + cost[index] > most:
            yield chunk
            chunk, total = [], 0
        chunk.append(index)
        total += cost[index]
    if chunk:
        yield chunk


def _of(values: Sequence[T], indices: Sequence[int]) -> list[T]:
    return [values[index] for index in indices]
