"""Prompts -> completions, with a key-value cache.

The model never sees more than `spec.sequence_length` tokens. When a text outgrows that, its older part is dropped and
the newer half is read again from position 0 (`context_start`): generation is unbounded, at the price of one more pass
over half a sequence every half sequence. What is dropped depends on the length of the text only, not on the prompt's.

A model on one device and an executor under any plan give the same tokens: one rank chooses for all. With an executor
all ranks must call.

Shapes: B sequences, T tokens, V vocabulary, K candidates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.base.seeds import seed_for
from ropewalk.model.protocol import ModelStage
from ropewalk.parallel.decoding import ModelDecoding
from ropewalk.parallel.executor import Decoding, Executor

ROWS = 64
"""Maximum prompts per batch: bounds the cache."""


def generate(
    model: ModelStage | Executor,
    prompts: list[list[int]],
    *,
    new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    end: int | None,
    vocabulary: int | None = None,
) -> list[list[int]]:
    """The completion of each prompt: at most `new_tokens` tokens, without the prompt and without the closing `end`.

    Temperature 0 takes the most likely token; `top_k` 0 draws from all. Prompt i draws from a random stream of its own,
    so its completion does not depend on its company (up to the rounding of differently sized matrix products).
    Tokens from `vocabulary` on are padding and never drawn; None: the model has no padding.
    """
    completions: list[list[int]] = [[] for _ in prompts]
    for indices in _batches(prompts):
        rows = [prompts[index] for index in indices]
        chances_BT = torch.stack([_chances(seed, index, new_tokens) for index in indices])
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
    """The tokens that `generate` gives for this prompt alone, as they are drawn."""
    chances_BT = _chances(seed, 0, new_tokens).unsqueeze(0)
    for (token,) in _continue(model, [prompt], chances_BT, temperature=temperature, top_k=top_k, vocabulary=vocabulary):
        if token == end:
            return
        yield token


def context_start(length: int, limit: int) -> int:
    """The first of `length` tokens that the model still sees, in sequences of at most `limit` tokens."""
    period = limit - limit // 2
    return max(0, -(-(length - limit) // period) * period)


def choose(logits_BV: Tensor, chances_B: Tensor, *, temperature: float, top_k: int) -> Tensor:
    """One token per sequence: the most likely one at temperature 0, else the one at quantile `chances_B` of the
    sharpened distribution."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    candidates_BK = None
    if 0 < top_k < logits_BV.shape[-1]:
        logits_BV, candidates_BK = logits_BV.topk(top_k, dim=-1)
    # In float64, and from the largest down, a very low temperature overflows to probability 0, not to nan.
    wide_BK = logits_BV.double()
    sharp_BK = (wide_BK - wide_BK.amax(-1, keepdim=True)) / temperature
    below_BK = sharp_BK.softmax(-1).cumsum(-1)
    quantile_B1 = chances_B.unsqueeze(1) * below_BK[:, -1:]
    place_B1 = torch.searchsorted(below_BK, quantile_B1, right=True).clamp(max=below_BK.shape[1] - 1)
    return (place_B1 if candidates_BK is None else candidates_BK.gather(1, place_B1)).squeeze(1)


def _batches(prompts: list[list[int]]) -> Iterator[list[int]]:
    """Indices of prompts of equal length, at most ROWS together: no padding."""
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    for indices in by_length.values():
        for first in range(0, len(indices), ROWS):
            yield indices[first : first + ROWS]


def _chances(seed: int, index: int, count: int) -> Tensor:
    """The random numbers in [0, 1) of prompt `index`, drawn on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(seed_for(seed, "generate", index))
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
    """The next token of every sequence, for each column of `chances_BT`."""
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
    """Forward passes of `model` over texts of at most `length` tokens."""
    if isinstance(model, ModelStage):
        return contextlib.nullcontext(ModelDecoding(model, room=min(model.spec.sequence_length, length)))
    return model.decoding(room=min(model.spec.sequence_length, length))
