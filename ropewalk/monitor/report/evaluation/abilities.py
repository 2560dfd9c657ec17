"""What a model can do, at a glance: its abilities, and the levels of knowledge of KoLA."""

from __future__ import annotations

from ropewalk.base.metric import SHARE
from ropewalk.base.progress import counted

from ...draw.forest import Estimate, forest_figure
from ...draw.markup import Markup
from ...evaluation_view import Ability, EvaluationView

OURS = "Abilities in grey were asked with a few items of our own: a smoke test, not a benchmark."
KOLA = {"KM": "memorisation", "KU": "understanding", "KA": "application", "KC": "creation"}


def ability_figure(view: EvaluationView) -> Markup | None:
    """Each ability from chance to all right, with its interval."""
    abilities = view.abilities
    if not abilities:
        return None
    rows = [_estimate(ability) for ability in abilities]
    note = OURS if any(ability.ours for ability in abilities) else ""
    return forest_figure(
        "Abilities", "score above chance, with 95 % intervals", rows, ends=("chance", "all right"), note=note
    )


def level_figure(view: EvaluationView) -> Markup | None:
    """The levels of KoLA, from the tasks whose headline is a share."""
    levels = view.levels()
    rows = []
    for level, found in levels.items():
        for task, metric in found:
            if metric.unit == SHARE:
                label = (
                    f"{level} {KOLA.get(level, '')}: {task}" if len(found) > 1 else f"{level} {KOLA.get(level, task)}"
                )
                rows.append(Estimate(label, metric.value, metric.interval, metric.text()))
    note = "Scores of one model alone; “ropewalk compare” standardises them over several, as KoLA does."
    return forest_figure("Knowledge by level", "KoLA", rows, ends=("0 %", "100 %"), note=note) if rows else None


def _estimate(ability: Ability) -> Estimate:
    measured = f" ({counted(ability.items, 'item')})" if ability.items is not None else ""
    tone = "plain" if ability.ours else "tone-0"
    shown = f"{100 * ability.value:.0f} %".replace("-", "−")
    return Estimate(f"{ability.name}{measured}", ability.value, ability.interval, shown, tone)
