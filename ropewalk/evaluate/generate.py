"""Generates completions with a key-value cache.

The context is at most `spec.sequence_length` tokens. When a text outgrows it, the older part is dropped and the newer
half is encoded from position 0 (`context_start`): generation is unbounded, at the cost of one pass over half a sequence
every half sequence. What is dropped depends on the length of the text only, not on the prompt's.

A model on one device and an executor under any plan give the same tokens, because one rank samples for all. With an
executor all ranks must call.

Shapes: B sequences, T tokens, V vocabulary, K candidates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.base.seeds import seed_for
from ropewalk.model.protocol import ModelStage
from ropewalk.parallel.decoding import ModelDecoding
from ropewalk.parallel.executor import Decoding, Executor

ROWS = 64
"""Maximum prompts per batch, which bounds the cache."""


def generate(
    model: ModelStage | Executor,
    prompts: list[list[int]],
    *,
    new_tokens: int,
    temperature: float,
    top_k: int,
    seeds: Sequence[int],
    end: int | None,
    vocabulary: int | None = None,
) -> list[list[int]]:
    """Completes each prompt with at most `new_tokens` tokens; results exclude the prompt and the closing `end`.

    Temperature 0 takes the most likely token; `top_k` 0 samples from all. Each prompt has the random numbers of its
    seed, so its completion does not depend on the batch (up to rounding of matmuls of different sizes). Tokens from
    `vocabulary` on are padding and never sampled; None: no padding.
    """
    completions: list[list[int]] = [[] for _ in prompts]
    for indices in _batches(prompts):
        rows = [prompts[index] for index in indices]
        chances_BT = torch.stack([_chances(seeds[index], new_tokens) for index in indices])
        open_rows = dict(enumerate(indices))
        for tokens in _continue(model, rows, chances_BT, temperature=temperature, top_k=top_k, vocabulary=vocabulary):
            for row, index in list(open_rows.items()):
                if tokens[row] == end:
                    del open_rows[row]
                else:
                    completions[index].append(tokens[row])
            if not open_rows:
                break
    return completions


def stream(
    model: ModelStage | Executor,
    prompt: list[int],
    *,
    new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    end: int | None,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Streams the tokens that `generate` gives for this prompt and seed."""
    chances_BT = _chances(seed, new_tokens).unsqueeze(0)
    for (token,) in _continue(model, [prompt], chances_BT, temperature=temperature, top_k=top_k, vocabulary=vocabulary):
        if token == end:
            return
        yield token


def context_start(length: int, limit: int) -> int:
    """The first of `length` tokens still in a context of at most `limit` tokens."""
    period = limit - limit // 2
    return max(0, -(-(length - limit) // period) * period)


def choose(logits_BV: Tensor, chances_B: Tensor, *, temperature: float, top_k: int) -> Tensor:
    """Samples one token per sequence: the most likely one at temperature 0, else by inverse CDF at the quantiles
    `chances_B` of the tempered distribution."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    candidates_BK = None
    if 0 < top_k < logits_BV.shape[-1]:
        logits_BV, candidates_BK = logits_BV.topk(top_k, dim=-1)
    # Float64 logits minus their maximum: a very low temperature underflows to probability 0 instead of nan.
    wide_BK = logits_BV.double()
    sharp_BK = (wide_BK - wide_BK.amax(-1, keepdim=True)) / temperature
    below_BK = sharp_BK.softmax(-1).cumsum(-1)
    quantile_B1 = chances_B.unsqueeze(1) * below_BK[:, -1:]
    place_B1 = torch.searchsorted(below_BK, quantile_B1, right=True).clamp(max=below_BK.shape[1] - 1)
    return (place_B1 if candidates_BK is None else candidates_BK.gather(1, place_B1)).squeeze(1)


def _batches(prompts: list[list[int]]) -> Iterator[list[int]]:
    """Indices of prompts of equal length, at most ROWS per batch: no padding."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    for indices in by_length.values():
        for first in range(0, len(indices), ROWS):
            yield indices[first : first + ROWS]


def _chances(seed: int, count: int) -> Tensor:
    """Random numbers in [0, 1) of `seed`, drawn on the CPU so that they are equal on all devices."""
    generator = torch.Generator().manual_seed(seed_for(seed, "generate"))
    return torch.rand(count, generator=generator, dtype=torch.float64)


@torch.no_grad()
def _continue(
    model: ModelStage | Executor,
    prompts: list[list[int]],
    chances_BT: Tensor,
    *,
    temperature: float,
    top_k: int,
    vocabulary: int | None,
) -> Iterator[list[int]]:
    """The next token of every sequence, once per column of `chances_BT`."""
    if not prompts[0]:
        raise UserError("an empty prompt cannot be completed; begin it with the end-of-text token")
    with _decoding(model, len(prompts[0]) + chances_BT.shape[1]) as decoding:
        device, limit = decoding.device, decoding.spec.sequence_length
        text_BT, start = torch.tensor(prompts, device=device), 0
        for chances_B in chances_BT.to(device).unbind(1):
            length = text_BT.shape[1]
            if start != context_start(length, limit):
                start = context_start(length, limit)
                decoding.restart()
            logits_BV = decoding.logits(text_BT[:, start + decoding.seen :])
            chosen_B = None
            if logits_BV is not None:
                chosen_B = choose(logits_BV[:, :vocabulary], chances_B, temperature=temperature, top_k=top_k)
            token_B = decoding.share(chosen_B, rows=len(prompts))
            text_BT = torch.cat((text_BT, token_B.unsqueeze(1)), dim=1)
            yield token_B.tolist()


def _decoding(model: ModelStage | Executor, length: int) -> contextlib.AbstractContextManager[Decoding]:
    """A context for decoding texts of at most `length` tokens with `model`."""
    if isinstance(model, ModelStage):
        return contextlib.nullcontext(ModelDecoding(model, room=min(model.spec.sequence_length, length)))
    return model.decoding(room=min(model.spec.sequence_length, length))
