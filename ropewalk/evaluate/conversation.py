"""Chat with a model on one device.

The prompt of an answer has all turns that fit the context. When it is full, the oldest question and answer are dropped;
the system text stays. Turns are never truncated.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ropewalk.base.errors import UserError
from ropewalk.checkpoint.format import TOKENIZER
from ropewalk.prepare.chat import ANSWERS, Turn
from ropewalk.prepare.foreign import encoding, try_text
from ropewalk.prepare.tokenizer import end_of_text, read, vocabulary_size

from .decode.stop_strings import pieces_before
from .from_checkpoint import chat_encoder, load_model, read_sampling, spelled, until
from .generate import stream


class Conversation:
    """A model and the turns so far."""

    def __init__(
        self,
        path: Path,
        *,
        template: str,
        own_template: str,
        system: str,
        sampling: Mapping[str, Any],
        seed: int,
    ) -> None:
        """`sampling` has the fields of `Sampling`."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._path = path / TOKENIZER
        self._model, self.step, tokenizer = load_model(path, device=device, texts=[system])
        self._tokenizer, self._content = tokenizer, read(path)
        self._end = end_of_text(tokenizer, path=self._path)
        with encoding(self._path):
            self._chat = chat_encoder(template, tokenizer, end=self._end)
        self.template, self.own_template = template, own_template
        """The template in use, and that of the training data (empty: no dialogues)."""
        self.context: int = self._model.spec.sequence_length
        """Maximum tokens of context."""
        self._sampling, self._seed = read_sampling(sampling), seed
        self._tokens = self._sampling.max_new_tokens
        self._system = [Turn("system", system)] if system else []
        self.reset()

    def reset(self) -> None:
        """Removes all turns except the system text."""
        self.turns: list[Turn] = []
        self.answers = 0
        """Answers given, including dropped ones."""
        self.dropped = 0
        """Turns dropped for the last answer."""
        self.drawn = 0
        """Tokens of the last answer."""

    @property
    def ended(self) -> bool:
        """Whether the model ended its last answer before the maximum number of tokens."""
        return self.drawn < self._tokens

    def answer(self, question: str) -> Generator[str, None, None]:
        """Generates the answer piece by piece. If the caller stops early, later turns see the answer so far. Raises
        UserError at once if the question exceeds the context."""
        prompt = self._prompt(question)
        return self._answer(question, prompt)

    def _answer(self, question: str, prompt: list[int]) -> Generator[str, None, None]:
        text, self.drawn = "", 0
        seed = self._seed + self.answers
        drawn = stream(
            self._model,
            prompt,
            self._sampling,
            seed=seed,
            end=self._end,
            vocabulary=vocabulary_size(self._tokenizer),
        )
        try:
            pieces = spelled(until(self._counted(drawn), self._chat.closing), self._tokenizer)
            for piece in pieces_before(pieces, self._sampling.stop):
                text += piece
                yield piece
        finally:
            self.answers += 1
            self.turns += [Turn("user", question), Turn(ANSWERS, text)]

    def _counted(self, tokens: Iterator[int]) -> Iterator[int]:
        for token in tokens:
            self.drawn += 1
            yield token

    def _prompt(self, question: str) -> list[int]:
        """The prompt tokens; drops the oldest turns until they fit."""
        try_text(self._content, question, path=self._path)
        # A longer answer continues with the newer half of the text (evaluate/generate.py).
        room = self.context - min(self._tokens, self.context // 2)
        self.dropped = 0
        while True:
            with encoding(self._path):
                prompt = [self._end, *self._chat.prompt([*self._system, *self.turns, Turn("user", question)])]
            if len(prompt) <= room or not self.turns:
                break
            del self.turns[:2]
            self.dropped += 2
        if len(prompt) >= self.context:
            before = " with the system text" if self._system else ""
            raise UserError(
                f"this question{before} has {len(prompt)} tokens; the model sees {self.context}; shorten it"
            )
        return prompt
