"""Contamination: which questions of a task stand in the run's own training corpus, and the metrics without them.

The rule is that of GPT-3 (Brown et al. 2020, appendix C): a question is contaminated if any of its n-grams of N words
stands in a training document, where N is the 5th percentile of the questions' lengths in words, at least 8 and at most
13. A question is its prompt with the right answer; few-shot examples and instructions do not count. Questions with
fewer than N words cannot be judged: they count as clean, and are reported.

An overlap says that a text was seen, not that it helped: compare the score on the clean questions, and its interval,
with the score on all of them. Paraphrases and translations are not found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.base.metric import Metric, metrics_tree
from ropewalk.base.progress import Progress
from ropewalk.prepare.overlap import Overlap, overlaps_with
from ropewalk.prepare.spelling import words_of

from .question_task import Item, Question

Measure = Callable[[Sequence[Item]], Sequence[Metric]]
"""The metrics of some items of a task."""
LEAST_WORDS, MOST_WORDS = 8, 13
MOST_EVIDENCE = 20
"""Contaminated questions of a task that are written with what was found."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A contaminated question and the training document that holds a part of it."""

    key: str
    span: str
    """The first n-gram of the question that was found."""
    share: float
    """Share of the question's n-grams that were found."""
    document: str
    source: str


@dataclass(frozen=True, slots=True)
class Contamination:
    """How much of a task stands in the training corpus, and its metrics on the rest."""

    words: int
    """Words per n-gram."""
    questions: int
    contaminated: int
    unchecked: int
    """Questions with fewer words than one n-gram."""
    clean: Sequence[Metric]
    """The task's metrics over the questions that are not contaminated; empty if all are."""
    evidence: Sequence[Evidence]

    def tree(self) -> dict[str, Any]:
        """As `evaluation/results.json` keeps it."""
        return {
            "words": self.words,
            "questions": self.questions,
            "contaminated": self.contaminated,
            "unchecked": self.unchecked,
            "clean": metrics_tree(self.clean),
            "evidence": [
                {"key": e.key, "span": e.span, "share": round(e.share, 4), "document": e.document, "source": e.source}
                for e in self.evidence
            ],
        }


def find_contamination(
    folder: Path,
    tasks: Mapping[str, tuple[Sequence[Item], Measure]],
    *,
    progress: Progress | None = None,
) -> dict[str, Contamination]:
    """Searches the training split prepared in `folder` for the items of each task, all in one pass. Each task says how
    its clean items are measured."""
    texts = {name: [question_text(item.question) for item in items] for name, (items, _) in tasks.items()}
    words = {name: ngram_words(found) for name, found in texts.items()}
    asked = [(text, words[name]) for name, found in texts.items() for text in found]
    overlaps = iter(overlaps_with(folder, *zip(*asked, strict=True), progress=progress)) if asked else iter(())
    return {
        name: _contamination(items, measure, [next(overlaps) for _ in items], words[name])
        for name, (items, measure) in tasks.items()
    }


def question_text(question: Question) -> str:
    """The text that is looked for: the task's own query if it has one, else the prompt, or the right context, with the
    right answer."""
    if question.query:
        return question.query
    right = question.gold[0] if question.gold and question.gold[0] < len(question.choices) else None
    prompt = question.contexts[right] if question.contexts and right is not None else question.prompt
    answer = question.choices[right] if right is not None else next(iter(question.references), "")
    return f"{prompt} {answer}"


def ngram_words(texts: Sequence[str]) -> int:
    """N for these questions."""
    lengths = [len(words_of(text).hashes) for text in texts]
    return int(np.clip(np.percentile(lengths, 5), LEAST_WORDS, MOST_WORDS)) if lengths else MOST_WORDS


def _contamination(items: Sequence[Item], measure: Measure, overlaps: Sequence[Overlap], words: int) -> Contamination:
    pairs = list(zip(items, overlaps, strict=True))
    clean = [item for item, overlap in pairs if not overlap.found]
    dirty = sorted(((i, o) for i, o in pairs if o.found), key=lambda pair: -pair[1].found / pair[1].ngrams)
    return Contamination(
        words=words,
        questions=len(items),
        contaminated=len(dirty),
        unchecked=sum(overlap.ngrams == 0 for overlap in overlaps),
        clean=measure(clean),
        evidence=[
            Evidence(item.question.key, o.span, o.found / o.ngrams, o.origin.id, o.origin.source)
            for item, o in dirty[:MOST_EVIDENCE]
            if o.origin
        ],
    )
