"""Generates completions with a key-value cache, of many prompts at once (evaluate/decode/batching.py).

The context is at most `spec.sequence_length` tokens. When a text outgrows it, the older part is dropped and the newer
half is encoded from position 0 (`context_start`): generation is unbounded, at the cost of one pass over half a sequence
every half sequence. What is dropped depends on the length of the text only, not on the prompt's.

A model on one device and an executor under any plan give the same tokens, because one rank samples for all. With an
executor all ranks must call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ropewalk.base.errors import UserError
from ropewalk.base.progress import Progress
from ropewalk.model.protocol import ModelStage
from ropewalk.parallel.decoding import ModelDecoding
from ropewalk.parallel.executor import Decoding, Executor

from .decode.batching import Batching
from .task import Sampling


def generate(
    model: ModelStage | Executor,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seeds: Sequence[int],
    end: int | None,
    vocabulary: int | None = None,
    text: Callable[[list[int]], str] | None = None,
    progress: Progress | None = None,
) -> list[list[int]]:
    """Completes each prompt; results exclude the prompt and the closing `end`.

    Each prompt has its own random stream, from its seed: a completion does not depend on the other prompts, up to
    rounding of matmuls of different sizes. Tokens from `vocabulary` on are padding and never sampled; None: no padding.
    `text` decodes the tokens of a completion and is needed for stop strings, before which completions end: a stop
    string that begins inside a token leaves that token to be cut (evaluate/decode/stop_strings.py). `progress` is told
    the number of finished completions.
    """
    if sampling.stop and text is None:
        raise ValueError("stop strings need `text`, which decodes tokens")
    if not prompts or not sampling.max_new_tokens:
        return [[] for _ in prompts]
    with _batching(model, prompts, sampling, seeds=seeds, end=end, vocabulary=vocabulary, text=text) as batching:
        while batching.step():
            if progress:
                progress.advance(batching.finished)
    return batching.completions


def stream(
    model: ModelStage | Executor,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    seed: int,
    end: int | None,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Streams the tokens that `generate` gives for this prompt alone, without a look at stop strings: those are for
    whoever decodes the tokens (`pieces_before` in evaluate/decode/stop_strings.py)."""
    with _batching(model, [prompt], sampling, seeds=[seed], end=end, vocabulary=vocabulary, text=None) as batching:
        (completion,) = batching.completions
        for place in range(sampling.max_new_tokens):
            batching.step()
            if len(completion) <= place:
                return
            yield completion[place]


@contextlib.contextmanager
def _batching(
    model: ModelStage | Executor,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    seeds: Sequence[int],
    end: int | None,
    vocabulary: int | None,
    text: Callable[[list[int]], str] | None,
) -> Iterator[Batching]:
    """Completes the prompts with `model`, in the block."""
    if not all(prompts):
        raise UserError("an empty prompt cannot be completed; begin it with the end-of-text token")
    longest = max(map(len, prompts)) + sampling.max_new_tokens
    room = min(model.spec.sequence_length, longest)
    opened: contextlib.AbstractContextManager[Decoding]
    if isinstance(model, ModelStage):
        opened = contextlib.nullcontext(ModelDecoding(model, sequences=len(prompts), room=room))
    else:
        opened = model.decoding(sequences=len(prompts), room=room)
    with opened as decoding:
        yield Batching(decoding, prompts, sampling, seeds=seeds, end=end, vocabulary=vocabulary, text=text)
