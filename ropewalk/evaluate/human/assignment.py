"""Who sees what in which order: the items, and a balanced, seeded order for each rater.

Every rater rates every item once, so that raters can be compared. A sheet has as many rounds as a prompt has items; in
round k, rater r sees item (p + k + r) mod S of prompt p. So

- items of one prompt stand a round apart,
- over S consecutive raters each item of a prompt occurs once in every round (a Latin square), so that no system gains
  from coming first,
- in each round every system occurs equally often, up to one.

The order of the prompts within a round is random, another one for each rater and round. Repeated items come from the
first half of the sheet and return half a sheet later; they measure how far raters agree with themselves.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ropewalk.base.errors import UserError
from ropewalk.base.seeds import seed_for

from .candidates import PromptTexts
from .rating_form import Mode

MOST_REPEATED = 0.5
"""Share of items that return: only those of the first half can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatedItem:
    """What one rating is about: a text, or two to compare."""

    prompt: int
    """Number of the prompt."""
    systems: tuple[str, ...]
    """One, or two in mode `pairwise`."""
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetLine:
    """One line of a rater's sheet."""

    id: str
    """Random letters that say nothing of the item."""
    item: int
    repeat: bool
    """Whether the rater has seen the item before."""
    swapped: bool
    """Whether the second text of a pair is shown as A."""


def choose_items(
    prompts: Sequence[PromptTexts], *, mode: Mode, count: int, seed: int
) -> tuple[list[PromptTexts], list[RatedItem]]:
    """(prompts, items): `count` items at most, of whole prompts. Prompts that most systems have completed come first,
    then a seeded order."""
    shuffled = sorted(enumerate(prompts), key=lambda pair: seed_for(seed, "human item", pair[0]))
    in_order = sorted((entry for _, entry in shuffled), key=lambda entry: -len(entry.texts))
    chosen: list[PromptTexts] = []
    items: list[RatedItem] = []
    for entry in in_order:
        systems = sorted(entry.texts)
        groups = list(itertools.combinations(systems, 2)) if mode == "pairwise" else [(one,) for one in systems]
        if not groups or len(items) + len(groups) > count:
            continue
        number = len(chosen)
        chosen.append(entry)
        items += [
            RatedItem(prompt=number, systems=group, texts=tuple(entry.texts[system] for system in group))
            for group in groups
        ]
    if not items and mode == "pairwise" and max((len(entry.texts) for entry in prompts), default=0) < 2:
        raise UserError("--mode pairwise compares two texts: name two runs, or one whose samples have a reference")
    if not items:
        raise UserError(f"--items {count} is fewer than the texts of one prompt; raise it")
    return chosen, items


def assign(items: Sequence[RatedItem], *, raters: int, repeat: float, seed: int) -> dict[str, list[SheetLine]]:
    """The lines of each rater's sheet, by the rater's name."""
    by_prompt: dict[int, list[int]] = {}
    for number, item in enumerate(items):
        by_prompt.setdefault(item.prompt, []).append(number)
    return {
        f"r{rater + 1}": _lines(items, list(by_prompt.values()), rater=rater, repeat=repeat, seed=seed)
        for rater in range(raters)
    }


def _lines(
    items: Sequence[RatedItem], by_prompt: list[list[int]], *, rater: int, repeat: float, seed: int
) -> list[SheetLine]:
    draw = random.Random(seed_for(seed, "human sheet", rater))
    order: list[int] = []
    for turn in range(max(map(len, by_prompt))):
        numbers = [
            group[(prompt + turn + rater) % len(group)] for prompt, group in enumerate(by_prompt) if turn < len(group)
        ]
        draw.shuffle(numbers)
        order += numbers
    return [
        SheetLine(
            id=_identity(seed, rater, position),
            item=item,
            repeat=again,
            # The other side at the second look: who always prefers the left contradicts himself.
            swapped=len(items[item].systems) == 2 and (item + rater + again) % 2 == 1,
        )
        for position, (item, again) in enumerate(_with_repeats(order, repeat=repeat, draw=draw))
    ]


def _with_repeats(order: list[int], *, repeat: float, draw: random.Random) -> list[tuple[int, bool]]:
    """(item, whether it was seen before) in order."""
    half = len(order) // 2
    again = sorted(draw.sample(range(half), min(half, round(repeat * len(order)))))
    after: dict[int, list[int]] = {}
    for place in again:
        # At least half a sheet later, and not always exactly so.
        after.setdefault(draw.randint(place + half, len(order) - 1), []).append(order[place])
    return [
        each
        for place, item in enumerate(order)
        for each in [(item, False), *((number, True) for number in after.get(place, ()))]
    ]


def _identity(seed: int, rater: int, position: int) -> str:
    """Says which line of which sheet it is and nothing of what stands there."""
    return f"r{rater + 1}-{seed_for(seed, 'human line', rater, position) % 16**8:08x}"
