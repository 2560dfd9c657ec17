"""How texts become tokens before they are scored or continued: one rule for our models, one for models from elsewhere.

| | our models (runs, checkpoints) | Hugging Face directories |
|---|---|---|
| before a text | the end-of-text token, as in training | what the tokenizer adds by itself, often nothing |
| an empty context | the end-of-text token | the beginning-of-text token, else the end-of-text token |
| after a whole document | the end-of-text token, which is scored too | nothing |

The right column is the rule of lm-evaluation-harness, so that log-likelihoods agree sample by sample. In both, context
and continuation are tokenized together, and spaces at the end of a context move to the continuation: " Paris" is one
token of most tokenizers, which a context ending with a space would make unreachable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .text import Detokenizer

Pair = tuple[list[int], list[int]]
"""Tokens of a context, at least one, and of its continuation."""


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Encodes texts for a model."""

    detokenizer: Detokenizer
    end_of_text: int
    foreign: bool = False
    """The right column of the table."""
    begin_of_text: int | None = None
    """Of a foreign tokenizer, where it has one."""

    def prompts(self, texts: Sequence[str | np.ndarray]) -> list[list[int]]:
        """Beginnings of documents, to be continued; never empty."""
        encoded = iter(self._encode([text for text in texts if isinstance(text, str)]))
        return [next(encoded) if isinstance(text, str) else self._led(text.tolist()) for text in texts]

    def pairs(self, pairs: Sequence[tuple[str | np.ndarray, str | np.ndarray]]) -> list[Pair]:
        """Contexts and continuations."""
        texts = [_moved(*pair) for pair in pairs if isinstance(pair[0], str) and isinstance(pair[1], str)]
        contexts = dict.fromkeys(context for context, _ in texts)
        begins = dict(zip(contexts, self._encode(list(contexts)), strict=True))
        wholes = iter(self._encode([context + continuation for context, continuation in texts]))
        moved = iter(texts)
        found: list[Pair] = []
        for pair in pairs:
            if not (isinstance(pair[0], str) and isinstance(pair[1], str)):
                found.append((self.prompts(pair[:1])[0], self._ids(pair[1])))
                continue
            (context, continuation), whole = next(moved), next(wholes)
            if self.foreign and not context:
                found.append(self._after_nothing(continuation))
            else:
                begin = len(begins[context])
                found.append((whole[:begin], whole[begin:]))
        return found

    def document(self, text: str | np.ndarray) -> np.ndarray:
        """A whole document to score: without the token before it, with the end of text where that is scored."""
        if not isinstance(text, str):
            return text
        return np.array([*self._ids(text), *([] if self.foreign else [self.end_of_text])], np.int64)

    @property
    def before(self) -> int:
        """The token that a document follows."""
        return self.end_of_text if not self.foreign or self.begin_of_text is None else self.begin_of_text

    def _after_nothing(self, continuation: str) -> Pair:
        ids = self._ids(continuation)
        return (ids[:1], ids[1:]) if ids[:1] == [self.before] else ([self.before], ids)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts with what precedes them."""
        found = self.detokenizer.encode_batch(texts, special=self.foreign)
        return [ids or [self.before] for ids in found] if self.foreign else [[self.end_of_text, *ids] for ids in found]

    def _ids(self, text: str | np.ndarray) -> list[int]:
        """Tokens alone."""
        return self.detokenizer.encode(text) if isinstance(text, str) else list(map(int, text))

    def _led(self, ids: list[int]) -> list[int]:
        """Token ids after what precedes a text."""
        if not self.foreign:
            return [self.end_of_text, *ids]
        return [*self.detokenizer.encode_batch([""], special=True)[0], *ids] or [self.before]


def _moved(context: str | np.ndarray, continuation: str | np.ndarray) -> tuple[str, str]:
    """The pair with the spaces at the end of the context before the continuation."""
    assert isinstance(context, str)
    assert isinstance(continuation, str)
    end = len(context.rstrip())
    return context[:end], context[end:] + continuation
