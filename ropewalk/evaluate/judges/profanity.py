"""A linear model of insulting words, which comes inside a package (alt-profanity-check); English."""

from __future__ import annotations

from collections.abc import Sequence

from ropewalk.base.errors import MissingPackage


class Profanity:
    """The probability that a text insults, of a linear model over words (200,000 annotated comments)."""

    name = "profanity"

    def __init__(self) -> None:
        try:
            from importlib.metadata import version

            from profanity_check import predict_prob
        except ImportError:
            raise MissingPackage("alt-profanity-check", "the judge of toxicity `profanity`", "toxicity") from None
        self._predict = predict_prob
        self.version = version("alt-profanity-check")

    def scores(self, texts: Sequence[str], contexts: Sequence[str]) -> list[float]:
        return [float(each) for each in self._predict(list(texts))] if texts else []
