"""F1 over tokens, and the words of any script."""

from __future__ import annotations

import pytest

from ropewalk.base.metric import SHARE
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.metrics.token_f1 import TokenF1, answer_tokens
from ropewalk.evaluate.metrics.word_tokens import language_of, words

from .texts import answered


def test_answers_lose_case_punctuation_and_articles() -> None:
    assert answer_tokens("The U.S.A.'s  an-swer, a “rope”!") == ["usas", "answer", "rope"]
    assert answer_tokens("Anatole paid $5") == ["anatole", "paid", "5"]
    assert answer_tokens("北京市（中国）2008") == ["北", "京", "市", "中", "国", "2008"]


def test_f1_counts_common_tokens_of_the_best_reference() -> None:
    metric = TokenF1()
    assert metric.score(answered("the cat sat sat", "a cat sat down", "dog")) == pytest.approx(2 * 2 / 6)
    assert metric.score(answered("北京", "北京市")) == pytest.approx(0.8)
    assert metric.score(answered("The", "")) == 1
    assert metric.score(answered("rope", "")) == metric.score(answered("", "rope")) == 0
    assert metric.score(answered("rope")) is None


def test_the_mean_is_a_share() -> None:
    (found,) = measured(TokenF1(), [answered("a b", "b"), answered("x", "y"), answered("no reference")])
    assert (found.value, found.n, found.unit) == (0.5, 2, SHARE)


def test_words_of_any_script() -> None:
    assert words("Don't STOP_it: 3.5 Ropes") == ["don", "t", "stop", "it", "3", "5", "ropes"]
    assert words("我爱rope，ＡＢＣ。") == ["我", "爱", "rope", "abc"]
    assert words("हिन्दी भाषा") == ["हिन्दी", "भाषा"]
    assert words("ひもAb") == ["ひ", "も", "ab"]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("今天天气很好", "zh"),
        ("我用 GPU 训练 大模型", "zh"),
        ("縄を編むのが好きです", "ja"),
        ("A word: 绳", ""),
        ("", ""),
    ],
)
def test_the_language_is_that_of_most_words(text: str, language: str) -> None:
    assert language_of([text]) == language
