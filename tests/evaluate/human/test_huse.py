"""HUSE beside its definition written out, and data whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from ropewalk.base.errors import DataError
from ropewalk.evaluate.human.huse import Huse, huse, wrong_votes


def by_definition(points: np.ndarray, is_model: np.ndarray) -> float:
    """Twice the leave-one-out error, in plain loops: the others not farther than the 16th nearest vote, an equal vote
    says human."""
    wrong = 0
    for i in range(len(points)):
        distances = {
            j: sum((a - b) ** 2 for a, b in zip(points[i], points[j], strict=True))
            for j in range(len(points))
            if j != i
        }
        limit = sorted(distances.values())[15]
        votes = [bool(is_model[j]) for j, distance in distances.items() if distance <= limit]
        says_model = votes.count(True) > votes.count(False)
        wrong += says_model != bool(is_model[i])
    return 2 * wrong / len(points)


def study(seed: int, *, texts: int = 100, score_gap: float = 0.0, log_gap: float = 0.0) -> dict[str, np.ndarray]:
    """`texts` by the model and as many by people; scores are means of few raters, with ties."""
    draw = np.random.default_rng(seed)
    is_model = np.arange(2 * texts) % 2 == 0
    tokens = draw.integers(5, 60, 2 * texts)
    return {
        "scores_N": np.round(draw.normal(3, 0.6, 2 * texts) - score_gap * is_model, 1),
        "log_probabilities_N": (draw.normal(-3, 0.4, 2 * texts) + log_gap * is_model) * tokens,
        "tokens_N": tokens,
        "is_model_N": is_model,
        "prompts_N": np.arange(2 * texts) // 2,
    }


def measured(found: dict[str, np.ndarray]) -> Huse:
    names = ("scores_N", "log_probabilities_N", "tokens_N", "is_model_N")
    return huse(*(found[name] for name in names), prompts_N=found["prompts_N"])


@pytest.mark.parametrize("seed", range(4))
def test_huse_is_its_definition_written_out(seed: int) -> None:
    data = study(seed, texts=60, score_gap=0.3 * seed, log_gap=0.2)
    found = measured(data)
    scores, per_token = data["scores_N"], data["log_probabilities_N"] / data["tokens_N"]
    scores, per_token = scores / scores.std(), per_token / per_token.std()
    assert found.huse == pytest.approx(by_definition(np.stack([scores, per_token], 1), data["is_model_N"]))
    assert found.quality == pytest.approx(by_definition(scores[:, None], data["is_model_N"]))
    assert found.diversity == pytest.approx(1 + found.huse - found.quality)


def test_all_ties_at_the_limit_vote_and_an_equal_vote_says_human() -> None:
    """40 texts with one score: all others vote. Those of each text have one more of the other kind."""
    points, is_model = np.zeros((40, 1)), np.arange(40) % 2 == 0
    assert wrong_votes(points, is_model, neighbour=16).mean() == 1
    is_model[0] = False  # 19 by the model, 21 by people: for a text by a person 19 against 20
    assert wrong_votes(points, is_model, neighbour=16).tolist() == is_model.astype(float).tolist()
    even = np.arange(41) % 2 == 1  # 20 by the model, 21 by people: 20 against 20 for a text by a person
    assert wrong_votes(np.zeros((41, 1)), even, neighbour=16).tolist() == even.astype(float).tolist()


def test_a_perfect_model_cannot_be_told_from_people() -> None:
    found = [measured(study(seed, texts=200)) for seed in range(3)]
    # The error of a coin over 400 texts has a standard deviation of .025, twice it .05.
    assert np.mean([each.huse for each in found]) == pytest.approx(1, abs=0.12)
    assert np.mean([each.quality for each in found]) == pytest.approx(1, abs=0.12)


def test_bad_texts_cost_quality_and_repetitive_ones_diversity() -> None:
    bad = measured(study(1, score_gap=6))
    assert (bad.huse, bad.quality, bad.diversity) == (0, 0, 1)
    repetitive = measured(study(1, log_gap=6))  # every text of the model is far likelier than any by a person
    assert repetitive.huse == 0
    assert repetitive.quality > 0.8
    assert repetitive.diversity < 0.2


def test_two_normal_clouds_give_twice_the_error_that_is_possible() -> None:
    """Scores one standard deviation to each side: the best classifier errs with probability .159."""
    draw = np.random.default_rng(0)
    is_model = np.arange(3000) % 2 == 0
    scores = draw.normal(0, 1, 3000) + np.where(is_model, -1, 1)
    error = wrong_votes(scores[:, None], is_model, neighbour=16).mean()
    assert error == pytest.approx(0.1587, abs=0.025)


def test_intervals_hold_the_values_and_narrow_with_more_texts() -> None:
    small, large = (measured(study(2, texts=texts, score_gap=0.4, log_gap=0.3)) for texts in (40, 400))
    for found in (small, large):
        for name in ("huse", "quality", "diversity"):
            low, high = getattr(found, f"{name}_interval")
            assert low <= getattr(found, name) <= high
    width = [found.huse_interval[1] - found.huse_interval[0] for found in (small, large)]
    assert width[1] < width[0] / 2
    low, high = measured(study(1, score_gap=6)).huse_interval  # no error at all still has an interval
    assert low == 0 < high


def test_too_few_texts_or_one_kind_only_are_refused() -> None:
    with pytest.raises(DataError, match="more than 16 rated texts, not 16"):
        measured(study(0, texts=8))
    data = study(0)
    data["is_model_N"] = np.ones(200, bool)
    with pytest.raises(DataError, match="both the model and people"):
        measured(data)
