"""Changes the prompt of a question and keeps its meaning.

    def shouted(text, draw, strength):
        return text.upper()

A perturbation is such a function: `draw` is a `random.Random` that depends on the run's seed, the perturbation and the
question alone; `strength` multiplies the share of words or letters that change. It never sees what must stay as it is
(`protected.py`): each such span is one character of a private plane in the text that the function gets.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropewalk.base.errors import UserError
from ropewalk.base.seeds import seed_for

from ..question_task import Question
from .config import PERTURBATIONS, SUITES, PerturbationKind
from .protected import hidden, language_of, shown

Change = Callable[[str, random.Random, float], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """A perturbation of the table, ready for use."""

    name: str
    change: Change
    language: str
    rewrites_numbers: bool
    strength: float
    seed: int

    def question(self, question: Question) -> Question | None:
        """The question with another prompt; None if nothing changed. Choices, references and preamble stay."""
        draw = random.Random(seed_for(self.seed, "perturb", self.name, question.key))
        if not question.contexts:
            prompt = self.text(question.prompt, draw, keep=(*question.choices, *question.references))
            return None if prompt == question.prompt else dataclasses.replace(question, prompt=prompt)
        # Choices stand inside the contexts: what the contexts share changes alike, what differs stays.
        start, middles, end = _parts(question.contexts, question.preamble)
        preamble = question.preamble if start.startswith(question.preamble) else ""
        shared = f"{start[len(preamble) :]}{_HOLE}{end}"
        changed = self.text(shared, draw, keep=(_HOLE, *question.choices, *question.references))
        if changed == shared:
            return None
        contexts = tuple(preamble + changed.replace(_HOLE, middle) for middle in middles)
        return dataclasses.replace(question, contexts=contexts)

    def text(self, text: str, draw: random.Random, *, keep: Sequence[str] = ()) -> str:
        """`text` changed, without what is protected and the strings to `keep`."""
        if self.language not in ("any", language_of(text)):
            return text
        visible, spans = hidden(text, keep=keep, numbers=not self.rewrites_numbers)
        changed = self.change(visible, draw, self.strength)
        if not isinstance(changed, str):
            raise UserError(f"perturbation `{self.name}` must return text, not {type(changed).__name__}")
        return shown(changed, spans, otherwise=text)


def open_perturbations(names: Sequence[str], *, strength: float, seed: int) -> list[Perturbation]:
    """The perturbations of `evaluate.perturbations`; suites become their members."""
    found: dict[str, Perturbation] = {}
    for name in names:
        for each in _members(name) if name in SUITES else [name]:
            kind = PERTURBATIONS[each]
            found[each] = Perturbation(
                name=each,
                change=kind.load(),
                language=kind.language,
                rewrites_numbers=kind.rewrites_numbers,
                strength=strength,
                seed=seed,
            )
    return list(found.values())


def unchanged(text: str, draw: random.Random, strength: float) -> str:
    """The text as it is; `open_perturbations` replaces suites by their members."""
    return text


def _members(suite: str) -> list[str]:
    def belongs(kind: PerturbationKind) -> bool:
        return suite == "all" or kind.language in ("any", suite)

    return [name for name, kind in PERTURBATIONS.items() if name not in SUITES and belongs(kind)]


_HOLE = "\U00100000"
"""Stands for the part in which the contexts of a question differ."""


def _parts(contexts: Sequence[str], preamble: str) -> tuple[str, list[str], str]:
    """What the contexts begin with, where they differ, and what they end with; no word is cut."""
    start = _common_start(contexts)
    if any(len(context) > len(start) and context[len(start)].isalnum() for context in contexts):
        start = re.sub(r"[^\W_]+$", "", start)
    start = preamble if preamble.startswith(start) and all(c.startswith(preamble) for c in contexts) else start
    rests = [context[len(start) :] for context in contexts]
    end = _common_start([rest[::-1] for rest in rests])[::-1]
    if any(len(rest) > len(end) and rest[-len(end) - 1].isalnum() for rest in rests):
        end = re.sub(r"^[^\W_]+", "", end)
    return start, [rest[: len(rest) - len(end)] for rest in rests], end


def _common_start(texts: Sequence[str]) -> str:
    same = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)
