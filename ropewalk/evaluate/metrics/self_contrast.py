"""Self-contrast, KoLA's score of knowledge creation (Yu et al. 2024).

The model continues a story twice: from the story alone (T), and with the events of the true continuation R given (Tk).
T and Tk differ by knowledge, not by style. A model that foresees what follows writes a T that is close to R and Tk;
one that follows given events writes a Tk close to R.
"""

from __future__ import annotations

import functools
import unicodedata
from typing import TYPE_CHECKING, Any, Literal

from ropewalk.base.errors import MissingPackage, UserError

from .item_metric import ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item


class SelfContrast(ItemMetric):
    """Mean over stories, in points of ROUGE-L F1 (d, 0 to 100).

    Variant `code`, as KoLA's scripts compute it: d(T, R) + d(Tk, R) - d(T, Tk), from -100 to 200; it punishes a T that
    is like Tk. Variant `paper`, as the paper describes it: the mean of d(T, R), d(Tk, R) and d(T, Tk). Of several
    references the closest counts.
    """

    name = "self_contrast"
    unit = "points"
    of = "question"

    def __init__(self, *, variant: Literal["code", "paper"] = "code") -> None:
        if variant not in ("code", "paper"):
            raise UserError(f'metric `self_contrast`: no variant "{variant}"; use "code" or "paper"')
        _scorer()  # before anything is generated: it needs a package
        self.variant = variant
        self.name = "self_contrast" if variant == "code" else f"self_contrast_{variant}"
        formula = {"code": "2*avg(d(T,R),d(Tk,R))-d(T,Tk)", "paper": "avg(d(T,R),d(Tk,R),d(T,Tk))"}[variant]
        self.signature = f"{variant}:{formula}|d:rouge-l-f1|tok:words,han"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        if len(item.predictions) != 2:
            raise UserError(
                f"metric `self_contrast` compares two completions, without and with the events; question "
                f"{item.question.key} has {len(item.predictions)}. Use it in task `knowledge-creation`"
            )
        references = item.question.references
        if not references:
            return None
        alone, knowing = item.predictions
        to_reference = [max(rouge_l(each, reference) for reference in references) for each in (alone, knowing)]
        between = rouge_l(alone, knowing)
        if self.variant == "code":
            return sum(to_reference) - between, 1.0
        return (sum(to_reference) + between) / 3, 1.0


def rouge_l(first: str, second: str) -> float:
    """ROUGE-L F1 of two texts, 0 to 100."""
    return 100 * float(_scorer().score(first, second)["rougeL"].fmeasure)


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise MissingPackage("rouge-score", "self-contrast", "evaluate") from None
    return RougeScorer(["rougeL"], tokenizer=_Words())


class _Words:
    """Words in lower case; each ideograph, kana or other letter of a script without spaces is one."""

    def tokenize(self, text: str) -> list[str]:
        """The words of `text`."""
        spaced = (_spaced(letter) for letter in unicodedata.normalize("NFKC", text).lower())
        return "".join(spaced).split()


def _spaced(letter: str) -> str:
    category = unicodedata.category(letter)
    if category == "Lo" and ord(letter) >= 0x0E00:  # Thai and beyond; Hangul too
        return f" {letter} "
    return letter if category[0] in "LMN" else " "
