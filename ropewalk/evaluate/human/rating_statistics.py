"""Means of systems, their differences, agreement of raters with themselves, and how each rater differs from the others.

Intervals are percentile bootstraps that draw raters and prompts at the same time (the pigeonhole bootstrap: Owen 2007,
The pigeonhole bootstrap, Annals of Applied Statistics): a rating counts as often as its rater was drawn times its
prompt was. So they cover other raters and other prompts. They err to the wide side: what varies from rating to
rating counts three times. All systems are drawn with the same raters and prompts, so that differences are paired. With
one rater, prompts alone are drawn.

Shapes: R raters, I items, P prompts, B resamples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..intervals import RESAMPLES, proportion
from .agreement import alpha_interval, cohen_kappa, fleiss_interval, fleiss_kappa, krippendorff_alpha, quantiles
from .rating_form import Level
from .rating_table import RatingTable

Floats = npt.NDArray[np.float64]
Tree = dict[str, Any]
_LISTED = 10
"""Items in the list of disagreements."""
_TIE = 1e-12


def system_means(table: RatingTable, *, seed: int = 0) -> list[Tree]:
    """The mean of each system with its interval, and of each rater."""
    drawn = _Drawn(table, seed=seed)
    found = []
    for system in sorted(set(table.systems)):
        here_RI = np.where(table.of(system), table.first_RI, np.nan)
        there = ~np.isnan(here_RI)
        if there.any():
            found.append(
                {
                    "system": system,
                    "mean": float(here_RI[there].mean()),
                    "interval": _unanimous(table, here_RI) or drawn.interval(drawn.means(here_RI)),
                    "items": int(there.any(0).sum()),
                    "ratings": int(there.sum()),
                    "by_rater": _by_rater(table, here_RI),
                }
            )
    return found


def differences(table: RatingTable, *, seed: int = 0) -> list[Tree]:
    """Differences of the means of two systems over the prompts and raters that have both, with intervals; how many
    raters see the same sign."""
    drawn = _Drawn(table, seed=seed)
    systems = sorted(set(table.systems))
    found = []
    for number, one in enumerate(systems):
        for other in systems[number + 1 :]:
            ours, theirs = _paired(table, one, other)
            there = ~np.isnan(ours)
            if not there.any():
                continue
            value = float(ours[there].mean() - theirs[there].mean())
            raters = {
                rater: float(np.nanmean(ours[row]) - np.nanmean(theirs[row]))
                for row, rater in enumerate(table.raters)
                if there[row].any()
            }
            found.append(
                {
                    "systems": [one, other],
                    "difference": value,
                    # All equal: no resample differs, which says nothing of other prompts.
                    "interval": None
                    if abs(value) == 1 and table.is_share
                    else drawn.interval(drawn.means(ours) - drawn.means(theirs)),
                    "pairs": int(there.sum()),
                    "by_rater": raters,
                    "raters_agreeing": sum(abs(each) > _TIE and each * value > 0 for each in raters.values()),
                }
            )
    return found


def agreement(table: RatingTable, levels: tuple[Level, ...], *, seed: int = 0) -> Tree:
    """Krippendorff's alpha at each level, Fleiss' kappa, and Cohen's kappa of every two raters."""
    ratings_RU = table.shared_RI
    here = [rater for rater, row in zip(table.raters, table.first_RI, strict=True) if not np.isnan(row).all()]
    kappas = [
        {"raters": [here[i], here[j]], "value": cohen_kappa(ratings_RU[i], ratings_RU[j])}
        for i in range(len(here))
        for j in range(i + 1, len(here))
    ]
    return {
        "krippendorff": {
            level: {
                "value": krippendorff_alpha(ratings_RU, level),
                "interval": alpha_interval(ratings_RU, level, seed=seed),
            }
            for level in levels
        },
        "fleiss": {"value": fleiss_kappa(ratings_RU), "interval": fleiss_interval(ratings_RU, seed=seed)},
        "cohen": kappas,
        "items": int(((~np.isnan(ratings_RU)).sum(0) >= 2).sum()),
    }


def self_agreement(table: RatingTable, level: Level, *, seed: int = 0) -> Tree | None:
    """How far raters repeat themselves on repeated items; None without any."""
    both = ~np.isnan(table.first_RI) & ~np.isnan(table.again_RI)
    first, again = table.first_RI[both], table.again_RI[both]
    if not len(first):
        return None
    equal = proportion("equal", int((first == again).sum()), len(first))
    apart = np.abs(first - again)
    draws = np.random.default_rng(seed).multinomial(len(apart), np.full(len(apart), 1 / len(apart)), RESAMPLES)
    pairs = np.stack([first, again])
    return {
        "ratings": len(first),
        "equal": equal.value,
        "equal_interval": equal.interval,
        "mean_difference": float(apart.mean()),
        "mean_difference_interval": quantiles(draws @ apart / len(apart)) if len(apart) > 1 else None,
        "alpha": {
            "level": level,
            "value": krippendorff_alpha(pairs, level),
            "interval": alpha_interval(pairs, level, seed=seed),
        },
        "by_rater": {
            rater: float((table.first_RI[row] == table.again_RI[row])[both[row]].mean())
            for row, rater in enumerate(table.raters)
            if both[row].any()
        },
    }


def rater_rows(table: RatingTable) -> list[Tree]:
    """Each rater beside the mean of the others on the same items: severity, correlation, spread."""
    rows = []
    for number, rater in enumerate(table.raters):
        own = table.first_RI[number]
        others = np.delete(table.first_RI, number, 0)
        count = (~np.isnan(others)).sum(0)
        mean = np.divide(np.nansum(others, 0), count, out=np.full(len(own), np.nan), where=count > 0)
        given = own[~np.isnan(own)]
        both = ~np.isnan(own) & ~np.isnan(mean)
        if len(given):
            rows.append(
                {
                    "rater": rater,
                    "ratings": len(given),
                    "mean": float(given.mean()),
                    "spread": float(given.std()),
                    "severity": float((own - mean)[both].mean()) if both.any() else None,
                    "correlation": _correlation(own[both], mean[both]),
                }
            )
    return rows


def position_bias(table: RatingTable) -> Tree | None:
    """The share of decided pairs in which A was chosen, which is half without bias."""
    if not table.left:
        return None
    chosen = proportion("left", sum(table.left), len(table.left))
    return {"ratings": len(table.left), "first_shown": chosen.value, "interval": chosen.interval}


def disagreements(table: RatingTable) -> list[tuple[int, float]]:
    """(item, standard deviation between raters) of the items that they see most differently."""
    several = np.flatnonzero((~np.isnan(table.first_RI)).sum(0) >= 2)
    spread = np.nanstd(table.first_RI[:, several], axis=0)
    order = sorted(zip(several.tolist(), spread.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return [(item, size) for item, size in order[:_LISTED] if size > 0]


class _Drawn:
    """Resamples of raters and prompts, the same for all systems of a question."""

    def __init__(self, table: RatingTable, *, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self._prompts, self._place = np.unique(table.prompts_I, return_inverse=True)
        self._count = len(self._prompts)
        self._prompts_BP = draw.multinomial(self._count, np.full(self._count, 1 / self._count), RESAMPLES)
        active = np.flatnonzero((~np.isnan(table.first_RI)).any(1))
        raters = len(active)
        self._raters_BR = np.ones((RESAMPLES, len(table.raters)))
        if raters > 1:
            self._raters_BR[:, active] = draw.multinomial(raters, np.full(raters, 1 / raters), RESAMPLES)

    def means(self, values_RI: Floats) -> Floats:
        """The mean of what is there, in each resample; nan where nothing was drawn."""
        there = ~np.isnan(values_RI)
        sums_RP, counts_RP = (self._by_prompt(np.where(there, each, 0.0)) for each in (values_RI, 1.0))
        total_B, count_B = (((self._prompts_BP @ each.T) * self._raters_BR).sum(1) for each in (sums_RP, counts_RP))
        with np.errstate(invalid="ignore", divide="ignore"):
            return total_B / count_B

    def interval(self, drawn_B: Floats) -> tuple[float, float] | None:
        """The 95 % interval; None for a single prompt."""
        return quantiles(drawn_B) if self._count > 1 else None

    def _by_prompt(self, values_RI: Floats) -> Floats:
        return np.stack([np.bincount(self._place, weights=row, minlength=self._count) for row in values_RI])


def _unanimous(table: RatingTable, values_RI: Floats) -> tuple[float, float] | None:
    """Wilson's interval over items of a share that is 0 or 1, of which no resample differs; None of others."""
    columns = ~np.isnan(values_RI).all(0)
    mean = float(np.nanmean(values_RI))
    if not table.is_share or mean not in (0.0, 1.0):
        return None
    return proportion("unanimous", int(mean * columns.sum()), int(columns.sum())).interval


def _paired(table: RatingTable, one: str, other: str) -> tuple[Floats, Floats]:
    """Ratings of two systems by rater and item, the second one at the item of the first, nan unless both are there."""
    place = {int(table.prompts_I[item]): item for item in np.flatnonzero(table.of(other))}
    ours, theirs = np.full((2, *table.first_RI.shape), np.nan)
    for item in np.flatnonzero(table.of(one)):
        partner = place.get(int(table.prompts_I[item]))
        if partner is not None:
            both = ~np.isnan(table.first_RI[:, item]) & ~np.isnan(table.first_RI[:, partner])
            ours[both, item] = table.first_RI[both, item]
            theirs[both, item] = table.first_RI[both, partner]
    return ours, theirs


def _by_rater(table: RatingTable, values_RI: Floats) -> dict[str, float]:
    return {
        rater: float(np.nanmean(row))
        for rater, row in zip(table.raters, values_RI, strict=True)
        if not np.isnan(row).all()
    }


def _correlation(one: Floats, other: Floats) -> float | None:
    if len(one) < 3 or one.std() == 0 or other.std() == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])
