"""HUSE: human and statistical evaluation together (Hashimoto, Zhang, Liang 2019, Unifying human and statistical
evaluation for natural language generation).

Each text, by the model or by a person, is a point: the mean score that raters gave its typicality, and its
log-probability under the model per token, each divided by its standard deviation. HUSE is twice the leave-one-out error
of a nearest-neighbour classifier that tells model from human by these points: 1 if they cannot be told apart, 0 if
they always can. HUSE-Q does the same by the score alone (quality); HUSE-D = 1 + HUSE - HUSE-Q is what the
log-probability adds (diversity).

The classifier is that of the authors' program: a text is classified by the other texts within the distance of its 16th
nearest one, ties included; an equal vote counts as human.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError

from ..intervals import RESAMPLES, Interval, proportion
from .agreement import quantiles

Floats = npt.NDArray[np.float64]
NEIGHBOUR = 16
"""Texts up to the distance of this nearest one vote."""
_ROWS = 256
"""Texts whose distances are computed at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Huse:
    """HUSE and its parts, each with a 95 % interval."""

    huse: float
    quality: float
    diversity: float
    huse_interval: Interval | None
    quality_interval: Interval | None
    diversity_interval: Interval | None
    texts: int
    neighbour: int


def huse(
    scores_N: Floats,
    log_probabilities_N: Floats,
    tokens_N: npt.NDArray[np.int64],
    is_model_N: npt.NDArray[np.bool_],
    *,
    prompts_N: npt.NDArray[np.int64],
    neighbour: int = NEIGHBOUR,
    seed: int = 0,
) -> Huse:
    """HUSE of N texts. `scores_N` are means over raters; texts of one prompt are resampled together.

    The interval resamples whether each text was classified wrongly; neighbours stay those of all texts, because a text
    that is drawn twice would be its own neighbour.
    """
    if len(scores_N) <= neighbour:
        raise DataError(
            f"HUSE needs more than {neighbour} rated texts, not {len(scores_N)}: each is classified by its {neighbour} "
            "nearest; rate more items (the authors took 200 texts with 20 raters each)"
        )
    if is_model_N.all() or not is_model_N.any():
        raise DataError("HUSE needs rated texts of both the model and people; export sheets with human texts")
    per_token_N = log_probabilities_N / tokens_N
    both = wrong_votes(np.stack([_scaled(scores_N), _scaled(per_token_N)], 1), is_model_N, neighbour=neighbour)
    alone = wrong_votes(_scaled(scores_N)[:, None], is_model_N, neighbour=neighbour)
    whole, quality = 2 * both.mean(), 2 * alone.mean()
    numbers, prompts = np.unique(prompts_N, return_inverse=True)
    sums_PK = np.stack([np.bincount(prompts, weights=values) for values in (both, alone, np.ones(len(both)))], 1)
    drawn = np.random.default_rng(seed).multinomial(len(numbers), np.full(len(numbers), 1 / len(numbers)), RESAMPLES)
    sums_BK = drawn @ sums_PK
    wholes_B, qualities_B = 2 * sums_BK[:, 0] / sums_BK[:, 2], 2 * sums_BK[:, 1] / sums_BK[:, 2]
    several = len(numbers) > 1
    return Huse(
        huse=float(whole),
        quality=float(quality),
        diversity=float(1 + whole - quality),
        huse_interval=_doubled(both, wholes_B) if several else None,
        quality_interval=_doubled(alone, qualities_B) if several else None,
        diversity_interval=quantiles(1 + wholes_B - qualities_B) if several else None,
        texts=len(scores_N),
        neighbour=neighbour,
    )


def wrong_votes(points_ND: Floats, is_model_N: npt.NDArray[np.bool_], *, neighbour: int) -> Floats:
    """1 for each text that its nearest others (up to the distance of number `neighbour`, ties included) classify
    wrongly, else 0."""
    wrong = np.zeros(len(points_ND))
    for first in range(0, len(points_ND), _ROWS):
        here = np.arange(first, min(first + _ROWS, len(points_ND)))
        apart = ((points_ND[here, None] - points_ND) ** 2).sum(2)
        apart[here - first, here] = np.inf  # leave one out
        limit = np.partition(apart, neighbour - 1, axis=1)[:, neighbour - 1 : neighbour]
        near = apart <= limit
        votes = (near & is_model_N).sum(1)
        wrong[here] = (2 * votes > near.sum(1)) != is_model_N[here]
    return wrong


def _doubled(wrong_N: Floats, drawn_B: Floats) -> Interval | None:
    """The interval of twice the share of wrong votes. Resamples of none or all wrong never differ: there it is
    Wilson's."""
    if 0 < wrong_N.sum() < len(wrong_N):
        return quantiles(drawn_B)
    interval = proportion("wrong", int(wrong_N.sum()), len(wrong_N)).interval
    return interval and (2 * interval[0], 2 * interval[1])


def _scaled(values: Floats) -> Floats:
    """Divided by the standard deviation; constant values tell nothing and become 0."""
    spread = values.std()
    return values / spread if spread > 0 else np.zeros_like(values)
