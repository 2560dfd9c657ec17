"""Intervals over documents, against the closed form for many documents."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ropewalk.evaluate.intervals import intervals


def drawn(count: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(200, 4000, count)
    tokens = sizes // 4
    nats = tokens * draw.normal(2.5, 0.4, count)
    return {"nats": nats, "sizes": sizes, "tokens": tokens, "correct": draw.binomial(tokens, 0.4)}


def of(data: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    return intervals(data["nats"], sizes=data["sizes"].tolist(), tokens=data["tokens"], correct=data["correct"])


def closed_form(over: np.ndarray, under: np.ndarray) -> tuple[float, float]:
    """Of a ratio of sums: its value and standard error by linearization."""
    ratio = over.sum() / under.sum()
    error = math.sqrt(len(over) / (len(over) - 1) * ((over - ratio * under) ** 2).sum()) / under.sum()
    return ratio, error


@pytest.mark.parametrize("metric", ["bits_per_byte", "loss", "accuracy"])
def test_intervals_of_many_documents_are_those_of_the_normal_approximation(metric: str) -> None:
    data = drawn(800)
    pairs = {
        "bits_per_byte": (data["nats"] / math.log(2), data["sizes"]),
        "loss": (data["nats"], data["tokens"]),
        "accuracy": (data["correct"], data["tokens"]),
    }
    ratio, error = closed_form(*pairs[metric])
    low, high = of(data)[metric]
    # A thousand draws know a percentile of 2.5 % to about 4 % of the width.
    assert (low, high) == pytest.approx((ratio - 1.96 * error, ratio + 1.96 * error), abs=0.3 * error)


def test_the_same_documents_give_the_same_intervals_and_one_gives_none() -> None:
    assert of(drawn(30)) == of(drawn(30))
    assert of(drawn(30)) != of(drawn(30, seed=1))
    assert of(drawn(1)) is None
    alike = {"nats": np.full(5, 300.0), "sizes": np.full(5, 400), "tokens": np.full(5, 100), "correct": np.full(5, 40)}
    bits = 300 / math.log(2) / 400
    assert of(alike) == {
        "bits_per_byte": pytest.approx((bits, bits)),
        "loss": pytest.approx((3.0, 3.0)),
        "accuracy": pytest.approx((0.4, 0.4)),
    }
