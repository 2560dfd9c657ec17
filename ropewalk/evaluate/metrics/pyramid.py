"""The PYRAMID score of a summary (Nenkova and Passonneau 2004): exact for annotated summaries, automatic for others.

The score is the weight of the content units in a summary over the largest weight possible. `original` compares with a
summary of as many units, which rewards precision; `modified` with one of as many units as a reference has on average,
which rewards recall.

Automatically, a unit is found where one sentence holds most of the words of one of its expressions, by stem and without
function words. Its agreement with people is measured by `agreement`; report it beside the score.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ropewalk.base.errors import UserError

from .item_metric import ItemMetric
from .meteor import FUNCTION_WORDS
from .pyramid_files import Annotation, Contributor, Pyramid, TextPart, read_pyramid
from .rouge import UnicodeTokenizer, porter_stem

if TYPE_CHECKING:
    from ..question_task import Item

THRESHOLD = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class PyramidScore:
    """The score of a summary."""

    weight: int
    """The sum of weights of its units."""
    found: int
    """Units of the pyramid that it has."""
    other: int
    """Its units that are not in the pyramid."""
    original: float
    modified: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Units that a program found against those that people found, over any number of summaries."""

    precision: float
    recall: float
    f1: float
    kappa: float
    """Cohen's, over all pairs of a summary and a unit of its pyramid."""
    pairs: int


def pyramid_score(annotation: Annotation) -> PyramidScore:
    """The score of an annotated summary, which people or `annotate` made."""
    pyramid = annotation.pyramid
    found = [unit for unit in pyramid.units if annotation.found.get(unit.uid)]
    weight, other = sum(unit.weight for unit in found), len(annotation.other)
    alike, average = pyramid.largest_sum(len(found) + other), pyramid.largest_sum(round(pyramid.units_per_reference))
    return PyramidScore(
        weight=weight,
        found=len(found),
        other=other,
        original=weight / alike if alike else 0.0,
        modified=weight / average,
    )


def annotate(pyramid: Pyramid, summary: str, *, threshold: float = THRESHOLD) -> Annotation:
    """The summary with the units that a program finds; sentences without any count as one unit outside the pyramid."""
    sentences = [match for match in _SENTENCE.finditer(summary) if _stems(match.group())]
    expressions = [Contributor(each.group(), (TextPart(each.group(), *each.span()),)) for each in sentences]
    stems = [_stems(each.group()) for each in sentences]
    found: dict[str, tuple[Contributor, ...]] = {}
    used: set[int] = set()
    for unit in pyramid.units:
        texts = [unit.label, *(each.label for each in unit.contributors)]
        best = max(range(len(stems)), key=lambda at: _overlap(texts, stems[at]), default=None)
        if best is not None and _overlap(texts, stems[best]) >= threshold:
            found[unit.uid] = (expressions[best],)
            used.add(best)
    other = tuple(each for at, each in enumerate(expressions) if at not in used)
    return Annotation(pyramid, tuple(summary.splitlines()), found, other)


def agreement(pairs: Sequence[tuple[Annotation, Annotation]]) -> Agreement:
    """How well automatic annotations (second) find the units of manual ones (first)."""
    both = only_people = only_program = neither = 0
    for people, program in pairs:
        for unit in people.pyramid.units:
            by_people, by_program = bool(people.found.get(unit.uid)), bool(program.found.get(unit.uid))
            both += by_people and by_program
            only_people += by_people and not by_program
            only_program += by_program and not by_people
            neither += not (by_people or by_program)
    n = both + only_people + only_program + neither
    chance = ((both + only_people) * (both + only_program) + (neither + only_people) * (neither + only_program)) / n**2
    return Agreement(
        precision=both / max(1, both + only_program),
        recall=both / max(1, both + only_people),
        f1=2 * both / max(1, 2 * both + only_people + only_program),
        kappa=((both + neither) / n - chance) / (1 - chance) if chance < 1 else 1.0,
        pairs=n,
    )


class AutomaticPyramid(ItemMetric):
    """The mean automatic score of completions; the field `pyramid` of a question's document names its .pyr file."""

    of = "summary"

    def __init__(
        self, *, score: Literal["modified", "original"] = "modified", threshold: float = THRESHOLD, folder: str = ""
    ) -> None:
        """`folder` holds the files that documents name."""
        if score not in ("modified", "original"):
            raise UserError(f'pyramid: no score "{score}"; known: modified, original')
        self.name = "pyramid" if score == "modified" else "pyramid_original"
        self._score, self._threshold, self._folder = score, threshold, Path(folder)
        self.signature = f"automatic|{score}|stem overlap>={threshold}|stem:porter|mean of items"

    def statistics(self, item: Item) -> tuple[float, float]:
        name = item.question.document.get("pyramid")
        if not isinstance(name, str):
            raise UserError(f"{self.name}: a question's document has no field `pyramid` with the path of a .pyr file")
        found = annotate(_read_once(self._folder / name), item.predictions[0], threshold=self._threshold)
        return float(getattr(pyramid_score(found), self._score)), 1.0


_SENTENCE = re.compile(r"\S[^\n]*?(?:[.!?;]+(?=\s|$)|[。！？；]+|$)", re.MULTILINE)
_read_once = functools.lru_cache(256)(read_pyramid)


@functools.lru_cache(1 << 14)
def _stems(text: str) -> frozenset[str]:
    found = _tokenizer().tokenize(text)
    return frozenset(found) - _function_stems() or frozenset(found)


@functools.cache
def _tokenizer() -> UnicodeTokenizer:
    return UnicodeTokenizer(porter_stem())


@functools.cache
def _function_stems() -> frozenset[str]:
    return frozenset(stem for word in FUNCTION_WORDS for stem in _tokenizer().tokenize(word))


def _overlap(texts: Iterable[str], sentence: frozenset[str]) -> float:
    """The largest share of a text's stems that the sentence holds."""
    return max((len(_stems(text) & sentence) / len(_stems(text)) for text in texts if _stems(text)), default=0.0)
